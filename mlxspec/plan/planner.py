"""The planner: drafts what emits most tokens per time, which may be nothing."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

from ..draft.drafter import Drafter, DraftTree, TreeBuilder, VerifiedStep
from ..draft.forced import GRAMMAR, Guide
from .cost_curve import USUAL_SYNC_OVERHEAD, CostCurve, Costs
from .experience import Experience
from .policy import (
    Policy,
    allowed_shortfall,
    expected_shortfall,
    expected_tokens,
    price_of_time,
    replayed_costs,
)

_log = logging.getLogger(__name__)

# The running gain starts with that of a chain whose tokens each have a p_accept of 60 %
# (docs/planner-notes.md, "Constants").
_FIRST_DRAFT = [0.6**depth for depth in range(1, 9)]

_FORCED = 0.99  # p_accept of a token that a constraint forces; nothing is certain


class Candidates:
    """Draft nodes below the current token, the likeliest first, parents before their children.

    Args:
        root: the current token.
        name: the source that proposes them.

    Attributes:
        tokens, parents: as in :class:`DraftTree`, the root first.
        depths: per node but the root, its distance from the root.
        p_reached: per node but the root, the probability that it is accepted.
    """

    def __init__(self, root: int, name: str = "draft") -> None:
        self.name = name
        self.tokens = [root]
        self.parents = [-1]
        self.depths: list[int] = []
        self.p_reached: list[float] = []

    def add(self, token: int, parent: int, p_reached: float) -> int:
        """Append a node; returns its number."""
        self.tokens.append(token)
        self.parents.append(parent)
        self.depths.append(1 + (self.depths[parent - 1] if parent else 0))
        self.p_reached.append(p_reached)
        return len(self.tokens) - 1

    def cut(self, n_draft: int) -> None:
        """Forget all but the first ``n_draft`` nodes."""
        del self.tokens[n_draft + 1 :], self.parents[n_draft + 1 :]
        del self.depths[n_draft:], self.p_reached[n_draft:]

    def origins(self, n_draft: int) -> list[str]:
        """The source of each of the first ``n_draft`` nodes."""
        return [self.name] * n_draft

    def draft(self, n_draft: int) -> DraftTree:
        """The tree of the first ``n_draft`` nodes."""
        return DraftTree(tuple(self.tokens[: n_draft + 1]), tuple(self.parents[: n_draft + 1]))

    def p_by_depth(self, n_draft: int) -> list[float]:
        """The probabilities that at least 1, 2, … of the first ``n_draft`` nodes are accepted."""
        depths = self.depths[:n_draft]
        p_by_depth = [0.0] * max(depths, default=0)
        for depth, probability in zip(depths, self.p_reached, strict=False):
            p_by_depth[depth - 1] += probability
        return p_by_depth

    def first_branch(self) -> list[float]:
        """``p_reached`` of the likeliest first token and of the best nodes down from it."""
        branch: list[float] = []
        node = 0
        for child, parent in enumerate(self.parents[1:], start=1):
            if parent == node:
                branch.append(self.p_reached[child - 1])
                node = child
        return branch


class Limits(NamedTuple):
    """What a source's candidates for one step are bounded by.

    Attributes:
        nodes: how many there may be.
        depth: how deep they may be.
        branching: whether a node may have several children.
        least_p: ``least_p[n]`` is the probability below which no node beyond the first n pays,
            even if a plain step's time is worth one token; see
            :attr:`mlxspec.plan.cost_curve.CostCurve.cheapest_rows`.
        costs: ``costs[rows]`` is T(rows) / T(1), from which the candidates tell what the time is
            worth; empty where other sequences have a say in that.
    """

    nodes: int
    depth: int
    branching: bool
    least_p: Sequence[float]
    costs: Sequence[float] = ()


class Source:
    """Where a planner's candidates come from: the base class of all sources.

    A source needs :meth:`candidates`; all else has a default that does nothing. The planner calls
    ``begin`` once with the prompt, then ``candidates`` and ``observe`` in turn (``observe`` alone
    in steps that skip the search), and ``end``.
    """

    name = "draft"
    """The origin of its draft tokens, for ``mlxspec explain``."""

    spent = 0.0
    """Seconds of the current step that say nothing about what rows cost."""

    fault: Exception | None = None
    """What a drafter of the user's own has raised, which is no fault of planning."""

    def begin(self, prompt: Sequence[int]) -> None:
        """Start a generation whose context is ``prompt``."""

    def candidates(self, limits: Limits) -> Candidates:
        """What may follow the current token, within these limits."""
        raise NotImplementedError

    def rows_beside(
        self, expected: Sequence[float], costs: Sequence[float], policy: Policy, max_depth: int
    ) -> tuple[int, float]:
        """Rows to verify beside the candidates, such as a window's.

        Args:
            expected: E(n) of the candidates.
            costs: ``costs[rows]`` is T(rows) / T(1), as far as there is room.
            policy: the planner's.
            max_depth: how deep these rows may be.

        Returns:
            how many rows, and the tokens per step that they earn.
        """
        return 0, 0.0

    def add_rows(self, tree: TreeBuilder) -> None:
        """Add these rows to the draft; called in steps that verify them."""

    def window_rows(self) -> dict[tuple[int, int], int]:
        """Lookahead's window in the last draft: the node of each row (level, column)."""
        return {}

    def observe(self, step: VerifiedStep, searched: bool) -> None:
        """Learn from a step; ``step.tokens`` now belong to the context.

        Args:
            step: what was verified.
            searched: whether :meth:`candidates` was asked for this step.
        """

    def end(self) -> None:
        """Release the generation's state."""


