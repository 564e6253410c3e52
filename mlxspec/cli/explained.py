"""What is explained: steps of a generation, each with its draft tree, window and tokens.

The names of what became of a node, the shape of the tree, lookahead decoding's window and the
looks of tokens, for the terminal and for the page.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from mlx_lm.tokenizer_utils import TokenizerWrapper
from rich.cells import cell_len, set_cell_size

from ..drafting.sources import RecordedStep
from ..generation.response import SpeculationStats
from ..models.detokenizer import detokenizer_of
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
        pieces: what the tokens look like.
        chosen: whether nobody has said which step is the first.
    """

    model: str
    decoder: str
    prompt: Sequence[int]
    steps: Sequence[RecordedStep]
    first: int
    count: int
    stats: SpeculationStats
    pieces: Pieces
    chosen: bool = False

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

    @property
    def opening(self) -> str:
        """Why the first steps are not among those that are shown; empty where they are."""
        if not (self.chosen and self.first):
            return ""
        return (
            f"This begins at step {self.first + 1}, where drafts show most; "
            "--skip 0 begins at the first."
        )


def telling_run(steps: Sequence[RecordedStep], count: int) -> int:
    """Where the ``count`` successive steps begin that show most.

    Those are the ones where most drafts were accepted in part, so that one sees acceptance begin
    and end; of several such runs, the one with the largest windows, then the one with most
    accepted tokens, then the first.
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
    """What became of a node; the value is what the reader is told."""

    ROOT = "emitted before"
    ACCEPTED = "accepted"
    REJECTED = "rejected"
    UNREACHED = "not reached"
    BONUS = "the target's own"


@dataclass
class Node:
    """A node of a verified tree, or the bonus token, which hangs where the walk ended.

    Attributes:
        token: its id.
        fate: what became of it.
        origin: where it was drafted from.
        choice: what the target chose after it; None after the bonus token.
        parent: the parent's number, -1 for the root.
        children: the children's numbers.
        size: how many nodes its subtree has, the bonus token not counted.
        leaves: how many of these are leaves.
    """

    token: int
    fate: Fate
    origin: str = ""
    choice: int | None = None
    parent: int = -1
    children: list[int] = field(default_factory=list)
    size: int = 1
    leaves: int = 0


def nodes_of(step: RecordedStep) -> list[Node]:
    """The nodes of a step's tree, and last the bonus token, unless the output ended before it.

    A node is rejected where the walk stood at its parent and the target chose something else.
    What hangs below a rejected node, or behind the output's end, was not reached.
    """
    verified = step.verified
    has_bonus = len(verified.tokens) > len(verified.accepted)
    walked = {0, *(verified.accepted if has_bonus else verified.accepted[:-1])}

    def fate(number: int, parent: int) -> Fate:
        if number == 0:
            return Fate.ROOT
        if number in verified.accepted:
            return Fate.ACCEPTED
        return Fate.REJECTED if parent in walked else Fate.UNREACHED

    tree = zip(
        *(verified.tree.tokens, step.origins, verified.choices, verified.tree.parents), strict=True
    )
    nodes = [
        Node(token, fate(number, parent), origin, choice, parent)
        for number, (token, origin, choice, parent) in enumerate(tree)
    ]
    for number, node in reversed([*enumerate(nodes)]):  # children come after their parents
        node.leaves = node.leaves or 1
        if number:
            parent = nodes[node.parent]
            parent.size += node.size
            parent.leaves += node.leaves
            parent.children.insert(0, number)
    if has_bonus:
        last = (0, *verified.accepted)[-1]
        nodes[last].children.append(len(nodes))
        nodes.append(Node(verified.tokens[-1], Fate.BONUS, parent=last, leaves=1))
    return nodes


def walk_first(node: Node) -> int:
    """Sorts branches: what was accepted, the bonus token, then the others."""
    return {Fate.ACCEPTED: 0, Fate.BONUS: 1}.get(node.fate, 2)


def described_counts(recorded: RecordedStep) -> str:
    """The figures of a step in words, and why nothing was drafted."""
    step = recorded.verified
    emitted = f"{len(step.tokens)} emitted"
    if not step.drafted:
        return f"1 row, {emitted}; nothing drafted: {recorded.no_draft}"
    accepted = f"{len(step.accepted)} of {step.drafted} draft tokens accepted"
    return f"{len(step.tree)} rows: {accepted}, {emitted}"


class Cell(NamedTuple):
    """A token of the window.

    Attributes:
        token: its id.
        place: how many tokens after the current one it stands.
        fate: what became of its row; None in the level that this step has computed.
    """

    token: int
    place: int
    fate: Fate | None


class WindowLevel(NamedTuple):
    """One Jacobi iteration.

    Attributes:
        name: "t−3" is the iteration of three steps ago, "now" this step's.
        cells: by column; None where the step had no room for a row.
    """

    name: str
    cells: list[Cell | None]


def window_levels(step: RecordedStep) -> list[WindowLevel]:
    """The window's levels from the oldest to the one that the step has computed.

    A column read downwards is an n-gram; the current token is the first of the first column
    (Fu et al., "Break the Sequential Dependency of LLM Inference Using Lookahead Decoding",
    2024, figure 2). Empty without a window.
    """
    if not step.window:
        return []
    nodes, argmaxes = nodes_of(step), step.verified.argmaxes
    height = 1 + max(level for level, _ in step.window)
    width = 1 + max(column for _, column in step.window)

    def cell(level: int, column: int) -> Cell | None:
        """A row's token, or below the last row what the model said after that."""
        node = step.window.get((min(level, height - 1), column))
        if node is None:
            return None
        if level == height:
            return Cell(argmaxes[node], column + level, None)
        return Cell(nodes[node].token, column + level, nodes[node].fate)

    return [
        WindowLevel(
            f"t−{height - level}" if level < height else "now",
            [cell(level, column) for column in range(width)],
        )
        for level in range(height + 1)
    ]


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
