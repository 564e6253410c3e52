"""One step of decoding: propose, verify (forward and choose), accept, commit.

A :class:`Sequence` is one generation, :func:`joint_step` runs a step of one or more sequences, and
a :class:`Batch` plans their drafts together.
"""

from __future__ import annotations

import math
import time
from collections import abc
from collections.abc import Callable, Generator, Iterable
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, TypeVar, cast

import mlx.core as mx
from mlx_lm.generate import generation_stream

from ..drafting.accept import VerifiedStep, accept
from ..drafting.costs import Costs
from ..drafting.drafter import Drafter, checked_draft
from ..drafting.lookahead import WINDOW
from ..drafting.planner import NO_PLAN, Plan, Planner, log_fault, plan_drafts
from ..drafting.tree import DraftTree
from .caches import move_rows
from .joint import Joint, JointMode, JointRows, joint_for
from .sampling import Chooser
from .target import Capability, Target

if TYPE_CHECKING:
    from .loaded_model import LoadedModel

_Result = TypeVar("_Result")

_STEPS_BETWEEN_CLEARING = 256  # as in mlx-lm; clearing frees the buffers that caches have outgrown

_NEXT = DraftTree.chain(-1)  # the single row after a token that is not yet known


class Sequence:
    """One generation: a growing context, the target with its cache, a drafter and a chooser.

    After every step, and however the sequence is closed, the target's cache holds exactly the
    context without its last token. While a pipelined plain step is pending, it holds one more.

    Args:
        target: the model; its cache holds the context before the prompt.
        prompt: at least one token id.
        drafter: proposes drafts, or plans them by their costs.
        chooser: picks the target's token after each row.
        max_tokens: the most tokens to emit, at least 1.
        ends: called with each emitted token in order; returns True to end the output after it.
        n_cached: the number of the prompt's first tokens that the target's cache already holds;
            less than all.
        in_mlx_lms_chunks: whether the prompt must run in the same chunks as in mlx-lm, because
            other chunks would change the output.

    Attributes:
        planner: the given drafter if it is a planner.
        length: the number of the context's positions, including the last token's.
        remaining: the number of tokens that may still be emitted.
        finished: whether the output has ended.
        tree: the rows of the current step.
        forward: the forward over these rows.
        ahead: the next step's forward, if the last step has already dispatched it.
        proposed: the number of draft tokens in the last proposal.
        last: the context's last token, which the next step's first row runs.
        uncounted: the seconds that drafting has taken since the last step, which count in the next.
        error: the exception that its drafter, processor or the like has raised. The sequence must
            then be closed.
        recorded: a list to which each step is appended, with the reason if nothing was drafted;
            None records nothing.
    """

    tree: DraftTree
    forward: Forward

    def __init__(
        self,
        target: Target,
        prompt: abc.Sequence[int],
        drafter: Drafter | Planner,
        chooser: Chooser,
        *,
        max_tokens: int,
        ends: Callable[[int], bool],
        n_cached: int = 0,
        in_mlx_lms_chunks: bool = False,
    ) -> None:
        self.prompt = tuple(prompt)  # a copy, which drafters cannot change
        self.target = target
        self.drafter = drafter
        self.planner = drafter if isinstance(drafter, Planner) else None
        self.chooser = chooser
        chooser.begin(self.prompt)
        self.length = target.length + len(self.prompt) - n_cached
        self.last = self.prompt[-1]
        self.remaining = max_tokens
        self.finished = False
        self.ahead: Forward | None = None
        self.proposed = 0
        self.error: Exception | None = None
        self.recorded: list[VerifiedStep] | None = None
        self.ends = ends
        self._n_cached = n_cached
        self.in_mlx_lms_chunks = in_mlx_lms_chunks
        self._steps = 0
        self._open = False
        self._started = self._planning_seconds = self.uncounted = 0.0
        self._no_draft = ""

    def begin(self) -> None:
        """Run the prompt without its last token, which the first step runs."""
        for _ in self.begin_in_chunks():
            pass

    def begin_in_chunks(
        self, chunk: Callable[[], int] | None = None
    ) -> Generator[tuple[int, int], None, None]:
        """Like :meth:`begin`, but run one chunk per iteration.

        Args:
            chunk: returns the number of tokens to run next; not called if ``in_mlx_lms_chunks``.

        Yields:
            the number of prompt tokens processed so far, and the total.
        """
        self._begin_drafter()
        tokens = self.tokens_to_prefill
        chunks = self.target.prefill_in_chunks(tokens, chunk, self.in_mlx_lms_chunks)
        with closing(chunks) as progress:
            while True:
                with mx.stream(generation_stream):
                    done = next(progress, None)
                if done is None:
                    return
                yield done, len(tokens)

    @property
    def tokens_to_prefill(self) -> tuple[int, ...]:
        """The prompt's tokens after the cached ones, without the last one, which the first step
        runs.
        """
        return self.prompt[self._n_cached : -1]

    def begin_as_rows(self) -> JointRows:
        """Begin with the whole prompt as a chain of rows, for a forward with other prompts.

        Only if :attr:`begins_as_rows`. All rows then have to be committed.
        """
        self._begin_drafter()
        self.target.prefill(())  # converts the caches
        first, *others = self.tokens_to_prefill
        return self.target, mx.array([first, *others]), DraftTree.chain(first, others)

    @property
    def begins_as_rows(self) -> bool:
        """Whether :meth:`begin_as_rows` gives the same result as :meth:`begin`."""
        tokens = len(self.tokens_to_prefill)
        return tokens > 0 and not self.in_mlx_lms_chunks and self.target.takes_as_rows(tokens)

    def _begin_drafter(self) -> None:
        if self.planner:
            self.planner.attach(self.target, self.chooser.perturb)
        self.drafter.begin(list(self.prompt))
        self._open = True

    def close(self) -> None:
        """Cut the cache to the context and end the drafter.

        Calling it again, or before :meth:`begin`, does nothing.
        """
        if not self._open:
            return
        self._open = False
        self.target.truncate(min(self.target.length, self.length - 1))
        try:
            self.drafter.end()
        finally:
            with mx.stream(generation_stream):
                mx.eval(self.target.arrays)  # an interrupted step leaves lazy arrays

    def propose(self) -> None:
        """Propose the rows of the step.

        If the last step has already dispatched this step's forward, that forward has a single row.
        A draft then has to wait for the next step.
        """
        self._started = time.perf_counter() - self.uncounted
        max_depth = self.max_depth
        proposal = self.drafter.propose(max_depth)
        tree = self._fitting(proposal, max_depth)
        self._planning_seconds = time.perf_counter() - self._started
        self.proposed = len(tree) - 1
        self.tree = DraftTree.chain(self.last) if self.proposed and self.ahead else tree
        self._no_draft = "" if self.recorded is None else self._why_no_draft(proposal, max_depth)

    def _why_no_draft(self, proposal: DraftTree, max_depth: int) -> str:
        """A clause that says why the step has no draft; empty if it has one."""
        if len(self.tree) > 1:
            return ""
        if self.proposed:
            return "the step had been dispatched before there was a draft, so the draft must wait"
        if len(proposal) > 1:
            return "the output's constraint or its end leaves no room for the proposed draft"
        return self.drafter.no_draft() if max_depth > 0 else "the output ends here"

    def rows(self, ahead: bool) -> JointRows:
        """The proposed rows; with ``ahead``, the row of the token that the plain step chooses."""
        if ahead:
            return self.target, self.forward.choices, _NEXT
        return self.target, mx.array(self.tree.tokens), self.tree

    @property
    def max_depth(self) -> int:
        """The greatest depth that the next draft may have."""
        return min(self.remaining - 1, self.target.max_depth)

    def _fitting(self, proposed: object, max_depth: int) -> DraftTree:
        """Cut a proposal to what the target can verify and ``max_tokens`` leaves room for."""
        tree = checked_draft(proposed, self.drafter, self.last)
        if len(tree) == 1:
            return tree
        # This comes first, since the grammar and the target need ids within the vocabulary.
        tree = tree.pruned(max_depth, self.target.loaded.vocab_size)
        # The rows of lookahead's window are no drafts, so they need not satisfy the grammar.
        if self.chooser.grammar and WINDOW not in tree.origins:
            tree = self.chooser.grammar.allowed(tree)
        return tree if self.target.capability is Capability.TREE else tree.first_chain()

    def take_ahead(self) -> None:
        """Use the forward that the last step dispatched as this step's."""
        assert self.ahead
        if self.ahead.logits is not None:
            with mx.stream(generation_stream):
                self.choose(self.ahead, self.tree)
                mx.async_eval(self.ahead.arrays)
        self.forward, self.ahead = self.ahead, None

    def choose(self, forward: Forward, tree: DraftTree, unknown: mx.array | None = None) -> None:
        """Choose the target's token after each row of a forward, lazily.

        The tokens that a constraint allows after a row depend on the row's token. While this token
        is unknown, nothing is chosen: :meth:`take_ahead` then chooses later.

        Args:
            forward: this sequence's forward.
            tree: the forward's rows.
            unknown: the token of the forward's single row, (1,), if it has not been read yet.
        """
        grammar = self.chooser.grammar
        if forward.logits is None or (grammar and unknown is not None):
            return
        following = self.length + (unknown is not None)
        choices, logprobs = self.chooser.choose(
            forward.logits,
            [following + depth for depth in tree.depths],
            self.chooser.contexts(tree, unknown),
            grammar.masks(tree) if grammar else None,
        )
        forward.set_choices(choices, logprobs, self.chooser.greedy)

    def accept(self) -> Accepted:
        """Wait for the target's choices and walk the tree along them."""
        choices = cast(list[int], self.forward.choices.tolist())
        nodes, tokens = accept(self.tree, choices)
        self.finished = len(tokens) >= self.remaining
        for count, token in enumerate(tokens, start=1):
            if self.ends(token):
                tokens, self.finished = tokens[:count], True
                break
        return Accepted(nodes[: len(tokens)], tokens, tuple(choices))

    def commit(self, accepted: Accepted) -> VerifiedStep:
        """Commit the accepted rows, which :func:`move_accepted` has moved, and let the drafter
        observe the step.
        """
        tree, forward, (nodes, tokens, choices) = self.tree, self.forward, accepted
        if len(tree) > 1:
            with mx.stream(generation_stream):
                self.target.commit_moved(accepted.rows)
        self.length += len(tokens)
        self.remaining -= len(tokens)
        self.last = tokens[-1]
        self.chooser.extend(tokens)
        if self.chooser.grammar and not self.finished:
            self.chooser.grammar.accept(tokens)
        self._steps += 1
        if self._steps % _STEPS_BETWEEN_CLEARING == 0:
            mx.clear_cache()
        greedy = forward.argmaxes is forward.choices
        argmaxes = choices if greedy else tuple(cast(list[int], forward.argmaxes.tolist()))
        ended = time.perf_counter()
        on_gpu = mx.default_device().type == mx.gpu
        verified = VerifiedStep(
            tree,
            choices,
            argmaxes,
            nodes,
            tokens,
            rows=forward.rows,
            sequences=forward.sequences,
            seconds=ended - self._started,
            planning_seconds=self._planning_seconds,
            blocking_seconds=0.0 if on_gpu else self._planning_seconds,
            pipelined=forward.pipelined,
            ahead=self.ahead is not None,
            context=self.length,
            logprobs=forward.logprobs_after(accepted.rows),
            no_draft=self._no_draft,
        )
        del self.forward  # frees its arrays
        if self.recorded is not None:
            self.recorded.append(verified)
        started = time.perf_counter()
        self.drafter.observe(verified)
        self.uncounted = time.perf_counter() - started
        return verified