class Planner(Drafter):
    """Drafts what gains most under the costs of rows.

    The costs are those that may plausibly be hoped for, so that what is hardly known is tried.
    In each step the sources' candidates are sorted by their probabilities, and the number of them
    is chosen at which expected tokens less the price of their time are greatest, within what the
    policy allows. Every step corrects the costs and the probabilities.

    A fault in any of that costs the generation its drafts and nothing else: a line in the log says
    what it was, and the remaining steps are plain. What a drafter of the user's own raises is
    raised.

    Args:
        costs: what steps cost; every step is recorded there.
        sources: of candidates; where several propose siblings, the first source's count first.
        branching: whether drafts may be trees; otherwise they are chains.
        replays: whether accepted tokens of a partly rejected draft run again (REPLAY).
        guarded: whether a guard bounds what failed drafts may cost.
        experience: of earlier generations; None where there are none.

    Attributes:
        policy: of the current generation.
        failed: whether planning has failed in the current generation.
        guide: knows what may come in a constrained output; None where all may.
    """

    guide: Guide | None = None

    def __init__(
        self,
        costs: Costs,
        sources: Sequence[Source],
        *,
        branching: bool = True,
        replays: bool = False,
        guarded: bool = True,
        experience: Experience | None = None,
    ) -> None:
        self.costs = costs
        self.branching = branching
        self._sources = sources
        self._replays = replays
        self._guarded = guarded
        self._experience = experience or Experience()

    def begin(self, prompt: Sequence[int]) -> None:
        self._last = prompt[-1]
        self._pending = 0
        self._given: Plan | None = None
        self._fault: Exception | None = None
        self.failed = False
        self._begun: list[Source] = []
        self._plan = NO_PLAN
        self.policy = Policy(self._guarded)
        try:
            self.costs.move_to(len(prompt))
            if self.costs.wants_plain_steps:
                self.policy.probe_step = self._experience.probe_step
            first = _FIRST_DRAFT[: self.costs.hopeful.widest - 1]
            self.policy.gain = self._gain_of_chain(first, guarded=False)
            for source in self._sources:
                source.begin(prompt)
                self._begun.append(source)
        except Exception as error:
            self._fails(error)

    def search(self, curve: CostCurve, limits: Limits) -> Candidates | None:
        """What may follow the current token; None where the policy skips the search.

        Args:
            curve: of rows.
            limits: of the candidates.
        """
        forced = self.guide is not None and bool(self.guide.forced())
        if not forced and self.policy.skips_search(curve):
            return None
        found = [source.candidates(limits) for source in self._sources]
        candidates = merged(found, limits.nodes)
        if self.guide is None:
            return candidates
        return guided(candidates, self.guide, limits.nodes, limits.depth)

    def plan_is(self, plan: Plan) -> None:
        """Take a plan for the next proposal that was made for several sequences together."""
        self._given = plan

    def fails_with(self, error: Exception) -> None:
        """Take note of what :meth:`search` has raised while several sequences were planned.

        If it is the fault of a drafter of the user's own, the next proposal raises it.
        """
        try:
            self._fails(error)
        except Exception as fault:
            self._fault = fault

    def _fails(self, error: Exception) -> None:
        """Draft no more after a fault of planning; raise one of the user's own drafter."""
        if any(source.fault is error for source in self._sources):
            raise error
        if not self.failed:
            self.failed = True
            log_fault(error)

    def propose(self, max_depth: int) -> DraftTree:
        if self._fault:
            raise self._fault
        given, self._given = self._given, None
        try:
            plan = NO_PLAN if self.failed else given or self._choose(max_depth)
            draft = self._draft_of(plan)
        except Exception as error:
            self._fails(error)
            plan, draft = NO_PLAN, DraftTree.chain(self._last)
        self._plan, self._draft = plan, draft
        return draft

    def _draft_of(self, plan: Plan) -> DraftTree:
        if plan.candidates is None:
            return DraftTree.chain(self._last)
        draft = plan.candidates.draft(plan.n_draft)
        if not plan.rows_beside:
            return draft
        builder = TreeBuilder.of(draft)
        for source in self._sources:
            source.add_rows(builder)
        return builder.tree()

    @property
    def pipelined(self) -> bool:  # type: ignore[override]
        """Whether to dispatch the next forward before the next token is known.

        Asked when nothing is drafted now. The next token may open a passage worth drafting. It
        pays to wait for that token where drafts have lately gained more than the sync overhead,
        or where one would if the likeliest token came. Where the sync overhead is high, the
        guard must allow that draft, too.
        """
        try:
            return self.failed or self._is_pipelined()
        except Exception as error:
            self._fails(error)
            return True

    def _is_pipelined(self) -> bool:
        plan, costs = self._plan, self.costs
        if plan.joint:
            return plan.joint.pipelined
        if self.policy.probes or plan.candidates is None:
            return True
        overhead = costs.sync_overhead
        return (
            self.policy.gain <= overhead
            and self.gain_of_waiting(plan.candidates, None, overhead) <= overhead
        )

    def gain_of_waiting(
        self, candidates: Candidates | None, costs: Sequence[float] | None, sync_overhead: float
    ) -> float:
        """What a draft after the next token gains on average, if the step waits for that token.

        Args:
            candidates: after the current token; None where none were searched for.
            costs: ``costs[rows]`` is what a step with so many rows costs; by default one of this
                sequence alone.
            sync_overhead: of such a step.
        """
        branch = candidates.first_branch() if candidates else []
        if len(branch) < 2:
            return self.policy.gain
        then = [probability / branch[0] for probability in branch[1:]]
        guarded = sync_overhead > USUAL_SYNC_OVERHEAD
        return max(self.policy.gain, branch[0] * self._gain_of_chain(then, guarded, costs))

    def observe(self, step: VerifiedStep) -> None:
        pending, self._pending = self._pending, step.pending
        self._last = step.tokens[-1]
        if not self.failed:
            try:
                self._learn(step, pending)
            except Exception as error:
                self._fails(error)

    def _learn(self, step: VerifiedStep, pending: int) -> None:
        """Learn from a step before which so many accepted tokens were pending."""
        spent = sum(source.spent for source in self._sources)
        if step.pipelined:  # it tells what plain decoding takes, which has no planner
            spent = max(spent, min(step.drafting, step.seconds / 2))
        # First: a lent cache may have made it longer than the prompt.
        self.costs.move_to(step.context)
        plan, charge = self._plan, None
        # Nor those that were dispatched while another sequence shared them.
        if not plan.joint and step.sequences == 1:
            self.costs.record(step.rows, step.seconds - spent, step.pipelined)
        if plan.joint:
            drafted = step.rows - step.sequences
            cost = plan.joint.costs.hopeful(1 + drafted)
            charge = plan.joint.charge if drafted else 1.0
        else:  # with what the step has told, since the hope may have been vain
            cost = self.costs.curve(pending + len(step.tree))
        costs = plan.joint.costs if plan.joint else self.costs
        self.policy.settle(
            step,
            cost,
            chosen=plan.n_draft > 0 or plan.rows_beside > 0,
            gain=plan.gain,
            probing=costs.wants_plain_steps,
            doubtful=costs.hopeful is not costs.curve,
            charge=charge,
        )
        for source in self._sources:
            source.observe(step, searched=plan.candidates is not None)

    def end(self) -> None:
        self._experience.probe_step = self.policy.probe_step
        with ExitStack() as ending:
            ending.callback(self._end, self.costs.end)
            ending.callback(self._end, self._experience.end)
            for source in reversed(self._begun):
                ending.callback(self._end, source.end)

    def _end(self, end: Callable[[], None]) -> None:
        try:
            end()
        except Exception as error:
            self._fails(error)

    def origins(self) -> tuple[str, ...]:
        """Per node of the tree proposed last: the source that proposed it, or "window"."""
        plan = self._plan
        names = plan.candidates.origins(plan.n_draft) if plan.candidates else []
        return "root", *names, *["window"] * (len(self._draft) - 1 - len(names))

    def window_rows(self) -> dict[tuple[int, int], int]:
        if self.failed:
            return {}
        return {row: node for source in self._sources for row, node in source.window_rows().items()}

    def no_draft(self) -> str:
        """Why the last proposal has no draft; computed again, since only ``explain`` asks."""
        candidates, policy, costs = self._plan.candidates, self.policy, self.costs
        if self.failed:
            return "planning has failed, as the log says"
        if candidates is None:
            return (
                "not searched for, since rows are expensive here and the last steps had none "
                "either; every fourth step searches"
            )
        is_known = costs.hopeful is costs.curve
        may_cost = "cost" if is_known else "may cost"
        if not candidates.p_reached:
            least = costs.hopeful.cheapest_rows[0]
            if least >= 1:
                return f"each row costs {least:.2f} plain steps here, so no draft can pay"
            return (
                "no text repeats here, or what followed it is right too seldom for rows that "
                f"{may_cost} {least:.2f} plain steps each"
            )
        if policy.probes:
            return "a plain step, to measure its time"
        expected = expected_tokens(candidates.p_reached)
        table, restart_cost = self._costs_of(expected), policy.restart_cost(costs.sync_overhead)
        price = price_of_time(expected, table, policy.rate)

        def gain(n_draft: int) -> float:
            more_time = table[n_draft + 1] + restart_cost - table[1]
            return expected[n_draft] - expected[0] - price * more_time

        best = max(range(1, len(expected)), key=gain)
        told = (
            f"{best + 1} rows {may_cost} {table[best + 1] + restart_cost:.2f} plain steps, "
            f"expected {expected[best]:.2f} tokens"
        )
        if gain(best) <= 0:
            return f"{told} (a plain step's time is worth {price:.2f})"
        shortfall = expected_shortfall(table[best + 1], candidates.p_by_depth(best))
        if policy.allows(shortfall, gain(best)):
            return "the guard forbids the rows of the lookahead window"
        return (
            f"the guard forbids it: {told}; the expected loss is {shortfall:.3f}, and its bank of "
            f"{policy.bank:.2f} allows {allowed_shortfall([policy.bank], gain(best)):.3f}"
        )

    def _choose(self, max_depth: int) -> Plan:
        """Gather the candidates after the current token and choose how many to verify."""
        costs, policy, curve = self.costs, self.policy, self.costs.hopeful
        max_nodes = max(0, curve.widest - 1 - self._pending)
        limits = Limits(max_nodes, max_depth, self.branching, curve.cheapest_rows, curve.table)
        candidates = self.search(curve, limits)
        if candidates is None:
            return NO_PLAN
        if policy.probes:
            return Plan(candidates, 0, 0.0)
        expected = expected_tokens(candidates.p_reached)
        table = self._costs_of(expected)
        for source in self._sources:
            rows, earned = source.rows_beside(expected, table, policy, max_depth)
            if rows:
                return self._with_rows_beside(candidates, expected, table, rows, earned)
        restart_cost = policy.restart_cost(costs.sync_overhead)
        gain, n_draft = policy.best(expected, table, candidates.p_by_depth, restart_cost)
        return Plan(candidates, n_draft, gain)

    def _with_rows_beside(
        self,
        candidates: Candidates,
        expected: Sequence[float],
        table: Sequence[float],
        rows: int,
        earned: float,
    ) -> Plan:
        """Choose how many candidates to verify beside ``rows`` that earn ``earned`` tokens."""
        costs = [0.0, *table[1 + rows :]]
        expected = [tokens + earned for tokens in expected[: len(costs) - 1]]
        price = price_of_time(expected, costs, self.policy.rate)
        restart_cost = self.policy.restart_cost(self.costs.sync_overhead)
        gained = earned - price * (costs[1] - table[1])
        gain, n_draft = self.policy.best(
            expected, costs, candidates.p_by_depth, restart_cost, earned=earned, gained=gained
        )
        gain += gained
        shortfall = expected_shortfall(costs[1], ()) - earned
        if not n_draft and not self.policy.allows(shortfall, gain):
            return Plan(candidates, 0, 0.0)
        return Plan(candidates, n_draft, max(gain, 0.0), rows)

    def _gain_of_chain(
        self, p_reached: Sequence[float], guarded: bool, costs: Sequence[float] | None = None
    ) -> float:
        """The gain of a chain whose first 1, 2, … tokens are accepted with these probabilities."""
        expected = expected_tokens(p_reached)
        costs = costs or self._costs_of(expected)
        expected = expected[: len(costs) - 1]
        gain, _ = self.policy.best(expected, costs, lambda n: p_reached[:n], guarded=guarded)
        return gain

    def _costs_of(self, expected: Sequence[float]) -> Sequence[float]:
        """``costs[rows]``: T(rows) / T(1) of a step with ``rows`` rows besides pending ones."""
        table = self.costs.hopeful.table
        return replayed_costs(expected, table, self._pending) if self._replays else table


