"""``mlxspec explain``: draws a few steps of a generation as draft trees."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from functools import partial
from typing import TYPE_CHECKING

import click
from rich.cells import cell_len
from rich.console import RenderableType
from rich.progress import TaskProgressColumn, TimeElapsedColumn
from rich.text import Text
from rich.tree import Tree

from ..errors import OptionError
from ..terminal import one_line, visible
from .common.generation import GenerationSettings, generation_options
from .common.model_choice import model_option, model_or_default, note_if_demo
from .common.options import COUNT, color_option, command, option, options_of
from .common.output import ProgressBar, ReportOptions, error_console
from .common.prompt import PromptOptions, prompt_argument
from .memory import Memories

if TYPE_CHECKING:
    from mlx_lm.tokenizer_utils import TokenizerWrapper

    from ..drafting.accept import VerifiedStep

_view = partial(option, group="Steps and output")


@command("explain")
@prompt_argument
@model_option
@options_of(PromptOptions, "prompt", "Model and prompt")
@option(
    "--max-tokens N",
    "Generate at most N tokens.",
    default=250,
    type=COUNT,
    group="Model and prompt",
)
@generation_options()
@_view("--steps K", "Show K steps.", default=3, type=COUNT)
@_view(
    "--skip N",
    "Show the steps after the first N.  [default: those with an accepted draft]",
    type=click.IntRange(0),
)
@options_of(ReportOptions, "shows", "Steps and output", leave_out=("as_json",))
@color_option("Steps and output", "Use colours.")
def explain_command(
    *,
    generation: GenerationSettings,
    prompt: PromptOptions,
    steps: int,
    skip: int | None,
    shows: ReportOptions,
    color: bool | None,
) -> None:
    """Generate text, and show what some steps of speculative decoding did.

    Each step is drawn as its draft tree: which tokens were drafted, where they came from, what the
    model chose, and which were accepted.

    The prompt and the options have the same meaning as with 'mlxspec generate', and the same text
    is generated.

    \b
    Examples:
      mlxspec explain --decoder lookahead -W 7 -N 4 --raw "def add(a, b):"
      mlxspec explain "Say this three times: ..." --steps 5 --skip 0
      mlxspec explain --decoder lookahead --prompt-file ask.txt --html steps.html
    """
    source = prompt.read()  # before a model is loaded

    from ..generation.scheduler import responses
    from ..models.model_files import given_name

    console = error_console(color)
    with Memories(not generation.drafting.no_saved_answers) as memories:
        decoder = generation.load(console, memories)
        tokens, chat = prompt.encoded(source, decoder.tokenizer)
        request, _ = generation.request(decoder, tokens, chat=chat)
        recorded = request.recorded = []
        figures = TaskProgressColumn(), TimeElapsedColumn()
        noted = f"generating at most {generation.max_tokens:,} tokens"
        with ProgressBar("Generating", *figures, console=console, noted=noted) as bar:
            bar(0, generation.max_tokens)  # also shows the time of the probes and the prefill
            with closing(responses(request)) as generated:
                for last in generated:
                    bar(last.generation_tokens, generation.max_tokens)
        if skip is not None and skip >= len(recorded):
            raise OptionError(f"--skip is {skip}: the output has {len(recorded)} steps; skip fewer")
        shown = [*range(len(recorded))][skip:]
        if skip is None:
            shown = [n for n in shown if recorded[n].accepted] or shown
        text, model = _text_of(decoder.tokenizer), given_name(model_or_default(generation.model))

        stats = last.stats
        heading = (
            Text("Steps of speculative decoding", "bold"),
            f"{one_line(model)}, decoder {generation.drafting.kind}: tokens {stats.emitted}, "
            f"steps {stats.steps}, tokens per step {stats.tokens_per_step:.2f}, "
            f"rows per step {stats.rows / stats.steps:.1f}",
            f"accepted drafts: {accepted_by_origin(recorded) or 'none'}",
            f"planning: {planning_share(recorded):.1%} of the steps' time",
        )
        note_if_demo(generation.model)
        drawing = drawn(recorded, shown[:steps], tokens, text)
        shows.show_tables({}, [*heading, *drawing], color)
        generation.note_if_full(decoder.model, last.finish_reason, last.generation_tokens)
        memories.suggest_once()


# --- the fates of nodes ---


_FATES = {
    "emitted before": ("●", ""),
    "accepted": ("✓", "bold color(32)"),  # as in the generated text
    "the target's own": ("★", "bold"),
    "rejected": ("✗", "color(166)"),
    "not reached": ("○", "dim"),
}
"""The possible fates of a node, with their signs and styles. Siblings are drawn in this order."""


def fates_of(step: VerifiedStep) -> list[str]:
    """The fates of the nodes of a step's tree.

    A node is rejected if its parent was accepted and the target chose another token than the
    node's. Nodes below a rejected node, or after the output's end, were not reached. The last fate
    is that of the bonus token, unless the output ended before it.
    """
    has_bonus = len(step.tokens) > len(step.accepted)
    walked = {0, *(step.accepted if has_bonus else step.accepted[:-1])}

    def fate(number: int, parent: int) -> str:
        if number in step.accepted:
            return "accepted"
        return "rejected" if parent in walked else "not reached"

    others = [fate(number, parent) for number, parent in enumerate(step.tree.parents)][1:]
    return ["emitted before", *others, *["the target's own"] * has_bonus]


def accepted_by_origin(steps: Sequence[VerifiedStep]) -> str:
    """How many drafted tokens of each origin were accepted."""
    drafted, accepted = Counter[str](), Counter[str]()
    for step in steps:
        origins = step.tree.node_origins
        drafted.update(origins[1:])
        accepted.update(origins[node] for node in step.accepted)
    return ", ".join(f"{origin} {accepted[origin]} of {n}" for origin, n in drafted.most_common())


def planning_share(steps: Sequence[VerifiedStep]) -> float:
    """The share of the steps' time that planning drafts and learning from steps took."""
    seconds = sum(step.seconds for step in steps)
    return sum(step.planning_seconds for step in steps) / seconds if seconds else 0.0


