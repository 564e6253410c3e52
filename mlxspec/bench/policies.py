"""What can be replayed: mlxspec's planner, what other programs draft, and hindsight."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from heapq import heappop, heappush

from ..corpus.memory import MAX_TOKENS, Memory
from ..drafting.costs import CostCurve, FixedCosts
from ..drafting.drafter import Drafter, DraftTree, Limits, TreeBuilder, VerifiedStep, accept
from ..drafting.kept import Experience
from ..drafting.planner import Planner
from ..drafting.policy import trees_pay
from ..drafting.sources import PromptLookupDrafter
from ..drafting.suffix_source import SuffixSource

# --- the rules of other programs ---

Rule = Callable[[Sequence[int]], DraftTree]
"""Appends tokens to its text, prompt and output, and drafts what may follow them."""


class RuleDrafter(Drafter):
    """Drafts by another program's rule, as deep as the rule says.

    Args:
        start: makes the rule, which begins with an empty text.
    """

    def __init__(self, start: Callable[[], Rule]) -> None:
        self._start = start

    def begin(self, prompt: Sequence[int]) -> None:
        self._rule = self._start()
        self._tree = self._rule(prompt)

    def propose(self, max_depth: int) -> DraftTree:
        return self._tree

    def observe(self, step: VerifiedStep) -> None:
        self._tree = self._rule(step.tokens)


def full_draft_lookup(n_draft: int = 10, ngram_max: int = 3) -> Rule:
    """The earliest match that ``n_draft`` tokens follow, of the longest n-gram that has one.

    The rule of ``find_candidate_pred_tokens`` in apoorvumang/prompt-lookup-decoding and of
    Spec-Bench's PLD (n = 3 to 1, 10 tokens).
    """
    lookups = [PromptLookupDrafter(n_draft, n, n) for n in range(ngram_max, 0, -1)]
    for lookup in lookups:
        lookup.begin(())

    def draft(tokens: Sequence[int]) -> DraftTree:
        for lookup in lookups:
            lookup.extend(tokens)
        found = (lookup.propose(n_draft) for lookup in lookups)
        full = (tree for tree in found if len(tree) == 1 + n_draft)
        return next(full, DraftTree.chain(tokens[-1]))

    return draft


def ngram_simple(size_n: int = 12, size_m: int = 48) -> Rule:
    """Drafts what followed the newest earlier occurrence of the last 12 tokens, up to 48.

    The rule of ``--spec-type ngram-simple`` (common/ngram-map.cpp) with llama.cpp's defaults:
    nothing is drafted when fewer tokens than the n-gram has could be.
    """
    text: list[int] = []
    newest: dict[tuple[int, ...], int] = {}  # where each n-gram ended last

    def draft(tokens: Sequence[int]) -> DraftTree:
        match = None
        for token in tokens:
            text.append(token)
            key = tuple(text[-size_n:])
            match = newest.get(key)  # before the very end, which is not a match
            if len(text) > size_n:  # llama.cpp never looks at the text's very first position
                newest[key] = len(text)
        if match is None or len(text) <= size_n + size_m + 1:
            return DraftTree.chain(text[-1])
        found = text[match : match + size_m]
        return DraftTree.chain(text[-1], found if len(found) >= size_n else ())

    return draft


def tensorrt_pool(n_draft: int = 10, ngram_max: int = 2) -> Rule:
    """A pool from n-grams to the oldest draft that followed them.

    The rules of ``NGramPoolManager`` and of ``PLDPool`` in TensorRT-LLM's
    examples/prompt_lookup: every n-gram with what followed it is put in the pool, the newest
    part of the context again at each step, since more follows there now; a draft that is
    shorter than allowed is replaced. (Of the drafts that is_keep_all keeps, is_use_oldest
    proposes the first, so only that one is kept here.)

    Args:
        n_draft: how many tokens to draft at most.
        ngram_max: the longest n-gram.
    """
    text: list[int] = []
    pool: dict[tuple[int, ...], list[int]] = {}
    start = 0

    def draft(tokens: Sequence[int]) -> DraftTree:
        nonlocal start
        text.extend(tokens)
        for size in range(ngram_max, 0, -1):
            for end in range(start + size, len(text)):
                key = tuple(text[end - size : end])
                if len(pool.get(key, ())) < n_draft:
                    pool[key] = text[end : end + n_draft]
        start = max(0, len(text) - (n_draft + ngram_max - 1))
        sizes = range(min(ngram_max, len(text) - 1), 0, -1)
        found = (pool.get(tuple(text[-size:])) for size in sizes)
        return DraftTree.chain(text[-1], next(filter(None, found), ()))

    return draft


def suffix_decoding(
    branching: bool = False,
    max_spec_factor: float = 1.0,
    min_token_prob: float = 0.1,
    max_depth: int = 64,
) -> Rule:
    """The most frequent continuation of some suffix of the text, over prompt and output.

    Each match length gives a draft of at most ``max_spec_factor`` times as many tokens; a
    token's probability is the share of the match's occurrences that it continues; the draft
    with the greatest sum of probabilities is taken. (Oliaro et al. 2024, arXiv 2411.04975,
    with the rules and defaults of Snowflake's ArcticInference: ``SuffixTree::speculate``. The
    text's own end counts as an occurrence there, and so it does here. Its global tree of
    earlier requests is left out.)

    Args:
        branching: draft the most probable nodes of the tree rather than one path.
        max_spec_factor: draft tokens per matched token.
        min_token_prob: the least probable token that is drafted.
        max_depth: matched and drafted tokens together.
    """
    text: list[int] = []
    ends: dict[int, list[int]] = {}  # per token, the positions after it

    def draft(tokens: Sequence[int]) -> DraftTree:
        for token in tokens:
            text.append(token)
            ends.setdefault(token, []).append(len(text))
        best, tree = 0.0, DraftTree.chain(text[-1])
        for positions, most in _matches(text, ends[text[-1]], max_spec_factor, max_depth):
            score, grown = _grown(text, positions, most, branching, min_token_prob)
            if score >= best:
                best, tree = score, grown
        return tree

    return draft


def _matches(
    text: Sequence[int], positions: list[int], factor: float, max_depth: int
) -> list[tuple[list[int], int]]:
    """The distinct sets of places where a suffix of the text occurs, shortest suffix first.

    Each has the length of its longest draft. Suffixes that occur at the same places differ only in
    that length, so the greatest is kept.
    """
    end = len(text)
    matches: list[tuple[list[int], int]] = []
    for length in range(1, min(end, max_depth)):
        token = text[end - length]
        longer = [p for p in positions if p >= length and text[p - length] == token]
        if len(longer) < 2:  # the text's end alone
            break
        most = min(int(length * factor + 1e-6), max_depth - length)
        if matches and len(longer) == len(positions):
            most = max(most, matches.pop()[1])
        matches.append((longer, most))
        positions = longer
    return matches


def _grown(
    text: Sequence[int], positions: list[int], most: int, branching: bool, least: float
) -> tuple[float, DraftTree]:
    """The most probable nodes of a match, and the sum of their probabilities."""
    builder = TreeBuilder(text[-1])
    frontier: list[tuple[float, int, int, int, int, list[int]]] = []
    serial = itertools.count()  # among equals the older one comes first
    score, node, depth, probability = 0.0, 0, 0, 1.0
    while True:
        groups: dict[int, list[int]] = {}  # occurrences by the token that follows
        for position in positions:
            if position + depth < len(text):
                groups.setdefault(text[position + depth], []).append(position)
        children = list(groups.items())
        if children and not branching:
            children = [max(children, key=lambda item: len(item[1]))]
        for token, group in children:
            share = probability * len(group) / len(positions)
            if share >= least:
                heappush(frontier, (-share, next(serial), node, depth + 1, token, group))
        if not frontier or len(builder) > most:
            return score, builder.tree()
        negative, _, parent, depth, token, positions = heappop(frontier)
        probability = -negative
        node = builder.child(parent, token)
        score += probability


# --- hindsight ---

_UNKNOWN = -1  # the choice after a row that was not accepted


def verify(tree: DraftTree, following: Sequence[int], ahead: bool = False) -> VerifiedStep:
    """Verify a tree against the tokens that follow its root; the last one may end the output."""
    right = [following[d] if d < len(following) else _UNKNOWN for d in tree.depths]
    accepted, tokens = accept(tree, right)
    path = {0, *accepted}
    choices = tuple(token if node in path else _UNKNOWN for node, token in enumerate(right))
    return VerifiedStep(tree, choices, choices, accepted, tokens[: len(following)], ahead=ahead)


@dataclass(eq=False)
class Hindsight(Drafter):
    """Verifies as many of the planner's candidates as turn out to pay best.

    The candidates and their order are the planner's. Of their first 0, 1, 2, … those are
    drafted that emit most per time, which takes knowing the output. So no planner
    reaches this speed with these candidates; with others, such as those of earlier outputs,
    one may.

    Args:
        output: what the target answers, from the first token after the prompt.
        curve: T(rows) / T(1).
        branching: whether drafts may be trees.
        token_classes: see :func:`mlxspec.drafting.acceptance.token_classes`.
    """

    output: Sequence[int]
    curve: CostCurve
    branching: bool
    token_classes: bytes = b""

    def __post_init__(self) -> None:
        self._source = SuffixSource(self.token_classes)

    def begin(self, prompt: Sequence[int]) -> None:
        self._source.begin(prompt)
        self._done = 0

    def propose(self, max_depth: int) -> DraftTree:
        following = self.output[self._done : self._done + self.curve.widest]
        # What is improbable may turn out to be right.
        least_p, depth = [0.0] * self.curve.widest, min(max_depth, len(following))
        limits = Limits(depth, self.curve.widest - 1, self.branching, least_p)
        everything = self._source.search(limits)
        return everything.first(self._best_n_draft(verify(everything, following).accepted))

    def observe(self, step: VerifiedStep) -> None:
        self._source.observe(step)
        self._done += len(step.tokens)

    def end(self) -> None:
        self._source.end()

    def _best_n_draft(self, right: Sequence[int]) -> int:
        """How many nodes to verify, given those on the output's path: up to one of them."""
        costs = self.curve.table
        rates = {node: (1 + depth) / costs[1 + node] for depth, node in enumerate(right, start=1)}
        return max((0, *right), key=lambda node: rates.get(node, 1.0))


