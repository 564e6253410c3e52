"""The decoding loop: propose, verify, accept, commit, until the output ends."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import cast

import mlx.core as mx
from mlx_lm.generate import generation_stream

from ..drafting import Drafter, DraftTree, VerifiedStep
from ..models.target import Progress, Target
from ..models.tiers import Tier
from .acceptance import accept
from .sampling import Chooser

_STEPS_BETWEEN_CLEARING = 256  # as mlx-lm: buffers of outgrown caches go back to the system


_NEXT = DraftTree.chain(-1)  # the one row after a token that is not known yet

RecordTime = Callable[[int, float, bool], None]
"""Told a step's rows, its wall time in seconds, and whether it was pipelined."""


@dataclass(frozen=True)
class DecodedStep:
    """One step of the loop.

    Attributes:
        verified: the tree, the target's choices and the emitted tokens.
        logprobs: lazy log-probabilities after each emitted token's predecessor,
            (tokens, vocabulary), before filters and temperature.
    """

    verified: VerifiedStep
    logprobs: mx.array


def decode(
    target: Target,
    prompt: Sequence[int],
    drafter: Drafter,
    chooser: Chooser,
    *,
    max_tokens: int,
    ends: Callable[[int], bool],
    record_time: RecordTime | None = None,
    on_progress: Progress | None = None,
) -> Iterator[DecodedStep]:
    """Generate tokens after a prompt, one verified step at a time.

    After every step, and when the generator is closed or interrupted, the target's cache holds
    exactly the context without its last token (while a pipelined plain step is in flight, one
    dispatched token more).

    Args:
        target: the model with an empty cache.
        prompt: at least one token id.
        drafter: proposes what the target verifies.
        chooser: picks the target's token after each row.
        max_tokens: how many tokens to emit at most, at least 1.
        ends: called with each emitted token in order; True ends the output behind it.
        record_time: called after each step; it was pipelined if its forward had been dispatched
            during the step before. The time that the consumer takes between steps does not count.
        on_progress: reports the prefill.
    """
    prompt = tuple(prompt)  # a drafter that keeps and extends what it is given changes nothing
    context_length = len(prompt)
    last = prompt[-1]
    ahead: _Flight | None = None
    drafter.begin(list(prompt))
    try:
        with mx.stream(generation_stream):
            target.prefill(prompt[:-1], on_progress)
        finished, steps = False, 0
        while not finished:
            started = time.perf_counter()
            remaining = max_tokens - (context_length - len(prompt))
            proposal = _fit(drafter.propose(remaining - 1), last, target, remaining - 1)
            pipelined = ahead is not None
            if ahead is None:
                tree, flight = proposal, _dispatch(target, chooser, proposal)
            else:
                # The last token's row is on its way; a draft waits for the step after it.
                tree, flight = DraftTree.chain(last) if len(proposal) > 1 else proposal, ahead
            ahead = None
            if len(proposal) == 1 and drafter.pipelined and remaining > 1:
                ahead = _dispatch(target, chooser, _NEXT, flight.choices)

            verified, finished = _settle(tree, flight, remaining, ends)
            if len(tree) > 1:
                target.keep((0, *verified.accepted[: len(verified.tokens) - 1]))
            context_length += len(verified.tokens)
            last = verified.tokens[-1]
            drafter.observe(verified)
            steps += 1
            if steps % _STEPS_BETWEEN_CLEARING == 0:
                mx.clear_cache()
            if record_time:
                record_time(len(tree), time.perf_counter() - started, pipelined)
            yield DecodedStep(verified, flight.logprobs_of(verified))
    finally:
        target.truncate(min(target.length, context_length - 1))
        drafter.end()


def _fit(tree: DraftTree, last: int, target: Target, max_depth: int) -> DraftTree:
    """Cut a proposal down to what the target can verify and the output can still hold.

    The root is what was emitted last, whatever the drafter believes.
    """
    if tree.tokens[0] != last:
        tree = DraftTree((last, *tree.tokens[1:]), tree.parents)
    if len(tree) == 1:
        return tree
    if target.tier is not Tier.TREE:
        tree = tree.first_chain()
        max_depth = min(max_depth, target.max_rows - 1)
    return tree.pruned(max_depth, target.vocab_size)


@dataclass(frozen=True)
class _Flight:
    """A forward that has been dispatched; all arrays are lazy.

    Shapes: choices and argmaxes (rows,), logprobs (rows, vocabulary).
    """

    choices: mx.array
    argmaxes: mx.array
    logprobs: mx.array

    def logprobs_of(self, verified: VerifiedStep) -> mx.array:
        """The rows after which the emitted tokens were chosen, (tokens, vocabulary)."""
        if len(self.choices) == 1:
            return self.logprobs
        rows = (0, *verified.accepted)[: len(verified.tokens)]
        with mx.stream(generation_stream):
            return self.logprobs[mx.array(rows)]


def _dispatch(
    target: Target, chooser: Chooser, tree: DraftTree, tokens: mx.array | None = None
) -> _Flight:
    """Start the forward over a tree's rows without waiting for it.

    ``tokens`` stand in for those of the tree where they are not known yet.

    The only row of a plain step stays whatever is chosen after it, so it is committed at once
    and the next forward can be dispatched behind it.
    """
    if tokens is None:
        tokens = mx.array(tree.tokens)
    with mx.stream(generation_stream):
        logits = target.forward(tokens, tree)
        positions = [target.length + depth + 1 for depth in tree.depths]
        choices, logprobs = chooser.choose(logits, positions)
        greedy = chooser.params.temp == 0
        argmaxes = choices if greedy else mx.argmax(logprobs, axis=-1)
    mx.async_eval(choices, argmaxes)
    if len(tree) == 1:
        target.keep((0,))
    return _Flight(choices, argmaxes, logprobs)


def _settle(
    tree: DraftTree, flight: _Flight, remaining: int, ends: Callable[[int], bool]
) -> tuple[VerifiedStep, bool]:
    """Wait for the target's choices and walk the tree; whether the output ends here."""
    choices = cast(list[int], flight.choices.tolist())
    argmaxes = cast(list[int], flight.argmaxes.tolist())
    accepted, tokens = accept(tree, choices)
    finished = len(tokens) >= remaining
    for count, token in enumerate(tokens, start=1):
        if ends(token):
            tokens, finished = tokens[:count], True
            break
    accepted = accepted[: len(tokens)]
    return VerifiedStep(tree, tuple(choices), tuple(argmaxes), accepted, tokens), finished
