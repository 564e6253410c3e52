"""The planner: chooses the draft that yields the most tokens per time, or none.

All times are in plain steps, that is, in multiples of the time of a pipelined step over one row.
notes/planner.md, "Constants", says where the constants come from.
"""

from __future__ import annotations

import logging
import math
import time
import traceback
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from heapq import heapify, heapreplace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, NamedTuple

from .accept import VerifiedStep
from .candidates import Candidates, Source, SourceNode, TreeNode
from .cost_curve import CostCurve
from .costs import Costs
from .experience import Experience
from .heads import HeadSource
from .sources import forced_chain
from .tree import DraftTree

_log = logging.getLogger(__name__)

_SHARE_OF_NOW = 0.8  # the weight of this step's best rate in the price of time; the average has 0.2
_FIRST_RATE = 1.2
_CHANGE = 0.1  # the weight of the newest step in running averages

_FIRST_BANK = 2.0
_MOST_BUDGET = 0.5  # also at first; less than the bank, which then outlasts it
_PLANNING = 0.02  # the share of time that planning may take beyond its gains
_INCOME = 1.02  # per emitted token, so at 98 % of plain speed the bank neither grows nor shrinks
_STAKE = 0.04  # the square of the allowed shortfall, divided by the product of bank and gain

# The longest delay of an output, in plain joint steps, in addition to a tenth of its time. With
# less patience at first, the newest of many short outputs would keep all others from drafting.
_FIRST_PATIENCE, _MOST_PATIENCE = 4.0, 64.0
_PATIENCE_PER_STEP = 0.1

_MUCH_GAIN = 0.3
_PROBE_ROUND = 60  # steps
_JOINT_PROBE_ROUND = 180  # steps of several sequences
_PROBE = range(42, 48)  # consecutive steps, since the first and the last do not show T(1)

_ROWS_OF_A_TREE = 16
_FLAT = 2.0  # the most that these rows may cost, in plain steps


class Policy:
    """The state of one generation that decides how many of a step's candidates to verify.

    A draft's **gain** is the number of tokens that it adds to a plain step's, less the price of its
    time. Four mechanisms limit drafts:

    - The *guard* is a bank of time that pays for drafts that fail. Each step deposits slightly more
      than its tokens, and withdraws its cost. The more the bank holds and the larger the gain, the
      more a draft may risk; see :func:`allowed_shortfall`. So safe drafts pass immediately, risky
      ones only after earlier gains, and drafts with little gain rarely.
    - The *sync overhead* is charged if the next step's forward has already been dispatched, since a
      draft interrupts the pipeline.
    - The *probe* measures plain steps, since all costs are relative to their time. If every step
      had a draft, a change of costs would look like a change of the machine's speed. So while
      plain steps are wanted, six consecutive steps out of every 60 have no draft, unless drafts
      gain much. The count of steps continues in the next generation, since short generations
      never reach 60 steps. In joint steps, one probe serves all sequences, one step in thirty.
    - The *budget* is for planning itself. It receives what drafts are expected to gain, and a small
      share of the time. While it is overdrawn, no drafts are searched for.

    Attributes:
        probe_step: the number of steps counted towards the next probe, also in earlier generations.
        rate: the running average of the tokens per plain step's time.
        gain: the running average of the chosen drafts' gains, 0 if none is chosen.
        bank: the guard's balance, in plain steps.
        budget: the time that planning may still take, in plain steps.
        ahead: whether the next step's forward has already been dispatched.
        patience: how long the drafts of other sequences may still delay this one, in plain joint
            steps.
    """

    def __init__(self) -> None:
        self.rate = _FIRST_RATE
        self.gain = 0.0
        self.bank = _FIRST_BANK
        self.budget = _MOST_BUDGET
        self.patience = _FIRST_PATIENCE
        self.probe_step = 0
        self.ahead = False

    @property
    def probes(self) -> bool:
        """Whether the next step, if it is not a joint step, is a probe: a plain step to measure."""
        return self.gain < _MUCH_GAIN and self.probe_step % _PROBE_ROUND in _PROBE

    def account_for(
        self,
        step: VerifiedStep,
        cost: float,
        *,
        gain: float,
        probing: bool,
        charge: float | None = None,
        planning_time: float = 0.0,
    ) -> None:
        """Account for a completed step.

        Args:
            step: the verified step; it has no draft if its forward was dispatched ahead.
            cost: T(rows) / T(1) of the step.
            gain: the draft's gain, 0 without one.
            probing: whether plain steps are wanted.
            charge: the amount to withdraw from the guard's bank if several sequences share the
                step; by default the step's cost.
            planning_time: the time that planning took, in plain steps.
        """
        emitted = len(step.tokens)
        self.ahead = step.ahead
        self.probe_step = self.probe_step + 1 if probing else 0
        self.gain += _CHANGE * (gain - self.gain)
        self.rate += _CHANGE * (emitted / cost - self.rate)
        # Alone, the cost of a draft was measured together with its planning.
        unpaid = 0.0 if step.sequences == 1 and step.drafted else planning_time
        self.bank += _INCOME * emitted - (cost if charge is None else charge) - unpaid
        # Below 0 nothing was searched. The rest of planning takes time in every step. If it were
        # charged, the budget of a fast model would never rise above 0 again.
        searching = planning_time if self.budget >= 0 else 0.0
        budget = self.budget + _PLANNING + gain - searching
        self.budget = min(max(budget, -_MOST_BUDGET), _MOST_BUDGET)
        patience = self.patience + _PATIENCE_PER_STEP + emitted - cost
        self.patience = min(max(patience, 0.0), _MOST_PATIENCE)


