"""Run an agent with a session, without a server: python agent_session.py [MODEL].

A JSON Schema constrains each answer, so every model answers with a valid call. Agents often repeat
tool results word for word, and the session's earlier turns supply these drafts.
"""

import json
import sys

from mlxspec import AutoDecoder, Constraint, Session

FILES = {"notes.txt": "Buy milk and bread.", "todo.txt": "Call Wendy, water the plants."}
ACTION = Constraint.json_schema(
    {
        "type": "object",
        "properties": {
            "tool": {"enum": ["read", "finish"]},
            "argument": {"type": "string", "maxLength": 80},
        },
        "required": ["tool", "argument"],
        "additionalProperties": False,
    }
)
TASK = """Answer with JSON. {"tool": "read", "argument": NAME} shows you a file; then answer with
{"tool": "finish", "argument": TEXT}. The files are notes.txt and todo.txt. Read notes.txt."""

model = sys.argv[1] if len(sys.argv) > 1 else "demo"
decoder, session = AutoDecoder(model), Session()
messages = [{"role": "user", "content": TASK}]

for _ in range(5):  # at most 5 turns
    responses = list(decoder.stream(messages, session=session, constraint=ACTION))
    text = "".join(response.text for response in responses)
    print(f"{text.strip()}  [{responses[-1].stats.tokens_per_step:.1f} tokens a step]")
    action = json.loads(text)
    if action["tool"] == "finish":
        break
    result = FILES.get(action["argument"], f"There is no file {action['argument']}.")
    messages += [{"role": "assistant", "content": text}, {"role": "user", "content": result}]
