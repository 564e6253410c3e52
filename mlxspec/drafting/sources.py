"""Small drafters: prompt lookup, forced tokens, and wrappers around other drafters."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

from ..errors import OptionError, whole
from .candidates import TreeNode
from .drafter import (
    Drafter,
    DraftTree,
    NoDraft,
    VerifiedStep,
    checked_draft,
    checked_drafter,
    merge,
    view,
)

_LONGEST_NGRAM = 64  # every length needs an index, which takes time and memory


class PromptLookupDrafter(Drafter):
    """Drafts a chain by looking up the context's last tokens in the context itself.

    For n from ``ngram_max`` down to ``ngram_min``, the last n tokens of prompt and output are
    looked up in the text before them. The draft is the tokens after the earliest occurrence of the
    longest n-gram that is found. (Apoorv Saxena, "Prompt Lookup Decoding", 2023; transformers also
    takes the earliest match.)

    Args:
        n_draft: the most tokens to draft.
        ngram_max: the length of the longest n-gram to look up, at most 64.
        ngram_min: the length of the shortest n-gram.

    Raises:
        OptionError: a number is not whole or is out of range, or ``ngram_min`` exceeds
            ``ngram_max``.
    """

    branching = False

    def __init__(self, n_draft: int = 10, ngram_max: int = 3, ngram_min: int = 1) -> None:
        self.n_draft = whole("n_draft", n_draft)
        self.ngram_max = whole("ngram_max", ngram_max)
        self.ngram_min = whole("ngram_min", ngram_min)
        if n_draft < 1:
            raise OptionError(
                f"n_draft is {n_draft}: choose 1 or more (only decoders take 0, for no drafts)"
            )
        if not 1 <= ngram_min <= ngram_max <= _LONGEST_NGRAM:
            raise OptionError(
                f"ngram_min is {ngram_min}, and ngram_max is {ngram_max}: "
                f"choose 1 <= ngram_min <= ngram_max <= {_LONGEST_NGRAM}"
            )

    def begin(self, prompt: Sequence[int]) -> None:
        self._text: list[int] = []
        # The end of each n-gram's earliest occurrence. A new token adds one entry for each n, so
        # the text need not be scanned.
        self._ends: dict[tuple[int, ...], int] = {}
        self._sizes = range(self.ngram_max, self.ngram_min - 1, -1)
        self.extend(prompt)

    def propose(self, max_depth: int) -> DraftTree:
        text = self._text
        for n in self._sizes:
            end = self._ends.get(tuple(text[-n:]), len(text))
            # Nothing follows the n-gram at the text's end, which the table also has.
            if end < len(text):
                draft = text[end : end + min(max_depth, self.n_draft)]
                return DraftTree.chain(text[-1], draft, "lookup")
        return DraftTree.chain(text[-1])

    def observe(self, step: VerifiedStep) -> None:
        self.extend(step.tokens)

    def end(self) -> None:
        del self._text, self._ends

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens to the text."""
        for token in tokens:
            self._text.append(token)
            suffix = tuple(self._text[-self.ngram_max :])
            for n in self._sizes:
                if n <= len(suffix):
                    self._ends.setdefault(suffix[-n:], len(self._text))


def parse_lookup_config(config: str | Sequence[object]) -> tuple[int, int, str | None]:
    """Parse TensorRT-LLM's ``prompt_lookup_config``, such as ``"[10,2,[0]]"`` or the list itself.

    Args:
        config: the number of draft tokens, the length of the longest n-gram, and optionally a list
            of devices.

    Returns:
        the number of draft tokens, the length of the longest n-gram, and a note to the user if a
        list of devices is ignored, or None.

    Raises:
        OptionError: the configuration has another form.
    """
    try:
        values: list[Any] = json.loads(config) if isinstance(config, str) else [*config]
        n_draft, ngram_max, *devices = values
        if min(n_draft, ngram_max) < 0 or type(n_draft + ngram_max) is not int or devices[1:]:
            raise ValueError
    except (RecursionError, TypeError, ValueError) as error:
        raise OptionError(
            f"prompt_lookup_config is {config!r}: write it as [draft tokens, longest n-gram], "
            "for example [10,2]"
        ) from error
    note = f"prompt_lookup_config: the list of devices {devices[0]} is ignored" if devices else None
    return n_draft, ngram_max, note