def expected_tokens(p_reached: Sequence[float]) -> list[float]:
    """E(n): the expected tokens of a step that verifies the first n draft nodes.

    Args:
        p_reached: for each draft node, the probability that it is accepted; the highest first.

    Returns:
        E(0), E(1), …, including the one token that every step emits.
    """
    return list(accumulate(p_reached, initial=1.0))


def price_of_time(best: float, rate: float) -> float:
    """The price of a plain step's time, in tokens.

    The time that this step saves is worth the tokens that later steps emit in it. Their rate is
    predicted from the average and from the best rate that is possible now, since an easy passage
    goes on for some time.

    Args:
        best: the most tokens per plain step's time that this step can reach.
        rate: the recent tokens per plain step's time.
    """
    return float(best**_SHARE_OF_NOW * rate ** (1 - _SHARE_OF_NOW))


def best_draft(
    expected: Sequence[float],
    costs: Sequence[float],
    rate: float,
    restart_cost: float = 0.0,
    allows: Callable[[float, int], bool] = lambda gain, n_draft: True,
) -> tuple[float, int]:
    """The greatest allowed gain, and its number of nodes; 0.0 and 0 if there is none.

    All numbers of nodes are compared, since costs rise in jumps. After a refusal, only half as many
    nodes or fewer are tried: slightly fewer would hardly be safer, and each check takes time.

    Args:
        expected: E(n) as from :func:`expected_tokens`.
        costs: ``costs[rows]`` is T(rows) / T(1).
        rate: as for :func:`price_of_time`.
        restart_cost: the cost of any draft in addition to that of its rows.
        allows: returns whether a gain with a number of nodes is allowed.
    """
    best = max(tokens / costs[rows] for rows, tokens in enumerate(expected, start=1))
    price = price_of_time(best, rate)
    plain = expected[0] - price * costs[1]
    gains = [
        (gain, n_draft)
        for n_draft, tokens in enumerate(expected)
        if (gain := tokens - price * (costs[n_draft + 1] + restart_cost) - plain) > 0
    ]
    limit = len(expected)
    for gain, n_draft in sorted(gains, reverse=True):
        if n_draft <= limit:
            if allows(gain, n_draft):
                return gain, n_draft
            limit = n_draft // 2
    return 0.0, 0


def expected_shortfall(cost: float, *drafts: Sequence[float]) -> float:
    """The expected time by which a step's cost exceeds its tokens: E[max(0, cost - emitted)].

    Args:
        cost: 1 plus the sum of the times by which the step delays each sequence.
        drafts: for each drafting sequence, the probabilities that at least 1, 2, … of its tokens
            are accepted.
    """
    n_max = sum(map(len, drafts))
    n_missing = min(max(math.ceil(cost - 1), 0), n_max + 1)  # with more tokens, nothing is missing
    accepted = [1.0]  # the probabilities that 0, 1, … < n_missing tokens are accepted in total
    for p_by_depth in drafts:
        at_least = [*accumulate((1.0, *p_by_depth), min), 0.0]
        exactly = [more - fewer for more, fewer in pairwise(at_least)]
        total = [0.0] * min(len(accepted) + len(exactly) - 1, n_missing)
        for before, p_before in enumerate(accepted):
            for count, p_count in enumerate(exactly[: n_missing - before], start=before):
                total[count] += p_before * p_count
        accepted = total
    return sum(p * (cost - 1 - count) for count, p in enumerate(accepted[:n_missing]))


