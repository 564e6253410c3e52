"""Extract a record from a text, as JSON of a given schema: python structured_output.py [MODEL]."""

import json
import sys

from mlxspec import AutoDecoder, Constraint

PERSON = Constraint.json_schema(
    {
        "type": "object",
        "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
)

model = sys.argv[1] if len(sys.argv) > 1 else "demo"
decoder = AutoDecoder(model)
prompt = [{"role": "user", "content": "Wendy, 20, likes green."}]
text = "".join(response.text for response in decoder.stream(prompt, constraint=PERSON))
person = json.loads(text)  # valid unless max_tokens cut it off
print(f"{person['name']} is {person['age']} years old.")
