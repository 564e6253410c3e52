"""``mlxspec memory``: the answers that are kept over runs to draft from."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from datetime import date, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from ..errors import LoadError, OptionError, StoreError
from ..files import check_writable, replaced
from ..terminal import one_line
from .common.model_choice import MODEL
from .common.notes import note, say
from .common.options import FILE, SETTINGS, Group, option
from .common.output import (
    FoldingTable,
    at_terminal,
    counted,
    json_text,
    print_tables,
    size_in_words,
    write_json,
)
from .memories import absolute

if TYPE_CHECKING:
    from ..corpus import About, Contents, KeptTexts, Settings, Text

_Earned = dict[date, dict[str, int]]
_DAYS = 7  # that are shown one by one
_ALWAYS = ("context", "memory")  # shown even where no draft came from there

EPILOG = """\b
Examples:
  mlxspec memory on
  mlxspec memory show
  mlxspec memory forget --since 2h
  mlxspec memory forget --matching "Jane Doe"
  mlxspec memory export -o answers.jsonl

Once it is on, generate, chat, serve and run keep what models answer, and draft from it, too.
Prompts are not kept. It never leaves this machine; the answers are readable for you alone.

On or off, mlxspec learns from each output which drafts are right. It keeps a few kilobytes of
weights for each model, and no text.

