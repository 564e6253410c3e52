"""``mlxspec store``: makes files of texts to draft from."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from itertools import count
from typing import TYPE_CHECKING

import click
from rich.progress import MofNCompleteColumn, TimeElapsedColumn

from .common.model_choice import MODEL
from .common.notes import note, say
from .common.options import NAME, argument, group, option
from .common.output import ProgressBar, counted, print_rows, size_in_words

if TYPE_CHECKING:
    from ..corpus.store import Store

_model_option = option(
    "-m --model MODEL",
    "The tokenizer: a directory, a Hub repository, an alias, 'demo', or a tokenizer's file.",
    required=True,
    type=MODEL,
)
_max_tokens_option = option(
    "--max-tokens N",
    "The most tokens that the store may hold.  [default: 50,000,000]",
    type=click.IntRange(min=2),
)

_paths = argument(
    "paths", "Files and directories: text, code, chat logs.", nargs=-1, required=True, type=NAME
)
_file = argument("file", "The store.", type=NAME)


@group("store", short_help="Make and inspect stores of text to draft from.")
def store_command() -> None:
    """Make and inspect stores of text that speed up generating similar text.

    \b
    Examples:
      mlxspec store build src docs --model mistral -o code.store
      mlxspec store build chats.jsonl --model owner/name -o chats.store
      mlxspec store add code.store more_code --model mistral
      mlxspec store info code.store

    A .jsonl file with "messages" in its lines is a chat log: the store takes the assistant's
    messages. It takes all other files whole. Files that are not UTF-8 text are skipped. In
    directories, hidden files, hidden directories and links to directories are skipped, too.

    A store contains the texts: whoever can read the file can read them. Only you can read a new
    store.
    """


@store_command.command("build")
@_paths
@_model_option
@option("-o --output FILE", "The store to write.", required=True, type=NAME)
@_max_tokens_option
@option("--force", "Replace an existing store.")
def build_command(
    paths: tuple[str, ...], model: str, output: str, max_tokens: int | None, force: bool
) -> None:
    """Make a store from files and directories: text, code, chat logs."""
    from ..corpus.store import write_store

    _write(output, paths, model, max_tokens, partial(write_store, output, force=force))


@store_command.command("add")
@_file
@_paths
@_model_option
@_max_tokens_option
def add_command(file: str, paths: tuple[str, ...], model: str, max_tokens: int | None) -> None:
    """Add files and directories to the store in FILE."""
    from ..corpus.store import write_store

    _write(file, paths, model, max_tokens, partial(write_store, file, adds=True))


@store_command.command("info")
@_file
def info_command(file: str) -> None:
    """Verify the store in FILE and show what it holds."""
    from ..corpus.store import Store

    store = Store(file).verify()
    size = size_in_words(store.nbytes)
    print_rows(("tokenizer", store.identity), ("holds", _in_texts(store)), ("size", size))


def _write(
    file: str,
    paths: tuple[str, ...],
    model: str,
    max_tokens: int | None,
    write: Callable[..., Store],
) -> None:
    """Read the texts in files, and have ``write`` put their tokens into the store in ``file``."""
    from ..corpus.store import MAX_TOKENS, find_files, read_texts
    from ..models.tokenizer import load_tokenizer_of

    started = time.perf_counter()
    limit = max_tokens or MAX_TOKENS
    files = find_files(paths)
    tokenizer = load_tokenizer_of(model)
    counts = Counter[str]()
    done = count(1)
    figures = MofNCompleteColumn(), TimeElapsedColumn()
    try:
        with ProgressBar("Reading", *figures) as bar:
            sequences = (
                tokenizer.encode(text, add_special_tokens=False)
                for text in read_texts(files, counts, lambda _: bar(next(done), len(files)))
            )
            store = write(sequences=sequences, tokenizer=tokenizer, max_tokens=limit)
    finally:  # even after an error: skipped texts may be its cause
        for number, thing, reason in (
            (counts["skipped"], "file", "cannot be read as UTF-8 text"),
            (counts["bad_lines"], "chat log line", "not a chat record"),
        ):
            if number:
                note(f"{counted(number, thing)} skipped: {reason}")
    if store.n_tokens >= limit - 1:
        note(f"the store has reached --max-tokens {limit}; the remaining texts were left out")
    took = f"in {time.perf_counter() - started:.1f} s"
    size = size_in_words(store.nbytes)
    read = counted(counts["files"], "file")
    say(f"Read {read} {took}. {file} holds {_in_texts(store)}, {size}.")


def _in_texts(store: Store) -> str:
    return f"{counted(store.n_tokens, 'token')} in {counted(store.n_texts, 'text')}"