# --- what can be replayed ---

NewDrafter = Callable[[Sequence[int]], Drafter]
"""Makes the drafter of an output; only hindsight reads the output."""


@dataclass(frozen=True)
class ReplayPolicy:
    """What can be replayed.

    Attributes:
        label: its name in tables; where the rule is another program's, with that one's name.
        description: what it is, for users.
        drafters: gives the drafters of a replay from its cost curve, T(rows) / T(1), and the
            classes of its tokens (see :func:`mlxspec.drafting.acceptance.token_classes`). They
            share what earlier outputs have taught.
        follows_costs: whether its drafts depend on the cost curve.
        memory_tokens: how many tokens of completions it remembers; None for all.
    """

    label: str
    description: str
    drafters: Callable[[CostCurve, bytes], NewDrafter]
    follows_costs: bool = False
    memory_tokens: int | None = 0


def _ruled(label: str, description: str, new: Callable[[], Drafter]) -> ReplayPolicy:
    """A policy that drafts from the text alone."""
    return ReplayPolicy(label, description, lambda curve, classes: lambda output: new())


def planned(
    label: str,
    description: str,
    memory_tokens: int | None = 0,
    other: Callable[[], Drafter] | None = None,
) -> ReplayPolicy:
    """The default decoder with a memory of this size, and with another drafter if given."""

    def drafters(curve: CostCurve, classes: bytes) -> NewDrafter:
        experience = Experience()
        memory: Memory | None = None
        if memory_tokens != 0:
            memory = Memory(sys.maxsize if memory_tokens is None else memory_tokens)

        def new(output: Sequence[int]) -> Drafter:
            if memory:
                memory.settle()  # it finds all outputs so far, however fast this goes
            sources: list[Drafter] = [SuffixSource(classes, experience, memory=memory)]
            if other is not None:
                sources.append(other())
            costs, branching = FixedCosts(curve), trees_pay(curve)
            return Planner(costs, sources, branching=branching, experience=experience)

        return new

    return ReplayPolicy(label, description, drafters, True, memory_tokens)


