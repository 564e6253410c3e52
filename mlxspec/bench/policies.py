"""What can be replayed: mlxspec's planner, what other programs draft, and hindsight."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from ..corpus.memory import MAX_TOKENS, Memory
from ..corpus.suffix_index import SuffixIndex
from ..drafting.acceptance import AcceptanceModel
from ..drafting.costs import CostCurve, FixedCosts
from ..drafting.drafter import Drafter, DraftTree, Limits, TreeBuilder, VerifiedStep, accept
from ..drafting.kept import Experience
from ..drafting.planner import Planner
from ..drafting.policy import trees_pay
from ..drafting.sources import NgramIndex, PromptLookupDrafter
from ..drafting.suffix_source import CONTEXT, SuffixSource, SuffixTree


class _TextDrafter(Drafter):
    """Keeps prompt and output, from which its subclasses draft a chain."""

    branching = False

    def begin(self, prompt: Sequence[int]) -> None:
        self._reset()
        self._extend(prompt)

    def propose(self, max_depth: int) -> DraftTree:
        return DraftTree.chain(self._text[-1], self._draft()[:max_depth])

    def observe(self, step: VerifiedStep) -> None:
        self._extend(step.tokens)

    def end(self) -> None:
        self._reset()

    def _reset(self) -> None:
        """Begin with an empty text."""
        self._text: list[int] = []

    def _extend(self, tokens: Sequence[int]) -> None:
        self._text.extend(tokens)

    def _draft(self) -> Sequence[int]:
        """What may follow the text."""
        raise NotImplementedError


@dataclass(eq=False)
class FullDraftLookup(_TextDrafter):
    """The earliest match that ``n_draft`` tokens follow, of the longest n-gram that has one.

    The rule of ``find_candidate_pred_tokens`` in apoorvumang/prompt-lookup-decoding and of
    Spec-Bench's PLD (n = 3 to 1, 10 tokens).
    """

    n_draft: int = 10
    ngram_max: int = 3

    def _reset(self) -> None:
        super()._reset()
        self._indices = [NgramIndex(n, n) for n in range(self.ngram_max, 0, -1)]

    def _extend(self, tokens: Sequence[int]) -> None:
        super()._extend(tokens)
        for index in self._indices:
            index.extend(tokens)

    def _draft(self) -> Sequence[int]:
        drafts = (index.continuation(self.n_draft) for index in self._indices)
        return next((draft for draft in drafts if len(draft) == self.n_draft), ())


@dataclass(eq=False)
class NgramSimple(_TextDrafter):
    """Drafts what followed the newest earlier occurrence of the last 12 tokens, up to 48.

    The rule of ``--spec-type ngram-simple`` (common/ngram-map.cpp) with llama.cpp's defaults:
    nothing is drafted when fewer tokens than the n-gram has could be.
    """

    size_n: int = 12
    size_m: int = 48

    def _reset(self) -> None:
        super()._reset()
        # Per n-gram its last end, and where the end before that is. The very end is not a match.
        self._newest: dict[tuple[int, ...], int] = {}

    def _extend(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            self._text.append(token)
            key = tuple(self._text[-self.size_n :])
            self._match = self._newest.get(key)
            # llama.cpp never looks at the text's very first position.
            if len(self._text) > self.size_n:
                self._newest[key] = len(self._text)

    def _draft(self) -> Sequence[int]:
        if self._match is None or len(self._text) <= self.size_n + self.size_m + 1:
            return ()
        draft = self._text[self._match : self._match + self.size_m]
        return draft if len(draft) >= self.size_n else ()


@dataclass(eq=False)
class SuffixDecoding(_TextDrafter):
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

    branching: bool = False
    max_spec_factor: float = 1.0
    min_token_prob: float = 0.1
    max_depth: int = 64

    def propose(self, max_depth: int) -> DraftTree:
        best, tree = 0.0, DraftTree.chain(self._text[-1])
        for positions, most in self._matches():
            score, grown = self._grow(positions, min(most, max_depth))
            if score >= best:
                best, tree = score, grown
        return tree

    def _reset(self) -> None:
        super()._reset()
        self._ends: dict[int, list[int]] = {}  # per token, the positions after it

    def _extend(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            self._text.append(token)
            self._ends.setdefault(token, []).append(len(self._text))

    def _matches(self) -> list[tuple[list[int], int]]:
        """The different sets of occurrences, shortest match first, and their longest drafts.

        Match lengths with the same occurrences differ in their longest draft alone.
        """
        text, end = self._text, len(self._text)
        matches: list[tuple[list[int], int]] = []
        positions = self._ends[text[-1]]
        for length in range(1, min(end, self.max_depth)):
            token = text[end - length]
            longer = [p for p in positions if p >= length and text[p - length] == token]
            if len(longer) < 2:  # the text's end alone
                break
            most = min(int(length * self.max_spec_factor + 1e-6), self.max_depth - length)
            if matches and len(longer) == len(positions):
                most = max(most, matches.pop()[1])
            matches.append((longer, most))
            positions = longer
        return matches

    def _grow(self, positions: list[int], most: int) -> tuple[float, DraftTree]:
        """The most probable nodes of a match, and the sum of their probabilities."""
        builder = TreeBuilder(self._text[-1])
        frontier: list[tuple[float, int, int, int, int, list[int]]] = []
        serial = itertools.count()  # among equals the older one comes first
        score, node, depth, probability = 0.0, 0, 0, 1.0
        while True:
            for token, group in self._continued(positions, depth):
                share = probability * len(group) / len(positions)
                if share >= self.min_token_prob:
                    heappush(frontier, (-share, next(serial), node, depth + 1, token, group))
            if not frontier or len(builder) > most:
                return score, builder.tree()
            negative, _, parent, depth, token, positions = heappop(frontier)
            probability = -negative
            node = builder.child(parent, token)
            score += probability

    def _continued(self, positions: list[int], depth: int) -> Sequence[tuple[int, list[int]]]:
        """Occurrences by the token that follows at a depth, of a path the most frequent alone.

        Occurrences at the text's end drop out.
        """
        groups: dict[int, list[int]] = {}
        for position in positions:
            if position + depth < len(self._text):
                groups.setdefault(self._text[position + depth], []).append(position)
        if self.branching or not groups:
            return list(groups.items())
        return [max(groups.items(), key=lambda item: len(item[1]))]


@dataclass(eq=False)
class TensorRTPool(_TextDrafter):
    """A pool from n-grams to the drafts that followed them.

    The rules of ``NGramPoolManager`` and of ``PLDPool`` in TensorRT-LLM's
    examples/prompt_lookup: every n-gram with what followed it is put in the pool, the newest
    part of the context again at each step, since more follows there now; a draft that is
    shorter than allowed is replaced rather than kept next to the next one.

    Args:
        n_draft: how many tokens to draft at most.
        ngram_max: the longest n-gram.
        is_keep_all: keep all the drafts of an n-gram, not the newest alone.
        is_use_oldest: propose the oldest draft kept, not the newest.
    """

    n_draft: int = 10
    ngram_max: int = 2
    is_keep_all: bool = True
    is_use_oldest: bool = True

    def _reset(self) -> None:
        super()._reset()
        self._pool: dict[tuple[int, ...], list[tuple[int, ...]]] = {}
        self._start = 0

    def _draft(self) -> Sequence[int]:
        self._enter(self._text[self._start :])
        self._start = max(0, len(self._text) - (self.n_draft + self.ngram_max - 1))
        for size in range(self.ngram_max, 0, -1):
            drafts = self._pool.get(tuple(self._text[-size:]))
            if drafts and size < len(self._text):
                return drafts[0 if self.is_use_oldest else -1]
        return ()

    def _enter(self, tokens: list[int]) -> None:
        for size in range(self.ngram_max, 0, -1):
            for left in range(len(tokens) - size):
                right = left + size
                key, draft = tuple(tokens[left:right]), tuple(tokens[right : right + self.n_draft])
                drafts = self._pool.get(key)
                if drafts is None or not self.is_keep_all or len(drafts[0]) < self.n_draft:
                    self._pool[key] = [draft]
                elif draft not in drafts:
                    drafts.append(draft)


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

    def begin(self, prompt: Sequence[int]) -> None:
        self._text = SuffixIndex(prompt)
        self._acceptance = AcceptanceModel(self.token_classes)
        self._acceptance.begin()
        self._done = 0

    def propose(self, max_depth: int) -> DraftTree:
        following = self.output[self._done : self._done + self.curve.widest]
        text = self._text
        # What is improbable may turn out to be right.
        least_p, depth = [0.0] * self.curve.widest, min(max_depth, len(following))
        limits = Limits(depth, self.curve.widest - 1, self.branching, least_p)
        found = text.tokens, text.occurrences(), self._acceptance
        self._candidates = SuffixTree(text.tokens[-1], CONTEXT, *found, limits)
        everything = self._candidates.tree()
        return everything.first(self._best_n_draft(verify(everything, following).accepted))

    def observe(self, step: VerifiedStep) -> None:
        self._candidates.learn(step.tokens)
        self._text.extend(step.tokens)
        self._done += len(step.tokens)

    def end(self) -> None:
        del self._text, self._candidates

    def _best_n_draft(self, right: Sequence[int]) -> int:
        """How many nodes to verify, given those on the output's path: up to one of them."""
        costs = self.curve.table
        rates = {node: (1 + depth) / costs[1 + node] for depth, node in enumerate(right, start=1)}
        return max((0, *right), key=lambda node: rates.get(node, 1.0))


