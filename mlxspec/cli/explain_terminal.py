"""Explained steps for a terminal, whatever its width, and for a pipe."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from rich.cells import cell_len
from rich.console import Console
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from .explained import (
    NEWLINE,
    SPACE,
    TAB,
    Cell,
    Explained,
    Fate,
    Node,
    Pieces,
    ShownStep,
    WindowLevel,
    described_counts,
    nodes_of,
    shortened,
    shortened_from_left,
    walk_first,
    window_levels,
)

_LOOKS = {  # a sign as well as a style, for readers without colours
    Fate.ROOT: ("●", ""),
    Fate.ACCEPTED: ("✓", "bold color(32)"),  # as in the generated text
    Fate.REJECTED: ("✗", "color(166)"),
    Fate.UNREACHED: ("○", "dim"),
    Fate.BONUS: ("★", "bold"),
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
        if explained.opening:
            console.print(Text(explained.opening, style=_QUIET))
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
    rule = Rule(f"Step {step.number} of {of}", align="left", style=_QUIET)
    console.print(rule, width=min(console.width, _RULE_WIDTH))
    console.print(Text(described_counts(step.recorded)))
    label = "after "
    before = shortened_from_left(step.before, console.width - len(label))
    console.print(Text(label + before, style=_QUIET, no_wrap=True, overflow="crop"))
    nodes = nodes_of(step.recorded)
    for line in outline(nodes):
        for text in _drawn(line, nodes, pieces, console.width):
            console.print(text, no_wrap=True, overflow="crop")
    levels = window_levels(step.recorded)
    if levels:
        console.print()
        console.print(Text("Window: Jacobi iterations", style="bold"))
        for block in _blocks(levels, pieces, console.width):
            console.print(_grid(levels, block, pieces))


# The tree as lines that grow downwards, so that it fits a narrow terminal. A line holds a run of
# nodes, up to where the tree branches. Below it stand the smaller branches and then the largest,
# all indented. Where that would go too deep, as in the trunk of lookahead decoding's window, the
# largest goes on at the indentation of the line itself: so a tree of n nodes is indented log2(n)
# times more at most.
_DEEPEST = 16  # columns


class Line(NamedTuple):
    """One line of the outline.

    Attributes:
        guides: the line drawing before the line's marker.
        guides_below: that before a continuation of the line, where it has to be broken.
        nodes: the numbers of successive nodes.
        branch: the only side branch at the last of the nodes, if it has no branches itself.
    """

    guides: str
    guides_below: str
    nodes: tuple[int, ...]
    branch: tuple[int, ...] = ()


def outline(
    nodes: Sequence[Node], start: int = 0, guides: str = "", below: str = ""
) -> Iterator[Line]:
    """A tree from the root downwards.

    Args:
        nodes: the tree.
        start: the node that the outline begins with.
        guides, below: what stands before its line, and before those below.
    """
    trunk: int | None = start
    while trunk is not None:
        run = _run(nodes, trunk)
        main, sides = _branches(nodes, run[-1])
        # The root's line has the token that is no draft, and nothing else.
        inline = trunk != 0 and main is not None and _fits_inline([nodes[one] for one in sides])
        branch = _run(nodes, sides.pop()) if inline else ()
        ends = main is None and not sides
        yield Line(guides, below + ("  " if ends else "│ "), run, branch)
        for side in sides:
            last = side == sides[-1] and main is None
            marks = ("└─", "  ") if last else ("├─", "│ ")
            yield from outline(nodes, side, below + marks[0], below + marks[1])
        trunk, guides = main, below
        if len(below) < _DEEPEST:
            guides, below = below + "└─", below + "  "


def _run(nodes: Sequence[Node], start: int) -> tuple[int, ...]:
    """The nodes from ``start`` on that have one child each, up to where acceptance ends."""
    run, accepted = [start], nodes[start].fate is Fate.ACCEPTED
    while start != 0 and len(nodes[run[-1]].children) == 1:
        child = nodes[run[-1]].children[0]
        if (nodes[child].fate is Fate.ACCEPTED) != accepted:
            break
        run.append(child)
    return tuple(run)


def _branches(nodes: Sequence[Node], start: int) -> tuple[int | None, list[int]]:
    """The largest branch below a node, if it branches itself; and the others."""
    children = nodes[start].children
    branching = [child for child in children if nodes[child].leaves > 1]
    main = max(branching, key=lambda child: nodes[child].size, default=None)
    sides = [child for child in children if child != main]
    return main, sorted(sides, key=lambda child: walk_first(nodes[child]))


def _fits_inline(sides: Sequence[Node]) -> bool:
    """Whether there is one side branch, which fits on the line that it leaves."""
    return [side.leaves for side in sides] == [1] and walk_first(sides[0]) == 2


def _drawn(line: Line, nodes: Sequence[Node], pieces: Pieces, width: int) -> Iterator[Text]:
    """A line of the outline, broken between tokens where it is too long."""
    start = Text().append(line.guides, _QUIET).append(*_LOOKS[nodes[line.nodes[0]].fate])
    room = width - cell_len(line.guides_below)
    words = _words(line, nodes, pieces, max(_LEAST_PIECE, min(_PIECE_WIDTH, room)))
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


def _words(line: Line, nodes: Sequence[Node], pieces: Pieces, longest: int) -> Iterator[Text]:
    """What stands on a line, word by word: tokens, their origins, the target's next choice."""
    run, branch = ([nodes[number] for number in numbers] for numbers in (line.nodes, line.branch))

    def word(node: Node) -> Text:
        return Text(shortened(pieces[node.token], longest), _LOOKS[node.fate][1])

    yield from map(word, run)
    if branch:
        sign, style = _LOOKS[branch[0].fate]
        yield Text("─", _QUIET).append(sign if branch[0].fate is Fate.REJECTED else "", style)
        yield from map(word, branch)
    if run[0].fate in (Fate.ROOT, Fate.BONUS):
        return
    last = [*run, *branch][-1]
    if last.fate is not Fate.ACCEPTED and last.choice is not None:
        yield Text(f"→ {shortened(pieces[last.choice], longest - 2)}", _QUIET)
    told = list(dict.fromkeys(node.origin for node in (*run, *branch)))
    if told != [nodes[run[0].parent].origin]:
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
    sign, style = _LOOKS[Fate.ACCEPTED]
    return Text(sign + piece, style) if cell.fate is Fate.ACCEPTED else Text(piece)


def _key(window: bool, width: int) -> Iterator[Text]:
    """What the signs mean."""
    meanings = [Text(f"{sign} {fate.value}", style) for fate, (sign, style) in _LOOKS.items()]
    others = (f"{SPACE} space", f"{NEWLINE} newline", f"{TAB} tab", "→ the target's next choice")
    meanings += [Text(meaning, _QUIET) for meaning in others]
    yield from _wrapped(meanings, Text(), width, gap="  ")
    if window:
        yield Text(
            "Column i of the window, read downwards, is what may follow i tokens after the current "
            "one: an n-gram, which the step gives to the pool once the window has all levels.",
            _QUIET,
        )
