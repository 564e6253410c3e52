"""``mlxspec memory``, and the memory that other commands draft from."""

from __future__ import annotations

import os
import re
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, suppress
from datetime import datetime, timedelta
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.filesize import decimal

from ..errors import FileError, LoadError, OptionError
from .common.model_choice import MODEL
from .common.notes import note, say
from .common.options import NAME, group, option
from .common.output import ProgressBar, confirm, counted, print_rows, write_json

if TYPE_CHECKING:
    import numpy as np

    from ..corpus.answer_index import AnswerIndex
    from ..corpus.answers import KeptAnswers


_MODEL = "-m --model MODEL"
_A_MODEL = "a directory, a Hub repository, an alias, 'demo', or a tokenizer's file."
_model_option = option(_MODEL, f"Only for the tokenizer of MODEL: {_A_MODEL}", type=MODEL)


class Memories(ExitStack):
    """The memories that keep a command's answers, until the end of the ``with`` block.

    Models with the same tokenizer share one memory. At the end of the block, the answers are on
    disk and sorted. If an error ends the block, they are on disk, and the next run sorts them.

    Args:
        keeps: whether to follow the user's settings; False neither keeps answers nor drafts from
            kept ones.

    Attributes:
        keeps: as passed.

    Raises:
        OptionError: the variable MLXSPEC_MEMORY has an invalid value.
        FileError: the user's settings cannot be read.
    """

    def __init__(self, keeps: bool = True) -> None:
        from ..corpus.answers import SWITCH, Settings, settings_in_force

        super().__init__()
        self.keeps = keeps
        self._settings = settings_in_force() if keeps else Settings()
        self._undecided = keeps and not os.environ.get(SWITCH)
        self._memories: dict[bytes, AnswerIndex] = {}

    def of(self, tokenizer: Any, model: str = "") -> AnswerIndex | None:
        """The memory for a tokenizer; None if answers are not kept.

        Args:
            model: the model's name as the user gave it; if it is empty, the tokenizer's own name.
        """
        from ..corpus.answer_index import AnswerIndex
        from ..corpus.answers import KeptAnswers, identify, memory_directory
        from ..models.model_files import absolute_name

        if not self._settings.on:
            return None
        identity, max_tokens = identify(tokenizer), self._settings.max_tokens
        if identity.fingerprint not in self._memories:
            name = absolute_name(model or str(getattr(tokenizer, "name_or_path", "")))
            try:
                kept = KeptAnswers(memory_directory(), identity, name)
            except FileError as error:
                note(f"{error}; answers are remembered only until this command ends")
                return None
            memory = AnswerIndex(max_tokens, kept=kept)
            self._memories[identity.fingerprint] = memory
            self.push(lambda kind, *_: memory.close(patience=0 if kind else None))
        return self._memories[identity.fingerprint]

    def suggest_once(self) -> None:
        """At a terminal, suggest once per user to keep answers.

        It creates the memory's directory. If the directory exists, the suggestion was shown before.
        """
        from ..corpus.answers import memory_directory

        if self._undecided and sys.stderr.isatty():
            with suppress(OSError):
                memory_directory().mkdir(mode=0o700, parents=True)
                note(
                    "mlxspec can remember answers between runs and draft from them: "
                    "mlxspec memory on (shown once)"
                )


@group("memory", short_help="Keep answers between runs, to draft from.")
def memory_command() -> None:
    """Keep answers between runs, and texts of your own, to draft from them.

    \b
    Examples:
      mlxspec memory on
      mlxspec memory add src docs --model mistral
      mlxspec memory show
      mlxspec memory forget --since 2h
      mlxspec memory forget --matching "Jane Doe"
      mlxspec memory export > answers.jsonl

    Once the memory is on, generate, chat, serve, explain and run keep the models' answers and draft
    from them. Prompts are not kept. The answers never leave this machine, and only you can read
    them.

    Whether the memory is on or off, mlxspec learns from each output which drafts tend to be right.
    It keeps a few kilobytes of weights for each model, and no text. The option --no-saved-answers
    turns off both the memory and this learning for one run, as does the variable
    MLXSPEC_MEMORY=off.

    MLXSPEC_MEMORY=on turns the memory on, and MLXSPEC_MEMORY=DIR turns it on with the answers in
    DIR. The option and the variable override 'memory on' and 'memory off'.
    """


