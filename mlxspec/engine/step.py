"""The decoding loop: propose, verify, accept, commit, until the output ends."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from typing import cast

import mlx.core as mx
from mlx_lm.generate import generation_stream

from ..draft.drafter import Drafter, VerifiedStep
from ..draft.tree import DraftTree, accept
from .chooser import Chooser, History
from .target import Capability, Progress, Target

_STEPS_BETWEEN_CLEARING = 256  # as mlx-lm: buffers of outgrown caches go back to the system


_NEXT = DraftTree.chain(-1)  # the one row after a token that is not known yet

RecordTime = Callable[[int, float, bool], None]
"""Told a step's rows (pending ones included), its wall time in seconds, and whether it was
pipelined."""


@dataclass(frozen=True)
class DecodedStep:
    """One step of the loop.

    Attributes:
        verified: the tree, the target's choices and the emitted tokens.
        logprobs: per emitted token, the log-probabilities after its predecessor, (vocabulary,),
            before filters and temperature; dispatched, and without the rejected rows'.
    """

    verified: VerifiedStep
    logprobs: Sequence[mx.array]


def decode(
    target: Target,
    prompt: Sequence[int],
    drafter: Drafter,
    chooser: Chooser,
    *,
    max_tokens: int,
    ends: Callable[[int], bool],
    n_cached: int = 0,
    deepest_draft: Callable[[int], int] | None = None,
    record_time: RecordTime | None = None,
    on_progress: Progress | None = None,
) -> Generator[DecodedStep, None, None]:
    """Generate tokens after a prompt, one verified step at a time.

    After every step, and when the generator is closed or interrupted, the target's cache holds
    exactly the context without its last token (while a pipelined plain step is in forward, one
    dispatched token more; with REPLAY without the target's pending tokens).

    Args:
        target: the model, with what precedes the prompt in its cache.
        prompt: at least one token id.
        drafter: proposes what the target verifies.
        chooser: picks the target's token after each row.
        max_tokens: how many tokens to emit at most, at least 1.
        ends: called with each emitted token in order; True ends the output behind it.
        n_cached: how many of the prompt's first tokens the target's cache holds, not its last.
        deepest_draft: given how many positions precede it, how deep a draft may be; where it
            matters, since there are models that verify none beyond some position.
        record_time: called after each step; it was pipelined if its forward had been dispatched
            during the step before. What the call itself takes counts for the step after it, and
            what the consumer takes between steps does not.
        on_progress: reports the prefill.
    """
    prompt = tuple(prompt)  # a drafter that keeps and extends what it is given changes nothing
    start = context_length = target.length + len(prompt) - n_cached
    last = prompt[-1]
    history = chooser.history(prompt)
    ahead: PendingForward | None = None
    drafter.begin(list(prompt))
    try:
        with mx.stream(generation_stream):
            target.prefill(prompt[n_cached:-1], on_progress)
        finished, steps, recording = False, 0, 0.0
        while not finished:
            started = time.perf_counter() - recording
            remaining = max_tokens - (context_length - start)
            max_depth = min(remaining - 1, target.max_depth)
            if deepest_draft:
                max_depth = min(max_depth, deepest_draft(target.length))
            proposal = _fit(drafter.propose(max_depth), last, target, max_depth)
            pipelined, pending = ahead is not None, len(target.pending)
            if ahead is None:
                tree, forward = proposal, _dispatch(target, chooser, history, proposal)
            else:
                # The last token's row is on its way; a draft waits for the step after it.
                tree, forward = DraftTree.chain(last) if len(proposal) > 1 else proposal, ahead
            ahead = None
            more = remaining > 1 or chooser.looks_ahead
            if len(proposal) == 1 and drafter.pipelined and more:
                ahead = _dispatch(target, chooser, history, _NEXT, forward.choices)

            verified, finished = _settle(tree, forward, remaining, ends)
            if len(tree) > 1:
                with mx.stream(generation_stream):
                    target.commit((0, *verified.accepted[: len(verified.tokens) - 1]))
                if target.pending:
                    verified = replace(verified, pending=len(target.pending))
            context_length += len(verified.tokens)
            last = verified.tokens[-1]
            if history:
                history.extend(verified.tokens)
            drafter.observe(verified)
            steps += 1
            if steps % _STEPS_BETWEEN_CLEARING == 0:
                mx.clear_cache()
            ended = time.perf_counter()
            if record_time:
                record_time(pending + len(tree), ended - started, pipelined)
            recording = time.perf_counter() - ended
            yield DecodedStep(verified, forward.logprobs_of(verified))
    finally:
        target.truncate(min(target.length, context_length - 1))
        drafter.end()
        with mx.stream(generation_stream):
            mx.eval(target.arrays)  # those of an interrupted step are lazy


def _fit(tree: DraftTree, last: int, target: Target, max_depth: int) -> DraftTree:
    """Cut a proposal down to what the target can verify and the output can still hold.

    The root is what was emitted last, whatever the drafter believes.
    """
    if tree.tokens[0] != last:
        tree = DraftTree((last, *tree.tokens[1:]), tree.parents)
    if len(tree) == 1:
        return tree
    if target.capability is not Capability.TREE:
        tree = tree.first_chain()
    return tree.pruned(max_depth, target.vocab_size)


@dataclass(frozen=True)
class PendingForward:
    """A forward that has been dispatched, and all of these with it.

    Shapes: choices and argmaxes (rows,), logprobs (rows, vocabulary), of one row (vocabulary,).
    """

    choices: mx.array
    argmaxes: mx.array
    logprobs: mx.array

    def logprobs_of(self, verified: VerifiedStep) -> list[mx.array]:
        """The rows after which the emitted tokens were chosen, (vocabulary,) each.

        Each is an array of its own: a part of the whole would keep all rows in memory.
        """
        if len(self.choices) == 1:
            return [self.logprobs]
        rows = (0, *verified.accepted)[: len(verified.tokens)]
        with mx.stream(generation_stream):
            taken = [mx.take(self.logprobs, mx.array(row), axis=0) for row in rows]
        mx.async_eval(taken)
        return taken


def _dispatch(
    target: Target,
    chooser: Chooser,
    history: History | None,
    tree: DraftTree,
    unknown: mx.array | None = None,
) -> PendingForward:
    """Start the forward over a tree's rows without waiting for it.

    ``unknown``, (1,), stands in for the token of a single row where it is not known yet.

    The only row of a plain step stays whatever is chosen after it, so it is committed at once
    and the next forward can be dispatched behind it.
    """
    tokens = mx.array(tree.tokens) if unknown is None else unknown
    with mx.stream(generation_stream):
        logits = target.forward(tokens, tree)
        positions = [target.length + depth + 1 for depth in tree.depths]
        contexts = history.contexts(tree, unknown) if history else None
        choices, logprobs = chooser.choose(logits, positions, contexts)
        argmaxes = choices if chooser.greedy else mx.argmax(logprobs, axis=-1)
        if len(tree) == 1:
            logprobs = logprobs.squeeze(0)
    # All that outlives the step: what is lazy can be read in this thread only. (No choice may
    # need a recurrent layer's last state, or the keys of a sparse layer's index.)
    mx.async_eval(choices, argmaxes, logprobs, target.arrays)
    if len(tree) == 1:
        target.commit((0,))
    return PendingForward(choices, argmaxes, logprobs)


def _settle(
    tree: DraftTree, forward: PendingForward, remaining: int, ends: Callable[[int], bool]
) -> tuple[VerifiedStep, bool]:
    """Wait for the target's choices and walk the tree; whether the output ends here."""
    choices = cast(list[int], forward.choices.tolist())
    greedy = forward.argmaxes is forward.choices
    argmaxes = choices if greedy else cast(list[int], forward.argmaxes.tolist())
    accepted, tokens = accept(tree, choices)
    finished = len(tokens) >= remaining
    for count, token in enumerate(tokens, start=1):
        if ends(token):
            tokens, finished = tokens[:count], True
            break
    accepted = accepted[: len(tokens)]
    return VerifiedStep(tree, tuple(choices), tuple(argmaxes), accepted, tokens), finished