def allowed_shortfall(banks: Sequence[float], gain: float) -> float:
    """The greatest expected shortfall of a draft that the guard allows.

    A draft is a bet. As in Kelly's criterion (Kelly 1956), the stake grows with the expected gain:
    the square of the shortfall is at most 4 % of the product of bank and gain.

    Args:
        banks: the banks of the sequences that share the step, in plain steps.
        gain: the draft's gain, in tokens.
    """
    return math.sqrt(_STAKE * max(0.0, sum(banks)) * max(0.0, gain))


def trees_pay(curve: CostCurve) -> bool:
    """Whether rows are cheap enough for branching drafts.

    Branches pay only if sixteen rows cost less than two plain steps. Otherwise a chain is as fast,
    and takes less work than a tree.
    """
    rows = min(_ROWS_OF_A_TREE, curve.widest)
    return rows > 1 and curve(rows) < _FLAT


# The running gain starts with the gain of a chain whose tokens each have a p_accept of 60 %
# (notes/planner.md, "Constants").
_FIRST_DRAFT = [0.6**depth for depth in range(1, 9)]

_UNSURE = 0.5  # a head has a trial only if the next token's candidates are less likely than this


class Plan(NamedTuple):
    """The draft of a sequence for one step.

    Attributes:
        candidates: the nodes to choose from; None if the search failed.
        n_draft: the number of candidates to verify.
        gain: the draft's gain, in tokens.
        pipelined: whether the next step may be dispatched before this step's tokens are known, if
            nothing is drafted.
        joint_costs: the costs of joint steps; None for a step of this sequence alone.
        charge: the part of a joint step's time that the sequence's guard pays, in plain steps.
        head_time: the expected time that trained heads took before the step, in plain steps.
        head_seconds: the measured time that they took, in seconds.
        planning_seconds: the sequence's share of the measured time that planning a joint step
            took, in seconds.
        fault: the exception raised while planning.
    """

    candidates: Candidates | None = None
    n_draft: int = 0
    gain: float = 0.0
    pipelined: bool = True
    joint_costs: Costs | None = None
    charge: float = 1.0
    head_time: float = 0.0
    head_seconds: float = 0.0
    planning_seconds: float = 0.0
    fault: Exception | None = None

    @property
    def p_next(self) -> float:
        """The probability that one of the candidates for the next token is right."""
        return self.candidates.p_next if self.candidates is not None else 0.0


NO_PLAN = Plan()
"""A plain step."""