@dataclass(frozen=True)
class Task:
    """What a policy may know of a completion to replay.

    Attributes:
        output: its tokens, which only hindsight reads.
        curve: T(rows) / T(1).
        classes: see :func:`mlxspec.drafting.acceptance.token_classes`.
        memory: of the completions so far, if the policy has one.
        experience: what the completions so far have taught, if the policy knows it.
    """

    output: Sequence[int]
    curve: CostCurve
    classes: bytes
    memory: Memory | None = None
    experience: Experience | None = None


@dataclass(frozen=True)
class ReplayPolicy:
    """What can be replayed.

    Attributes:
        label: its name in tables; where the rule is another program's, with that one's name.
        description: what it is, for users.
        make_drafter: gives a new drafter for each completion.
        follows_costs: whether its drafts depend on the cost curve.
        memory_tokens: how many tokens of completions it remembers; None for all.
    """

    label: str
    description: str
    make_drafter: Callable[[Task], Drafter]
    follows_costs: bool = False
    memory_tokens: int | None = 0


def _planned(task: Task, *others: Drafter) -> Planner:
    experience = task.experience or Experience()
    suffixes = SuffixSource(task.classes, experience, memory=task.memory)
    return Planner(
        FixedCosts(task.curve),
        [suffixes, *others],
        branching=trees_pay(task.curve),
        experience=experience,
    )