# Where these come from: notes/planner.md, "Constants".
_DEPTHS = 8  # depths with their own probabilities; deeper nodes have the last one
_FIRST_P_ACCEPT = 0.5
_RATE = 0.1
_LEAST, _MOST = 0.01, 0.99  # nothing is certain


class DrafterSource(Drafter):
    """Adds probabilities to the drafts of any drafter, which drafts as if it were the only one.

    If its drafts have no probabilities, these are learned for each depth from the tokens that
    followed, whether or not the draft was verified. So if a drafter is often wrong, its drafts are
    soon left out, and it costs only the time that it takes to propose them.

    Args:
        drafter: proposes the drafts, whose origin is the name of its class. It serves one
            generation at a time.

    Attributes:
        spent: the seconds that the drafter has taken in the current step.
        fault: the exception that the drafter has raised; it is not a fault of planning.
    """

    spent = 0.0
    fault: Exception | None = None

    def __init__(self, drafter: Drafter) -> None:
        self._drafter = checked_drafter(drafter)
        self._p_accept = [_FIRST_P_ACCEPT] * (_DEPTHS + 1)

    def attach(self, target: Any, perturb: Callable[..., Any]) -> None:
        self._drafter.attach(target, perturb)

    def begin(self, prompt: Sequence[int]) -> None:
        self._last = prompt[-1]
        self._tree: DraftTree | None = None
        with self._asking():
            self._drafter.begin(list(prompt))
        self.spent = 0.0

    def search(self, max_depth: int) -> Sequence[TreeNode]:
        """Like :meth:`mlxspec.drafting.suffix_source.SuffixSource.search`."""
        with self._asking():
            proposed = self._drafter.propose(max_depth)
            proposed = checked_draft(proposed, self._drafter, self._last)
        self._tree = tree = proposed.pruned(max_depth, sys.maxsize)
        names = (type(self._drafter).__name__,) * (len(tree) - 1)
        p_reached = tree.p_reached or tuple(self._estimate(tree))
        return [TreeNode(replace(tree, p_reached=p_reached, origins=names))]

    def observe(self, step: VerifiedStep) -> None:
        tree, self._tree = self._tree, None
        if tree is not None:
            if not tree.p_reached:
                self._learn(tree, step.tokens)
            step = view(step, tree)
        self._last = step.tokens[-1]
        self.spent = 0.0
        with self._asking():  # this time counts in the next step
            self._drafter.observe(step)

    def end(self) -> None:
        with self._asking():
            self._drafter.end()

    @contextmanager
    def _asking(self) -> Iterator[None]:
        """Time a call of the drafter and record its exception."""
        started = time.perf_counter()
        try:
            yield
        except Exception as error:
            self.fault = error
            raise
        finally:
            self.spent += time.perf_counter() - started

    def _estimate(self, tree: DraftTree) -> list[float]:
        """For each node except the root, the probability that it is accepted."""
        p_reached = [1.0]
        for parent, depth in zip(tree.parents[1:], tree.depths[1:], strict=True):
            p_reached.append(p_reached[parent] * self._p_accept[min(depth, _DEPTHS)])
        return p_reached[1:]

    def _learn(self, tree: DraftTree, tokens: Sequence[int]) -> None:
        """Learn from the tokens that followed, up to the first one outside the tree."""
        for node, right in tree.judged(tokens):
            depth = min(tree.depths[node], _DEPTHS)
            p_accept = self._p_accept[depth] + _RATE * (right - self._p_accept[depth])
            self._p_accept[depth] = min(_MOST, max(_LEAST, p_accept))