class Planner:
    """Chooses the draft with the greatest gain, given the costs of rows.

    A sequence calls it as it would call a :class:`.drafter.Drafter`.

    For each step, it merges the sources' trees and sorts their nodes by probability. It drafts the
    number of nodes that maximises the expected tokens less the price of their time, within the
    limits of the policy; see :func:`plan_drafts`. Every step corrects the costs and the
    probabilities.

    If planning fails, the generation loses nothing but its drafts: a line is logged, and the
    remaining steps are plain. But exceptions of a user's own drafter are raised.

    Args:
        costs: the costs of steps, which learn from every step.
        sources: the sources of drafts. Of two siblings with the same probability, the one from the
            earlier source comes first.
        branching: whether drafts may be trees; otherwise they are chains.
        experience: the experience of earlier generations, or None.

    Attributes:
        shared_plan: the next step's plan, if the sequences that share the step planned it together.
        policy: the current generation's policy.
        failed: whether planning has failed in the current generation.
        stop_tokens: the tokens that end the output.
        guide: a constrained output's :class:`mlxspec.engine.grammar.Grammar`, or None.
        head: a trained head's source, which drafts when nothing else is likely enough, or None.
    """

    stop_tokens: Collection[int] = ()
    guide: Any = None
    head: HeadSource | None = None

    def __init__(
        self,
        costs: Costs,
        sources: Sequence[Source],
        *,
        branching: bool = True,
        experience: Experience | None = None,
    ) -> None:
        self.costs = costs
        self.branching = branching
        self._sources = sources
        self._experience = experience or Experience()

    @property
    def _all_sources(self) -> Sequence[Source | HeadSource]:
        return [*self._sources, self.head] if self.head else self._sources

    def begin(self, prompt: Sequence[int]) -> None:
        """Begin a generation after ``prompt``, with a policy of its own."""
        self._last = prompt[-1]
        self.failed = False
        self.shared_plan: Plan | None = None
        self._step_plan = NO_PLAN
        self.policy = Policy()
        try:
            self.costs.move_to(len(prompt))
            if self.costs.wants_plain_steps:
                self.policy.probe_step = self._experience.probe_step
            self.policy.gain = self._gain_of_chain(_FIRST_DRAFT, self.costs.hopeful.table)
            for source in self._all_sources:
                source.begin(prompt)
        except Exception as error:
            self._fails(error)

    def attach(self, target: Any, perturb: Callable[..., Any]) -> None:
        """Give the trained head or draft model, if any, what :meth:`.HeadSource.attach` needs."""
        if self.head:
            self.head.attach(target, perturb)

    def search(
        self, max_depth: int, row_costs: Sequence[float] = (), scale: float = 1.0
    ) -> Candidates:
        """The candidates after the current token.

        Args:
            max_depth: their greatest depth.
            row_costs: the lowest costs of a row after 0, 1, … nodes, for a constrained output.
            scale: the tokens that a cost of 1 must gain.
        """
        if self.policy.budget < 0:
            return self._candidates((), max_depth)
        roots = list[SourceNode]()
        for source in self._sources:
            roots += source.search(max_depth)
        candidates = self._candidates(roots, max_depth)
        if self.guide is None:
            return candidates
        # The constraint judges whole trees, so this one is grown as far as nodes may pay.
        while candidates.p_of(len(candidates)) > scale * row_costs[len(candidates)]:
            candidates.add()
        forced = forced_chain(self._last, self.guide.forced()[:max_depth])
        allowed = self.guide.allowed(candidates.tree(len(candidates)))
        return self._candidates([TreeNode(forced), TreeNode(allowed)], max_depth)

    def with_head(self, text: Candidates, head: DraftTree, max_depth: int) -> Candidates:
        """The candidates from texts merged with the trained head's; the likelier come first."""
        if self.guide:
            head = self.guide.allowed(head)
        roots = [TreeNode(text.tree(len(text))), TreeNode(head)]
        if head.p_reached and head.p_reached[0] > text.p_of(0):
            roots.reverse()
        return self._candidates(roots, max_depth)

    def _candidates(self, roots: Sequence[SourceNode], max_depth: int) -> Candidates:
        return Candidates(
            self._last,
            roots,
            branching=self.branching,
            max_depth=max_depth,
            stop_tokens=self.stop_tokens,
        )

    @property
    def head_time(self) -> float:
        """The expected time that trained heads took before the last step, in plain steps."""
        return self._step_plan.head_time

    def propose(self, max_depth: int) -> DraftTree:
        """The draft of :attr:`shared_plan`, or else of a plan for this sequence alone."""
        plan, self.shared_plan = self.shared_plan, None
        try:
            if plan is None and not self.failed:
                (plan,) = plan_drafts({self: max_depth}, self.costs)
        except Exception as error:
            plan = Plan(fault=error)
        if plan and plan.fault:
            self._fails(plan.fault)
        if plan is None or plan.candidates is None or self.failed:
            self._step_plan = NO_PLAN
            return DraftTree.chain(self._last)
        self._step_plan = plan
        return plan.candidates.tree(plan.n_draft)

    def _fails(self, error: Exception) -> None:
        """Stop drafting after an error in planning; raise the error of a user's own drafter."""
        if any(source.fault is error for source in self._sources):
            raise error
        if not self.failed:
            self.failed = True
            log_fault(error)

    @property
    def pipelined(self) -> bool:
        """Whether to dispatch the next forward before the next token is known.

        This is read when nothing is drafted now. But it may be possible to draft after the next
        token. Waiting for it pays if drafts have lately gained more than the sync overhead, or if a
        draft after the likeliest token would gain more, and the guard would allow it.
        """
        return self.failed or self._step_plan.pipelined

    def gain_of_waiting(self, candidates: Candidates | None, costs: Sequence[float]) -> float:
        """The expected gain of a draft after the next token, if the step waits for that token.

        Args:
            candidates: the candidates after the current token; None if the search failed.
            costs: ``costs[rows]`` is the cost of a step with that many rows.
        """
        gain = self.policy.gain
        branch = candidates.first_branch() if candidates else ()
        if len(branch) < 2:
            return gain
        then = [probability / branch[0] for probability in branch[1:]]
        return max(gain, branch[0] * self._gain_of_chain(then, costs))

    def _gain_of_chain(self, p_reached: Sequence[float], costs: Sequence[float]) -> float:
        """The greatest allowed gain of a chain whose tokens have these probabilities."""
        expected = expected_tokens(p_reached)[: len(costs) - 1]

        def allows(gain: float, n_draft: int) -> bool:
            shortfall = expected_shortfall(costs[n_draft + 1], p_reached[:n_draft])
            return shortfall <= allowed_shortfall([self.policy.bank], gain)

        return best_draft(expected, costs, self.policy.rate, allows=allows)[0]

    def observe(self, step: VerifiedStep) -> None:
        """Let the costs, the policy and the sources learn from a step."""
        self._last = step.tokens[-1]
        if not self.failed:
            try:
                self._learn(step)
            except Exception as error:
                self._fails(error)

    def _learn(self, step: VerifiedStep) -> None:
        spent_seconds = sum(source.spent_seconds for source in self._sources)
        if step.pipelined:  # this step's time stands for plain decoding, which has no planner
            spent_seconds = max(spent_seconds, min(step.blocking_seconds, step.seconds / 2))
        # This comes first, since with a caller's cache the context is longer than the prompt.
        self.costs.move_to(step.context)
        plan, costs, charge = self._step_plan, self._step_plan.joint_costs or self.costs, None
        # Even a step that was planned alone can share a forward that was dispatched ahead.
        if not plan.joint_costs and step.sequences == 1:
            seconds = step.seconds - spent_seconds - plan.head_seconds
            self.costs.record(step.rows, seconds, step.pipelined)
        if plan.joint_costs:
            drafted = step.rows - step.sequences
            cost = costs.hopeful(1 + drafted)
            charge = plan.charge if drafted or not plan.n_draft else 1.0
        else:  # the costs as corrected by this step, since the plan's were hopeful
            cost = costs.curve(len(step.tree))
        cost += plan.head_time
        probing = costs.wants_plain_steps
        # While one sequence plans, all wait. The time of heads is part of the cost.
        planning_seconds = step.planning_seconds - (0.0 if plan.joint_costs else plan.head_seconds)
        planning_time = step.sequences * max(planning_seconds, 0.0) / costs.plain_seconds
        self.policy.account_for(
            step, cost, gain=plan.gain, probing=probing, charge=charge, planning_time=planning_time
        )
        for source in self._all_sources:
            source.observe(step)

    def end(self) -> None:
        """End the generation: costs, experience and sources keep what they have learned."""
        self._experience.probe_step = self.policy.probe_step
        faults = []
        for part in (self.costs, self._experience, *self._sources):
            try:
                part.end()
            except Exception as error:
                faults.append(error)
        for fault in faults:  # after all have ended, since a user drafter's exception is raised
            self._fails(fault)

    def no_draft(self) -> str:
        """A clause that says why the last proposal has no draft."""
        candidates, policy, costs = self._step_plan.candidates, self.policy, self.costs
        if candidates is None:
            return "planning failed: see the log"
        if policy.budget < 0:
            return "drafts have gained too little lately to search for one in every step"
        if policy.probes:
            return "a plain step, to measure its time"
        table = costs.hopeful.table
        if not len(candidates):
            return (
                "no continuation is likely enough here for rows that cost "
                f"{costs.hopeful.row_costs[0]:.2f} plain steps each"
            )
        expected = expected_tokens(candidates.p_reached)
        restart = costs.sync_overhead * policy.ahead
        gain, n_draft = best_draft(expected, table, policy.rate, restart)
        rows = (n_draft or 1) + 1
        tokens = expected[rows - 1]
        reason = f"{rows} rows cost {table[rows]:.2f} plain steps, expected {tokens:.2f} tokens"
        if not gain:
            return reason
        return f"the guard, with {policy.bank:.2f} plain steps in its bank, forbids it: {reason}"


