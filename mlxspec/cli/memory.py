"""``mlxspec memory``, and the memory that other commands draft from."""

from __future__ import annotations

import os
import re
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import replace
from datetime import datetime, timedelta
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import click
from rich.filesize import decimal

from ..errors import FileError, LoadError, OptionError
from .common.model_choice import MODEL
from .common.notes import note, say
from .common.options import group, option
from .common.output import confirm, counted, print_rows, write_json

if TYPE_CHECKING:
    import numpy as np

    from ..corpus.answers import KeptAnswers
    from ..corpus.memory import Memory


_model_option = option(
    "-m --model MODEL",
    "Only for one tokenizer: a directory, a Hub repository, an alias, 'demo', or a tokenizer's "
    "file.",
    type=MODEL,
)


class Memories(ExitStack):
    """The memories that keep a command's answers, until the end of the ``with`` block.

    Models with the same tokenizer share one. At the end, the answers are on disk, and are sorted.
    If an error ends the block, the next run sorts them.

    Args:
        keeps: False ignores the kept answers, whatever the user's settings are.

    Attributes:
        keeps: as given.

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
        self._memories: dict[bytes, Memory] = {}

    def of(self, tokenizer: Any, model: str = "") -> Memory | None:
        """The memory for a tokenizer; None if its answers are not kept.

        Args:
            tokenizer: a model's tokenizer.
            model: the model's name as the user gave it.
        """
        from ..corpus.answers import KeptAnswers, identify, memory_directory
        from ..corpus.memory import Memory
        from ..models.model_files import absolute_name

        if not self._settings.keeps_some:  # identifying a tokenizer takes a tenth of a second
            return None
        identity, most = identify(tokenizer), self._settings.max_tokens
        if not self._settings.keeps(identity):
            return None
        if identity.fingerprint not in self._memories:
            try:
                kept = KeptAnswers(memory_directory(), identity, absolute_name(model))
            except FileError as error:
                note(f"{error}; answers are remembered only until this command ends")
                return None
            memory = Memory(most, kept=kept)
            self._memories[identity.fingerprint] = memory
            self.push(lambda kind, *_: memory.close(patience=0 if kind else None))
        return self._memories[identity.fingerprint]

    def suggest_once(self) -> None:
        """At a terminal, suggest keeping answers, once per user.

        Creates the memory's directory, which records that the suggestion was shown.
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
    """Keep answers between runs to draft from; show, forget or export them.

    \b
    Examples:
      mlxspec memory on
      mlxspec memory show
      mlxspec memory forget --since 2h
      mlxspec memory forget --matching "Jane Doe"
      mlxspec memory export > answers.jsonl

    Once the memory is on, generate, chat, serve, explain and run keep the models' answers and draft
    from them. Prompts are not kept. The answers never leave this machine, and only you can read
    them.

    Whether the memory is on or off, mlxspec learns from each output which drafts tend to be right.
    It keeps a few kilobytes of weights for each model, and no text. --no-memory turns both off for
    a run, as does MLXSPEC_MEMORY=off.

    MLXSPEC_MEMORY=on turns the memory on, and MLXSPEC_MEMORY=DIR turns it on with the answers in
    DIR. All of these override 'memory on' and 'memory off'.
    """


@memory_command.command("on")
@_model_option
@option(
    "--max-tokens N",
    "Tokens to keep per tokenizer; the oldest answers are dropped.  [default: as before, or "
    "50,000,000]",
    type=click.IntRange(min=2),
)
def on_command(model: str | None, max_tokens: int | None) -> None:
    """Keep answers from now on, and draft from them."""
    _switch(model, keeps=True, max_tokens=max_tokens)


@memory_command.command("off")
@_model_option
def off_command(model: str | None) -> None:
    """Stop keeping answers, and stop drafting from the kept ones."""
    _switch(model, keeps=False)