--no-memory leaves both out for a run, and so does MLXSPEC_MEMORY=off. MLXSPEC_MEMORY=on turns the
memory on, and MLXSPEC_MEMORY=DIR does so with the answers in DIR. All of these override on and off.
"""

_model_option = option(
    "-m --model MODEL",
    "Only of one tokenizer: a directory, a Hub repository, an alias, 'demo', or "
    "a tokenizer's file.",
    type=MODEL,
)


@click.group(
    "memory",
    cls=Group,
    short_help="Keep answers over runs, to draft from.",
    epilog=EPILOG,
    context_settings=SETTINGS,
)
def memory_command() -> None:
    """Keep answers over runs, to draft from them: on, off, and what is kept."""


@memory_command.command("on", context_settings=SETTINGS)
@_model_option
@option(
    "--max-tokens N",
    "Tokens to keep for a tokenizer; what was not used for longest goes.  "
    "[default: as before, or 50,000,000]",
    type=click.IntRange(min=2),
)
def on_command(model: str | None, max_tokens: int | None) -> None:
    """Keep answers from now on, and draft from them."""
    from ..corpus import (
        directory_name,
        identify,
        load_settings,
        memory_directory,
        open_kept,
        save_settings,
    )

    before = load_settings(note)
    settings = replace(before, max_tokens=max_tokens or before.max_tokens)
    whose = "every tokenizer"
    if model is None:
        settings = replace(settings, everything=True, tokenizers=frozenset())
    else:
        identity = identify(_tokenizer_of(model))
        whose = str(identity)
        open_kept(identity, absolute(model), settings.max_tokens)
        if not settings.keeps(identity):
            names = settings.tokenizers ^ {directory_name(identity)}
            settings = replace(settings, tokenizers=names)
    save_settings(settings)
    most = counted(settings.max_tokens, "token") + (" each" if model is None else "")
    say(f"Answers are kept from now on, with {whose}, up to {most}.")
    say(f"They are in {memory_directory()}, readable for you alone.")
    _tell_of_switch()


@memory_command.command("off", context_settings=SETTINGS)
@_model_option
def off_command(model: str | None) -> None:
    """Neither keep answers nor draft from those that are kept."""
    from ..corpus import (
        directory_name,
        identify,
        load_settings,
        memory_directory,
        save_settings,
    )

    settings, whose = load_settings(note), "any tokenizer"
    tokenizer = _tokenizer_of(model)
    if tokenizer is None:
        settings = replace(settings, everything=False, tokenizers=frozenset())
    else:
        identity = identify(tokenizer)
        whose = str(identity)
        if settings.keeps(identity):
            names = settings.tokenizers ^ {directory_name(identity)}
            settings = replace(settings, tokenizers=names)
    save_settings(settings)
    say(f"No answers are kept from now on with {whose}.")
    if any(one.contents.texts for one in _holdings(tokenizer, note)):
        say(f"What was kept stays in {memory_directory()}: mlxspec memory forget --all removes it.")
    _tell_of_switch()


@memory_command.command("show", context_settings=SETTINGS)
@_model_option
@option("--json", "Write one JSON object and no text.", "as_json")
def show_command(model: str | None, as_json: bool) -> None:
    """Show what is kept, where, and what it earned.

    Of each day the last table says which share of the answers' tokens were accepted drafts, by
    where they came from: the context, these answers, a store, and so on.
    """
    from ..corpus import earned_by_day, memory_directory, settings_in_force
    from ..drafting.kept import experience_directory, kept_experience

    taught = len(kept_experience())
    settings = settings_in_force(note)
    holdings = [*_holdings(_tokenizer_of(model), note)]
    earned = [earned_by_day(one.kept, _unheard) for one in holdings]
    if as_json:
        report = {
            "on": settings.everything,
            "max_tokens": settings.max_tokens,
            "directory": str(memory_directory()),
            "experience": {"models": taught, "directory": str(experience_directory())},
            "tokenizers": [_report(*one, settings) for one in zip(holdings, earned, strict=True)],
        }
        write_json(report, indent=2)
        return
    if settings.everything:
        state = "on, but for some tokenizers" if settings.tokenizers else "on"
    else:
        state = "on for some tokenizers" if settings.tokenizers else "off"
    rows: list[tuple[str, object]] = [
        ("memory", state),
        ("keeps", f"{counted(settings.max_tokens, 'token')} at most"),
        ("in", memory_directory()),
    ]
    if taught:
        learned = f"which drafts are right for {counted(taught, 'model')}; no text"
        rows += [("learned", learned), ("in", experience_directory())]
    _print_rows(rows)
    for one, figures in zip(holdings, earned, strict=True):
        click.echo()
        _show(one, figures, settings)


@memory_command.command("forget", context_settings=SETTINGS)
@option("--since WHEN", "Answers that ended then or later: 2h, 3d, 2026-11-23, 2026-11-23T14:30.")
@option("--before WHEN", "Answers that ended before.")
@option("--matching TEXT", "Answers with this text in them, in capitals or not.")
@option("--all", "All answers, damaged files, and which drafts were right.", "everything")
@_model_option
@option("-y --yes", "Forget without asking.")
def forget_command(
    since: str | None,
    before: str | None,
    matching: str | None,
    everything: bool,
    model: str | None,
    yes: bool,
) -> None:
    """Forget answers, wherever they are kept.

    An answer goes if all of --since, --before and --matching that are given say so. What it has
    earned is forgotten with it. Processes that run forget it, too. Damaged files, in which answers
    cannot be told from each other, are removed whatever is chosen.
    """
    if matching is not None and not matching.strip():
        raise OptionError("--matching is empty: give a text, or forget --all")
    folded = matching.casefold() if matching is not None else None
    chosen = _Chosen(_when("--since", since), _when("--before", before), folded)
    if everything and chosen != (None, None, None):
        raise OptionError("--all and other choices are given together: leave out --all or these")
    if not everything and chosen == (None, None, None):
        raise OptionError("what is to be forgotten? Give --since, --before, --matching or --all")
    if chosen.since is not None and chosen.before is not None and chosen.since >= chosen.before:
        raise OptionError(f"--since {since} is not before --before {before}: nothing lies between")
    from ..corpus import forget
    from ..drafting.kept import kept_experience

    tokenizer = _tokenizer_of(model)
    found: list[tuple[KeptTexts, Callable[[Text], bool]]] = []
    number = 0
    for one in _holdings(tokenizer, note):
        goes = chosen.of(one.about, tokenizer)
        texts = [text for text in one.texts(_unheard) if goes(text)]
        number += len(texts)
        if texts:
            tokens = counted(sum(len(text.tokens) for text in texts), "token")
            first, last = (_at(of(text.learned for text in texts)) for of in (min, max))
            ended = first if first == last else f"{first} to {last}"
            say(f"{one.about.identity}: {counted(len(texts), 'answer')}, {tokens}, {ended}")
        found.append((one.kept, goes))  # where none goes, too, what is damaged does
    if number and not (yes or _may_forget()):
        say("Nothing was forgotten.")
        sys.exit(1)
    number = sum(forget(kept, goes, note) for kept, goes in found)
    taught = kept_experience() if everything and model is None else []
    for path in taught:
        path.unlink(missing_ok=True)
    if taught:
        say(f"Forgot which drafts were right for {counted(len(taught), 'model')}.")
    if number or not taught:
        say(f"Forgot {counted(number, 'answer')}." if number else "There is nothing to forget.")


@memory_command.command("export", context_settings=SETTINGS)
@_model_option
@option("-o --output FILE", "Write it there, and not to standard output.", type=FILE)
@option("--force", "Replace a file that is there.")
def export_command(model: str | None, output: Path | None, force: bool) -> None:
    """Write the answers as a chat log, the oldest first.

    A line is {"messages": [{"role": "assistant", "content": "..."}], "created": SECONDS}, as
    'mlxspec store build' and 'mlxspec replay' read it from a file *.jsonl.
    """
    if output is not None:
        check_writable(output, OptionError)
        if output.exists() and not force:
            raise OptionError(f"--output {output}: exists; name another file, or add --force")
    answers = _answers(_tokenizer_of(model))
    if output is None:
        for line in answers:
            click.echo(line)
        return
    number = 0
    with replaced(output, StoreError) as file:
        for line in answers:
            file.write(line.encode() + b"\n")
            number += 1
    say(f"Wrote {output}: {counted(number, 'answer')}.")


class _Holding(NamedTuple):
    """What is kept with one tokenizer.

    Attributes:
        about: whose it is, and where.
        kept: the files.
        contents: how much.
    """

    about: About
    kept: KeptTexts
    contents: Contents

    def texts(self, tell: Callable[[str], None]) -> Iterator[Text]:
        """All answers.

        Args:
            tell: called with a line for each file that is damaged.
        """
        from ..corpus import kept_texts

        return kept_texts(self.kept, tell)


def _holdings(tokenizer: Any, tell: Callable[[str], None]) -> Iterator[_Holding]:
    """What is kept with each tokenizer.

    Args:
        tokenizer: the one alone that counts; None for all.
        tell: called with a line for each file that cannot be read.

    Raises:
        StoreError: what is kept cannot be read.
    """
    from ..corpus import contents, identify, kept_directories

    wanted = identify(tokenizer).fingerprint if tokenizer else None
    for about in kept_directories(tell):
        if wanted in (None, about.identity.fingerprint):
            kept = about.open()
            yield _Holding(about, kept, contents(kept, tell))


def _unheard(line: str) -> None:
    """For what has been told before, or will be."""


def _tokenizer_of(model: str | None) -> Any:
    """The tokenizer of --model, where that is given.

    Raises:
        LoadError: there is none.
    """
    if model is None:
        return None
    from ..models.tokenizer import load_tokenizer_of  # takes a second

    return load_tokenizer_of(model)


def _decoder(about: About, tokenizer: Any) -> Callable[[Text], str]:
    """What makes texts of a directory's answers.

    Args:
        about: the directory.
        tokenizer: the one of its answers; None for the one that they were learned with.

    Raises:
        LoadError: that is gone.
    """
    from ..corpus import identify

    tokenizer = tokenizer or _tokenizer_of(about.model or about.identity.name)
    if identify(tokenizer).fingerprint != about.identity.fingerprint:
        raise LoadError(f"{about.model}: has another tokenizer by now")

    def decode(text: Text) -> str:
        options = {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}
        return str(tokenizer.decode(text.tokens.tolist(), **options))

    return decode


def _readable(about: About, tokenizer: Any) -> Callable[[Text], str]:
    """As :func:`_decoder`; the error says what helps."""
    try:
        return _decoder(about, tokenizer)
    except LoadError as error:
        raise LoadError(
            f"{error}; answers of {about.identity} are read with its tokenizer: name a copy of it "
            "with --model"
        ) from error


def _answers(tokenizer: Any) -> Iterator[str]:
    """Lines of JSON, the oldest answer first.

    Raises:
        OptionError: there is none.
        LoadError: a tokenizer is gone.
    """
    found = [one for one in _holdings(tokenizer, note) if one.contents.texts]
    if not found:
        raise OptionError("no answer is kept: 'mlxspec memory on' keeps those from then on")
    decoders = [_readable(one.about, tokenizer) for one in found]  # all, before the first line
    for one, decode in zip(found, decoders, strict=True):
        for text in sorted(one.texts(note), key=lambda text: text.learned):
            messages = [{"role": "assistant", "content": decode(text)}]
            yield json_text({"messages": messages, "created": text.learned})


class _Chosen(NamedTuple):
    """Which answers are to be forgotten; None where that does not matter.

    Attributes:
        since, before: when they ended, in seconds since 1970.
        matching: what stands in them, without capitals.
    """

    since: float | None
    before: float | None
    matching: str | None

    def of(self, about: About, tokenizer: Any) -> Callable[[Text], bool]:
        """Says of each answer in a directory whether it is one of them."""
        since, before, matching = self
        decode = _readable(about, tokenizer) if matching is not None else None

        def goes(text: Text) -> bool:
            return (
                (since is None or text.learned >= since)
                and (before is None or text.learned < before)
                and (decode is None or str(matching) in decode(text).casefold())
            )

        return goes


_AGO = re.compile(r"([0-9]+) ?([mhdw])")
_UNITS = {"m": "minutes", "h": "hours", "d": "days", "w": "weeks"}


def _when(option: str, text: str | None) -> float | None:
    """A time, in seconds since 1970.

    Raises:
        OptionError: it is written otherwise.
    """
    if text is None:
        return None
    try:
        if ago := _AGO.fullmatch(text.strip()):
            return time.time() - timedelta(**{_UNITS[ago[2]]: int(ago[1])}).total_seconds()
        return datetime.fromisoformat(text.strip()).timestamp()
    except (ValueError, OverflowError, OSError):
        raise OptionError(
            f"{option} is {text!r}: write it as 30m, 2h, 3d, 2026-11-23 or 2026-11-23T14:30"
        ) from None


def _may_forget() -> bool:
    """Ask at a terminal.

    Raises:
        OptionError: nobody can be asked.
    """
    if not at_terminal():
        raise OptionError("forget asks first, and this is no terminal: add --yes")
    return click.confirm("Forget them?", err=True)


def _tell_of_switch() -> None:
    """Say so where a variable goes before the settings."""
    from ..corpus import SWITCH

    if switch := os.environ.get(SWITCH):
        note(f"{SWITCH} is {switch!r} here and goes before that")


def _show(one: _Holding, earned: _Earned, settings: Settings) -> None:
    """Show what is kept with one tokenizer."""
    about, held = one.about, one.contents
    answers, tokens = counted(held.texts, "answer"), counted(held.tokens, "token")
    rows: list[tuple[str, object]] = [
        ("tokenizer", about.identity),
        ("memory", "on" if settings.keeps(about.identity) else "off"),
        ("holds", f"{answers}, {tokens}, {size_in_words(held.nbytes)}"),
    ]
    if held.oldest is not None and held.newest is not None:
        rows += [("oldest", _at(held.oldest)), ("newest", _at(held.newest))]
    _print_rows([*rows, ("in", about.directory)])
    if earned:
        print_tables([_table(earned)])


def _print_rows(rows: Iterable[tuple[str, object]]) -> None:
    for name, value in rows:
        click.echo(f"{name:<10} {one_line(value)}")


def _at(seconds: float) -> str:
    return f"{datetime.fromtimestamp(seconds):%Y-%m-%d %H:%M}"


def _table(earned: _Earned) -> FoldingTable:
    """What the answers of the last days earned, and all of them together."""
    from ..corpus import SOURCES

    total = {
        name: sum(day[name] for day in earned.values()) for name in next(iter(earned.values()))
    }
    named = [name for name in SOURCES if total[name] or name in _ALWAYS]
    table = FoldingTable(
        *("day", "answers", "tokens", "tokens per step", *named),
        caption="Shares of the tokens that were accepted drafts, by where these came from.",
    )
    last = [*earned.items()][-_DAYS:]
    for day, figures in [*((f"{day}", figures) for day, figures in last), ("all days", total)]:
        steps, tokens = max(1, figures["steps"]), max(1, figures["tokens"])
        table.add_row(
            day,
            f"{figures['answers']:,}",
            f"{figures['tokens']:,}",
            f"{figures['tokens'] / steps:.2f}",
            *(f"{figures[name] / tokens:.0%}" for name in named),
        )
    return table


def _report(one: _Holding, earned: _Earned, settings: Settings) -> dict[str, Any]:
    """What is kept with one tokenizer, for programs."""
    identity = one.about.identity
    return {
        "tokenizer": identity.name,
        "vocab_size": identity.vocab_size,
        "fingerprint": identity.fingerprint.hex(),
        "model": one.about.model,
        "on": settings.keeps(identity),
        "directory": str(one.about.directory),
        **{"bytes" if name == "nbytes" else name: n for name, n in vars(one.contents).items()},
        "earned": {day.isoformat(): figures for day, figures in earned.items()},
    }