AUTO = "auto"
HINDSIGHT = "hindsight"
"""Not a decoder, since it knows the output; it shows how much is left to gain."""

POLICIES: dict[str, ReplayPolicy] = {
    AUTO: ReplayPolicy(
        AUTO,
        "mlxspec's default decoder without a memory; earlier outputs teach what is likely",
        _planned,
        follows_costs=True,
    ),
    "auto-memory": ReplayPolicy(
        "auto-memory",
        "the default decoder as it is: it remembers the process's earlier outputs",
        _planned,
        follows_costs=True,
        memory_tokens=MAX_TOKENS,
    ),
    "prompt-lookup": ReplayPolicy(
        "prompt-lookup",
        "as in 'mlxspec generate': n-grams of 3 to 1, 10 tokens",
        lambda task: PromptLookupDrafter(),
    ),
    # Its PLD, the yardstick of published figures.
    "spec-bench": ReplayPolicy(
        "prompt lookup (Spec-Bench)",
        "its PLD: n-grams of 3 to 1, 10 tokens, full drafts only",
        lambda task: FullDraftLookup(),
    ),
    # transformers: generate(prompt_lookup_num_tokens=10), max_matching_ngram_size 2.
    "transformers": ReplayPolicy(
        "prompt lookup (transformers)",
        "its prompt_lookup_num_tokens=10, n-grams of 2 and 1",
        lambda task: PromptLookupDrafter(n_draft=10, ngram_max=2),
    ),
    # vLLM: method "ngram", prompt_lookup_min = prompt_lookup_max = 5; the number of tokens
    # has no default there, 5 is that of its documentation.
    "vllm": ReplayPolicy(
        "n-grams (vLLM)",
        "its n-gram speculator: n-grams of 5, 5 tokens",
        lambda task: PromptLookupDrafter(n_draft=5, ngram_max=5, ngram_min=5),
    ),
    # TensorRT-LLM: prompt_lookup_config [10,2], is_keep_all and is_use_oldest.
    "tensorrt-llm": ReplayPolicy(
        "prompt lookup (TensorRT-LLM)",
        "its prompt lookup pool: n-grams of 2 and 1, 10 tokens, keep all, oldest",
        lambda task: TensorRTPool(),
    ),
    "llama.cpp": ReplayPolicy(
        "ngram-simple (llama.cpp)",
        "its n-grams of 12, 48 tokens",
        lambda task: NgramSimple(),
    ),
    "suffix-path": ReplayPolicy(
        "suffix path (ArcticInference)",
        "its SuffixDecoding: the most frequent continuation of what matches, as one chain",
        lambda task: SuffixDecoding(),
    ),
    "suffix-tree": ReplayPolicy(
        "suffix tree (ArcticInference)",
        "the same with a tree of continuations, up to four times the match's length",
        lambda task: SuffixDecoding(branching=True, max_spec_factor=4.0),
    ),
    HINDSIGHT: ReplayPolicy(
        f"{HINDSIGHT} (unreachable)",
        "no decoder: auto's candidates, as many as the known output shows to pay best",
        lambda task: Hindsight(task.output, task.curve, trees_pay(task.curve), task.classes),
        follows_costs=True,
    ),
}
"""By name; a further one, with a drafter of any kind, is one entry."""


def policies_with(drafter: type[Drafter]) -> dict[str, ReplayPolicy]:
    """A custom drafter class, alone and together with the default decoder's look-ups."""
    name = drafter.__name__
    return {
        name: ReplayPolicy(name, "a drafter of your own", lambda task: drafter()),
        f"auto+{name}": ReplayPolicy(
            f"auto+{name}",
            "the default decoder, which drafts with it too",
            lambda task: _planned(task, drafter()),
            follows_costs=True,
        ),
    }
