"""Explained steps of a generation, drawn for a terminal or a page: tree, window and key."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum

from mlx_lm.tokenizer_utils import TokenizerWrapper
from rich.cells import cell_len
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from ..drafting.sources import RecordedStep
from ..generation.response import SpeculationStats
from ..models.detokenizer import detokenizer_of
from ..terminal import one_line, visible
from .common.output import html_page


class Fate(Enum):
    """What became of a node: its meaning in the key, its sign and its style."""

    ROOT = ("emitted before", "●", "")
    ACCEPTED = ("accepted", "✓", "bold color(32)")  # as in the generated text
    REJECTED = ("rejected", "✗", "color(166)")
    UNREACHED = ("not reached", "○", "dim")
    BONUS = ("the target's own", "★", "bold")

    def __init__(self, meaning: str, sign: str, style: str) -> None:
        self.meaning, self.sign, self.style = meaning, sign, style


@dataclass
class Node:
    """A node of a verified tree, or the bonus token, a child of the last accepted node.

    Attributes:
        token: its id.
        fate: what became of it.
        origin: where it was drafted from.
        choice: what the target chose after it; None after the bonus token.
        parent: the parent's number, -1 for the root.
        children: the children's numbers.
    """

    token: int
    fate: Fate
    origin: str = ""
    choice: int | None = None
    parent: int = -1
    children: list[int] = field(default_factory=list)


def nodes_of(step: RecordedStep) -> list[Node]:
    """The nodes of a step's tree, and last the bonus token, unless the output ended before it.

    A node is rejected if its parent was accepted and the target chose another token there.
    Nodes below a rejected one, or behind the output's end, were not reached.
    """
    verified = step.verified
    has_bonus = len(verified.tokens) > len(verified.accepted)
    walked = {0, *(verified.accepted if has_bonus else verified.accepted[:-1])}
    nodes: list[Node] = []
    for number, (token, origin, choice, parent) in enumerate(
        zip(
            *(verified.tree.tokens, step.origins, verified.choices, verified.tree.parents),
            strict=True,
        )
    ):
        fate = Fate.REJECTED if parent in walked else Fate.UNREACHED
        if number == 0 or number in verified.accepted:
            fate = Fate.ACCEPTED if number else Fate.ROOT
        nodes.append(Node(token, fate, origin, choice, parent))
    if has_bonus:
        last = (0, *verified.accepted)[-1]
        nodes.append(Node(verified.tokens[-1], Fate.BONUS, parent=last))
    for number, node in enumerate(nodes[1:], start=1):
        nodes[node.parent].children.append(number)
    for node in nodes:  # the walk first, then the bonus token
        node.children.sort(
            key=lambda child: {Fate.ACCEPTED: 0, Fate.BONUS: 1}.get(nodes[child].fate, 2)
        )
    return nodes


def window_of(step: RecordedStep) -> dict[str, list[tuple[int, bool] | None]]:
    """Lookahead decoding's window: its Jacobi iterations, oldest first, last the new one.

    By the iteration's name ("t−2", "t−1", "now") the token in each column and whether it was
    accepted; None where the step had no room for a row. The tokens of a column are an n-gram
    (Fu et al., "Break the Sequential Dependency of LLM Inference Using Lookahead Decoding", 2024,
    figure 2). Empty without a window.
    """
    if not step.window:
        return {}
    verified = step.verified
    height = 1 + max(level for level, _ in step.window)
    width = 1 + max(column for _, column in step.window)
    result: dict[str, list[tuple[int, bool] | None]] = {}
    for level in range(height + 1):
        tokens = verified.argmaxes if level == height else verified.tree.tokens
        nodes = [step.window.get((min(level, height - 1), column)) for column in range(width)]
        result[f"t−{height - level}" if level < height else "now"] = [
            None if node is None else (tokens[node], level < height and node in verified.accepted)
            for node in nodes
        ]
    return result


def most_instructive(steps: Sequence[RecordedStep], count: int) -> int:
    """The first of the ``count`` successive steps in which most drafts were accepted in part.

    Among equals the steps with the largest windows, then those with most accepted tokens, then
    the first ones.
    """

    def rank(first: int) -> tuple[int, int, int]:
        run = steps[first : first + count]
        partly = sum(0 < len(one.verified.accepted) < one.verified.drafted for one in run)
        accepted = sum(len(one.verified.accepted) for one in run)
        return partly, sum(len(one.window) for one in run), accepted

    return max(range(max(1, len(steps) - count + 1)), key=rank)


_SPACE, _NEWLINE, _TAB = "·", "↵", "⇥"
_SIGNS = str.maketrans(
    {"\n": _NEWLINE, "\t": _TAB, "\r": "␍", "\u2028": _NEWLINE, "\u2029": _NEWLINE}
)
_PIECE_WIDTH = 24


class Pieces:
    """The text of tokens, with visible white space.

    Args:
        tokenizer: the model's.
    """

    def __init__(self, tokenizer: TokenizerWrapper) -> None:
        self._tokenizer = tokenizer

    def __getitem__(self, token: int) -> str:
        """One token, its white space as signs; never empty and without spaces."""
        text = self._decode([token])
        if text and unicodedata.combining(text[0]):
            text = f"◌{text}"  # or it would change the sign before it
        elif not text.strip("\ufffd") or cell_len(_readable(text)) == 0:
            # A part of a character, or a token without text.
            name = self._tokenizer.convert_ids_to_tokens(token)
            text = name if isinstance(name, str) and name.startswith("<0x") else f"<{token}>"
        return _readable(text).replace(" ", _SPACE)

    def text(self, tokens: Sequence[int]) -> str:
        """Successive tokens on one line: spaces stay, other white space becomes signs."""
        return _readable(self._decode(tokens))

    def _decode(self, tokens: Sequence[int]) -> str:
        detokenizer = detokenizer_of(self._tokenizer)
        for token in tokens:
            detokenizer.add_token(token)
        detokenizer.finalize()
        return detokenizer.text


def _readable(text: str) -> str:
    return visible(text.translate(_SIGNS))


_CONTEXT = 30  # tokens shown before a step
_ASCII = str.maketrans(  # one for one, so that columns stay aligned
    {
        **{"●": "*", "✓": "+", "✗": "x", "○": "o", "★": "=", "→": ">", "…": "~", "−": "-"},
        **{_SPACE: "_", _NEWLINE: "$", _TAB: "^", "─": "-"},
    }
)


@dataclass(frozen=True)
class Explained:
    """Steps of one generation.

    Attributes:
        model, decoder: their names, as the user gave them.
        prompt: the prompt's tokens.
        steps: all steps of the generation.
        first, count: which of them to show; the first has number 0.
        stats: the generation's figures.
        pieces: the text of tokens.
        chosen: whether :func:`most_instructive` has chosen the first step.
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

    def print(self, console: Console) -> None:
        """Write the steps to a console of any width; to one without Unicode in ASCII."""
        with console.capture() as capture:
            for part in self._parts():
                console.print(part)
        text = capture.get()
        console.file.write(text.translate(_ASCII) if console.options.ascii_only else text)

    def page(self) -> str:
        """The same as an HTML page, with all text escaped."""
        prompt = Text(f"Prompt: {self.pieces.text(self.prompt)}", "dim")
        return html_page([prompt, *self._parts()], "mlxspec explain")

    def _parts(self) -> Iterator[RenderableType]:
        stats = self.stats
        yield Text(
            f"{one_line(self.model)}, decoder {self.decoder}: tokens {stats.emitted}, "
            f"steps {stats.steps}, tokens per step {stats.tokens_per_step:.2f}, "
            f"rows per step {stats.rows / stats.steps:.1f}"
        )
        if self.chosen and self.first:
            yield Text(
                f"This begins at step {self.first + 1}, where drafts show most; "
                "--skip 0 begins at the first.",
                "dim",
            )
        text, windows = list(self.prompt), False
        for number, step in enumerate(self.steps[: self.first + self.count], start=1):
            if number > self.first:
                yield Text(f"\nStep {number} of {len(self.steps)}", "bold")
                yield from self._step(step, text[-_CONTEXT:], cut=len(text) > _CONTEXT)
                windows = windows or bool(step.window)
            text.extend(step.verified.tokens)
        yield ""
        yield from _key(windows)

    def _step(self, step: RecordedStep, before: list[int], cut: bool) -> Iterator[RenderableType]:
        verified = step.verified
        emitted = f"{len(verified.tokens)} emitted"
        accepted = f"{len(verified.accepted)} of {verified.drafted} draft tokens accepted"
        yield Text(
            f"{len(verified.tree)} rows: {accepted}, {emitted}"
            if verified.drafted
            else f"1 row, {emitted}; nothing drafted: {step.no_draft}"
        )
        yield Text(f"after {'…' if cut else ''}{self.pieces.text(before)}", "dim")
        nodes = nodes_of(step)
        tree = Tree(self._run(nodes, [0]), guide_style="dim")
        self._grow(tree, nodes, 0)
        yield tree
        if window := window_of(step):
            yield Text("\nWindow: Jacobi iterations", "bold")
            yield self._window(window)

    def _grow(self, tree: Tree, nodes: Sequence[Node], start: int) -> None:
        """Add what is below a node: successive nodes without branches share a line."""
        for child in nodes[start].children:
            run, accepted = [child], nodes[child].fate is Fate.ACCEPTED
            while len(below := nodes[run[-1]].children) == 1:
                if (nodes[below[0]].fate is Fate.ACCEPTED) != accepted:
                    break
                run.append(below[0])
            self._grow(tree.add(self._run(nodes, run)), nodes, run[-1])

    def _run(self, nodes: Sequence[Node], run: Sequence[int]) -> Text:
        """A line: the tokens, what the target chose after them, and a new origin."""
        first, last = nodes[run[0]], nodes[run[-1]]
        line = Text().append(first.fate.sign, first.fate.style)
        for number in run:
            line.append(" ").append(self._piece(nodes[number].token), nodes[number].fate.style)
        if first.fate in (Fate.ROOT, Fate.BONUS):
            return line
        if last.fate is not Fate.ACCEPTED and last.choice is not None:
            line.append(f" → {self._piece(last.choice)}", "dim")
        origins = list(dict.fromkeys(nodes[number].origin for number in run))
        if origins != [nodes[first.parent].origin]:
            line.append(f" ({', '.join(origins)})", "italic dim")
        return line

    def _window(self, window: dict[str, list[tuple[int, bool] | None]]) -> Table:
        table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="dim")
        table.add_column("", style="dim", no_wrap=True)
        for name in window:
            table.add_column(name, no_wrap=True, style="bold" if name == "now" else "")
        for column, cells in enumerate(zip(*window.values(), strict=True)):
            row = [Text() if cell is None else self._cell(*cell) for cell in cells]
            table.add_row(str(column), *row)
        return table

    def _cell(self, token: int, accepted: bool) -> Text:
        sign, style = (Fate.ACCEPTED.sign, Fate.ACCEPTED.style) if accepted else ("", "")
        return Text(sign + self._piece(token), style)

    def _piece(self, token: int) -> str:
        piece = Text(self.pieces[token])
        piece.truncate(_PIECE_WIDTH, overflow="ellipsis")
        return piece.plain


def _key(windows: bool) -> Iterator[Text]:
    """What the signs mean."""
    yield Text("  ").join(Text(f"{fate.sign} {fate.meaning}", fate.style) for fate in Fate)
    yield Text(f"{_SPACE} space  {_NEWLINE} newline  {_TAB} tab  → the target's next choice", "dim")
    if windows:
        yield Text(
            "Row i of the window is an n-gram that may follow i tokens after the current one: the "
            "step adds it to the pool once the window has all levels.",
            "dim",
        )
