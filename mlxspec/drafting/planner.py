"""The planner: drafts what emits most tokens per time, which may be nothing."""

from __future__ import annotations

import heapq
import logging
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from .acceptance import Experience
from .combined import Guide, guided, united
from .costs import CostCurve, Costs
from .drafter import Drafter, DraftTree, Limits, TreeBuilder, VerifiedStep
from .lookahead import LookaheadDrafter
from .policy import (
    Policy,
    allowed_shortfall,
    best_allowed,
    expected_shortfall,
    expected_tokens,
    gains_of,
    price_of_time,
    replayed_costs,
)
from .sources import DrafterSource
from .suffix_source import SuffixSource

_log = logging.getLogger(__name__)

# The running gain starts with that of a chain whose tokens each have a p_accept of 60 %
# (docs/planner-notes.md, "Constants").
_FIRST_DRAFT = [0.6**depth for depth in range(1, 9)]


class Plan(NamedTuple):
    """What a sequence verifies in one step.

    Attributes:
        candidates: for the current token, the likeliest first; None where none were searched for.
        n_draft: how many of them to verify.
        gain: what these gain, in tokens.
        rows_beside: rows of a window that are verified beside them.
        pipelined: whether the next step may be dispatched before this one's tokens are known, if
            nothing is drafted.
        joint: what steps of so many sequences cost; None for a step of the sequence alone.
        charge: the part of a joint step's time that the sequence's guard pays, in plain steps.
        fault: what has failed in planning it.
    """

    candidates: DraftTree | None = None
    n_draft: int = 0
    gain: float = 0.0
    rows_beside: int = 0
    pipelined: bool = True
    joint: Costs | None = None
    charge: float = 1.0
    fault: Exception | None = None


NO_PLAN = Plan()
"""A plain step."""


