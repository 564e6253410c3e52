"""Write a drafter that looks up the last two tokens: python own_drafter.py [MODEL].

A drafter changes only the speed, never the output. AutoDecoder learns how often its drafts are
right, and uses them when that pays.
"""

import sys
from collections.abc import Sequence

from mlxspec import AutoDecoder, Drafter, DraftTree, VerifiedStep


class LastBigram(Drafter):
    """Drafts what followed the previous occurrence of the last two tokens."""

    branching = False  # it drafts chains; a DraftTree could also branch

    def begin(self, prompt: Sequence[int]) -> None:
        self.text: list[int] = []
        self.follows: dict[tuple[int, ...], int] = {}
        self.extend(prompt)

    def extend(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            self.follows[tuple(self.text[-2:])] = len(self.text)
            self.text.append(token)

    def propose(self, max_depth: int) -> DraftTree:
        start = self.follows.get(tuple(self.text[-2:]), len(self.text))
        return DraftTree.chain(self.text[-1], self.text[start : start + min(max_depth, 8)])

    def observe(self, step: VerifiedStep) -> None:
        self.extend(step.tokens)


if __name__ == "__main__":
    model = sys.argv[1] if len(sys.argv) > 1 else "demo"
    decoder = AutoDecoder(model, extra_drafter=LastBigram)
    question = 'Repeat the following phrase 5 times: "The quick brown fox.".'
    prompt = [{"role": "user", "content": question}]
    result = decoder.generate(prompt)
    print(f"{result.stats.tokens_per_step:.2f} tokens a step")
