"""One step of decoding: propose, verify, accept, commit."""

from __future__ import annotations

import sys
import time
from collections import abc
from collections.abc import Callable, Generator
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import mlx.core as mx
from mlx_lm.generate import generation_stream

from ..draft.custom import not_a_draft
from ..draft.drafter import Drafter, DraftTree, VerifiedStep, accept, window_rows_of
from .caches import held_arrays, move_rows, parts
from .chooser import Chooser
from .joint import Joint, JointRows
from .target import Capability, Progress, Target

if TYPE_CHECKING:
    from ..plan.planner import Planner
    from ..plan.sharing import Plan
    from .grammar import GrammarState

_STEPS_BETWEEN_CLEARING = 256  # as mlx-lm: buffers of outgrown caches go back to the system

_NEAR = 64  # positions before the first crossing; hardly any draft is deeper
_NEXT = DraftTree.chain(-1)  # the one row after a token that is not known yet


class Sequence:
    """One generation: a growing context, the target's cache of it, a drafter and a chooser.

    After every step, and when it is closed in whatever way, the target's cache holds exactly the
    context without its last token (while a pipelined plain step is pending, one dispatched token
    more; with REPLAY without the target's pending tokens).

    Args:
        target: the model, with what precedes the prompt in its cache.
        prompt: at least one token id.
        drafter: proposes what the target verifies.
        chooser: picks the target's token after each row.
        max_tokens: how many tokens to emit at most, at least 1.
        ends: called with each emitted token in order; True ends the output after it.
        n_cached: how many of the prompt's first tokens the target's cache holds; less than all.
        first_crossing: the first position after which the model might verify no drafts; see
            :func:`mlxspec.engine.capability.first_crossing`.
        draft_end: called once the context comes near that; returns the position from which on
            nothing is drafted, or None if there is none.
        grammar: what constrains the output, at its beginning; None without a constraint.
        chunks_matter: told how many positions the prompt has and the target's caches, whether it
            gives something else in other chunks than mlx-lm's.

    Attributes:
        length: positions of the context, the last token included.
        remaining: how many tokens may still be emitted.
        finished: whether the output has ended.
        ahead: the next step's forward, if it was dispatched in the last step.
        proposed: how many draft tokens were proposed last.
    """

    def __init__(
        self,
        target: Target,
        prompt: abc.Sequence[int],
        drafter: Drafter,
        chooser: Chooser,
        *,
        max_tokens: int,
        ends: Callable[[int], bool],
        n_cached: int = 0,
        first_crossing: int = sys.maxsize,
        draft_end: Callable[[], int | None] = lambda: None,
        grammar: GrammarState | None = None,
        chunks_matter: Callable[[int, list[Any]], bool] = lambda length, caches: False,
    ) -> None:
        self.prompt = tuple(prompt)  # a copy, which no drafter can change
        self.target = target
        self.drafter = drafter
        self.chooser = chooser
        self.history = chooser.history(self.prompt)
        self.length = target.length + len(self.prompt) - n_cached
        self.last = self.prompt[-1]
        self.remaining = max_tokens
        self.finished = False
        self.ahead: PendingForward | UnchosenForward | None = None
        self.proposed = 0
        self.ends = ends
        self.grammar = grammar
        self._n_cached = n_cached
        self._first_crossing = first_crossing
        self._draft_end = draft_end
        self._chunks_matter = chunks_matter
        self._steps = 0
        self._open = False
        self._uncounted = 0.0  # seconds that the drafter's last ``observe`` took

    def begin(self, on_progress: Progress | None = None) -> None:
        """Run the prompt, all but its last token."""
        self.open_drafter()
        with mx.stream(generation_stream):
            self.target.prefill(self.to_prefill, on_progress, self.prefills_as_mlx_lm)

    def begin_in_chunks(self, chunk: Callable[[], int]) -> Generator[tuple[int, int], None, None]:
        """As :meth:`begin`, but run a chunk each time the next progress is asked for.

        Args:
            chunk: returns how many tokens to run next; not asked with ``prefills_as_mlx_lm``.

        Yields:
            the number of prompt tokens processed so far and the number in all.
        """
        self.open_drafter()
        chunks = self.target.prefill_in_chunks(self.to_prefill, chunk, self.prefills_as_mlx_lm)
        with closing(chunks) as progress:
            while True:
                with mx.stream(generation_stream):
                    done = next(progress, None)
                if done is None:
                    return
                yield done, len(self.to_prefill)

    def open_drafter(self) -> None:
        """Tell the drafter of the prompt: what a sequence begins with."""
        self.drafter.begin(list(self.prompt))
        self._open = True

    @cached_property
    def prefills_as_mlx_lm(self) -> bool:
        """Whether the prompt has to run in mlx-lm's chunks; to be asked before it has begun."""
        return self._chunks_matter(self.length - 1, self.target.cache)

    @property
    def to_prefill(self) -> tuple[int, ...]:
        """The tokens of the prompt that have to run before the first step."""
        return self.prompt[self._n_cached : -1]

    def close(self) -> None:
        """Cut the cache to the context, and end the drafter.

        May be called again, and before :meth:`begin`.
        """
        if not self._open:
            return
        self._open = False
        self.target.truncate(min(self.target.length, self.length - 1))
        try:
            self.drafter.end()
        finally:
            with mx.stream(generation_stream):
                mx.eval(self.target.arrays)  # those of an interrupted step are lazy

    def propose(self, plan: Plan | None = None) -> DraftTree:
        """The rows to verify next; where the step's forward is dispatched already, its one row.

        A draft that is proposed then has to wait for the next step.

        Args:
            plan: the drafter's, who is a planner, made together with those of others.
        """
        self._started = time.perf_counter() - self._uncounted
        max_depth = self.max_depth
        if plan is None:
            proposed = self.drafter.propose(max_depth)
        else:
            proposed = cast("Planner", self.drafter).draft(plan)
        tree = self._fitting(proposed, max_depth)
        on_gpu = mx.default_device().type == mx.gpu
        self._drafting = 0.0 if on_gpu else time.perf_counter() - self._started
        self.proposed = len(tree) - 1
        return DraftTree.chain(self.last) if self.proposed and self.ahead else tree

    @property
    def max_depth(self) -> int:
        """How deep the next draft may be."""
        return min(self.remaining - 1, self.target.max_depth, self._room())

    @property
    def may_go_on(self) -> bool:
        """Whether there may be a step after the proposed one."""
        return self.remaining > 1 or self.chooser.looks_ahead

    @property
    def pipelined(self) -> bool:
        """Whether the next forward may be dispatched before the proposed step's token is known."""
        return not self.proposed and self.drafter.pipelined

    def accept(self, tree: DraftTree, forward: PendingForward) -> Accepted:
        """Wait for the target's choices; what they accept is to be settled.

        Args:
            tree: the rows, from :meth:`propose`.
            forward: over these rows.
        """
        choices = cast(list[int], forward.choices.tolist())
        greedy = forward.argmaxes is forward.choices
        argmaxes = choices if greedy else cast(list[int], forward.argmaxes.tolist())
        accepted, tokens = accept(tree, choices)
        self.finished = len(tokens) >= self.remaining
        for count, token in enumerate(tokens, start=1):
            if self.ends(token):
                tokens, self.finished = tokens[:count], True
                break
        return Accepted(tree, forward, choices, argmaxes, accepted[: len(tokens)], tokens)

    def settle(self, accepted: Accepted) -> DecodedStep:
        """Commit what the target has accepted, whose rows are moved already; tell the drafter."""
        tree, forward, choices, argmaxes, nodes, tokens = accepted
        if len(tree) > 1:
            with mx.stream(generation_stream):
                self.target.commit_moved(accepted.rows)
        self.length += len(tokens)
        self.remaining -= len(tokens)
        self.last = tokens[-1]
        if self.history:
            self.history.extend(tokens)
        if self.grammar and not self.finished:
            self.grammar.accept(tokens)
        self._steps += 1
        if self._steps % _STEPS_BETWEEN_CLEARING == 0:
            mx.clear_cache()
        ended = time.perf_counter()
        verified = VerifiedStep(
            tree,
            tuple(choices),
            tuple(argmaxes),
            nodes,
            tokens,
            pending=len(self.target.pending),
            rows=forward.rows,
            sequences=forward.sequences,
            seconds=ended - self._started,
            drafting=self._drafting,
            pipelined=forward.pipelined,
            ahead=self.ahead is not None,
            context=self.length,
        )
        self.drafter.observe(verified)
        self._uncounted = time.perf_counter() - ended
        return DecodedStep(verified, forward.logprobs_of(verified))

    def _room(self) -> int:
        """How deep a draft may be before it stands where the model verifies none."""
        room = self._first_crossing - 1 - self.target.length
        if room < _NEAR:
            end = self._draft_end()
            room = sys.maxsize if end is None else end - 1 - self.target.length
        return max(0, room)

    def _fitting(self, tree: object, max_depth: int) -> DraftTree:
        """Cut a proposal down to what the target can verify and the output can still hold."""
        if not isinstance(tree, DraftTree) or tree.tokens[0] != self.last:
            raise not_a_draft(tree, self.drafter, self.last)
        if len(tree) == 1:
            return tree
        # First, since nothing that follows has to know ids that the model lacks.
        tree = tree.pruned(max_depth, self.target.vocab_size)
        # The rows of lookahead's window are no drafts: nobody minds what they are.
        if self.grammar and not window_rows_of(self.drafter):
            tree = self.grammar.allowed(tree)
        return tree if self.target.capability is Capability.TREE else tree.first_chain()

    def choose(
        self, logits: mx.array, tree: DraftTree, unknown: mx.array | None = None
    ) -> tuple[mx.array, mx.array, mx.array]:
        """The target's choices after the rows of a forward, lazily.

        Args:
            logits: (rows, vocabulary).
            tree: its rows.
            unknown: as for :func:`dispatch`.

        Returns:
            as in :class:`PendingForward`: choices, argmaxes and log-probabilities.
        """
        chooser = self.chooser
        following = self.length + (unknown is not None)
        positions = [following + depth for depth in tree.depths]
        contexts = self.history.contexts(tree, unknown) if self.history else None
        allowed = self.grammar.masks(tree) if self.grammar else None
        choices, logprobs = chooser.choose(logits, positions, contexts, allowed)
        argmaxes = choices if chooser.greedy else mx.argmax(logprobs, axis=-1)
        return choices, argmaxes, logprobs.squeeze(0) if len(tree) == 1 else logprobs

    def chosen(self, ahead: PendingForward | UnchosenForward) -> PendingForward:
        """The forward that was dispatched in the last step, with the choice after its row."""
        if isinstance(ahead, PendingForward):
            return ahead
        with mx.stream(generation_stream):
            chosen = self.choose(ahead.logits, DraftTree.chain(self.last))
            mx.async_eval(chosen)
        return PendingForward(*chosen, ahead.rows, ahead.sequences, pipelined=True)


