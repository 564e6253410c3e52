"""Estimate what drafts would gain on your own chats: python replay_logs.py CHATS.jsonl [MODEL].

A replay runs no model: it needs the logged answers, a tokenizer, and the cost curves of chips.
Each line of CHATS.jsonl is {"messages": [...]}, as in OpenAI's API. To add your own machine, run
mlxspec calibrate MODEL --json > curve.json, and pass --curve curve.json to mlxspec replay.
"""

import json
import subprocess
import sys

chats = sys.argv[1]
model = sys.argv[2] if len(sys.argv) > 2 else "demo"
command = ["replay", chats, "--tokenizer", model, "--chip", "M2 Pro", "--chip", "M4 Pro", "--json"]
report = json.loads(subprocess.check_output([sys.executable, "-m", "mlxspec", *command]))

for entry in report["comparison"]:
    print(f"{entry['chip']}: {entry['speedup']:.2f} times as fast as plain decoding, modelled")