def _switch(model: str | None, keeps: bool, max_tokens: int | None = None) -> None:
    """Turn the memory on or off, for one tokenizer or all, and print the effect."""
    from ..corpus import answers as corpus

    tokenizer, settings = _tokenizer_of(model), corpus.load_settings()
    settings = replace(settings, max_tokens=max_tokens or settings.max_tokens)
    if tokenizer is None:
        settings = replace(settings, everything=keeps, tokenizers=frozenset())
    else:
        settings = settings.with_tokenizer(corpus.identify(tokenizer), keeps)
    corpus.save_settings(settings)
    if switch := os.environ.get(corpus.SWITCH):
        note(f"{corpus.SWITCH} is {switch!r} here and overrides this")
    which = "every tokenizer" if tokenizer is None else corpus.identify(tokenizer)
    directory = corpus.memory_directory()
    if keeps:
        up_to = counted(settings.max_tokens, "token")
        say(f"Answers are kept from now on, for {which}, up to {up_to} per tokenizer.")
        say(f"They are in {directory}; only you can read them.")
    else:
        say(f"No answers are kept from now on, for {which}.")
        say(f"Kept answers stay in {directory}: mlxspec memory forget --all removes them.")


@memory_command.command("show")
@_model_option
@option("--json", "Write one JSON object instead of text.", "as_json")
def show_command(model: str | None, as_json: bool) -> None:
    """Show how much is kept, where, and how much it helped.

    For each tokenizer, it shows the share of the answers' tokens that were accepted drafts from
    each source: the context, kept answers, a store, and so on. --json has these figures by day.
    """
    from ..corpus.answers import memory_directory, settings_in_force
    from ..drafting.learned import experience_directory, experience_files

    settings, kept, taught = settings_in_force(), _kept(_tokenizer_of(model)), experience_files()
    report: dict[str, Any] = {
        "on": settings.everything,
        "max_tokens": settings.max_tokens,
        "directory": str(memory_directory()),
        "experience": {"models": len(taught), "directory": str(experience_directory())},
        "tokenizers": [
            {
                "tokenizer": str(one.identity),
                "model": one.model,
                "on": settings.keeps(one.identity),
                **one.count(),
                "earned": one.earned_by_day(),
            }
            for one in kept
        ],
    }
    if as_json:
        write_json(report, indent=2)
        return
    exceptions = ", except for some tokenizers" if settings.tokenizers else ""
    print_rows(
        ("memory", _ON[settings.everything] + exceptions),
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
            ("memory", _ON[held["on"]]),
            ("holds", f"{answers}, {tokens}, {decimal(held['bytes'])}"),
            *((name, _at(held[name])) for name in ("oldest", "newest") if held[name] is not None),
            ("earned", _earned(held["earned"])),
        )


_ON = {True: "on", False: "off"}


@memory_command.command("forget")
@option("--since WHEN", "Answers that ended after WHEN: 2h, 3d, 2026-11-23, 2026-11-23T14:30.")
@option("--matching TEXT", "Answers that contain TEXT, ignoring case.")
@option("--all", "All answers, and what was learned about drafts.", "everything")
@_model_option
@option("-y --yes", "Forget without asking.")
def forget_command(
    since: str | None, matching: str | None, everything: bool, model: str | None, yes: bool
) -> None:
    """Forget answers, wherever they are kept.

    With both --since and --matching, only answers that meet both conditions are forgotten, with
    their figures. Running processes forget them, too. Damaged files are always removed.
    """
    if matching is not None and not matching.strip():
        raise OptionError("--matching is empty: give a text, or use --all")
    if everything == (since is not None or matching is not None):
        raise OptionError("choose what to forget: give --all, or --since, --matching or both")
    from ..drafting.learned import experience_files

    first = 0.0 if since is None else _time(since)
    tokenizer = _tokenizer_of(model)
    found: list[tuple[KeptAnswers, list[int]]] = []
    for kept in _kept(tokenizer):
        chosen = [one for one in kept.read() if first <= one[2]]
        if matching is not None:
            decode, text = _decoder(kept, tokenizer), matching.casefold()
            chosen = [one for one in chosen if text in decode(one[1]).casefold()]
        if chosen:
            times = [ended for _, _, ended in chosen]
            between = f"{_at(min(times))} to {_at(max(times))}"
            say(f"{kept.identity}: {counted(len(chosen), 'answer')}, {between}")
            found.append((kept, [row for row, _, _ in chosen]))
    if found and not yes:
        confirm("forget", "Forget them?", "Nothing was forgotten.")
    for kept, rows in found:
        kept.forget(rows)
    taught = experience_files() if everything and model is None else []
    for path in taught:
        path.unlink(missing_ok=True)
    if taught:
        say(f"Forgot which drafts were right for {counted(len(taught), 'model')}.")
    say(f"Forgot {counted(sum(len(rows) for _, rows in found), 'answer')}.")