class Accepted(NamedTuple):
    """What a step has accepted.

    Attributes:
        nodes: the accepted nodes of the step's tree, in order; the first is a child of the root.
        tokens: the emitted tokens.
        choices: the target's token after each node of the tree.
    """

    nodes: tuple[int, ...]
    tokens: tuple[int, ...]
    choices: tuple[int, ...]

    @property
    def rows(self) -> tuple[int, ...]:
        """The indices of the rows that stay in the caches."""
        return 0, *self.nodes[: len(self.tokens) - 1]


@dataclass
class Forward:
    """A sequence's part of a dispatched forward.

    Args:
        rows: the number of rows of the whole forward, including those of other sequences.
        sequences: the number of sequences that share the forward.
        pipelined: whether it was dispatched during the previous step.

    Attributes:
        logits: the logits after the sequence's rows, (rows, vocabulary), until tokens are chosen;
            None then.
        choices, argmaxes: (rows,), once tokens are chosen.
        logprobs: (rows, vocabulary); (vocabulary,) for a single row.
    """

    rows: int
    sequences: int
    pipelined: bool
    logits: mx.array | None = field(init=False, default=None)
    choices: mx.array = field(init=False)
    argmaxes: mx.array = field(init=False)
    logprobs: mx.array = field(init=False)

    def set_choices(self, choices: mx.array, logprobs: mx.array, greedy: bool) -> None:
        """Set the chosen tokens, (rows,), and their log-probabilities, (rows, vocabulary)."""
        self.logits, self.choices = None, choices
        self.argmaxes = choices if greedy else mx.argmax(logprobs, axis=-1)
        self.logprobs = logprobs.squeeze(0) if len(logprobs) == 1 else logprobs

    @property
    def arrays(self) -> tuple[mx.array, ...]:
        """The arrays that the step will read, for ``mx.eval``."""
        if self.logits is not None:
            return (self.logits,)
        return self.choices, self.argmaxes, self.logprobs

    def logprobs_after(self, rows: abc.Sequence[int]) -> list[mx.array]:
        """For each row, the log-probabilities of the token after it, (vocabulary,).

        Each is a separate array, since a slice would keep all rows in memory.
        """
        if self.logprobs.ndim == 1:
            return [self.logprobs]
        with mx.stream(generation_stream):
            taken = [mx.take(self.logprobs, mx.array(row), axis=0) for row in rows]
        mx.async_eval(taken)
        return taken


