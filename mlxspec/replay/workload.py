"""What is replayed: recorded outputs as the tokens of one model's tokenizer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..errors import LoadError, OptionError
from ..models.model_files import local_path
from ..planning.token_classes import token_classes
from .rendering import Completion, Encode, render
from .traces import Trace, read_traces


@dataclass(frozen=True)
class TraceTokenizer:
    """What replaying needs of a tokenizer.

    Attributes:
        encode: a text's ids, without special tokens.
        bos_id: what a context begins with.
        eos_id: what an answer ends with.
        classes: see :func:`mlxspec.planning.token_classes.token_classes`.
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
        PromptError: see :func:`mlxspec.replay.traces.read_traces`.
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
        source: as for :func:`mlxspec.models.tokenizer_source.load_tokenizer_of`.

    Raises:
        LoadError: there is none, or it has no end token.
    """
    path = local_path(source)
    if path.is_file() and path.suffix != ".json":
        return _from_sentencepiece(path)
    return _from_model(source)


def _from_model(source: str | Path) -> TraceTokenizer:
    from ..models.tokenizer_source import load_tokenizer_of

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
    from ..models.sentencepiece_tokenizer import build_tokenizer, tokenizer_config

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
