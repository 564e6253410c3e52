"""Use OpenAI's library with mlxspec serve: OPENAI_BASE_URL=... python openai_client.py [MODEL].

Start the server first: mlxspec serve MODEL. An editor that can guess the answer passes its guess
as `prediction`, and the server drafts from it.
"""

import sys

from openai import OpenAI

CODE = "total = 0\nfor row in rows:\n    total += row\nprint(total)"

client = OpenAI()  # reads OPENAI_BASE_URL and OPENAI_API_KEY
model = sys.argv[1] if len(sys.argv) > 1 else client.models.list().data[0].id
stream = client.chat.completions.create(
    model=model,
    messages=[{"role": "user", "content": f"Rename `total` to `river` in this code:\n{CODE}"}],
    prediction={"type": "content", "content": CODE.replace("total", "river")},
    max_completion_tokens=100,
    stream=True,
    stream_options={"include_usage": True},
)
for chunk in stream:
    for choice in chunk.choices:
        print(choice.delta.content or "", end="", flush=True)
    if chunk.usage and chunk.usage.completion_tokens_details:
        details = chunk.usage.completion_tokens_details
        print(f"\n{chunk.usage.completion_tokens} tokens", end=", ")
        print(f"{details.accepted_prediction_tokens} of them accepted drafts")