class Planner(Drafter):
    """Drafts what gains most under the costs of rows.

    It plans with optimistic costs (``hopeful``), so that widths whose cost is hardly known are
    tried. In each step the drafters' trees are merged and their nodes sorted by probability. The
    number of nodes is chosen that maximises the expected tokens less the price of their time,
    within what the policy allows: see :func:`plan_drafts`. Every step corrects the costs and the
    probabilities.

    A fault in any of that costs the generation its drafts and nothing else: a line in the log says
    what it was, and the remaining steps are plain. What a drafter of the user's own raises is
    raised.

    Args:
        costs: what steps cost; every step is recorded there.
        drafters: what it drafts from; where several propose siblings, the first one's come first.
            Any drafter that is not a source of the planner's own is wrapped in a
            :class:`DrafterSource`.
        branching: whether drafts may be trees; otherwise they are chains.
        replays: whether accepted tokens of a partly rejected draft run again (REPLAY).
        experience: of earlier generations; None where there are none.

    Attributes:
        branching: as given.
        policy: of the current generation.
        failed: whether planning has failed in the current generation.
        guide: knows what may come in a constrained output; None where all may.
    """

    guide: Guide | None = None

    def __init__(
        self,
        costs: Costs,
        drafters: Sequence[Drafter],
        *,
        branching: bool = True,
        replays: bool = False,
        experience: Experience | None = None,
    ) -> None:
        self.costs = costs
        self.branching = branching
        self._sources = [one if _has_probabilities(one) else DrafterSource(one) for one in drafters]
        self._guests = [one for one in self._sources if isinstance(one, DrafterSource)]
        self._windows = [one for one in self._sources if isinstance(one, LookaheadDrafter)]
        self._replays = replays
        self._experience = experience or Experience()

    def begin(self, prompt: Sequence[int]) -> None:
        self._last = prompt[-1]
        self._pending = 0
        self.failed = False
        self._begun: list[Drafter] = []
        self._plan = NO_PLAN
        self.policy = Policy()
        try:
            self.costs.move_to(len(prompt))
            if self.costs.wants_plain_steps:
                self.policy.probe_step = self._experience.probe_step
            first = _FIRST_DRAFT[: self.costs.hopeful.widest - 1]
            self.policy.gain = self._gain_of_chain(first)
            for source in self._sources:
                source.begin(prompt)
                self._begun.append(source)
        except Exception as error:
            self._fails(error)

    def search(self, curve: CostCurve, limits: Limits) -> DraftTree | None:
        """What may follow the current token, the likeliest first; None if the policy skips it.

        Args:
            curve: of rows.
            limits: of the draft.
        """
        forced = self.guide is not None and bool(self.guide.forced())
        if not forced and self.policy.skips_search(curve):
            return None
        tree = united([source.propose(limits) for source in self._sources], limits)
        return guided(tree, self.guide, limits.nodes, limits) if self.guide else tree

    def propose(self, max_depth: int) -> DraftTree:
        try:
            plan = NO_PLAN
            if not self.failed:
                (plan,) = plan_drafts([self], [max_depth], self.costs, rows_taken=self._pending)
        except Exception as error:
            plan = Plan(fault=error)
        return self.draft(plan)

    def draft(self, plan: Plan) -> DraftTree:
        """The draft of a plan for this planner's next step.

        Raises:
            Exception: what a drafter of the user's own has raised.
        """
        try:
            if plan.fault:
                raise plan.fault
            tree = self._tree_of(plan)
        except Exception as error:
            self._fails(error)
            plan, tree = NO_PLAN, DraftTree.chain(self._last)
        self._plan = plan
        return tree

    def _tree_of(self, plan: Plan) -> DraftTree:
        """The planned candidates, and the planned rows beside them."""
        if plan.candidates is None or self.failed:
            return DraftTree.chain(self._last)
        tree = plan.candidates.first(plan.n_draft)
        if not plan.rows_beside:
            return tree
        builder = TreeBuilder.of(tree)
        for window in self._windows:
            window.add_rows(builder)
        return builder.tree()

    def _fails(self, error: Exception) -> None:
        """Draft no more after a fault of planning; raise one of the user's own drafter."""
        if any(guest.fault is error for guest in self._guests):
            raise error
        if not self.failed:
            self.failed = True
            log_fault(error)

    @property
    def pipelined(self) -> bool:  # type: ignore[override]
        """Whether to dispatch the next forward before the next token is known.

        Asked when nothing is drafted now. The next token may open a passage worth drafting. It
        pays to wait for that token where drafts have lately gained more than the sync overhead,
        or where one would if the likeliest token came. The guard must allow that draft, too.
        """
        return self.failed or self._plan.pipelined

    def gain_of_waiting(self, candidates: DraftTree | None, costs: Sequence[float] | None) -> float:
        """What a draft after the next token gains on average, if the step waits for that token.

        Args:
            candidates: after the current token; None where none were searched for.
            costs: ``costs[rows]`` is what a step with so many rows costs; by default one of this
                sequence alone.
        """
        branch = candidates.first_chain().p_reached if candidates else ()
        if len(branch) < 2:
            return self.policy.gain
        then = [probability / branch[0] for probability in branch[1:]]
        return max(self.policy.gain, branch[0] * self._gain_of_chain(then, costs))

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
        spent = sum(guest.spent for guest in self._guests)
        if step.pipelined:  # it measures plain decoding, which has no planner
            spent = max(spent, min(step.drafting, step.seconds / 2))
        # First: a lent cache may have made it longer than the prompt.
        self.costs.move_to(step.context)
        plan, costs, charge = self._plan, self._plan.joint or self.costs, None
        # A step that is planned alone may have been dispatched before, together with others.
        if not plan.joint and step.sequences == 1:
            self.costs.record(step.rows, step.seconds - spent, step.pipelined)
        if plan.joint:
            drafted = step.rows - step.sequences
            cost = costs.hopeful(1 + drafted)
            charge = plan.charge if drafted else 1.0
        else:  # as corrected by this step, since the plan's costs were optimistic
            cost = costs.curve(pending + len(step.tree))
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
            source.observe(step)

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

    def window_rows(self) -> dict[tuple[int, int], int]:
        if self.failed:
            return {}
        return {row: node for window in self._windows for row, node in window.window_rows().items()}

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
        if len(candidates) == 1:
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
        table = self.step_costs(expected, costs.hopeful.table)
        restart_cost = costs.sync_overhead if policy.ahead else 0.0
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
        allowed = allowed_shortfall([policy.bank], gain(best))
        if shortfall <= allowed:
            return "the guard forbids the rows of the lookahead window"
        return (
            f"the guard forbids it: {told}; the expected loss is {shortfall:.3f}, and its bank of "
            f"{policy.bank:.2f} allows {allowed:.3f}"
        )

    def _gain_of_chain(
        self, p_reached: Sequence[float], costs: Sequence[float] | None = None
    ) -> float:
        """What a chain may gain whose first 1, 2, … tokens have these probabilities."""
        expected = expected_tokens(p_reached)
        costs = costs or self.step_costs(expected, self.costs.hopeful.table)
        expected = expected[: len(costs) - 1]
        bank = self.policy.bank

        def allows(gain: float, n_draft: int) -> bool:
            shortfall = expected_shortfall(costs[n_draft + 1], p_reached[:n_draft])
            return shortfall <= allowed_shortfall([bank], gain)

        return best_allowed(gains_of(expected, costs, self.policy.rate, 0.0), allows)[0]

    def step_costs(self, expected: Sequence[float], table: Sequence[float]) -> Sequence[float]:
        """What a step costs with ``rows`` rows besides pending ones, as ``costs[rows]``.

        Args:
            expected: E(n) of the nodes that may be verified.
            table: ``table[rows]`` is T(rows) / T(1).
        """
        return replayed_costs(expected, table, self._pending) if self._replays else table

    def window_beside(
        self, expected: Sequence[float], costs: Sequence[float], max_depth: int
    ) -> tuple[int, float]:
        """As :meth:`LookaheadDrafter.rows_beside`; 0 rows without such a drafter."""
        for window in self._windows if self.branching else ():
            price = price_of_time(expected[: len(costs) - 1], costs, self.policy.rate)
            bank = self.policy.bank
            rows, earned = window.rows_beside(expected, costs, price, bank, max_depth)
            if rows:
                return rows, earned
        return 0, 0.0