class JointStep(NamedTuple):
    """What a sequence has to know of a step that it shares with others.

    Attributes:
        costs: of such steps; one row is a plain step of all sequences.
        charge: the part of the step's time that the sequence's guard pays, in plain steps.
        pipelined: whether the next step may be dispatched before this one's tokens are known.
    """

    costs: Costs
    charge: float
    pipelined: bool


class Plan(NamedTuple):
    """What to verify in one step.

    Attributes:
        candidates: for the current token; None where none were searched for.
        n_draft: how many of them to verify.
        gain: what these gain, in tokens.
        rows_beside: rows that are verified beside them.
        joint: how the step is shared; None for a step of the sequence alone.
    """

    candidates: Candidates | None
    n_draft: int
    gain: float
    rows_beside: int = 0
    joint: JointStep | None = None


NO_PLAN = Plan(None, 0, 0.0)
"""A plain step."""


def log_fault(error: Exception) -> None:
    """Say in a line of the log what has failed in planning, which costs speed alone."""
    place = traceback.extract_tb(error.__traceback__)[-1]
    reason = str(error).partition("\n")[0]
    _log.warning(
        "planning drafts has failed (%s: %s, in %s:%s): steps run without drafts",
        type(error).__name__,
        reason,
        Path(place.filename).name,
        place.lineno,
        exc_info=_log.isEnabledFor(logging.DEBUG),
    )


