"""Compare mlxspec with other programs' draft rules, and with hindsight, on recorded outputs.

    python benchmarks/rivals.py traces/*.jsonl --tokenizer MODEL --chip all --decoder all

The options are those of ``mlxspec replay``; ``--decoder`` knows these names as well. With
``--json``, ``benchmarks/plot_replay.py`` draws the result. Hindsight always "wins", since it knows
the outputs: it is a bound, and no decoder.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from mlxspec.bench.policies import POLICIES, NewDrafter, ReplayPolicy, from_text
from mlxspec.bench.replay import verify
from mlxspec.cli.replay import replay_command
from mlxspec.drafting.accept import VerifiedStep
from mlxspec.drafting.candidates import Candidates
from mlxspec.drafting.cost_curve import CostCurve
from mlxspec.drafting.drafter import Drafter
from mlxspec.drafting.p_accept import TokenClasses
from mlxspec.drafting.planner import trees_pay
from mlxspec.drafting.prompt_lookup import PromptLookupDrafter
from mlxspec.drafting.suffix_source import SuffixSource
from mlxspec.drafting.tree import DraftTree

_FULL = 10  # tokens in a draft of Spec-Bench's PLD
_DEEPEST = 64  # the most tokens that a match and its draft have together in suffix decoding


class FullLookup(Drafter):
    """Drafts the ten tokens after the earliest match of the text's last 3, 2 or 1 tokens.

    The longest of these n-grams is used that has a match with ten tokens after it. This is the rule
    of ``find_candidate_pred_tokens`` in apoorvumang/prompt-lookup-decoding, and of Spec-Bench's
    PLD.
    """

    branching = False

    def __init__(self) -> None:
        self._lookups = [PromptLookupDrafter(_FULL, n, n) for n in (3, 2, 1)]

    def begin(self, prompt: Sequence[int]) -> None:
        for lookup in self._lookups:
            lookup.begin(prompt)

    def propose(self, max_depth: int) -> DraftTree:
        found = [lookup.propose(_FULL) for lookup in self._lookups]
        full = (tree for tree in found if len(tree) == 1 + _FULL)
        return next(full, DraftTree.chain(found[0].tokens[0]))

    def observe(self, step: VerifiedStep) -> None:
        for lookup in self._lookups:
            lookup.observe(step)


class _TextDrafter(Drafter):
    """Drafts a chain from the text so far (prompt and output) by a fixed rule."""

    branching = False

    def __init__(self) -> None:
        self._text: list[int] = []

    def begin(self, prompt: Sequence[int]) -> None:
        self._extend(prompt)

    def propose(self, max_depth: int) -> DraftTree:
        return DraftTree.chain(self._text[-1], self._draft())

    def observe(self, step: VerifiedStep) -> None:
        self._extend(step.tokens)

    def _extend(self, tokens: Sequence[int]) -> None:
        raise NotImplementedError

    def _draft(self) -> list[int]:
        raise NotImplementedError


class NgramSimple(_TextDrafter):
    """Drafts up to 48 tokens that followed the latest earlier occurrence of the last 12 tokens.

    This is the rule of llama.cpp's ``--spec-type ngram-simple`` (common/ngram-map.cpp), with its
    defaults. Drafts shorter than the n-gram are not proposed.
    """

    def __init__(self, size_n: int = 12, size_m: int = 48) -> None:
        super().__init__()
        self._size_n, self._size_m = size_n, size_m
        self._newest: dict[tuple[int, ...], int] = {}  # where each n-gram last ended

    def _extend(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            self._text.append(token)
            key = tuple(self._text[-self._size_n :])
            self._match = self._newest.get(key)  # looked up before the text's own end is added
            if len(self._text) > self._size_n:  # llama.cpp ignores the text's very first position
                self._newest[key] = len(self._text)

    def _draft(self) -> list[int]:
        if self._match is None or len(self._text) <= self._size_n + self._size_m + 1:
            return []
        found = self._text[self._match : self._match + self._size_m]
        return found if len(found) >= self._size_n else []


class SuffixPath(_TextDrafter):
    """Drafts the most frequent continuation of a suffix of the text so far (prompt and output).

    Each suffix that occurs earlier gives one draft, which is at most as long as the suffix. The
    probability of a draft's token is the share of the suffix's occurrences that continue like the
    draft up to this token. Of all drafts, the one with the greatest sum of probabilities is
    proposed. (Oliaro et al. 2024, arXiv 2411.04975, with the rules and defaults of
    ``SuffixTree::speculate`` in Snowflake's ArcticInference. As there, the text's own end counts as
    an occurrence. ArcticInference's global tree of earlier requests is left out.)

    Args:
        min_token_prob: tokens with a lower probability are not drafted.
    """

    def __init__(self, min_token_prob: float = 0.1) -> None:
        super().__init__()
        self._least = min_token_prob
        self._ends: dict[int, list[int]] = {}  # for each token, the positions after it

    def _extend(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            self._text.append(token)
            self._ends.setdefault(token, []).append(len(self._text))

    def _draft(self) -> list[int]:
        text, best = self._text, (0.0, list[int]())
        ends = self._ends[text[-1]]
        for length in range(1, min(len(text), _DEEPEST)):
            ends = [end for end in ends if end >= length and text[end - length] == text[-length]]
            if len(ends) < 2:  # only the text's own end
                break
            found = self._path(ends, min(length, _DEEPEST - length))
            best = max(found, best, key=lambda one: one[0])
        return best[1]

    def _path(self, ends: list[int], most: int) -> tuple[float, list[int]]:
        """The most frequent continuation: the sum of its tokens' probabilities, and the tokens."""
        path: list[int] = []
        score, probability = 0.0, 1.0
        while len(path) < most:
            following = [(self._text[end], end + 1) for end in ends if end < len(self._text)]
            if not following:
                break
            ((token, count),) = Counter(token for token, _ in following).most_common(1)
            probability *= count / len(ends)
            if probability < self._least:
                break
            path.append(token)
            score += probability
            ends = [end for own, end in following if own == token]
        return score, path


@dataclass(eq=False)
class Hindsight(Drafter):
    """An upper bound for planners: it knows the output, and so drafts the best number of tokens.

    The candidates and their order are the planner's. The draft is the first n of them, where n
    maximises the tokens emitted per unit of time. So no planner can be faster with the same
    candidates. A planner with other candidates, such as those from earlier outputs, may be faster.

    Args:
        output: the recorded output, as token ids.
        curve: T(rows) / T(1).
        branching: whether drafts may be trees.
        token_classes: see :class:`mlxspec.drafting.p_accept.TokenClasses`.
    """

    output: Sequence[int]
    curve: CostCurve
    branching: bool
    token_classes: TokenClasses = b""

    def __post_init__(self) -> None:
        self._source = SuffixSource(self.token_classes)

    def begin(self, prompt: Sequence[int]) -> None:
        self._source.begin(prompt)
        self._last, self._done = prompt[-1], 0

    def propose(self, max_depth: int) -> DraftTree:
        following = self.output[self._done : self._done + self.curve.widest]
        depth = min(max_depth, len(following))
        roots = self._source.search(depth)
        found = Candidates(self._last, roots, branching=self.branching, max_depth=depth)
        everything = found.tree(self.curve.widest - 1)
        return found.tree(self._best_n_draft(verify(everything, following).accepted))

    def observe(self, step: VerifiedStep) -> None:
        self._source.observe(step)
        self._last = step.tokens[-1]
        self._done += len(step.tokens)

    def end(self) -> None:
        self._source.end()

    def _best_n_draft(self, right: Sequence[int]) -> int:
        """The best number of nodes to verify, root excluded.

        A best draft is empty or ends with a node of ``right``, the nodes that match the output.
        """
        costs = self.curve.table
        rates = {node: (1 + depth) / costs[1 + node] for depth, node in enumerate(right, start=1)}
        return max((0, *right), key=lambda node: rates.get(node, 1.0))


def _hindsight(curve: CostCurve, classes: TokenClasses) -> NewDrafter:
    return lambda output: Hindsight(output, curve, trees_pay(curve), classes)


RIVALS: dict[str, ReplayPolicy] = {
    # Spec-Bench's PLD, for which there are published figures to compare with.
    "spec-bench": from_text(FullLookup),
    # generate(prompt_lookup_num_tokens=10), max_matching_ngram_size 2.
    "transformers": from_text(lambda: PromptLookupDrafter(n_draft=10, ngram_max=2)),
    # Method "ngram", prompt_lookup_min = prompt_lookup_max = 5. The number of draft tokens has no
    # default; vLLM's documentation uses 5 in its example.
    "vllm": from_text(lambda: PromptLookupDrafter(n_draft=5, ngram_max=5, ngram_min=5)),
    "llama.cpp": from_text(NgramSimple),
    "suffix-path": from_text(SuffixPath),
    "hindsight": _hindsight,
}


if __name__ == "__main__":
    POLICIES.update(RIVALS)
    replay_command()