def each(
    phase: Callable[[Sequence], _Result], sequences: Iterable[Sequence]
) -> dict[Sequence, _Result]:
    """Run a phase for each sequence that has no error; an exception becomes its error.

    Returns:
        the phase's result, for each sequence in which it raised nothing.
    """
    results = {}
    for sequence in sequences:
        if sequence.error is None:
            try:
                results[sequence] = phase(sequence)
            except Exception as error:
                sequence.error = error
    return results


def joint_step(
    sequences: abc.Sequence[Sequence], joint: Joint | None = None, waits: bool = False
) -> list[VerifiedStep | Exception]:
    """Run one step of each sequence; all forwards are dispatched before the first result is read.

    If the last step has already dispatched a sequence's forward, a draft of this sequence waits for
    the next step. If nothing is drafted, the next step's forward may be dispatched right after this
    one.

    Args:
        sequences: sequences of one model, none of them finished.
        joint: runs the rows of all sequences in one forward; required for several sequences.
        waits: whether to dispatch the next step only after this one has ended: because other
            sequences are about to join, and two small forwards take longer than one; or because
            other forwards run in between, in whose time it would be counted.

    Returns:
        for each sequence, its step, or the exception of its drafter, processor, sampler or forward.
        A sequence with an exception must be closed; the others continue.
    """
    proposed = each(Sequence.propose, sequences)
    waiting = [sequence for sequence in proposed if not sequence.ahead]
    try:
        ready = each(Sequence.take_ahead, [sequence for sequence in proposed if sequence.ahead])
        running = [*ready, *dispatch(waiting, joint)]
        if not waits:
            dispatch_next(running, joint)
        accepted = each(Sequence.accept, running)
        move_accepted(accepted)
    except Exception as error:  # of the forward that all share
        return [sequence.error or error for sequence in sequences]
    steps = each(lambda sequence: sequence.commit(accepted[sequence]), accepted)
    return [steps[sequence] if sequence.error is None else sequence.error for sequence in sequences]