@memory_command.command("on")
@option(
    "--max-tokens N",
    "Keep at most N tokens per tokenizer, and drop the oldest answers.  [default: as before, or "
    "50,000,000]",
    type=click.IntRange(min=2),
)
def on_command(max_tokens: int | None) -> None:
    """Keep answers from now on, and draft from them."""
    _switch(on=True, max_tokens=max_tokens)


@memory_command.command("off")
def off_command() -> None:
    """Stop keeping answers, and stop drafting from the kept ones."""
    _switch(on=False)


def _switch(on: bool, max_tokens: int | None = None) -> None:
    """Turn the memory on or off, and print the effect."""
    from ..corpus import answers as corpus

    settings = corpus.Settings(on, max_tokens or corpus.load_settings().max_tokens)
    corpus.save_settings(settings)
    if switch := os.environ.get(corpus.SWITCH):
        note(f"{corpus.SWITCH} is {switch!r} here and overrides this")
    directory = corpus.memory_directory()
    if on:
        up_to = counted(settings.max_tokens, "token")
        say(f"Answers are kept from now on, up to {up_to} per tokenizer.")
        say(f"They are in {directory}; only you can read them.")
    else:
        say("No answers are kept from now on.")
        say(f"Kept answers stay in {directory}: mlxspec memory forget --all removes them.")


