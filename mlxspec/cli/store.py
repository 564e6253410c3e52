"""``mlxspec store``: texts on disk that drafts are drawn from."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import click

from ..terminal import one_line
from .names import NAME
from .outcome import note, reported, say
from .wording import counted, size_in_words

if TYPE_CHECKING:
    from ..store.building import Reading, TextFile
    from ..store.store import Store, StoreInfo, Vocabulary

EPILOG = """\b
Examples:
  mlxspec store build src docs --model mistral -o code.store
  mlxspec store build chats.jsonl --model owner/name -o chats.store
  mlxspec store add code.store more_code --model mistral
  mlxspec store info code.store

A .jsonl file whose lines hold "messages" is a chat log, of which the assistant's messages are
taken. Other files are taken whole. Passed over are files that are not UTF-8 text and, in
directories, hidden files, hidden directories and links to directories.

A store holds the texts, and whoever can read the file can read them. It is written readable by
you alone.
"""

_CONTEXT = {"help_option_names": ["-h", "--help"]}
_model_option = click.option(
    "--model",
    required=True,
    type=NAME,
    metavar="MODEL",
    help="Whose tokenizer: a model directory, a Hub repository, 'demo', or a tokenizer's file.",
)
_max_tokens_option = click.option(
    "--max-tokens",
    type=click.IntRange(min=2),
    metavar="N",
    help="Tokens that the store may hold.  [default: 50,000,000]",
)


@click.group(
    "store",
    short_help="Make and inspect stores of text to draft from.",
    epilog=EPILOG,
    context_settings=_CONTEXT,
)
def store_command() -> None:
    """Make and inspect stores of text that speed up generating similar text."""


@store_command.command("build", context_settings=_CONTEXT)
@click.argument("paths", nargs=-1, required=True, type=NAME, metavar="PATHS...")
@_model_option
@click.option(
    "-o", "--output", required=True, type=NAME, metavar="FILE", help="The store to write."
)
@_max_tokens_option
@click.option("--force", is_flag=True, help="Replace a store that is there.")
def build_command(
    paths: tuple[str, ...], model: str, output: str, max_tokens: int | None, force: bool
) -> None:
    """Make a store from files and directories: text, code, chat logs."""
    with reported():
        from ..store.building import build_store

        _write(
            paths,
            model,
            max_tokens,
            lambda sequences, tokenizer, limit: build_store(
                output, sequences, tokenizer, max_tokens=limit, force=force
            ),
            output,
        )


@store_command.command("add", context_settings=_CONTEXT)
@click.argument("file", type=NAME, metavar="FILE")
@click.argument("paths", nargs=-1, required=True, type=NAME, metavar="PATHS...")
@_model_option
@_max_tokens_option
def add_command(file: str, paths: tuple[str, ...], model: str, max_tokens: int | None) -> None:
    """Add files and directories to the store in FILE."""
    with reported():
        from ..store.building import add_to_store
        from ..store.store import open_store

        held = open_store(file).info
        _write(
            paths,
            model,
            max_tokens,
            lambda sequences, tokenizer, limit: add_to_store(
                file, sequences, tokenizer, max_tokens=limit
            ),
            file,
            held,
        )


@store_command.command("info", context_settings=_CONTEXT)
@click.argument("file", type=NAME, metavar="FILE")
def info_command(file: str) -> None:
    """Verify the store in FILE and say what it holds."""
    with reported():
        from ..store.store import open_store

        info = open_store(file).info
        for name, value in (
            ("tokenizer", info.identity),
            ("built", _in_texts(info)),
            (
                "learned",
                f"{counted(info.learned_tokens, 'token')} in "
                f"{counted(info.learned_sequences, 'output')}",
            ),
            ("size", size_in_words(info.nbytes)),
        ):
            click.echo(f"{name:<10} {one_line(value)}")


_Writer = Callable[[Iterator[Sequence[int]], "Vocabulary", int], "Store"]


def _write(
    paths: tuple[str, ...],
    model: str,
    max_tokens: int | None,
    write: _Writer,
    output: str,
    held: StoreInfo | None = None,
) -> None:
    """Read the texts, let ``write`` make a store of them, and say what has become of them.

    ``held`` is what the store held before, of one that is added to.
    """
    from ..loading.tokenizer import load_tokenizer_of
    from ..store.building import MAX_TOKENS, Reading, find_files, read_texts

    started = time.perf_counter()
    limit = max_tokens or MAX_TOKENS
    files = find_files(paths)
    tokenizer = load_tokenizer_of(model)
    reading = Reading()
    try:
        with _progress(files) as on_bytes:
            sequences = (
                tokenizer.encode(text, add_special_tokens=False)
                for text in read_texts(files, reading, on_bytes)
            )
            store = write(sequences, tokenizer, limit)
    finally:  # they may be why there is nothing to write
        _note_omissions(reading)
    info = store.info
    if info.built_tokens >= limit - 1:
        note(f"the store is full: --max-tokens {limit} is reached, and the rest is left out")
    source = counted(reading.files, "file")
    took = f"in {time.perf_counter() - started:.1f} s"
    if held is None:
        tokens, size = counted(info.built_tokens, "token"), size_in_words(info.nbytes)
        say(f"Wrote {output}: {tokens} from {source}, {size}, {took}.")
        return
    new = info.built_tokens - held.built_tokens
    added = f"Added {counted(new, 'token')} from" if new else "Found nothing new in"
    say(
        f"{added} {source}, {took}. {output} holds {_in_texts(info)}, {size_in_words(info.nbytes)}."
    )


def _in_texts(info: StoreInfo) -> str:
    """What was built into a store."""
    return f"{counted(info.built_tokens, 'token')} in {counted(info.built_sequences, 'text')}"


def _note_omissions(reading: Reading) -> None:
    if reading.binary:
        note(f"{counted(reading.binary, 'file')} passed over: no UTF-8 text")
    if reading.unreadable:
        note(f"{counted(reading.unreadable, 'file')} passed over: cannot be read")
    if reading.bad_lines:
        note(f"{counted(reading.bad_lines, 'line')} of chat logs passed over: no chat record")


@contextmanager
def _progress(files: list[TextFile]) -> Iterator[Callable[[int], None]]:
    """Yields what to call with the bytes of each file."""
    from rich.progress import DownloadColumn, TimeElapsedColumn

    from .consoles import error_console
    from .progress_bar import progress_bar

    with progress_bar(error_console(None), DownloadColumn(), TimeElapsedColumn()) as bar:
        task = bar.add_task("Reading", total=sum(file.size for file in files))

        def on_bytes(size: int) -> None:
            bar.advance(task, size)
            if bar.finished:
                bar.update(task, description="Sorting")

        yield on_bytes