def dispatch(
    sequences: abc.Sequence[Sequence], joint: Joint | None, ahead: bool = False
) -> Iterable[Sequence]:
    """Dispatch a forward over rows of one or more sequences, and the choices after these rows.

    The single row of a plain step stays, whatever token is chosen after it. So it is committed
    immediately, and the next forward can be dispatched before the token is known.

    Args:
        sequences: the sequences, which have proposed their rows.
        joint: runs the forward of several sequences.
        ahead: whether to run, instead of the proposed rows, the row that follows each sequence's
            plain step, whose token is not yet known.

    Returns:
        the sequences without an error.
    """
    if not sequences:
        return ()
    rows = {sequence: sequence.rows(ahead) for sequence in sequences}
    n_rows = sum(len(tree) for _, _, tree in rows.values())
    with mx.stream(generation_stream):
        spans = [slice(None)]
        if joint and len(rows) > 1:
            logits, spans = joint.forward([*rows.values()])
        else:
            ((target, tokens, tree),) = rows.values()
            logits = target.forward(tokens, tree)
        forwards = {sequence: Forward(n_rows, len(rows), ahead) for sequence in rows}
        if any(sequence.chooser.grammar for sequence in rows):
            mx.async_eval(logits)  # computed while the masks are made
        shares = len(rows) > 1 and all(sequence.chooser.takes_argmax for sequence in rows)
        if shares:
            choices, logprobs = sequences[0].chooser.choose(logits, ())
            split = zip(_split(choices, spans), _split(logprobs, spans), strict=True)
            for forward, (chosen_tokens, chosen_logprobs) in zip(
                forwards.values(), split, strict=True
            ):
                forward.set_choices(chosen_tokens, chosen_logprobs, greedy=True)
        else:
            for forward, span in zip(forwards.values(), spans, strict=True):
                forward.logits = logits[span]
        chosen = each(
            lambda s: s.choose(forwards[s], rows[s][2], rows[s][1] if ahead else None), rows
        )
    # Evaluate everything that outlives the step, since only this thread can evaluate lazy arrays.
    # To evaluate the choices is not enough: some arrays do not affect them, such as a recurrent
    # layer's last state or the keys of a sparse layer's index.
    mx.async_eval(
        [forwards[sequence].arrays for sequence in chosen],
        [target.arrays for target, *_ in rows.values()],
    )
    for sequence in chosen:
        if ahead:
            sequence.ahead = forwards[sequence]
        else:
            sequence.forward = forwards[sequence]
        if len(rows[sequence][2]) == 1:
            sequence.target.commit_moved((0,))
    return chosen