def _has_probabilities(drafter: Drafter) -> bool:
    """Whether a drafter takes :class:`Limits`, and knows how likely its drafts are right."""
    if isinstance(drafter, LookaheadDrafter):
        return drafter.follows_costs
    return isinstance(drafter, DrafterSource | SuffixSource)


def plan_drafts(
    planners: Sequence[Planner],
    max_depths: Sequence[int],
    costs: Costs,
    *,
    sequences: int = 1,
    rows_taken: int = 0,
    patient: bool = False,
) -> list[Plan]:
    """Plan the drafts of the next step, of one sequence or of several together.

    All candidates are sorted by their probabilities. The number of them is chosen that maximises
    the tokens expected of all sequences less the price of the step's time, within what the guard
    allows. A token counts by the time that it saves, so one of a fast sequence counts less: text
    that is easily copied can be copied later.

    A draft delays every sequence of the step, so there are two guards. The sequences share their
    banks: the sum pays for a step that fails, and what a step costs beyond a plain one is charged
    to those that draft, in proportion to their rows. And none waits for the others longer than its
    patience: a few plain joint steps in all, and a tenth of its time.

    Args:
        planners: of the sequences that plan their drafts, in the middle of a generation.
        max_depths: per planner, how deep its draft may be.
        costs: of steps of so many sequences: one row is a plain step of all, each further row is
            one of a draft.
        sequences: how many sequences share the step, those without a planner included.
        rows_taken: rows that the step has in any case, beside one of each sequence.
        patient: whether sequences may wait for others as long as all gain together.

    Returns:
        per planner its plan, whose fault is what its drafters raised, if they did.
    """
    step = _Step(planners, costs, sequences, rows_taken)
    plans = step.search(max_depths)
    if step.alone and not step.drafting:
        return plans
    gain, n_draft, window = step.choose(max_depths, patient)
    pipelined = not n_draft and not window and step.is_pipelined(plans)
    if step.alone:
        return [Plan(plans[0].candidates, n_draft, gain, window, pipelined)]
    shares = step.shares(n_draft)
    parts = [shares[index] / n_draft if n_draft else 0.0 for index in range(len(plans))]
    return [
        plan._replace(
            n_draft=shares[index],
            gain=part * gain,
            pipelined=pipelined,
            joint=costs,
            charge=1 + part * step.further(n_draft),
        )
        for index, (plan, part) in enumerate(zip(plans, parts, strict=True))
    ]


