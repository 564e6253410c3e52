"""Generate an answer and show what drafts gained: python generate.py [MODEL]."""

import sys

from mlxspec import AutoDecoder

model = sys.argv[1] if len(sys.argv) > 1 else "demo"  # or a directory, or a Hub repository
decoder = AutoDecoder(model)
question = 'Repeat the following phrase 5 times: "The quick brown fox jumps over the lazy dog.".'
prompt = [{"role": "user", "content": question}]

result = decoder.generate(prompt, max_tokens=200)  # prints the text as it is generated

stats = result.stats
print(f"{len(result.tokens)} tokens in {stats.steps} steps: {stats.tokens_per_step:.2f} a step")
print(f"{stats.acceptance_rate:.0%} of the drafted tokens were accepted")
