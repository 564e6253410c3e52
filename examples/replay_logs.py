"""What drafts would gain on your own chats: python replay_logs.py CHATS.jsonl [MODEL].

Replaying runs no model: it needs the logged answers, a tokenizer, and the curves of chips. A line
of CHATS.jsonl is {"messages": [...]}, as OpenAI's API has them. Beside a few chips whose costs are
known, put the curve of your own: mlxspec calibrate MODEL --json > curve.json, --curve curve.json.
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
