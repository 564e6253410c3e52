"""Stream an answer with accepted drafts in colour: python stream.py [MODEL]."""

import sys

from rich.console import Console
from rich.text import Text

from mlxspec import AutoDecoder

model = sys.argv[1] if len(sys.argv) > 1 else "demo"
decoder = AutoDecoder(model)
question = "Alice is a baker from Paris. The pilot Henry lives in Cairo.\n\nCopy the text."
prompt = [{"role": "user", "content": question}]

console = Console()
for response in decoder.stream(prompt, max_tokens=200, temp=0.7, top_p=0.9, seed=1):
    console.print(Text(response.text, style="bold blue" if response.from_draft else ""), end="")
    if response.finish_reason:
        console.print(f"\n{response.generation_tps:.0f} tokens/s, {response.finish_reason}")
