"""What is explained: steps of a generation, each with its draft tree, window and tokens.

The names of what became of a node, the shape of the tree, lookahead decoding's window and the
looks of tokens, for the terminal and for the page.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

from mlx_lm.tokenizer_utils import TokenizerWrapper
from rich.cells import cell_len, set_cell_size

from ..draft.drafter import VerifiedStep
from ..draft.recording import RecordedStep
from ..draft.tree import DraftTree
from ..generation.response import SpeculationStats
from ..loading.detokenizer import detokenizer_of
from ..terminal import one_line, visible

_CONTEXT = 60  # tokens before a step that may be shown


@dataclass(frozen=True)
class ShownStep:
    """One of the steps.

    Attributes:
        number: counted from 1.
        before: the end of the text before the step, its last token included.
        recorded: the step.
    """

    number: int
    before: str
    recorded: RecordedStep


@dataclass(frozen=True)
class Explained:
    """Steps of one generation.

    Attributes:
        model, decoder: their names, as the user gave them.
        prompt: the prompt's tokens.
        steps: all steps of the generation.
        first, count: which of them to show; the first has number 0.
        stats: the generation's figures.
        pieces: the tokens' looks.
    """

    model: str
    decoder: str
    prompt: Sequence[int]
    steps: Sequence[RecordedStep]
    first: int
    count: int
    stats: SpeculationStats
    pieces: Pieces

    def shown(self) -> Iterator[ShownStep]:
        """The steps to show."""
        text = list(self.prompt)
        for number, step in enumerate(self.steps[: self.first + self.count], start=1):
            if number > self.first:
                cut = "…" if len(text) > _CONTEXT else ""
                yield ShownStep(number, cut + self.pieces.text(text[-_CONTEXT:]), step)
            text.extend(step.verified.tokens)

    @property
    def summary(self) -> str:
        """One line about the generation."""
        stats = self.stats
        return (
            f"{one_line(self.model)}, decoder {self.decoder}: "
            f"tokens {stats.emitted}, steps {stats.steps}, "
            f"tokens per step {stats.tokens_per_step:.2f}, "
            f"rows per step {stats.rows / stats.steps:.1f}"
        )


def telling_run(steps: Sequence[RecordedStep], count: int) -> int:
    """Where the most telling ``count`` successive steps begin.

    Those are the ones where most drafts were accepted in part, so that a walk and its end can be
    seen; among equals, those with the largest windows, then those with most accepted tokens,
    then the first.
    """

    def told(first: int) -> tuple[int, int, int]:
        run = steps[first : first + count]
        partly = sum(0 < len(one.verified.accepted) < one.verified.drafted for one in run)
        return (
            partly,
            sum(len(one.window) for one in run),
            sum(len(one.verified.accepted) for one in run),
        )

    return max(range(max(1, len(steps) - count + 1)), key=told)


class Fate(Enum):
    """What the walk did with a node; the value tells the reader."""

    ROOT = "emitted before"
    ACCEPTED = "accepted"
    REJECTED = "rejected"
    UNREACHED = "not reached"
    BONUS = "the target's own"


def fates(step: VerifiedStep) -> tuple[Fate, ...]:
    """Per node of the tree, what became of it.

    A node is rejected where the walk stood at its parent and the target chose something else;
    what hangs below a rejected node, or behind the output's end, was not reached.
    """
    walked = {0, *step.accepted}
    if bonus(step) is None:
        walked.discard(step.accepted[-1])  # the output ended there, and nothing was compared
    result = [Fate.ROOT]
    for node, parent in enumerate(step.tree.parents[1:], start=1):
        if node in step.accepted:
            result.append(Fate.ACCEPTED)
        else:
            result.append(Fate.REJECTED if parent in walked else Fate.UNREACHED)
    return tuple(result)


def bonus(step: VerifiedStep) -> int | None:
    """The token that the target added to the accepted ones; None if the output ended before."""
    return step.tokens[-1] if len(step.tokens) > len(step.accepted) else None


def described_counts(step: VerifiedStep) -> str:
    """The figures of a step in words."""
    emitted = f"{len(step.tokens)} emitted"
    if not step.drafted:
        return f"1 row, no draft, {emitted}"
    accepted = f"{len(step.accepted)} of {step.drafted} draft tokens accepted"
    return f"{len(step.tree)} rows: {accepted}, {emitted}"


BONUS = -1
"""Stands for the bonus token where nodes are listed."""


class TreeShape:
    """How the nodes of a verified tree hang together.

    Attributes:
        children: per node its children; ``BONUS`` is one of the node where the walk ended.
        sizes: per node, how many nodes its subtree has.
        leaves: per node, how many nodes of its subtree are leaves.
    """

    def __init__(self, step: VerifiedStep) -> None:
        self._accepted = set(step.accepted)
        self.children = _children(step.tree)
        self.sizes, self.leaves = _sizes_and_leaves(step.tree)
        if bonus(step) is not None:
            self.children[(0, *step.accepted)[-1]].append(BONUS)

    def is_accepted(self, node: int) -> bool:
        """Whether the walk came to a node."""
        return node in self._accepted


def _children(tree: DraftTree) -> list[list[int]]:
    children: list[list[int]] = [[] for _ in tree.tokens]
    for node, parent in enumerate(tree.parents[1:], start=1):
        children[parent].append(node)
    return children


def _sizes_and_leaves(tree: DraftTree) -> tuple[list[int], list[int]]:
    """Per node, how many nodes its subtree has, and how many of them are leaves."""
    sizes, leaves = [1] * len(tree), [0] * len(tree)
    for node in range(len(tree) - 1, -1, -1):
        leaves[node] = leaves[node] or 1
        if node:
            sizes[tree.parents[node]] += sizes[node]
            leaves[tree.parents[node]] += leaves[node]
    return sizes, leaves


@dataclass(frozen=True)
class Cell:
    """A token of the window.

    Attributes:
        token: its id.
        place: how many tokens after the current one it stands.
        fate: what became of its row; None in the level that this step has computed.
    """

    token: int
    place: int
    fate: Fate | None


@dataclass(frozen=True)
class WindowLevel:
    """One Jacobi iteration.

    Attributes:
        name: "t−3" is the iteration of three steps ago, "now" this step's.
        cells: by column; None where the step had no room for a row.
    """

    name: str
    cells: tuple[Cell | None, ...]


def window_levels(step: RecordedStep) -> list[WindowLevel]:
    """The window's levels from the oldest to the one that the step has computed.

    A column read downwards is an n-gram; the current token is the first of the first column
    (Fu et al., "Break the Sequential Dependency of LLM Inference Using Lookahead Decoding",
    2024, figure 2). Empty without a window.
    """
    if not step.window:
        return []
    verified, became = step.verified, fates(step.verified)
    height = 1 + max(level for level, _ in step.window)
    columns = range(1 + max(column for _, column in step.window))

    def cell(level: int, column: int) -> Cell | None:
        node = step.window.get((level, column))
        if node is None:
            return None
        return Cell(verified.tree.tokens[node], column + level, became[node])

    def outcome(column: int) -> Cell | None:
        node = step.window.get((height - 1, column))
        return None if node is None else Cell(verified.argmaxes[node], column + height, None)

    levels = [
        WindowLevel(f"t−{height - level}", tuple(cell(level, column) for column in columns))
        for level in range(height)
    ]
    return [*levels, WindowLevel("now", tuple(outcome(column) for column in columns))]


SPACE, NEWLINE, TAB = "·", "↵", "⇥"
_REPLACEMENT = "\ufffd"
_SIGNS = str.maketrans({"\n": NEWLINE, "\t": TAB, "\r": "␍", "\u2028": NEWLINE, "\u2029": NEWLINE})


class Pieces:
    """What tokens look like.

    Args:
        tokenizer: the model's.
    """

    def __init__(self, tokenizer: TokenizerWrapper) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, str] = {}

    def __getitem__(self, token: int) -> str:
        """One token, its white space in signs; never empty and without spaces."""
        if token not in self._known:
            self._known[token] = self._piece(token)
        return self._known[token]

    def text(self, tokens: Sequence[int]) -> str:
        """Successive tokens on one line: spaces stay, other white space becomes signs."""
        return _readable(self._decode(tokens))

    def _piece(self, token: int) -> str:
        text = self._decode([token])
        if text and unicodedata.combining(text[0]):
            text = f"◌{text}"  # or it would change the sign before it
        elif not text.strip(_REPLACEMENT) or cell_len(_readable(text)) == 0:
            # A part of a character, or nothing that has a text of its own.
            name = self._tokenizer.convert_ids_to_tokens(token)
            text = name if isinstance(name, str) and name.startswith("<0x") else f"<{token}>"
        return _readable(text).replace(" ", SPACE)

    def _decode(self, tokens: Sequence[int]) -> str:
        detokenizer = detokenizer_of(self._tokenizer)
        for token in tokens:
            detokenizer.add_token(token)
        detokenizer.finalize()
        return detokenizer.text


def shortened(piece: str, width: int) -> str:
    """At most so many cells of a terminal, the last of them "…" where something is left out."""
    if cell_len(piece) <= width:
        return piece
    return set_cell_size(piece, width - 1).rstrip() + "…"


def shortened_from_left(text: str, width: int) -> str:
    """The end of a text, at most so many cells of a terminal wide."""
    if cell_len(text) <= width:
        return text
    kept = ""
    for sign in reversed(text):
        if cell_len(sign + kept) > width - 1:
            break
        kept = sign + kept
    return "…" + kept


def _readable(text: str) -> str:
    return visible(text.translate(_SIGNS))
