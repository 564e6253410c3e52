"""What is kept of answers: counting, reading and forgetting them."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import date, datetime
from itertools import chain, compress
from typing import NamedTuple, TypeVar

import numpy as np

from ..errors import StoreError
from .journal import JOURNAL, MOVED, parse
from .kept import KeptTexts, OnTrouble, reason
from .part import EARNED, NOTHING, SUPERSEDED, Learned, Merged, Part, distinct, hash_of
from .part_file import DAMAGED, DamagedPartError, FilePart

_PATIENCE = 120.0  # seconds to wait for a process that merges

Result = TypeVar("Result")


class Text(NamedTuple):
    """A kept answer.

    Attributes:
        tokens: (n,) of int32.
        learned: when it ended, in seconds since 1970.
    """

    tokens: np.ndarray
    learned: int


@dataclass(frozen=True)
class Contents:
    """What is kept with one tokenizer.

    Attributes:
        texts, tokens: how many answers, and tokens of them.
        nbytes: size of all files.
        oldest, newest: when the first and the last of them ended, in seconds since 1970; None
            where there is none.
    """

    texts: int
    tokens: int
    nbytes: int
    oldest: int | None
    newest: int | None


def contents(kept: KeptTexts, tell: OnTrouble) -> Contents:
    """Count what is kept.

    Args:
        kept: where.
        tell: called with a line for each file that cannot be read.

    Raises:
        StoreError: the directory cannot be read.
    """
    texts = tokens = 0
    times: list[int] = []
    for part, current in _current(_parts(kept, tell)):
        records = part.records[current]
        texts += len(records)
        tokens += int(part.lengths[current].sum()) - len(records)
        times += [int(time) for time in (records["learned"].min(), records["learned"].max())]
    nbytes = 0
    with _errors_of(kept), os.scandir(kept.directory) as entries:
        for entry in entries:
            with suppress(FileNotFoundError):  # another process has just replaced it
                nbytes += entry.stat(follow_symlinks=False).st_size
    return Contents(texts, tokens, nbytes, min(times, default=None), max(times, default=None))


def kept_texts(kept: KeptTexts, tell: OnTrouble) -> Iterator[Text]:
    """Each answer once, those of a file in the order of their learning.

    All files are verified first, so that what is damaged is left out.

    Args:
        kept: where.
        tell: called with a line for each file that cannot be read or is damaged.

    Raises:
        StoreError: the directory cannot be read.
    """
    for part, current in _current([one for one in _parts(kept, tell) if _is_whole(one, tell)]):
        yield from compress(_texts(part), current.tolist())


def earned_by_day(kept: KeptTexts, tell: OnTrouble) -> dict[date, dict[str, int]]:
    """What the generations of the kept answers earned, by the local day on which they ended.

    Args:
        kept: where.
        tell: called with a line for each file that cannot be read.

    Returns:
        for each day, in order, the number of "answers" and the sum of each figure of EARNED.

    Raises:
        StoreError: the directory cannot be read.
    """
    names = ("answers", *EARNED)
    sums: dict[date, dict[str, int]] = {}
    for part in _parts(kept, tell):
        # All times of a quarter of an hour are of one day in every time zone.
        quarters, places = np.unique(part.records["learned"] // 900, return_inverse=True)
        days = [datetime.fromtimestamp(900 * quarter).date() for quarter in quarters.tolist()]
        ordinals = np.array([day.toordinal() for day in days], np.int64)[places]
        first = int(ordinals.min(initial=date.max.toordinal()))
        counts = [np.bincount(ordinals - first)]
        counts += [np.bincount(ordinals - first, part.records[name]) for name in EARNED]
        for day in set(days):
            figures = sums.setdefault(day, dict.fromkeys(names, 0))
            for name, count in zip(names, counts, strict=True):
                figures[name] += int(count[day.toordinal() - first])
    return dict(sorted(sums.items()))


def forget(kept: KeptTexts, which: Callable[[Text], bool], tell: OnTrouble) -> int:
    """Forget some answers, in all files, also in those that other processes write.

    What other processes hold in memory goes when they see it: before their next answer is kept,
    or when their next generation begins. Files that are damaged, in which answers cannot be told
    from each other, go whole, whatever is to be forgotten.

    Args:
        kept: where.
        which: whether a text is to be forgotten.
        tell: called with a line for each file that cannot be read, is damaged, or went whole.

    Returns:
        how many answers are forgotten.

    Raises:
        StoreError: the directory cannot be read or written, or another process does not finish
            merging. What was not forgotten is still there.
    """
    forgotten: set[int] = set()
    with _alone(kept):
        kept.parts(tell)
        kept.tidy_up()
        finished(kept.set_aside_damaged(tell))
        try:
            for _ in kept.adopt(tell):  # sets those aside that are damaged
                pass
            for name in sorted(kept.journal_names()):
                _forget_in_journal(kept, name, which, forgotten, tell)
        finally:
            kept.close()
        for part in kept.parts(tell):
            if not finished(kept.verify(part, tell)):
                continue
            out = np.array([which(text) for text in _texts(part)], bool)
            if not out.any():
                continue
            forgotten.update(part.records["hash"][out].tolist())
            if out.all():
                kept.remove([part.name])
            else:
                merged = Merged(part, NOTHING, (out, np.zeros(0, bool)))
                finished(kept.write(merged, [part], ()))
        for entry in os.listdir(kept.directory):
            if entry.endswith(DAMAGED):
                (kept.directory / entry).unlink(missing_ok=True)
                tell(f"{kept.directory / entry}: is removed, with all that was in it")
    return len(forgotten)


def finished(steps: Generator[object, None, Result]) -> Result:
    """Do all steps at once."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            result: Result = end.value
            return result


