"""Prompts for the demo model: four grounded tasks, and two texts with nothing to copy."""

CODE = """```python
def copy_table(rows, limit):
    total = 0
    result = []
    for row in rows:
        if total >= limit:
            break
        result.append(row)
        total += 1
    print("total is", total)
    return result
```"""

JSON = """```json
[
  {
    "id": 412,
    "name": "Grace",
    "city": "Oslo",
    "job": "pilot"
  },
  {
    "id": 77,
    "name": "Victor",
    "city": "Lima",
    "job": "baker"
  },
  {
    "id": 958,
    "name": "Nina",
    "city": "Prague",
    "job": "tailor"
  }
]
```"""

FACTS = (
    "Alice is a baker from Paris who is 34 years old. "
    "The pilot Henry lives in Cairo and is 61 years old. "
    "Rosa is a gardener from Lisbon who is 27 years old. "
    "The judge Oscar lives in Denver and is 55 years old."
)

INSTRUCTIONS = {
    "repeat": "Repeat the following phrase 10 times: "
    '"The quick brown fox jumps over the lazy dog.". Don\'t say anything else.',
    "rename": f"Rename `total` to `river` in this code:\n{CODE}",
    "edit JSON": f'Set `city` to "Berlin" for the item with id 77:\n{JSON}',
    "quote": f"{FACTS}\n\nCopy the text.",
}
"""Grounded tasks, to be put into the chat template."""

CONTINUATIONS = {
    "free code": "import os\nimport sys\n\nclass Queue:\n    def __init__(self, size):\n",
    "free text": "The history of the",
}
"""Texts that the model continues as they are."""
