"""Drafters that try to break the decoding loop."""

from __future__ import annotations

import random
from collections.abc import Generator, Sequence
from typing import Any

from mlxspec import Decoder
from mlxspec.drafting.accept import VerifiedStep
from mlxspec.drafting.drafter import Drafter
from mlxspec.drafting.tree import DraftTree
from mlxspec.generation.drafter_factories import DrafterFactory
from mlxspec.generation.response import GenerationResponse
from mlxspec.generation.scheduler import responses


def drafted(
    decoder: Decoder, prompt: Any, drafter: Drafter, max_tokens: int = 250, **options: Any
) -> Generator[GenerationResponse, None, None]:
    """Stream a decoder's output, with another drafter than the decoder's."""
    factory = DrafterFactory(maker=lambda: drafter)
    return responses(decoder.new_request(prompt, max_tokens, options, factory))


class TruthDrafter(Drafter):
    """Base of drafters that know plain decoding's output; keeps track of the position in it.

    Args:
        truth: the output of plain decoding.
    """

    def __init__(self, truth: Sequence[int]) -> None:
        self._truth = list(truth)

    def begin(self, prompt: Sequence[int]) -> None:
        self._emitted = 0
        self._last = prompt[-1]

    def observe(self, step: VerifiedStep) -> None:
        self._emitted += len(step.tokens)
        self._last = step.tokens[-1]


class Oracle(TruthDrafter):
    """Drafts the true continuation, so that all draft tokens are accepted."""

    branching = False

    def propose(self, max_depth: int) -> DraftTree:
        draft = self._truth[self._emitted : self._emitted + max_depth]
        return DraftTree.chain(self._last, draft)

    def end(self) -> None:
        self.ended = True


class HostileDrafter(TruthDrafter):
    """Drafts random trees of true continuations, near misses and invalid tokens.

    Args:
        truth: the output of plain decoding; drafts from it are accepted.
        vocab_size: some of the proposed ids are beyond it.
        stop_token: proposed in the middle of drafts.
        seed: seed of the random choices.
        chains: propose chains only.
    """

    def __init__(
        self,
        truth: Sequence[int],
        vocab_size: int,
        stop_token: int,
        seed: int,
        chains: bool = False,
    ) -> None:
        self.branching = not chains
        super().__init__(truth)
        self._odd_tokens = [stop_token, -1, vocab_size, vocab_size + 7, 2**70, 0]
        self._vocab_size = vocab_size
        self._random = random.Random(seed)
        self._chains = chains

    def propose(self, max_depth: int) -> DraftTree:
        branches = [self._branch() for _ in range(self._random.randint(0, 4))]
        return DraftTree.from_branches(self._last, branches[:1] if self._chains else branches)

    def _branch(self) -> list[int]:
        pick = self._random
        length = pick.choice([0, 1, 2, 3, 5, 8, 40])  # 40: longer than the remaining output
        branch = self._truth[self._emitted : self._emitted + length]
        if branch and pick.random() < 0.6:
            branch[pick.randrange(len(branch))] = pick.randrange(self._vocab_size)
        if branch and pick.random() < 0.3:
            branch.insert(pick.randrange(len(branch)), pick.choice(self._odd_tokens))
        return branch + [pick.randrange(self._vocab_size) for _ in range(pick.randint(0, 3))]


class PartlyRightDrafter(TruthDrafter):
    """Drafts random trees of short branches that are right up to some token, like real drafts.

    Args:
        truth: the output of plain decoding.
        vocab_size: wrong tokens are drawn from it.
        seed: seed of the random choices.
        chains: propose chains only.
    """

    pipelined = True

    def __init__(
        self, truth: Sequence[int], vocab_size: int, seed: int, chains: bool = False
    ) -> None:
        self.branching = not chains
        super().__init__(truth)
        self._vocab_size = vocab_size
        self._random = random.Random(seed)

    def propose(self, max_depth: int) -> DraftTree:
        count = self._random.choice([0, 1, 2, 3]) if self.branching else 1
        return DraftTree.from_branches(self._last, [self._branch() for _ in range(count)])

    def _branch(self) -> list[int]:
        pick = self._random
        branch = self._truth[self._emitted : self._emitted + pick.randint(1, 7)]
        if branch and pick.random() < 0.8:
            wrong = pick.randrange(len(branch))
            branch[wrong] = (branch[wrong] + pick.randint(1, 5)) % self._vocab_size
        return branch