class Accepted(NamedTuple):
    """What the target's choices make of a step's rows.

    Attributes:
        tree: the rows.
        forward: over them.
        choices, argmaxes: per row a token.
        nodes: the accepted ones, from the root's child downwards.
        tokens: the emitted ones, to the end of the output at most.
    """

    tree: DraftTree
    forward: PendingForward
    choices: abc.Sequence[int]
    argmaxes: abc.Sequence[int]
    nodes: tuple[int, ...]
    tokens: tuple[int, ...]

    @property
    def rows(self) -> tuple[int, ...]:
        """Those that stay in the caches."""
        return 0, *self.nodes[: len(self.tokens) - 1]


class PendingForward(NamedTuple):
    """A forward that has been dispatched, with the choices after its rows.

    Attributes:
        choices, argmaxes: (rows,).
        logprobs: (rows, vocabulary), of one row (vocabulary,).
        rows: how many rows the forward has, those of other sequences and pending ones included.
        sequences: how many sequences share it.
        pipelined: whether it was dispatched during the step before its own.
    """

    choices: mx.array
    argmaxes: mx.array
    logprobs: mx.array
    rows: int
    sequences: int
    pipelined: bool

    @property
    def arrays(self) -> tuple[mx.array, ...]:
        """All that is to be computed."""
        return self.choices, self.argmaxes, self.logprobs

    def logprobs_of(self, verified: VerifiedStep) -> list[mx.array]:
        """Per emitted token, the log-probabilities from which it was chosen, (vocabulary,).

        Each is an array of its own: a slice would keep all rows in memory.
        """
        if len(verified.tree) == 1:
            return [self.logprobs]
        rows = (0, *verified.accepted)[: len(verified.tokens)]
        with mx.stream(generation_stream):
            taken = [mx.take(self.logprobs, mx.array(row), axis=0) for row in rows]
        mx.async_eval(taken)
        return taken