# --- the drawing ---

_SPACE, _NEWLINE, _TAB = "·", "↵", "⇥"
_SIGNS = str.maketrans({"\n": _NEWLINE, "\t": _TAB, "\r": "␍"})


TextOf = Callable[[Sequence[int]], str]
"""Turns tokens into text on one line: spaces stay, other white space becomes signs."""


def _text_of(tokenizer: TokenizerWrapper) -> TextOf:
    from ..models.tokenizer import detokenizer_of

    def text_of(tokens: Sequence[int]) -> str:
        detokenizer = detokenizer_of(tokenizer)
        for token in tokens:
            detokenizer.add_token(token)
        detokenizer.finalize()
        return visible(detokenizer.text.translate(_SIGNS))

    return text_of


def _piece(token: int, text_of: TextOf) -> str:
    """The text of a token with a sign for each space; its id if it has no text of its own."""
    text = text_of([token]).replace(" ", _SPACE)
    return text if text.strip("\ufffd") and cell_len(text) else f"<{token}>"


_CONTEXT = 30  # tokens shown before a step


def drawn(
    steps: Sequence[VerifiedStep], shown: Sequence[int], prompt: Sequence[int], text_of: TextOf
) -> Iterator[RenderableType]:
    """Draw steps, and a key to the signs.

    Args:
        steps: all steps of the generation.
        shown: the numbers of those to draw, from 0.
    """
    before = list(prompt)
    for number, step in enumerate(steps):
        if number in shown:
            yield Text(f"\nStep {number + 1} of {len(steps)}", "bold")
            yield from _step(step, before, text_of)
        before.extend(step.tokens)
    yield ""
    yield Text("  ").join(Text(f"{sign} {fate}", style) for fate, (sign, style) in _FATES.items())
    signs = f"{_SPACE} space  {_NEWLINE} newline  {_TAB} tab"
    yield Text(f"{signs}  → the target's next choice", "dim")


def _step(step: VerifiedStep, before: list[int], text_of: TextOf) -> Iterator[RenderableType]:
    emitted = f"{len(step.tokens)} emitted"
    accepted = f"{len(step.accepted)} of {step.drafted} draft tokens accepted"
    yield Text(
        f"{len(step.tree)} rows: {accepted}, {emitted}"
        if step.drafted
        else f"1 row, {emitted}; nothing drafted: {step.no_draft}"
    )
    cut = "…" if len(before) > _CONTEXT else ""
    yield Text(f"after {cut}{text_of(before[-_CONTEXT:])}", "dim")
    yield _tree(step, text_of)


def _tree(step: VerifiedStep, text_of: TextOf) -> Tree:
    """The draft tree with the bonus token; nodes in a row without branches share a line."""
    fates = fates_of(step)
    tokens = *step.tree.tokens, step.tokens[-1]
    parents = *step.tree.parents, (0, *step.accepted)[-1]
    children: dict[int, list[int]] = defaultdict(list)
    order = [*_FATES]
    for node in sorted(range(1, len(fates)), key=lambda node: order.index(fates[node])):
        children[parents[node]].append(node)

    def line(run: Sequence[int]) -> Text:
        """A line: its tokens, the target's choice after them, and their origin if it is new."""
        first, last = run[0], run[-1]
        text = Text().append(*_FATES[fates[first]])
        for node in run:
            _, style = _FATES[fates[node]]
            text.append(" ").append(_piece(tokens[node], text_of), style)
        if first in (0, len(step.tree)):
            return text
        if fates[last] != "accepted":
            text.append(f" → {_piece(step.choices[last], text_of)}", "dim")
        of_nodes = step.tree.node_origins
        origins = list(dict.fromkeys(of_nodes[node] for node in run))
        if origins != [of_nodes[parents[first]]]:
            text.append(f" ({', '.join(origins)})", "italic dim")
        return text

    def grow(tree: Tree, start: int) -> None:
        for child in children[start]:
            run, accepted = [child], fates[child] == "accepted"
            while len(below := children[run[-1]]) == 1:
                if (fates[below[0]] == "accepted") != accepted:
                    break
                run.append(below[0])
            grow(tree.add(line(run)), run[-1])

    tree = Tree(line([0]), guide_style="dim")
    grow(tree, 0)
    return tree
