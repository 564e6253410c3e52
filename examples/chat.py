"""Chat with a model; each turn continues the last one: python chat.py [MODEL].

Every turn passes the whole conversation. The session keeps the KV cache of the unchanged part, so
the model runs only what is new. Each line of standard input is a turn.
"""

import sys

from mlxspec import AutoDecoder, Session

model = sys.argv[1] if len(sys.argv) > 1 else "demo"
decoder, session = AutoDecoder(model), Session()
messages: list[dict[str, str]] = []

for line in sys.stdin:
    messages.append({"role": "user", "content": line.strip()})
    answer = ""
    for response in decoder.stream(messages, max_tokens=200, session=session):
        print(response.text, end="", flush=True)
        answer += response.text
    print(f"\n[{response.reused_tokens} of {response.prompt_tokens} prompt tokens kept]")
    messages.append({"role": "assistant", "content": answer})