def plan_drafts(
    planners: Mapping[Planner, int],
    costs: Costs,
    *,
    sequences: int = 1,
    rows_taken: int = 0,
    patient: bool = False,
) -> list[Plan]:
    """Plan the next step's drafts, for one sequence or for several together.

    The candidates of all sequences are sorted by probability. Of these, the plan takes the number
    that maximises the expected tokens of all sequences less the price of the step's time, within
    the limits of the guard. A token is weighted by the time that it saves. So the tokens of a fast
    sequence count less: text that is easy to copy can be copied later.

    A draft delays every sequence of the step, so there are two more limits. First, the sequences
    share their banks: the sum pays for a step that fails, and the drafting sequences are charged
    for the step's extra time, in proportion to their rows. Second, others delay no sequence beyond
    its patience: a few plain joint steps in all, and a tenth of its time.

    Args:
        planners: the planners of the sequences, all in the middle of a generation, each with the
            greatest depth that its draft may have.
        costs: the costs of steps of all sequences: one row stands for a plain step of all, and each
            draft token adds a row.
        sequences: the number of sequences that share the step, including those without a planner.
        rows_taken: the number of rows that the step has in any case, besides one per sequence.
        patient: whether the drafts of some sequences may delay others without limit, if all
            together gain.

    Returns:
        a plan for each planner; its ``fault`` is the exception of its drafters, if any.
    """
    started = time.perf_counter()
    step = JointPlan(planners, costs, sequences, rows_taken, patient or sequences == 1)
    plans = step.run_heads(step.search())
    nodes = step.frontier([plan.candidates for plan in plans])
    gain, n_draft = step.choose(nodes)
    pipelined = n_draft == 0 and step.is_pipelined(nodes, plans)
    shares = nodes.shares(n_draft)
    parts = [shares[index] / n_draft if n_draft else 0.0 for index in range(len(plans))]
    seconds = (time.perf_counter() - started - plans[0].head_seconds) / len(plans)
    return [
        plan._replace(
            n_draft=shares[index],
            gain=part * gain - plan.head_time,
            pipelined=pipelined,
            joint_costs=costs if sequences > 1 else None,
            planning_seconds=seconds if sequences > 1 else 0.0,  # alone, the step measures it
            charge=plan.charge + part * step.more_time(n_draft),
        )
        for index, (plan, part) in enumerate(zip(plans, parts, strict=True))
    ]