def _forget_in_journal(
    kept: KeptTexts,
    name: str,
    which: Callable[[Text], bool],
    forgotten: set[int],
    tell: OnTrouble,
) -> None:
    """Make a part of what remains of a journal, which may be another process's."""

    def goes(answer: Learned) -> bool:
        return which(Text(np.frombuffer(answer.text, np.int32), answer.learned))

    if not any(map(goes, kept.journaled(name, tell))):
        return
    path = kept.directory / f"{name}{JOURNAL}"
    moved = path.with_suffix(MOVED)
    # Its writer sees that, and writes anew what is not in it by now.
    path.rename(moved)
    answers = distinct(parse(moved.read_bytes(), kept.identity)[0])
    remaining = [answer for answer in answers if not goes(answer)]
    forgotten.update(hash_of(answer.text) for answer in answers if goes(answer))
    if remaining:
        finished(kept.write(Merged(NOTHING, Part.of(remaining)), (), [name]))
    else:
        kept.remove([name])


def _parts(kept: KeptTexts, tell: OnTrouble) -> list[Part]:
    """All texts, those of journals made into parts, the newest part first."""
    with _errors_of(kept):
        kept.parts(tell)
        journals = {name: kept.journaled(name, tell) for name in kept.journal_names()}
        # After the journals, so that nothing is missed that another process merges meanwhile.
        files = kept.parts(tell)
    for name in kept.replaced():
        journals.pop(name, None)
    journaled = sorted(chain(*journals.values()), key=lambda answer: answer.learned)
    return [Part.of(distinct(journaled)), *files]


def _texts(part: Part) -> Iterator[Text]:
    """All texts of a part, those that are in a newer one, too."""
    start = 0
    records = part.records
    for end, learned in zip(records["end"].tolist(), records["learned"].tolist(), strict=True):
        yield Text(part.array.tokens[start : end - 1], learned)
        start = end


def _is_whole(part: Part, tell: OnTrouble) -> bool:
    """Whether a part is as it was written."""
    if isinstance(part, FilePart):
        try:
            finished(part.verify())
        except FileNotFoundError:  # another process has just merged it, and verified it before
            return True
        except (DamagedPartError, OSError) as error:
            tell(f"{part.path}: {reason(error)}; the answers in it are left out")
            return False
    return True


def _current(parts: Iterable[Part]) -> Iterator[tuple[Part, np.ndarray]]:
    """The parts, and which of their texts, at least one, are in no newer one."""
    seen = np.zeros(0, np.uint64)
    for part in parts:
        hashes = part.records["hash"]
        current = (part.used != SUPERSEDED) & ~np.isin(hashes, seen)
        seen = np.union1d(seen, hashes[current])
        if current.any():
            yield part, current


@contextmanager
def _alone(kept: KeptTexts) -> Iterator[None]:
    """Keep other processes from replacing files while the body runs."""
    with _errors_of(kept), kept.merging(_PATIENCE) as alone:
        if not alone:
            raise StoreError(
                f"{kept.directory}: another process has been merging for {_PATIENCE:.0f} seconds; "
                "try again later"
            )
        yield


@contextmanager
def _errors_of(kept: KeptTexts) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StoreError(
            f"{kept.directory}: {reason(error)}; see that you may read and write it"
        ) from error