class CombinedDrafter(Drafter):
    """Merges the drafts of two drafters; common prefixes are verified once.

    Each drafter observes a step as if its own tree had been verified: with the target's choices
    after its own nodes, and with all emitted tokens. A target that verifies only chains gets the
    first drafter's chain, or the second's if the first has no draft.

    Args:
        first: the drafter that has priority when drafts are cut to a chain.
        second: the other drafter. If its ``is_fallback`` is True, it drafts only when the first has
            no draft.
    """

    def __init__(self, first: Drafter, second: Drafter) -> None:
        self.first = first
        self.second = second

    @property
    def pipelined(self) -> bool:  # type: ignore[override]
        """Whether both drafters expect no draft soon."""
        return self.first.pipelined and self.second.pipelined

    def attach(self, target: Any, perturb: Callable[..., Any]) -> None:
        self.first.attach(target, perturb)
        self.second.attach(target, perturb)

    def begin(self, prompt: Sequence[int]) -> None:
        self.first.begin(list(prompt))
        self.second.begin(list(prompt))

    def propose(self, max_depth: int) -> DraftTree:
        first = self.first.propose(max_depth)
        needless = self.second.is_fallback and len(first) > 1
        second = self.second.propose(0 if needless else max_depth)
        self._parts = first, second
        return merge(self._parts)

    def observe(self, step: VerifiedStep) -> None:
        first, second = self._parts
        self.first.observe(view(step, first))
        self.second.observe(view(step, second))

    def end(self) -> None:
        try:
            self.first.end()
        finally:
            self.second.end()


GRAMMAR = "grammar"
"""The origin of forced tokens."""

Forced = Callable[[], Sequence[int]]
"""Returns the tokens that must come next, whatever the model predicts; empty if several tokens may
come next.
"""

_P_ACCEPT = 0.99  # of a forced token; nothing is certain


class ForcedDrafter(NoDraft):
    """Drafts only the tokens that a constraint forces, which ``forced`` returns."""

    def __init__(self, forced: Forced) -> None:
        self._forced = forced

    def propose(self, max_depth: int) -> DraftTree:
        return forced_chain(self._last, self._forced()[:max_depth])


def with_forced(drafter: Drafter, forced: Forced) -> Drafter:
    """A drafter for a constrained output that also drafts the forced tokens."""
    both = CombinedDrafter(ForcedDrafter(forced), drafter)
    # There is no alternative to a forced token, so merging the two never adds a branch.
    both.branching = drafter.branching
    return both


def forced_chain(last: int, forced: Sequence[int]) -> DraftTree:
    """A chain of the tokens that a constraint forces after the last token; maybe just the root."""
    p_reached = tuple(_P_ACCEPT**depth for depth in range(1, 1 + len(forced)))
    return replace(DraftTree.chain(last, forced, GRAMMAR), p_reached=p_reached)


class RecordedStep(NamedTuple):
    """A step, and the reason if nothing was drafted.

    Attributes:
        verified: the step.
        no_draft: a clause that says why nothing was drafted; empty if something was.
    """

    verified: VerifiedStep
    no_draft: str = ""


class RecordingDrafter(Drafter):
    """Records the steps of another drafter.

    Args:
        drafter: the drafter to record.
        steps: the list to append steps to.
    """

    def __init__(self, drafter: Drafter, steps: list[RecordedStep]) -> None:
        self._drafter = drafter
        self._steps = steps
        self.branching = drafter.branching

    @property
    def pipelined(self) -> bool:  # type: ignore[override]  # the drafter's
        return self._drafter.pipelined

    def attach(self, target: Any, perturb: Callable[..., Any]) -> None:
        self._drafter.attach(target, perturb)

    def begin(self, prompt: Sequence[int]) -> None:
        self._drafter.begin(prompt)

    def propose(self, max_depth: int) -> DraftTree:
        tree = self._drafter.propose(max_depth)
        self._no_draft = self._drafter.no_draft() if max_depth > 0 else "the output ends here"
        self._proposed = tree
        return tree

    def observe(self, step: VerifiedStep) -> None:
        if step.drafted:
            self._no_draft = ""
        elif len(self._proposed) > 1:
            self._no_draft = (
                "the step had been dispatched before there was a draft, so the draft must wait"
                if step.pipelined
                else "the output's constraint or its end leaves no room for the proposed draft"
            )
        self._steps.append(RecordedStep(step, self._no_draft))
        self._drafter.observe(step)

    def end(self) -> None:
        self._drafter.end()