class UnchosenForward(NamedTuple):
    """A forward over a row that was not known yet, of a sequence whose output is constrained.

    Which tokens may follow the row depends on its token, so nothing is chosen before that is read.

    Attributes:
        logits: (1, vocabulary).
        rows, sequences: as in :class:`PendingForward`.
    """

    logits: mx.array
    rows: int
    sequences: int

    @property
    def arrays(self) -> tuple[mx.array, ...]:
        """All that is to be computed."""
        return (self.logits,)


@dataclass(frozen=True)
class DecodedStep:
    """One step of a sequence.

    Attributes:
        verified: the tree, the target's choices and the emitted tokens.
        logprobs: per emitted token, the log-probabilities from which it was chosen,
            (vocabulary,), before filters and temperature; dispatched, not waited for.
    """

    verified: VerifiedStep
    logprobs: abc.Sequence[mx.array]


Faults = dict[Sequence, Exception]
"""What sequences have raised in a step; the others go on without them."""


def begin_together(sequences: abc.Sequence[Sequence], joint: Joint) -> Faults:
    """Begin several sequences: run their prompts, all but the last tokens, in one forward.

    Args:
        sequences: of one model; their targets have ``prefills_jointly``.
        joint: runs the forward.

    Returns:
        what drafters have raised.
    """
    faults: Faults = {}
    for sequence in sequences:
        try:
            sequence.open_drafter()
        except Exception as error:
            faults[sequence] = error
    begun = [sequence for sequence in sequences if sequence not in faults]
    if begun:
        with mx.stream(generation_stream):
            joint.prefill([(sequence.target, sequence.to_prefill) for sequence in begun])
    return faults