class _Nodes(NamedTuple):
    """The candidates of all sequences that may draft: the best first, parents before children.

    Attributes:
        candidates: those of each sequence, by its index.
        owners: for each node, the index of its sequence.
        expected: the expected tokens of a step that verifies the first 0, 1, … nodes.
    """

    candidates: Mapping[int, Candidates]
    owners: Sequence[int]
    expected: Sequence[float]

    def shares(self, n_draft: int) -> Counter[int]:
        """For each sequence, the number of nodes that it has among the first ``n_draft``."""
        return Counter(self.owners[:n_draft])


class JointPlan:
    """A step to plan drafts for. The arguments are those of :func:`plan_drafts`."""

    def __init__(
        self,
        planners: Mapping[Planner, int],
        costs: Costs,
        sequences: int,
        rows_taken: int,
        patient: bool,
    ) -> None:
        self._planners, self._depths = [*planners], [*planners.values()]
        self._costs, self._sequences, self._patient = costs, sequences, patient
        self._policies = [planner.policy for planner in planners]
        self._curve = costs.hopeful
        self._taken = min(rows_taken, self._curve.widest - 1)
        self._max_nodes = self._curve.widest - 1 - self._taken
        self._table = [0.0, *self._curve.table[1 + self._taken :]]
        # The weight of each sequence's tokens: in proportion to the time that a token usually takes
        # there, and 1 on average.
        times = [1 / policy.rate for policy in self._policies]
        self._weights = [time * len(times) / sum(times) for time in times]
        rates = zip(self._policies, self._weights, strict=True)
        self._rate = sum(policy.rate * weight for policy, weight in rates)
        self._rate += sequences - len(planners)
        self._gain = sum(policy.gain for policy in self._policies)
        if sequences == 1:
            self._probes = self._policies[0].probes
        else:
            in_probe = costs.steps % _JOINT_PROBE_ROUND in _PROBE
            self._probes = costs.wants_plain_steps and in_probe and self._gain < _MUCH_GAIN

    def search(self) -> list[Plan]:
        """Ask each planner for its candidates.

        Returns:
            plans with candidates, but no drafts yet.
        """
        plans = []
        for planner, depth, weight in zip(self._planners, self._depths, self._weights, strict=True):
            scale = self._sequences / weight  # since a row takes the time of all sequences
            try:
                plans.append(Plan(planner.search(depth, self._curve.row_costs, scale)))
            except Exception as error:  # the other planners continue
                plans.append(Plan(fault=error))
        return plans

    def frontier(self, by_sequence: Sequence[Candidates | None]) -> _Nodes:
        """Take the best candidates of all sequences, or none if the next step is a probe.

        It ends where no further node can pay: where the next one adds fewer tokens than its row
        costs, at the lowest cost of any further row and at the price of time so far. The price can
        only rise with more nodes, and no such node can raise the best rate.
        """
        growing = {
            index: candidates
            for index, candidates in enumerate(by_sequence)
            if candidates is not None and not self._probes
        }
        taken = dict.fromkeys(growing, 0)
        heap = [
            (-candidates.p_of(0) * self._weights[index], index)
            for index, candidates in growing.items()
        ]
        heapify(heap)
        owners, expected = list[int](), [float(self._sequences)]
        best = expected[0] / self._table[1]
        price = min(price_of_time(best, self._rate), best)
        cheapest = self._curve.row_costs[self._taken :]
        while heap and len(owners) < self._max_nodes:
            negative_gain, index = heap[0]
            if -negative_gain <= price * cheapest[len(owners)]:
                break
            owners.append(index)
            expected.append(expected[-1] - negative_gain)
            rate = expected[-1] / self._table[len(expected)]
            if rate > best:
                best, price = rate, min(price_of_time(rate, self._rate), rate)
            taken[index] += 1
            candidates = growing[index]
            if taken[index] > len(candidates):
                candidates.add()
            heapreplace(heap, (-candidates.p_of(taken[index]) * self._weights[index], index))
        return _Nodes(growing, owners, expected)

    def run_heads(self, plans: list[Plan]) -> list[Plan]:
        """Let trained heads draft, if that is expected to gain more than it costs.

        Returns:
            the plans with the candidates of the heads and the time that these took.
        """
        if any(policy.ahead for policy in self._policies):
            return plans  # the next token is unknown, so a draft would have to wait
        heads = {
            index: planner.head
            for index, (planner, plan) in enumerate(zip(self._planners, plans, strict=True))
            if planner.head and not plan.fault and planner.head.ready
            if self._depths[index] > 0 and not self._probes
        }
        depth = self._depth_of_heads(plans, heads) if heads else 0
        if not depth:
            return plans
        members = [*heads.values()]
        started = time.perf_counter()
        drafts = members[0].run(members, depth)
        seconds = time.perf_counter() - started
        taken = self._time_of_heads(depth, members)
        plans = [plan._replace(head_time=taken, head_seconds=seconds) for plan in plans]
        for (index, head), draft in zip(heads.items(), drafts, strict=True):
            text, tree = plans[index].candidates, head.drafted(*draft)
            assert text is not None
            plans[index] = plans[index]._replace(
                candidates=self._planners[index].with_head(text, tree, self._depths[index]),
                charge=1 + self._sequences * taken / len(members),
            )
        return plans

    def _time_of_heads(self, depth: int, heads: Sequence[HeadSource]) -> float:
        """The expected time of a draft for several sequences, in plain steps."""
        return heads[0].experience.seconds(depth, len(heads)) / self._costs.plain_seconds

    def _depth_of_heads(self, plans: Sequence[Plan], heads: Mapping[int, HeadSource]) -> int:
        """The depth to which heads should draft, according to their experience; 0 for not at all.

        A head is assumed to replace a draft from texts if its next token is likelier to be right.
        """
        texts, members = [plan.candidates for plan in plans], [*heads.values()]
        nodes = self.frontier(texts)
        options = [(*self._tokens_and_cost(nodes, self.choose(nodes)[1]), 0)]
        max_depth = min(max(self._depths[index] for index in heads), self._max_nodes)
        for depth in range(1, min(max_depth, len(members[0].experience.p_accept)) + 1):
            surer = {
                index: Candidates(head.last, [TreeNode(outlook)], branching=False, max_depth=depth)
                for index, head in heads.items()
                if (outlook := head.outlook(depth)).p_reached[0] > plans[index].p_next
            }
            if not surer:
                break
            nodes = self.frontier([surer.get(index, text) for index, text in enumerate(texts)])
            taken = self._time_of_heads(depth, members)
            if n_draft := self.choose(nodes, taken)[1]:
                tokens, cost = self._tokens_and_cost(nodes, n_draft)
                options.append((tokens, cost + taken, depth))
        price = price_of_time(max(tokens / cost for tokens, cost, _ in options), self._rate)
        _, _, best = max(options, key=lambda option: option[0] - price * option[1])
        trial = any(head.trials and plans[index].p_next < _UNSURE for index, head in heads.items())
        return best or int(trial)

    def _tokens_and_cost(self, nodes: _Nodes, n_draft: int) -> tuple[float, float]:
        """The expected tokens of a step with the first ``n_draft`` nodes, and its cost."""
        return nodes.expected[n_draft], self._table[n_draft + 1]

    def more_time(self, n_draft: int) -> float:
        """The time that ``n_draft`` nodes add to a plain step, the sum over all sequences."""
        return self._sequences * (self._table[n_draft + 1] / self._table[1] - 1)

    def choose(self, nodes: _Nodes, head_time: float = 0.0) -> tuple[float, int]:
        """The greatest allowed gain, in tokens, and its number of nodes.

        Args:
            nodes: the nodes to choose from.
            head_time: the time, in plain steps, of the heads that would have to run first.
        """
        policies = self._policies
        # A sequence that has just joined does not know whether a forward has been dispatched.
        restart = head_time + self._costs.sync_overhead * any(policy.ahead for policy in policies)
        banks = [policy.bank for policy in policies]

        def allows(gain: float, n_draft: int) -> bool:
            shares = nodes.shares(n_draft)
            more = self.more_time(n_draft) + self._sequences * head_time
            drafts = [nodes.candidates[index].p_by_depth(count) for index, count in shares.items()]
            if expected_shortfall(1 + more, *drafts) > allowed_shortfall(banks, gain):
                return False
            return self._patient or self._is_endured(more / self._sequences, nodes, shares)

        return best_draft(nodes.expected, self._table, self._rate, restart, allows)

    def _is_endured(self, more_time: float, nodes: _Nodes, shares: Counter[int]) -> bool:
        """Whether each sequence's delay, less the tokens that its own draft gains, is within its
        patience.
        """
        return all(
            more_time
            - sum(nodes.candidates[index].p_reached[: shares[index]] if shares[index] else ())
            <= policy.patience
            for index, policy in enumerate(self._policies)
        )

    def is_pipelined(self, nodes: _Nodes, plans: Sequence[Plan]) -> bool:
        """Whether the next step may be dispatched before this step's tokens are known.

        This holds for a step without drafts. The next step may be dispatched if drafts after these
        tokens are expected to gain no more than the wait costs.
        """
        if self._probes:
            return True
        overhead = self._sequences * self._costs.sync_overhead
        if self._gain > overhead:
            return False
        for planner, plan in zip(self._planners, plans, strict=True):
            if planner.head and planner.head.trials and plan.p_next < _UNSURE:
                return False
        # A drafting sequence pays for the time that its rows take from all sequences.
        costs = self._curve.table[1 + self._taken :]
        table = [0.0, *(1 + self._sequences * (cost / costs[0] - 1) for cost in costs)]
        gains = (
            planner.gain_of_waiting(plan.candidates, table)
            for planner, plan in zip(self._planners, plans, strict=True)
        )
        return sum(gains) <= overhead


def log_fault(error: Exception) -> None:
    """Log a failure of planning in one line, since it costs nothing but speed."""
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