class _Union(Candidates):
    """Candidates of several sources."""

    def __init__(self, root: int) -> None:
        super().__init__(root)
        self.names: list[str] = []

    def origins(self, n_draft: int) -> list[str]:
        return self.names[:n_draft]


def merged(sources: Sequence[Candidates], max_nodes: int) -> Candidates:
    """The best ``max_nodes`` candidates of several sources for one token.

    A node that several sources propose keeps its highest probability, as far as its siblings
    leave room for that. The p_accept of a node that only a later source proposes is scaled by the
    probability that none of the earlier sources' siblings is right.
    """
    if len(sources) == 1:
        return sources[0]
    union = _Union(sources[0].tokens[0])
    p_reached = union.p_reached
    children: dict[tuple[int, int], int] = {}
    below = [0.0]  # per node, the probability that a child of it is accepted
    for candidates in sources:
        nodes = [0]
        # Per node, the share of its probability that the earlier sources' children leave.
        left = [
            max(0.0, 1 - p_children / p_node) if p_node else 0.0
            for p_node, p_children in zip([1.0, *p_reached], below, strict=True)
        ]
        for token, parent, p_own in zip(
            candidates.tokens[1:], candidates.parents[1:], candidates.p_reached, strict=True
        ):
            above = nodes[parent]
            p_above = p_reached[above - 1] if above else 1.0
            p_node = p_above * p_own / (candidates.p_reached[parent - 1] if parent else 1.0)
            room = max(0.0, p_above - below[above])
            node = children.get((above, token))
            if node is None:
                gained = min(p_node * left[above], room)
                node = children[above, token] = union.add(token, above, gained)
                union.names.append(candidates.name)
                below.append(0.0)
                left.append(1.0)
            else:
                gained = max(0.0, min(p_node - p_reached[node - 1], room))
                p_reached[node - 1] = min(p_reached[node - 1] + gained, p_above)
            below[above] += gained
            nodes.append(node)
    return _best_of(union, max_nodes)