def step(sequence: Sequence) -> DecodedStep:
    """Run one step of one sequence."""
    (outcome,) = joint_step([sequence])
    if isinstance(outcome, Exception):
        raise outcome
    return outcome


def joint_step(
    sequences: abc.Sequence[Sequence],
    joint: Joint | None = None,
    plans: abc.Mapping[Sequence, Plan] | None = None,
) -> list[DecodedStep | Exception]:
    """Run one step of each sequence: all are dispatched before the first is waited for.

    Where an earlier step has dispatched a sequence's forward already, its draft is not verified:
    it has to wait for the next step. Where nothing is drafted, the next step's forward may be
    dispatched right after this one.

    Args:
        sequences: of one model; none is finished.
        joint: runs the rows of all sequences in one forward; needed where there are several.
        plans: of those sequences whose drafts were planned together.

    Returns:
        per sequence its step, or what its drafter, a processor or the like has raised. That
        sequence has to be closed; the others go on.
    """
    plans = plans or {}
    faults: Faults = {}
    trees: dict[Sequence, DraftTree] = {}
    for sequence in sequences:
        try:
            trees[sequence] = sequence.propose(plans.get(sequence))
        except Exception as error:
            faults[sequence] = error
    forwards: dict[Sequence, PendingForward] = {}
    for sequence in trees:
        if sequence.ahead:
            try:
                forwards[sequence] = sequence.chosen(sequence.ahead)
            except Exception as error:
                faults[sequence] = error
    others = {s: (tree, None) for s, tree in trees.items() if not s.ahead}
    for sequence, forward in dispatch(others, joint, faults).items():
        assert isinstance(forward, PendingForward)  # over rows that are known
        forwards[sequence] = forward
    for sequence in forwards:
        sequence.ahead = None
    # All go on together or none: two forwards of a few rows take longer than one.
    going_on = [sequence for sequence in forwards if sequence.may_go_on]
    pipelined = True
    for sequence in going_on:
        try:
            pipelined &= sequence.pipelined
        except Exception as error:
            faults[sequence] = error
    if pipelined:
        next_rows = {s: (_NEXT, forwards[s].choices) for s in going_on if s not in faults}
        for sequence, ahead in dispatch(next_rows, joint, faults).items():
            sequence.ahead = ahead
    accepted: dict[Sequence, Accepted] = {}
    for sequence, forward in forwards.items():
        if sequence not in faults:
            try:
                accepted[sequence] = sequence.accept(trees[sequence], forward)
            except Exception as error:
                faults[sequence] = error
    moved = [s.target.kept(own.rows) for s, own in accepted.items() if len(own.tree) > 1]
    if moved:
        with mx.stream(generation_stream):
            move_rows(moved)
    steps: dict[Sequence, DecodedStep] = {}
    for sequence, own in accepted.items():
        try:
            steps[sequence] = sequence.settle(own)
        except Exception as error:
            faults[sequence] = error
    return [faults.get(sequence) or steps[sequence] for sequence in sequences]


