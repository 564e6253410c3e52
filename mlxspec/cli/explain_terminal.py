"""Explained steps for a terminal, whatever its width, and for a pipe."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from rich.cells import cell_len
from rich.console import Console
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from ..draft.drafter import VerifiedStep
from .explained import (
    BONUS,
    NEWLINE,
    SPACE,
    TAB,
    Cell,
    Explained,
    Fate,
    Pieces,
    ShownStep,
    TreeShape,
    WindowLevel,
    described_counts,
    fates,
    shortened,
    shortened_from_left,
    window_levels,
)

# Each fate has a sign as well as a style, for readers without colours.
_SIGNS = {
    Fate.ROOT: "●",
    Fate.ACCEPTED: "✓",
    Fate.REJECTED: "✗",
    Fate.UNREACHED: "○",
    Fate.BONUS: "★",
}
_STYLES = {
    Fate.ROOT: "",
    Fate.ACCEPTED: "bold color(32)",  # as in the generated text
    Fate.REJECTED: "color(166)",
    Fate.UNREACHED: "dim",
    Fate.BONUS: "bold",
}
_QUIET = "dim"
_PIECE_WIDTH, _LEAST_PIECE = 24, 8
_NAME_WIDTH, _CELL_WIDTH = 4, 12
_RULE_WIDTH = 100
_ASCII = str.maketrans(  # one for one, so that columns stay below each other
    {
        **{"●": "*", "✓": "+", "✗": "x", "○": "o", "★": "=", "→": ">", "…": "~", "−": "-"},
        **{"├": "|", "└": "`", "│": "|", "─": "-", SPACE: "_", NEWLINE: "$", TAB: "^"},
    }
)


def print_explained(explained: Explained, console: Console) -> None:
    """Write the steps, each with its tree and its window, and a key to the signs."""
    with console.capture() as capture:
        console.print(Text(explained.summary))
        for step in explained.shown():
            console.print()
            _print_step(step, len(explained.steps), explained.pieces, console)
        console.print()
        window = any(step.recorded.window for step in explained.shown())
        for line in _key(window, console.width):
            console.print(line)
    text = capture.get()
    console.file.write(text.translate(_ASCII) if console.options.ascii_only else text)


def _print_step(step: ShownStep, of: int, pieces: Pieces, console: Console) -> None:
    verified = step.recorded.verified
    rule = Rule(f"Step {step.number} of {of}", align="left", style=_QUIET)
    console.print(rule, width=min(console.width, _RULE_WIDTH))
    console.print(Text(described_counts(verified)))
    label = "after "
    before = shortened_from_left(step.before, console.width - len(label))
    console.print(Text(label + before, style=_QUIET, no_wrap=True, overflow="crop"))
    for line in outline(verified):
        for text in _drawn(line, step, pieces, console.width):
            console.print(text, no_wrap=True, overflow="crop")
    levels = window_levels(step.recorded)
    if levels:
        console.print()
        console.print(Text("Window: Jacobi iterations", style="bold"))
        for block in _blocks(levels, pieces, console.width):
            console.print(_grid(levels, block, pieces))


# The tree as lines that grow downwards, so that it fits a narrow terminal. A line holds a run of
# nodes, up to where the tree branches. Below it stand the smaller branches, indented, and then the
# largest, which goes on at the indentation of the line itself. So the trunk of lookahead
# decoding's window runs straight down, and a tree of n nodes is indented log2(n) times at most.


@dataclass(frozen=True)
class Line:
    """One line of the outline.

    Attributes:
        guides: the line drawing before the line's marker.
        guides_below: that before a continuation of the line, where it has to be broken.
        fate: what became of the first node.
        nodes: successive nodes; ``(BONUS,)`` for the bonus token.
        branch: the only side branch at the last of the nodes, if it has no branches itself.
    """

    guides: str
    guides_below: str
    fate: Fate
    nodes: tuple[int, ...]
    branch: tuple[int, ...] = ()


def outline(step: VerifiedStep) -> list[Line]:
    """The step's tree from the root downwards; the bonus token hangs where the walk ended."""
    return list(_Outline(step).lines(0, "", ""))


class _Outline:
    def __init__(self, step: VerifiedStep) -> None:
        self._fates = fates(step)
        self._shape = TreeShape(step)

    def lines(self, node: int, guides: str, below: str) -> Iterator[Line]:
        """The subtree at a node, whose marker stands behind ``guides``."""
        if node == BONUS:
            yield Line(guides, below + "  ", Fate.BONUS, (BONUS,))
            return
        trunk: int | None = node
        while trunk is not None:
            run = self._run(trunk)
            main, sides = self._branches(run[-1])
            # The root's line has the token that is no draft, and nothing else.
            inline = trunk != 0 and main is not None and self._fits_inline(sides)
            branch = self._run(sides.pop()) if inline else ()
            ends = main is None and not sides
            yield Line(guides, below + ("  " if ends else "│ "), self._fates[trunk], run, branch)
            for side in sides:
                last = side == sides[-1] and main is None
                yield from self.lines(
                    side, below + ("└─" if last else "├─"), below + ("  " if last else "│ ")
                )
            trunk, guides = main, below

    def _run(self, node: int) -> tuple[int, ...]:
        """The nodes from ``node`` on that have one child each, up to where acceptance ends."""
        shape, run = self._shape, [node]
        while node != 0 and len(shape.children[run[-1]]) == 1:
            child = shape.children[run[-1]][0]
            if child == BONUS or shape.is_accepted(child) != shape.is_accepted(node):
                break
            run.append(child)
        return tuple(run)

    def _branches(self, node: int) -> tuple[int | None, list[int]]:
        """The largest branch below a node, if it branches itself; and the others."""
        shape = self._shape
        children = shape.children[node]
        branching = [child for child in children if child != BONUS and shape.leaves[child] > 1]
        main = max(branching, key=lambda child: shape.sizes[child], default=None)
        return main, sorted((child for child in children if child != main), key=self._rank)

    def _rank(self, child: int) -> int:
        """Accepted branches come first, then the bonus token."""
        if child == BONUS:
            return 1
        return 0 if self._shape.is_accepted(child) else 2

    def _fits_inline(self, sides: list[int]) -> bool:
        """Whether there is one side branch, which fits on the line that it leaves."""
        if len(sides) != 1 or sides[0] == BONUS:
            return False
        side = sides[0]
        return self._shape.leaves[side] == 1 and not self._shape.is_accepted(side)