class _Step:
    """A step whose drafts are planned.

    Args:
        planners, costs, sequences, rows_taken: as for :func:`plan_drafts`.

    Attributes:
        alone: whether one sequence has the step for itself.
        drafting: by the planner's number, the candidates of those who may draft.
    """

    def __init__(
        self, planners: Sequence[Planner], costs: Costs, sequences: int, rows_taken: int
    ) -> None:
        self.alone = sequences == 1
        self.drafting: dict[int, DraftTree] = {}
        self._planners = planners
        self._policies = [planner.policy for planner in planners]
        self._costs = costs
        self._curve = costs.hopeful
        self._sequences = sequences
        self._max_nodes = max(0, self._curve.widest - 1 - rows_taken)
        # What a token of each sequence counts, 1 on average: the time that it usually takes.
        self._weights = [1.0]
        self._table: Sequence[float] = self._curve.table
        if not self.alone:
            times = [1 / policy.rate for policy in self._policies]
            self._weights = [time * len(times) / sum(times) for time in times]
            taken = min(rows_taken, self._curve.widest - 1)
            self._table = [0.0, *self._curve.table[1 + taken :]]

    def search(self, max_depths: Sequence[int]) -> list[Plan]:
        """Ask each planner for its candidates: plans that verify none of them yet."""
        plans: list[Plan] = []
        curve, max_nodes = self._curve, self._max_nodes
        least_p, costs = curve.cheapest_rows, curve.table
        for index, planner in enumerate(self._planners):
            if not self.alone:  # a row takes time from all sequences
                scale = self._sequences / self._weights[index]
                least_p, costs = [scale * cost for cost in curve.cheapest_rows], []
            limits = Limits(max_depths[index], max_nodes, planner.branching, least_p, costs)
            try:
                found = planner.search(curve, limits)
            except Exception as error:  # the others go on
                plans.append(Plan(fault=error))
                continue
            plans.append(Plan(found))
            if found is not None and not planner.policy.probes:
                self.drafting[index] = found
        self._sort()
        return plans

    def _sort(self) -> None:
        """Sort all nodes, the best first; a node's parent is before it."""
        if self.alone:
            p_reached: Sequence[float] = self.drafting[0].p_reached if self.drafting else ()
            self._owners = [0] * len(p_reached)
        else:
            best_first = heapq.merge(
                *(
                    [(-p * self._weights[index], index) for p in candidates.p_reached]
                    for index, candidates in self.drafting.items()
                )
            )
            order = list(islice(best_first, self._max_nodes))
            p_reached = [-p for p, _ in order]
            self._owners = [index for _, index in order]
        self._expected = expected_tokens(p_reached, self._sequences)
        if self.alone:
            self._table = self._planners[0].step_costs(self._expected, self._table)

    def shares(self, n_draft: int) -> Counter[int]:
        """How many of the first nodes each planner has."""
        return Counter(self._owners[:n_draft])

    def choose(self, max_depths: Sequence[int], patient: bool) -> tuple[float, int, int]:
        """The greatest gain that the guard allows.

        Returns:
            the gain in tokens, the number of nodes, and the rows of a window.
        """
        costs, expected, gained, window, earned = self._table, self._expected, 0.0, 0, 0.0
        if self.alone:  # a window is verified beside the draft of one sequence only
            (planner,), (max_depth,) = self._planners, max_depths
            window, earned = planner.window_beside(expected, costs, max_depth)
        if len(expected) == 1 and not window:
            return 0.0, 0, 0
        policies, overhead = self._policies, self._costs.sync_overhead
        rate = sum(one.rate * weight for one, weight in zip(policies, self._weights, strict=True))
        rate += self._sequences - len(policies)
        # Who has just joined does not know what was dispatched.
        restart = overhead if any(policy.ahead for policy in policies) else 0.0
        if window:
            costs = [0.0, *costs[1 + window :]]
            expected = [tokens + earned for tokens in expected[: len(costs) - 1]]
            gained = earned - price_of_time(expected, costs, rate) * (costs[1] - self._table[1])
        banks = [policy.bank for policy in policies]

        def allows(gain: float, n_draft: int) -> bool:
            shares = self.shares(n_draft)
            cost = costs[n_draft + 1] if self.alone else 1 + self.further(n_draft)
            drafts = [self.drafting[index].p_by_depth(own) for index, own in shares.items()]
            shortfall = expected_shortfall(cost, *drafts) - earned
            allowed = shortfall <= allowed_shortfall(banks, gain + gained)
            return allowed and (self.alone or patient or self._is_endured(n_draft, shares))

        gains = gains_of(expected, costs, rate, restart)
        gain, n_draft = best_allowed(gains, allows)
        gain += gained
        if window and not n_draft and not allows(0.0, 0):
            return 0.0, 0, 0
        return max(gain, 0.0), n_draft, window

    def further(self, n_draft: int) -> float:
        """The time that so many nodes take beyond a plain step, from all sequences together."""
        return self._sequences * (self._table[n_draft + 1] / self._table[1] - 1)

    def _is_endured(self, n_draft: int, shares: Counter[int]) -> bool:
        """Whether nobody waits for these nodes longer than its patience."""
        further = self.further(n_draft) / self._sequences
        tokens = [0.0] * len(self._policies)
        for index, own in shares.items():
            tokens[index] = sum(self.drafting[index].p_reached[:own])
        return all(
            further - own <= policy.patience
            for own, policy in zip(tokens, self._policies, strict=True)
        )

    def is_pipelined(self, plans: Sequence[Plan]) -> bool:
        """Whether a step without drafts need not wait for its tokens, since drafts after these
        would hardly gain more than the wait costs."""
        if not self.alone and self._costs.wants_plain_steps:
            # A probe of one sequence is not waited for by the others.
            return True
        most = self._sequences * self._costs.sync_overhead
        if sum(policy.gain for policy in self._policies) > most:
            return False
        table: Sequence[float] | None = None
        if not self.alone:  # whoever drafts pays for what its rows take from all
            table = [0.0, *(1 + self.further(n) for n in range(len(self._table) - 1))]
        gains = (
            planner.gain_of_waiting(plan.candidates, table)
            for planner, plan in zip(self._planners, plans, strict=True)
        )
        return sum(gains) <= most


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