def dispatch(
    members: abc.Mapping[Sequence, tuple[DraftTree, mx.array | None]],
    joint: Joint | None,
    faults: Faults,
) -> dict[Sequence, PendingForward | UnchosenForward]:
    """Start a forward over the trees of one or more sequences, without waiting for it.

    The only row of a plain step stays whatever is chosen after it. So it is committed at once, and
    the next forward can be dispatched after it.

    Args:
        members: per sequence, the rows to verify, and (1,), what stands in for the token of a
            single row that is not known yet.
        joint: runs the forward where there are several sequences.
        faults: gets what a sequence's processor, sampler or constraint raises.

    Returns:
        per sequence its forward: an :class:`UnchosenForward` where the output is constrained and
        its row is not known.
    """
    if not members:
        return {}
    rows = [
        JointRows(sequence.target, mx.array(tree.tokens) if unknown is None else unknown, tree)
        for sequence, (tree, unknown) in members.items()
    ]
    n_rows = sum(len(target.pending) + len(tree) for target, _, tree in rows)
    forwards: dict[Sequence, PendingForward | UnchosenForward] = {}
    with mx.stream(generation_stream):
        if len(rows) == 1:
            ((target, tokens, tree),) = rows
            logits, spans = target.forward(tokens, tree), [slice(len(tree))]
        else:
            assert joint is not None
            logits, spans = joint.forward(rows)
        if any(sequence.grammar for sequence in members):
            mx.async_eval(logits)  # which are computed while the masks are
        alike = len(rows) > 1 and all(
            s.chooser.greedy and not s.history and not s.grammar for s in members
        )
        together = next(iter(members)).chooser.choose(logits, ()) if alike else None
        for span, (sequence, (tree, unknown)) in zip(spans, members.items(), strict=True):
            own_logits = logits[span] if len(rows) > 1 else logits
            if sequence.grammar and unknown is not None:
                forwards[sequence] = UnchosenForward(own_logits, n_rows, len(rows))
                continue
            if together:
                choices, logprobs = together
                own = choices[span], logprobs[span.start if len(tree) == 1 else span]
                chosen = own[0], *own
            else:
                try:
                    chosen = sequence.choose(own_logits, tree, unknown)
                except Exception as error:
                    faults[sequence] = error
                    continue
            forwards[sequence] = PendingForward(
                *chosen, n_rows, len(rows), pipelined=unknown is not None
            )
    # Everything that outlives the step, since lazy arrays can be read in this thread only.
    # (The choices need not depend on all of the caches: a recurrent layer's last state, or the
    # keys of a sparse layer's index.)
    mx.async_eval(
        [forward.arrays for forward in forwards.values()],
        held_arrays(cache for sequence in members for cache in parts(sequence.target.cache)),
    )
    for sequence in forwards:
        if len(members[sequence][0]) == 1:
            sequence.target.commit_moved((0,))
    return forwards


def decode(
    sequence: Sequence, on_progress: Progress | None = None
) -> Generator[DecodedStep, None, None]:
    """Run a sequence alone, from its prompt to its end."""
    try:
        sequence.begin(on_progress)
        while not sequence.finished:
            yield step(sequence)
    finally:
        sequence.close()