def _hindsight(curve: CostCurve, classes: bytes) -> NewDrafter:
    return lambda output: Hindsight(output, curve, trees_pay(curve), classes)


AUTO = "auto"
HINDSIGHT = "hindsight"
"""Not a decoder, since it knows the output; it shows how much is left to gain."""

POLICIES: dict[str, ReplayPolicy] = {
    AUTO: planned(
        AUTO, "mlxspec's default decoder without a memory; earlier outputs teach what is likely"
    ),
    "auto-memory": planned(
        "auto-memory",
        "the default decoder as it is: it remembers the process's earlier outputs",
        MAX_TOKENS,
    ),
    "prompt-lookup": _ruled(
        "prompt-lookup",
        "as in 'mlxspec generate': n-grams of 3 to 1, 10 tokens",
        PromptLookupDrafter,
    ),
    # Its PLD, the yardstick of published figures.
    "spec-bench": _ruled(
        "prompt lookup (Spec-Bench)",
        "its PLD: n-grams of 3 to 1, 10 tokens, full drafts only",
        lambda: RuleDrafter(full_draft_lookup),
    ),
    # transformers: generate(prompt_lookup_num_tokens=10), max_matching_ngram_size 2.
    "transformers": _ruled(
        "prompt lookup (transformers)",
        "its prompt_lookup_num_tokens=10, n-grams of 2 and 1",
        lambda: PromptLookupDrafter(n_draft=10, ngram_max=2),
    ),
    # vLLM: method "ngram", prompt_lookup_min = prompt_lookup_max = 5; the number of tokens
    # has no default there, 5 is that of its documentation.
    "vllm": _ruled(
        "n-grams (vLLM)",
        "its n-gram speculator: n-grams of 5, 5 tokens",
        lambda: PromptLookupDrafter(n_draft=5, ngram_max=5, ngram_min=5),
    ),
    # TensorRT-LLM: prompt_lookup_config [10,2], is_keep_all and is_use_oldest.
    "tensorrt-llm": _ruled(
        "prompt lookup (TensorRT-LLM)",
        "its prompt lookup pool: n-grams of 2 and 1, 10 tokens, keep all, oldest",
        lambda: RuleDrafter(tensorrt_pool),
    ),
    "llama.cpp": _ruled(
        "ngram-simple (llama.cpp)",
        "its n-grams of 12, 48 tokens",
        lambda: RuleDrafter(ngram_simple),
    ),
    "suffix-path": _ruled(
        "suffix path (ArcticInference)",
        "its SuffixDecoding: the most frequent continuation of what matches, as one chain",
        lambda: RuleDrafter(suffix_decoding),
    ),
    "suffix-tree": _ruled(
        "suffix tree (ArcticInference)",
        "the same with a tree of continuations, up to four times the match's length",
        lambda: RuleDrafter(partial(suffix_decoding, branching=True, max_spec_factor=4.0)),
    ),
    HINDSIGHT: ReplayPolicy(
        f"{HINDSIGHT} (unreachable)",
        "no decoder: auto's candidates, as many as the known output shows to pay best",
        _hindsight,
        follows_costs=True,
    ),
}
"""By name; a further one, with a drafter of any kind, is one entry."""


def policies_with(drafter: type[Drafter]) -> dict[str, ReplayPolicy]:
    """A custom drafter class, alone and together with the default decoder's look-ups."""
    name = drafter.__name__
    both = f"auto+{name}"
    return {
        name: _ruled(name, "a drafter of your own", drafter),
        both: planned(both, "the default decoder, which drafts with it too", other=drafter),
    }