@memory_command.command("export", short_help="Write the answers as a chat log.")
@_model_option
def export_command(model: str | None) -> None:
    """Write the answers to standard output as a chat log, the oldest first.

    Each line is {"messages": [{"role": "assistant", "content": "..."}], "created": SECONDS}.
    Written to a file *.jsonl, it can be read by 'mlxspec store build' and 'mlxspec replay'.
    """
    tokenizer = _tokenizer_of(model)
    kept = [one for one in _kept(tokenizer) if one.count()["texts"]]
    if not kept:
        raise OptionError("no answers are kept: to keep them from now on, run mlxspec memory on")
    decoders = [_decoder(one, tokenizer) for one in kept]  # load all before the first line
    for one, decode in zip(kept, decoders, strict=True):
        for _, tokens, ended in sorted(one.read(), key=itemgetter(2)):
            message = {"role": "assistant", "content": decode(tokens)}
            write_json({"messages": [message], "created": ended})


def _kept(tokenizer: Any) -> list[KeptAnswers]:
    """The kept answers of all tokenizers, or only of this one.

    Raises:
        FileError: the database cannot be read.
    """
    from ..corpus.answers import identify, kept_answers, memory_directory

    wanted = identify(tokenizer).fingerprint if tokenizer else None
    found = kept_answers(memory_directory())
    return [one for one in found if wanted in (None, one.identity.fingerprint)]


def _tokenizer_of(model: str | None) -> Any:
    """The tokenizer of ``--model``; None if it is not given.

    Raises:
        LoadError: it cannot be loaded.
    """
    if model is None:
        return None
    from ..models.tokenizer import load_tokenizer_of  # takes a second

    return load_tokenizer_of(model)


def _decoder(kept: KeptAnswers, tokenizer: Any) -> Callable[[np.ndarray], str]:
    """Make a function that turns the tokens of answers into text.

    Args:
        kept: the answers.
        tokenizer: their tokenizer; None loads the one that they were generated with.

    Raises:
        LoadError: it cannot be loaded.
    """
    from ..corpus.answers import identify

    try:
        tokenizer = tokenizer or _tokenizer_of(kept.model or kept.identity.name)
        if identify(tokenizer).fingerprint != kept.identity.fingerprint:
            raise LoadError(f"{kept.model} now has another tokenizer")
    except LoadError as error:
        raise LoadError(
            f"{error}; answers of {kept.identity} need its tokenizer: name a copy of it with "
            "--model"
        ) from error
    options = {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}
    return lambda tokens: str(tokenizer.decode(tokens.tolist(), **options))


_UNITS = {"m": "minutes", "h": "hours", "d": "days", "w": "weeks"}


def _time(text: str) -> float:
    """Parse the time of ``--since``; returns seconds since 1970.

    Raises:
        OptionError: it is not a time.
    """
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
    from ..corpus.answers import SOURCES

    total = Counter[str]()
    for figures in days.values():
        total.update(figures)
    if not (tokens := total["tokens"]):
        return "nothing yet"
    shares = [f"{total[name] / tokens:.0%} from {name}" for name in SOURCES if total[name]]
    return ", ".join([f"{tokens / max(1, total['steps']):.2f} tokens per step", *shares])
