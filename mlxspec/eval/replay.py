"""Replaying a recorded output: the steps in which a drafter would have decoded it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..draft.drafter import Drafter, VerifiedStep
from ..draft.tree import DraftTree
from ..errors import LoadError, OptionError
from ..jsonl import load_json
from ..loading.model_files import local_path
from ..plan.cost_curve import CostCurve
from ..plan.p_accept import token_classes
from .traces import Completion, Encode, Trace, read_traces, render

_BUDGET = 4096  # the drafter does not know where the output ends
_UNKNOWN = -1  # the choice after a row that was not accepted


@dataclass(frozen=True)
class ReplayedCompletion:
    """What replaying one output gave.

    Attributes:
        tokens: how many the output has.
        rows: per step, how many rows the target verified.
    """

    tokens: int
    rows: tuple[int, ...]

    def cost(self, curve: Callable[[int], float]) -> float:
        """The time of all steps, in plain tokens, under a cost curve."""
        return sum(map(curve, self.rows))


def replay(prompt: Sequence[int], output: Sequence[int], drafter: Drafter) -> ReplayedCompletion:
    """Let a drafter draft an output that is known.

    The drafter is called as the decoding loop calls it; the target's choices are read from the
    output, and after rows that were not accepted they are unknown (-1).

    Args:
        prompt: the context of the output, at least one token id.
        output: what the target answered, its end token included.
    """
    rows: list[int] = []
    done, last, ahead = 0, prompt[-1], False
    drafter.begin(prompt)
    try:
        while done < len(output):
            proposal = drafter.propose(_BUDGET)
            # A plain step that was dispatched ahead runs first, whatever is proposed meanwhile.
            tree = DraftTree.chain(last) if ahead else proposal
            step = verify(tree, output[done : done + len(tree)])
            ahead = len(proposal) == 1 and drafter.pipelined
            rows.append(len(tree))
            done += len(step.tokens)
            last = step.tokens[-1]
            drafter.observe(step)
    finally:
        drafter.end()
    return ReplayedCompletion(len(output), tuple(rows))


def verify(tree: DraftTree, following: Sequence[int]) -> VerifiedStep:
    """Walk a tree along the tokens that follow its root; the last one may end the output."""
    choices = [_UNKNOWN] * len(tree)
    accepted: list[int] = []
    tokens: list[int] = []
    node = 0
    for token in following:
        choices[node] = token
        tokens.append(token)
        child = tree.child(node, token)
        if child is None:
            break
        accepted.append(child)
        node = child
    return VerifiedStep(tree, tuple(choices), tuple(choices), tuple(accepted), tuple(tokens))


_WIDEST = 1024  # rows; far more than any draft has
_UNUSABLE = (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError)


def read_curve(path: Path) -> CostCurve:
    """Read a curve.

    The file holds the JSON of ``mlxspec calibrate``, or ``{"rows": [1, ...], "cost": [1, ...]}``.

    Raises:
        OptionError: it cannot be read, or holds no curve or several, or one of too many rows.
    """
    try:
        content = load_json(path.read_text(encoding="utf-8-sig"))
        points = _points(content)
    except _UNUSABLE as error:
        raise OptionError(
            f"{path}: no cost curve; write one with mlxspec calibrate MODEL --json"
        ) from error
    widest = max((rows for rows, _ in points), default=0)
    if widest > _WIDEST:
        raise OptionError(
            f"{path}: a cost curve up to {widest} rows; leave out what is beyond {_WIDEST}"
        )
    return CostCurve(points)


def _points(content: Any) -> list[tuple[int, float]]:
    if "curves" in content:
        (content,) = content["curves"]
    if "times" in content:
        return [(int(time["rows"]), float(time["cost"])) for time in content["times"]]
    rows, costs = content["rows"], content["cost"]
    return [(int(row), float(cost)) for row, cost in zip(rows, costs, strict=True)]


@dataclass(frozen=True)
class TraceTokenizer:
    """What replaying needs of a tokenizer.

    Attributes:
        encode: a text's ids, without special tokens.
        bos_id: what a context begins with.
        eos_id: what an answer ends with.
        classes: see :func:`mlxspec.plan.p_accept.token_classes`.
    """

    encode: Encode
    bos_id: int
    eos_id: int
    classes: bytes


@dataclass(frozen=True)
class Workload:
    """Completions, those of a category in a row, and the classes of their tokens."""

    completions: Sequence[Completion]
    classes: bytes

    @property
    def tokens(self) -> int:
        """How many tokens the outputs have."""
        return sum(len(completion.output) for completion in self.completions)


def read_workload(paths: Iterable[Path], tokenizer: TraceTokenizer, limit: int) -> Workload:
    """Read traces and encode them.

    Args:
        paths: files of traces or chat logs.
        tokenizer: gives the tokens.
        limit: how many conversations of a category to take at most, evenly spaced.

    Raises:
        OptionError: ``limit`` is below 1.
        PromptError: see :func:`mlxspec.eval.traces.read_traces`.
    """
    if limit < 1:
        raise OptionError(f"--limit is {limit}: take at least 1 conversation of a category")
    by_category: dict[str, list[Trace]] = {}
    for path in paths:
        for trace in read_traces(path):
            by_category.setdefault(trace.category, []).append(trace)
    completions = [
        completion
        for traces in by_category.values()
        for trace in _spread(traces, limit)
        for completion in render(trace, tokenizer.encode, tokenizer.bos_id, tokenizer.eos_id)
    ]
    return Workload(completions, tokenizer.classes)


def _spread(traces: Sequence[Trace], limit: int) -> list[Trace]:
    """At most ``limit`` of them, evenly spaced."""
    taken = min(limit, len(traces))
    return [traces[index * len(traces) // taken] for index in range(taken)]


def load_trace_tokenizer(source: str | Path) -> TraceTokenizer:
    """A tokenizer for replaying.

    Args:
        source: as for :func:`mlxspec.loading.tokenizer.load_tokenizer_of`.

    Raises:
        LoadError: there is none, or it has no end token.
    """
    path = local_path(source)
    if path.is_file() and path.suffix != ".json":
        return _from_sentencepiece(path)
    return _from_model(source)


def _from_model(source: str | Path) -> TraceTokenizer:
    from ..loading.tokenizer import load_tokenizer_of

    tokenizer = load_tokenizer_of(source)
    bos_id, eos_id = _ends(source, tokenizer.bos_token_id, tokenizer.eos_token_id)
    pieces = (piece or "" for piece in tokenizer.convert_ids_to_tokens(range(len(tokenizer))))
    return TraceTokenizer(
        encode=lambda text: tokenizer.encode(text, add_special_tokens=False),
        bos_id=bos_id,
        eos_id=eos_id,
        classes=token_classes(pieces, set(tokenizer.all_special_ids)),
    )


def _from_sentencepiece(path: Path) -> TraceTokenizer:
    from ..loading.sentencepiece_tokenizer import build_tokenizer, tokenizer_config

    tokenizer, names = build_tokenizer(path), tokenizer_config(path)
    ids = [
        tokenizer.token_to_id(names[key]) if key in names else None
        for key in ("bos_token", "eos_token")
    ]
    bos_id, eos_id = _ends(path, *ids)
    pieces = (tokenizer.id_to_token(index) or "" for index in range(tokenizer.get_vocab_size()))
    added = tokenizer.get_added_tokens_decoder()
    return TraceTokenizer(
        encode=lambda text: tokenizer.encode(text, add_special_tokens=False).ids,
        bos_id=bos_id,
        eos_id=eos_id,
        classes=token_classes(pieces, {index for index, token in added.items() if token.special}),
    )


def _ends(source: str | Path, bos_id: int | None, eos_id: int | None) -> tuple[int, int]:
    if eos_id is None:
        raise LoadError(f"{source}: the tokenizer has no EOS token, with which answers end")
    # Some models have no BOS; another token in front of everything else changes no draft.
    return (eos_id if bos_id is None else bos_id), eos_id