def _best_of(union: _Union, max_nodes: int) -> _Union:
    """The best candidates, the likeliest first."""
    best = _Union(union.tokens[0])
    order = best_first(union, best)
    best.names = [union.names[node - 1] for node in order]
    best.cut(max_nodes)
    return best


def guided(candidates: Candidates, guide: Guide, max_nodes: int, max_depth: int) -> Candidates:
    """The best ``max_nodes`` candidates that may come, and the tokens that must follow them.

    Args:
        candidates: whatever sources propose.
        guide: of the output.
        max_nodes: how many candidates to return at most.
        max_depth: how deep they may be.
    """
    allowed, forced = guide.guide(candidates.tokens, candidates.parents)
    names = candidates.origins(len(candidates.tokens) - 1)
    every = _Union(candidates.tokens[0])
    children: dict[tuple[int, int], int] = {}
    number = {0: 0}

    def add(above: int, token: int, p_accept: float, name: str) -> int:
        if (above, token) not in children:
            p_above = every.p_reached[above - 1] if above else 1.0
            children[above, token] = every.add(token, above, p_above * p_accept)
            every.names.append(name)
        return children[above, token]

    def add_forced(node: int) -> None:
        above = number[node]
        room = max_depth - (every.depths[above - 1] if above else 0)
        for token in forced.get(node, ())[:room]:
            above = add(above, token, _FORCED, GRAMMAR)

    add_forced(0)  # first, since it is likelier than its sources say
    for node in range(1, len(candidates.tokens)):
        if allowed[node]:
            parent, p_reached = candidates.parents[node], candidates.p_reached
            p_above = p_reached[parent - 1] if parent else 1.0
            p_accept = p_reached[node - 1] / p_above if p_above else 0.0
            number[node] = add(number[parent], candidates.tokens[node], p_accept, names[node - 1])
            add_forced(node)
    return _best_of(every, max_nodes)


def best_first(candidates: Candidates, into: Candidates) -> list[int]:
    """Add the nodes to ``into``, the likeliest first; returns their former numbers.

    Equal ones keep their order, so that parents come before children.
    """
    order = sorted(range(1, len(candidates.tokens)), key=lambda n: -candidates.p_reached[n - 1])
    number = {0: 0}
    for node in order:
        parent = number[candidates.parents[node]]
        number[node] = into.add(candidates.tokens[node], parent, candidates.p_reached[node - 1])
    return order