@memory_command.command("add", short_help="Add texts of your own to draft from.")
@click.argument(
    "paths",
    help="Files and directories: text, code, chat logs.",
    nargs=-1,
    required=True,
    type=NAME,
)
@option(_MODEL, f"The model, for its tokenizer: {_A_MODEL}", required=True, type=MODEL)
def add_command(paths: tuple[str, ...], model: str) -> None:
    """Add the texts of files and directories to the answers, to draft from them.

    They stay until 'mlxspec memory forget PATHS', however many answers are kept. Adding a path
    again replaces its texts.

    A .jsonl file with "messages" in its lines is a chat log. Of a chat log, the assistant's
    messages are added; of any other file, the whole text. Files that are not UTF-8 text are
    skipped. In directories, hidden files, hidden directories and links to directories are skipped,
    too.
    """
    from ..corpus.answer_index import AnswerIndex
    from ..corpus.answers import KeptAnswers, identify, memory_directory, settings_in_force
    from ..corpus.suffix_index import TOKEN_BYTES, encode_texts
    from ..corpus.text_files import find_files, read_texts
    from ..models.model_files import absolute_name

    started = time.perf_counter()
    names = [*dict.fromkeys(map(os.path.abspath, paths))]
    named_files = [(name, file) for name in names for file in find_files(Path(name))]
    tokenizer, settings, counts = _tokenizer_of(model), settings_in_force(), Counter[str]()
    identity, texts_by_name = identify(tokenizer), dict[str, list[bytes]]()
    with ProgressBar("Reading") as bar:
        for number, (name, file) in enumerate(named_files):
            bar(number, len(named_files))
            texts = texts_by_name.setdefault(name, [])
            for text in read_texts(file, counts):
                tokens = tokenizer.encode(text, add_special_tokens=False)
                texts += encode_texts(tokens, identity.vocab_size)
    for number, thing, reason in (
        (counts["skipped"], "file", "not readable as UTF-8 text"),
        (counts["bad_lines"], "chat log line", "not a chat record"),
    ):
        if number:
            note(f"{counted(number, thing)} skipped: {reason}")
    for name in names:
        if not texts_by_name.get(name):
            raise FileError(f"{name}: nothing to add; name files with text")
    kept = KeptAnswers(memory_directory(), identity, absolute_name(model))
    kept.add_texts(texts_by_name)
    AnswerIndex(settings.max_tokens, kept=kept).close()  # indexes them
    n_tokens = sum(len(text) // TOKEN_BYTES for texts in texts_by_name.values() for text in texts)
    of, seconds = counted(counts["files"], "file"), time.perf_counter() - started
    say(f"Added {counted(n_tokens, 'token')} of {of} in {seconds:.1f} s.")
    if not settings.on:
        note("nothing is drafted from them until the memory is on: mlxspec memory on")


@memory_command.command("show")
@_model_option
@option("--json", "Write one JSON object instead of text.", "as_json")
def show_command(model: str | None, as_json: bool) -> None:
    """Show how many answers are kept, where, and how much they helped.

    For each tokenizer, it shows which share of the answers' tokens were accepted drafts from each
    source: the context, the memory, and so on. --json gives these figures by day.
    """
    from ..corpus.answers import memory_directory, settings_in_force
    from ..drafting.experience import experience_directory, experience_files

    settings, all_kept = settings_in_force(), _kept(_tokenizer_of(model))
    taught = experience_files()
    report: dict[str, Any] = {
        "on": settings.on,
        "max_tokens": settings.max_tokens,
        "directory": str(memory_directory()),
        "experience": {"models": len(taught), "directory": str(experience_directory())},
        "tokenizers": [
            {
                "tokenizer": str(kept.identity),
                "model": kept.model,
                **kept.count(),
                "earned": kept.earned_by_day(),
            }
            for kept in all_kept
        ],
    }
    if as_json:
        write_json(report, indent=2)
        return
    print_rows(
        ("memory", "on" if settings.on else "off"),
        ("keeps", f"{counted(settings.max_tokens, 'token')} at most"),
        ("in", memory_directory()),
        ("learned", f"which drafts are right for {counted(len(taught), 'model')}; no text"),
        ("in", experience_directory()),
    )
    for held in report["tokenizers"]:
        answers, tokens = counted(held["texts"], "answer"), counted(held["tokens"], "token")
        click.echo()
        print_rows(
            ("tokenizer", held["tokenizer"]),
            ("holds", f"{answers}, {tokens}, {decimal(held['bytes'])}"),
            *((name, _at(held[name])) for name in ("oldest", "newest") if held[name] is not None),
            *(
                ("added", f"{path}, {counted(figures['tokens'], 'token')}")
                for path, figures in held["added"].items()
            ),
            ("earned", _earned(held["earned"])),
        )


@memory_command.command("forget")
@click.argument(
    "paths", help="Texts that were added from these files or directories.", nargs=-1, type=NAME
)
@option(
    "--since WHEN",
    "What ended or was added after WHEN: 2h, 3d, 2026-11-23, 2026-11-23T14:30.",
)
@option("--matching TEXT", "What contains TEXT, ignoring case.")
@option("--all", "All answers and added texts, and what was learned about drafts.", "everything")
@_model_option
@option("-y --yes", "Forget without asking.")
def forget_command(
    paths: tuple[str, ...],
    since: str | None,
    matching: str | None,
    everything: bool,
    model: str | None,
    yes: bool,
) -> None:
    """Forget answers and added texts.

    With several of PATHS, --since and --matching, only what meets all these conditions is
    forgotten. The answers' figures are removed, too, and running processes also forget the answers.
    """
    if matching is not None and not matching.strip():
        raise OptionError("--matching is empty: give a text, or use --all")
    if everything == bool(paths or since is not None or matching is not None):
        raise OptionError(
            "choose what to forget: give --all, or paths that were added, --since or --matching"
        )
    from ..drafting.experience import experience_files

    first = 0.0 if since is None else _time(since)
    tokenizer = _tokenizer_of(model)
    all_kept, names = _kept(tokenizer), [*map(os.path.abspath, paths)]
    added = {name for kept in all_kept for name in kept.count()["added"]}
    for name in names:
        if name not in added:
            raise OptionError(f"{name}: was not added; mlxspec memory show lists what was")
    to_forget: list[tuple[KeptAnswers, dict[int, str | None]]] = []
    for kept in all_kept:
        chosen = [
            (row, tokens, ended, name)
            for row, tokens, ended, name in kept.read()
            if ended >= first and (not names or name in names)
        ]
        if matching is not None:
            decode, text = _decoder(kept, tokenizer), matching.casefold()
            chosen = [item for item in chosen if text in decode(item[1]).casefold()]
        if chosen:
            times = [ended for _, _, ended, _ in chosen]
            between = f"{_at(min(times))} to {_at(max(times))}"
            rows = {row: name for row, _, _, name in chosen}
            say(f"{kept.identity}: {_number(rows)}, {between}")
            to_forget.append((kept, rows))
    taught = experience_files() if everything and model is None else []
    if taught:
        say(f"Which drafts were right for {counted(len(taught), 'model')}")
    if (to_forget or taught) and not yes:
        confirm("forget", "Forget them?", "Nothing was forgotten.")
    for kept, rows in to_forget:
        kept.forget(rows)
    for path in taught:
        path.unlink(missing_ok=True)
    if taught:
        say(f"Forgot which drafts were right for {counted(len(taught), 'model')}.")
    if to_forget or not taught:
        say(f"Forgot {_number(*(rows for _, rows in to_forget))}.")


def _number(*kept_rows: dict[int, str | None]) -> str:
    """The numbers of answers and of added texts among rows with these names."""
    names = [name for rows in kept_rows for name in rows.values()]
    answers = names.count(None)
    both = (answers, "answer"), (len(names) - answers, "added text")
    return " and ".join(counted(number, thing) for number, thing in both if number) or "nothing"


@memory_command.command("export", short_help="Write the answers as a chat log.")
@_model_option
def export_command(model: str | None) -> None:
    """Write the answers to standard output as a chat log: by tokenizer, the oldest first.

    Each line is {"messages": [{"role": "assistant", "content": "..."}], "created": SECONDS}.
    Written to a file *.jsonl, it can be read by 'mlxspec memory add' and 'mlxspec replay'.
    """
    tokenizer = _tokenizer_of(model)
    all_kept = [kept for kept in _kept(tokenizer) if kept.count()["texts"]]
    if not all_kept:
        raise OptionError("no answers are kept: to keep them from now on, run mlxspec memory on")
    decoders = [_decoder(kept, tokenizer) for kept in all_kept]  # load all before the first line
    for kept, decode in zip(all_kept, decoders, strict=True):
        for _, tokens, ended, name in sorted(kept.read(), key=itemgetter(2)):
            if name is None:
                message = {"role": "assistant", "content": decode(tokens)}
                write_json({"messages": [message], "created": ended})


def _kept(tokenizer: Any) -> list[KeptAnswers]:
    """The kept answers of all tokenizers, or only of this one."""
    from ..corpus.answers import identify, kept_answers, memory_directory

    wanted = identify(tokenizer).fingerprint if tokenizer else None
    all_kept = kept_answers(memory_directory())
    return [kept for kept in all_kept if wanted in (None, kept.identity.fingerprint)]


def _tokenizer_of(model: str | None) -> Any:
    """The tokenizer of ``--model``; None if it is not given."""
    if model is None:
        return None
    from ..models.tokenizer import load_tokenizer_of  # takes a second

    return load_tokenizer_of(model)


def _decoder(kept: KeptAnswers, tokenizer: Any) -> Callable[[np.ndarray], str]:
    """Make a function that turns the tokens of answers into text.

    Args:
        tokenizer: their tokenizer; None loads the one that they were generated with.
    """
    from ..corpus.answers import identify

    try:
        tokenizer = tokenizer or _tokenizer_of(kept.model or kept.identity.name)
        if identify(tokenizer).fingerprint != kept.identity.fingerprint:
            raise LoadError(f"{kept.model} now has another tokenizer")
    except LoadError as error:
        raise LoadError(
            f"{error}; to read the answers of {kept.identity}, name a copy of this tokenizer with "
            "--model"
        ) from error
    options = {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}
    return lambda tokens: str(tokenizer.decode(tokens.tolist(), **options))


_UNITS = {"m": "minutes", "h": "hours", "d": "days", "w": "weeks"}


def _time(text: str) -> float:
    """Parse the time of ``--since``; returns seconds since 1970."""
    try:
        if ago := re.fullmatch(r"([0-9]+)([mhdw])", text):
            return time.time() - timedelta(**{_UNITS[ago[2]]: int(ago[1])}).total_seconds()
        return datetime.fromisoformat(text).timestamp()
    except (ValueError, OverflowError):
        raise OptionError(
            f"--since is {text!r}: write it as 30m, 2h, 3d, 2026-11-23 or 2026-11-23T14:30"
        ) from None


def _at(seconds: float) -> str:
    return f"{datetime.fromtimestamp(seconds):%Y-%m-%d %H:%M}"


def _earned(days: dict[str, dict[str, int]]) -> str:
    """Tokens per step, and the shares of tokens that were accepted drafts, by source."""
    from ..corpus.answers import ORIGINS

    total = Counter[str]()
    for figures in days.values():
        total.update(figures)
    if not (tokens := total["tokens"]):
        return "nothing yet"
    shares = [f"{total[name] / tokens:.0%} from {name}" for name in ORIGINS if total[name]]
    return ", ".join([f"{tokens / max(1, total['steps']):.2f} tokens per step", *shares])