def _split(array: mx.array, spans: abc.Sequence[slice]) -> list[mx.array]:
    """The rows of each span, in one operation; together the spans are all rows, in any order."""
    ends = sorted(span.stop for span in spans)
    parts = dict(zip(ends, mx.split(array, ends[:-1]), strict=True))
    return [parts[span.stop] for span in spans]


def dispatch_next(sequences: Iterable[Sequence], joint: Joint | None) -> None:
    """Dispatch the next plain step of all sequences that go on, unless one of them may draft.

    It is dispatched for all sequences or for none, since two small forwards take longer than one.
    """
    going_on = [s for s in sequences if s.remaining > 1 or s.chooser.looks_ahead]
    pipelined = each(lambda s: not s.proposed and s.drafter.pipelined, going_on)
    if all(pipelined.values()):
        dispatch([*pipelined], joint, ahead=True)


def move_accepted(accepted: abc.Mapping[Sequence, Accepted]) -> None:
    """Move the accepted rows to their places in the caches, for all sequences at once."""
    moved = [s.target.to_move(result.rows) for s, result in accepted.items() if len(s.tree) > 1]
    if moved:
        with mx.stream(generation_stream):
            move_rows(moved)


class Batch:
    """Runs the steps of several sequences of one model, which may join and leave between steps.

    If the planning of drafts fails, the step is plain. Only the first failure is logged, since the
    next steps are likely to fail in the same way.

    Args:
        mode: the model's mode, :attr:`.LoadedModel.joint_mode`. With ``ALONE``,
            each sequence has its own forward in every step.
        patient: whether the drafts of some sequences may delay another, if all together gain.
        spare: as for :class:`.joint.Joint`.
    """

    def __init__(
        self, loaded: LoadedModel, mode: JointMode, patient: bool = False, spare: int | None = None
    ) -> None:
        self._patient = patient
        self._joint = None if mode is JointMode.ALONE else joint_for(loaded, mode, spare)
        self._costs_of: dict[int, Costs] = {}
        # The numbers of sequences and rows that have run: the first step of each counts for
        # nothing, since it may compile kernels.
        self._shapes: set[tuple[int, int]] = set()
        self._has_failed = False

    def _planned(self, plan: Callable[[], _Result]) -> _Result | None:
        """The result of a function that plans drafts; None if it fails."""
        try:
            return plan()
        except Exception as error:
            if not self._has_failed:
                self._has_failed = True
                log_fault(error)
            return None

    def takes_prompt(self, sequence: Sequence) -> bool:
        """Whether a sequence's prompt can run in one forward with others."""
        takes = self._joint and self._joint.takes(sequence.target)
        return bool(takes) and sequence.begins_as_rows

    def prefill(self, sequences: abc.Sequence[Sequence]) -> None:
        """Run the prompts of several sequences in one forward, as :meth:`Sequence.begin` does.

        Args:
            sequences: :meth:`takes_prompt` says so for each. An exception of a drafter becomes its
                sequence's error.
        """
        assert self._joint
        with mx.stream(generation_stream):
            rows = each(Sequence.begin_as_rows, sequences)
            if rows:
                self._joint.forward([*rows.values()])
            for target, tokens, _ in rows.values():
                target.commit_moved(range(len(tokens)))
            mx.eval([target.arrays for target, *_ in rows.values()])
            mx.clear_cache()

    def join(self, sequence: Sequence) -> None:
        """Add a sequence whose prompt has run."""
        if self._joint:
            self._joint.join(sequence.target)

    def leave(self, sequence: Sequence) -> None:
        """Remove a sequence, before it is closed."""
        if self._joint:
            self._joint.leave(sequence.target)
        for costs in self._costs_of.values():
            self._planned(costs.end)

    def step(
        self, sequences: abc.Sequence[Sequence], waits: bool = False
    ) -> list[VerifiedStep | Exception]:
        """Run one step of each sequence. The arguments and the result are as for
        :func:`joint_step`.
        """
        together = [s for s in sequences if self._joint and self._joint.takes(s.target)]
        waits = waits or len(sequences) > max(1, len(together))  # some take turns
        outcomes: dict[Sequence, VerifiedStep | Exception] = {}
        if len(together) > 1:
            steps = self._step_together(together, waits)
            outcomes = dict(zip(together, steps, strict=True))
        for sequence in sequences:
            if sequence not in outcomes:
                (outcomes[sequence],) = joint_step([sequence], waits=waits)
        return [outcomes[sequence] for sequence in sequences]

    def _step_together(
        self, sequences: abc.Sequence[Sequence], waits: bool
    ) -> list[VerifiedStep | Exception]:
        started = time.perf_counter()
        planners = {s: planner for s in sequences if (planner := s.planner) and not planner.failed}
        costs, plans = None, [NO_PLAN] * len(planners)
        if planners and (planned := self._planned(lambda: self._plan(sequences, planners))):
            costs, plans = planned
        for (sequence, planner), plan in zip(planners.items(), plans, strict=True):
            planner.shared_plan = plan
            sequence.uncounted += plan.planning_seconds
        outcomes = joint_step(sequences, self._joint, waits)
        steps = [outcome for outcome in outcomes if isinstance(outcome, VerifiedStep)]
        together = [step for step in steps if step.sequences == len(sequences)]
        if costs and len(together) == len(sequences):
            rows = 1 + together[0].rows - len(sequences)
            if (len(sequences), rows) not in self._shapes:
                self._shapes.add((len(sequences), rows))
                return outcomes
            seconds = time.perf_counter() - started - plans[0].head_seconds
            if together[0].pipelined:  # stands for plain decoding, which has no planner
                seconds -= min(sum(step.blocking_seconds for step in together), seconds / 2)
            self._planned(partial(costs.record, rows, seconds, together[0].pipelined))
        return outcomes

    def cost(self, sequence: Sequence, step: VerifiedStep) -> float:
        """The price of a sequence's step by the measured costs, in steps without drafts.

        It is 1 for a step without a draft. Other programs, a long context and prompts that run in
        between slow both kinds of step, so they hardly affect this ratio.

        Returns:
            NaN if the sequence has no planner, since the cost of drafting is then unknown.
        """
        planner, count = sequence.planner, step.sequences
        if planner is None:
            return math.nan
        alone, rows = planner.costs, 1 + step.rows - count
        cost = self._planned(lambda: self._costs_for(alone, count).curve(rows) + planner.head_time)
        return cost or math.nan

    def _costs_for(self, alone: Costs, count: int) -> Costs:
        """The costs of steps that ``count`` sequences share; ``alone`` are the costs of one."""
        if count == 1:
            return alone
        if count not in self._costs_of:
            self._costs_of[count] = alone.for_sequences(count)
        return self._costs_of[count]

    def _plan(
        self, sequences: abc.Sequence[Sequence], planners: dict[Sequence, Planner]
    ) -> tuple[Costs, list[Plan]]:
        """Plan the drafts of all sequences together; return the costs of their steps, and the
        plans.
        """
        count = len(sequences)
        costs = self._costs_for(next(iter(planners.values())).costs, count)
        costs.move_to(max(sequence.length for sequence in sequences))
        # The other sequences propose later. Expect as many draft tokens as they proposed last.
        others = [sequence for sequence in sequences if sequence not in planners]
        plans = plan_drafts(
            {planner: sequence.max_depth for sequence, planner in planners.items()},
            costs,
            sequences=count,
            rows_taken=sum(sequence.proposed for sequence in others),
            patient=self._patient,
        )
        return costs, plans