def _drawn(line: Line, step: ShownStep, pieces: Pieces, width: int) -> Iterator[Text]:
    """A line of the outline, broken between tokens where it is too long."""
    start = Text().append(line.guides, _QUIET).append(_SIGNS[line.fate], _STYLES[line.fate])
    room = width - cell_len(line.guides_below)
    words = _words(line, step, pieces, max(_LEAST_PIECE, min(_PIECE_WIDTH, room)))
    return _wrapped([start, *words], Text().append(line.guides_below, _QUIET), width)


def _wrapped(words: Iterable[Text], margin: Text, width: int, gap: str = " ") -> Iterator[Text]:
    """Words in lines of at most ``width`` cells, from the second on behind ``margin``."""
    line, begun = Text(), False
    for word in words:
        if begun and line.cell_len + len(gap) + word.cell_len > width:
            yield line
            line, begun = margin.copy(), False
        line.append(gap if begun else "").append_text(word)
        begun = True
    yield line


def _words(line: Line, step: ShownStep, pieces: Pieces, longest: int) -> Iterator[Text]:
    """What stands on a line, word by word: tokens, their origins, the target's next choice."""
    verified, origins = step.recorded.verified, step.recorded.origins
    if line.nodes == (BONUS,):
        yield Text(shortened(pieces[verified.tokens[-1]], longest), _STYLES[Fate.BONUS])
        return
    became, tokens = fates(verified), verified.tree.tokens

    def word(node: int) -> Text:
        return Text(shortened(pieces[tokens[node]], longest), _STYLES[became[node]])

    yield from map(word, line.nodes)
    if line.branch:
        fate = became[line.branch[0]]
        yield Text("─", _QUIET).append(_SIGNS[fate] if fate is Fate.REJECTED else "", _STYLES[fate])
        yield from map(word, line.branch)
    if line.fate is Fate.ROOT:
        return
    nodes = (*line.nodes, *line.branch)
    if became[nodes[-1]] is not Fate.ACCEPTED:
        choice = pieces[verified.choices[nodes[-1]]]
        yield Text(f"→ {shortened(choice, longest - 2)}", _QUIET)
    told = list(dict.fromkeys(origins[node] for node in nodes))
    if told != [origins[verified.tree.parents[nodes[0]]]]:
        yield Text(f"({', '.join(told)})", f"italic {_QUIET}")


def _blocks(levels: Sequence[WindowLevel], pieces: Pieces, width: int) -> Iterator[range]:
    """The columns, cut into blocks that fit beside the levels' names."""
    used, start = _NAME_WIDTH, 0
    for column in range(len(levels[0].cells)):
        cells = [_cell(level.cells[column], pieces).cell_len for level in levels]
        wide = 1 + max(len(str(column)), *cells)
        if used + wide > width and column > start:
            yield range(start, column)
            used, start = _NAME_WIDTH, column
        used += wide
    yield range(start, len(levels[0].cells))


def _grid(levels: Sequence[WindowLevel], columns: range, pieces: Pieces) -> Table:
    grid = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style=_QUIET)
    grid.add_column("", style=_QUIET, min_width=_NAME_WIDTH, no_wrap=True)
    for column in columns:
        grid.add_column(str(column), no_wrap=True)
    for level in levels:
        cells = [_cell(level.cells[column], pieces) for column in columns]
        grid.add_row(level.name, *cells, style="bold" if level.name == "now" else "")
    return grid


def _cell(cell: Cell | None, pieces: Pieces) -> Text:
    if cell is None:
        return Text("")
    piece = shortened(pieces[cell.token], _CELL_WIDTH)
    if cell.fate is Fate.ACCEPTED:
        return Text(_SIGNS[cell.fate] + piece, _STYLES[cell.fate])
    return Text(piece)


def _key(window: bool, width: int) -> Iterator[Text]:
    """What the signs mean."""
    meanings = [Text(f"{sign} {fate.value}", _STYLES[fate]) for fate, sign in _SIGNS.items()]
    others = (f"{SPACE} space", f"{NEWLINE} newline", f"{TAB} tab", "→ the target's next choice")
    meanings += [Text(meaning, _QUIET) for meaning in others]
    yield from _wrapped(meanings, Text(), width, gap="  ")
    if window:
        yield Text(
            "Column i of the window, read downwards, is what may follow i tokens after the current "
            "one: an n-gram, which the step gives to the pool once the window has all levels.",
            _QUIET,
        )
