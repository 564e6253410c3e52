"""``mlxspec store``: makes files of texts to draft from."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from rich.filesize import decimal

from .common.model_choice import MODEL
from .common.notes import note, say
from .common.options import NAME, argument, group, option
from .common.output import ProgressBar, counted, print_rows

if TYPE_CHECKING:
    from ..corpus.store import Store


@group("store", short_help="Make and inspect stores of text to draft from.")
def store_command() -> None:
    """Make and inspect stores of text that speed up generating similar text.

    \b
    Examples:
      mlxspec store build src docs --model mistral -o code.store
      mlxspec store build chats.jsonl --model owner/name -o chats.store
      mlxspec store info code.store

    A .jsonl file with "messages" in its lines is a chat log: the store takes the assistant's
    messages. It takes all other files whole. Files that are not UTF-8 text are skipped. In
    directories, hidden files, hidden directories and links to directories are skipped, too.

    A store contains its texts, so whoever can read the file can read them. A new store is readable
    only by you.
    """


@store_command.command("build")
@argument(
    "paths", "Files and directories: text, code, chat logs.", nargs=-1, required=True, type=NAME
)
@option(
    "-m --model MODEL",
    "The tokenizer: a directory, a Hub repository, an alias, 'demo', or a tokenizer's file.",
    required=True,
    type=MODEL,
)
@option("-o --output FILE", "The store to write.", required=True, type=NAME)
@option("--force", "Replace an existing store.")
def build_command(paths: tuple[str, ...], model: str, output: str, force: bool) -> None:
    """Make a store from files and directories: text, code, chat logs."""
    from ..corpus.store import MAX_TOKENS, build_store, find_files, read_texts
    from ..models.tokenizer import load_tokenizer_of

    started = time.perf_counter()
    files = find_files(paths)
    tokenizer = load_tokenizer_of(model)
    counts = Counter[str]()

    def shown() -> Iterator[Path]:
        for number, file in enumerate(files):
            bar(number, len(files))
            yield file

    try:
        with ProgressBar("Reading") as bar:
            texts = read_texts(shown(), counts)
            sequences = (tokenizer.encode(text, add_special_tokens=False) for text in texts)
            store = build_store(output, sequences, tokenizer, force=force)
    finally:  # even after an error, which skipped texts may have caused
        for number, thing, reason in (
            (counts["skipped"], "file", "not UTF-8 text"),
            (counts["bad_lines"], "chat log line", "not a chat record"),
        ):
            if number:
                note(f"{counted(number, thing)} skipped: {reason}")
    if store.n_tokens >= MAX_TOKENS - 1:
        note(f"a store holds {MAX_TOKENS:,} tokens at most; the remaining texts were left out")
    read, seconds = counted(counts["files"], "file"), time.perf_counter() - started
    holds = f"{_in_texts(store)}, {decimal(store.nbytes)}"
    say(f"Read {read} in {seconds:.1f} s. {output} holds {holds}.")


@store_command.command("info")
@argument("file", "The store.", type=NAME)
def info_command(file: str) -> None:
    """Verify the store in FILE and show what it holds."""
    from ..corpus.store import Store

    store = Store(file).verify()
    size = decimal(store.nbytes)
    print_rows(("tokenizer", store.identity), ("holds", _in_texts(store)), ("size", size))


def _in_texts(store: Store) -> str:
    return f"{counted(store.n_tokens, 'token')} in {counted(store.n_texts, 'text')}"
