"""Answer several prompts at once, in shared forwards: python batch.py [MODEL]."""

import sys

import mlxspec

QUESTIONS = [
    'Repeat the following phrase 3 times: "Good morning.".',
    "Rename `total` to `river` in this code:\ntotal = 0\nfor row in rows:\n    total += row",
    "Rosa is a gardener from Lisbon who is 27 years old.\n\nCopy the text.",
]

path = sys.argv[1] if len(sys.argv) > 1 else "demo"
model, tokenizer = mlxspec.load(path)
prompts = [
    tokenizer.apply_chat_template([{"role": "user", "content": q}], add_generation_prompt=True)
    for q in QUESTIONS
]

answers = mlxspec.batch_generate(model, tokenizer, prompts, max_tokens=100)

for question, answer in zip(QUESTIONS, answers.texts, strict=True):
    print(f"{question}\n-> {answer.strip()}\n")
