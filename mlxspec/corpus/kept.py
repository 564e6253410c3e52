"""Answers that are kept over runs: one directory for each tokenizer, shared by processes.

Parts are immutable; a new one names the files whose texts it has, and whoever reads the directory
passes over those. So whenever a process is killed, there is the old state or the new one.
"""

from __future__ import annotations

import fcntl
import os
import re
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ..errors import StoreError
from ..files import PRIVATE, remove_leftovers
from .journal import JOURNAL, MOVED, Journal, parse, read
from .part import Learned, Merged
from .part_file import DAMAGED, PART, USED, DamagedPartError, FilePart, LaterPartError, write_part
from .tokenizer_identity import TokenizerIdentity

KEPT_TOKENS = 50_000_000
"""Tokens that are kept for a tokenizer unless it is told otherwise."""

OnTrouble = Callable[[str], None]
"""Called with one line about what could not be done. The memory goes on without it."""

_LOCK = "lock"
_FILE = re.compile(rf"([0-9a-f]{{16}})(\{PART}|\{USED}|\{JOURNAL}|\{MOVED})")
_LEFTOVER = re.compile(rf"\.([0-9a-f]{{16}}(?:\{PART}|\{USED}))\.[0-9a-f]{{16}}\.partial")
_PRIVATE_DIRECTORY = 0o700
_POLL = 0.05
_FRESH = 100_000_000  # nanoseconds within which two changes of a directory may look like one


class KeptTexts:
    """The files of one tokenizer's answers. One thread at a time may use it.

    Args:
        directory: where they are; it is made if it is not there.
        identity: the tokenizer.
        max_tokens: how many tokens of answers are kept.

    Attributes:
        journals: those that this process appends to or has taken over, the current one last.

    Raises:
        OSError: the directory cannot be made.
    """

    def __init__(
        self, directory: Path, identity: TokenizerIdentity, max_tokens: int = KEPT_TOKENS
    ) -> None:
        self.directory = directory
        self.identity = identity
        self.max_tokens = max_tokens
        self.journals: list[Journal] = []
        self._parts: dict[str, FilePart] = {}
        self._refused: set[str] = set()
        self._seen: int | None = None
        directory.mkdir(mode=_PRIVATE_DIRECTORY, parents=True, exist_ok=True)

    def changed(self) -> bool:
        """Whether files have come or gone since :meth:`parts` looked."""
        try:
            return self.directory.stat().st_mtime_ns != self._seen
        except OSError:
            return False

    def parts(self, tell: OnTrouble) -> list[FilePart]:
        """The parts as they are now, opened, the newest first. Damaged ones are passed over.

        Raises:
            OSError: the directory cannot be read.
        """
        while True:
            modified = self.directory.stat().st_mtime_ns
            names = self._names(PART)
            opened = {name: self._open(name, tell) for name in names - self._refused}
            if None not in opened.values():
                break  # otherwise one was replaced meanwhile
        self._seen = modified if time.time_ns() - modified > _FRESH else None
        self._parts = {name: part for name, part in opened.items() if part}
        replaced = self.replaced()
        current = [part for name, part in self._parts.items() if name not in replaced]
        return sorted(current, key=lambda part: part.newest, reverse=True)

    def refuse(self, part: FilePart) -> None:
        """Leave a part out from now on, since it proves to be damaged."""
        self._refused.add(part.name)

    def _open(self, name: str, tell: OnTrouble) -> FilePart | None:
        """A part; None if it is gone."""
        if name in self._parts:
            return self._parts[name]
        path = self.directory / f"{name}{PART}"
        try:
            return FilePart(path, self.identity)
        except FileNotFoundError:
            return None
        except (DamagedPartError, LaterPartError, OSError) as error:
            self._refused.add(name)
            tell(f"{path}: {reason(error)}; what it holds is not drafted from")
            return None

    def replaced(self) -> set[str]:
        """The names of files whose texts other parts have, as :meth:`parts` found them."""
        return set().union(*(part.replaces for part in self._parts.values()))

    def _names(self, kind: str) -> set[str]:
        """The names of all files of a kind."""
        found = (_FILE.fullmatch(entry) for entry in os.listdir(self.directory))
        return {match[1] for match in found if match and match[2] == kind}

    def journal_names(self) -> set[str]:
        """The journals in the directory, of whichever process, that no part replaces.

        Raises:
            OSError: the directory cannot be read.
        """
        return self._names(JOURNAL) - self.replaced()

    def journaled(self, name: str, tell: OnTrouble) -> list[Learned]:
        """The answers in a journal, which may be another process's."""
        path = self.directory / f"{name}{JOURNAL}"
        try:
            with path.open("rb") as file:
                return parse(read(file.fileno()), self.identity)[0]
        except FileNotFoundError:
            return []
        except (OSError, ValueError) as error:
            tell(f"{path}: {reason(error)}")
            return []

    def adopt(self, tell: OnTrouble) -> Iterator[list[Learned]]:
        """Take over the journals of processes that are gone.

        Yields:
            the answers of each, which now is one of :attr:`journals`.

        Raises:
            OSError: the directory cannot be read.
        """
        own = {journal.name for journal in self.journals}
        for name in sorted(self.journal_names() - own):
            path = self.directory / f"{name}{JOURNAL}"
            try:
                journal = Journal(self.directory, self.identity, name)
            except (BlockingIOError, FileNotFoundError):
                continue
            except OSError as error:
                tell(f"{path}: {reason(error)}; what it holds is not drafted from")
                continue
            try:
                answers = journal.adopt()
            except (ValueError, OSError) as error:
                journal.close()
                self._set_aside(path, reason(error), tell)
                continue
            if answers:
                self.journals.insert(0, journal)
                yield answers
            else:
                journal.remove()

    def append(self, answer: Learned) -> None:
        """Write an answer into the current journal; the first one begins it.

        Raises:
            JournalMovedError: another process has moved it.
            OSError: it cannot be written.
        """
        if not self.journals:
            self.journals.append(Journal(self.directory, self.identity))
        self.journals[-1].append(answer)

    def close(self) -> None:
        """Leave the journals to whoever opens the directory next."""
        for journal in self.journals:
            journal.close()
        self.journals = []

    @contextmanager
    def merging(self, patience: float = 0.0) -> Iterator[bool]:
        """Keep other processes from replacing files while the body runs.

        Args:
            patience: seconds to wait for a process that does.

        Yields:
            whether that succeeded.

        Raises:
            OSError: the lock's file cannot be made.
        """
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        descriptor = os.open(self.directory / _LOCK, flags, PRIVATE)
        deadline = time.monotonic() + patience
        try:
            while not (held := _locked(descriptor)) and time.monotonic() < deadline:
                time.sleep(_POLL)
            yield held
        finally:
            os.close(descriptor)

    # What follows is done while `merging`.

    def tidy_up(self) -> None:
        """Finish what killed processes had begun: remove what is replaced, and their leftovers.

        Raises:
            OSError: the directory cannot be read.
        """
        replaced = self.replaced()
        parts = self._names(PART)
        for name in self._names(MOVED) - replaced:
            moved = self.directory / f"{name}{MOVED}"
            moved.rename(moved.with_suffix(JOURNAL))
        self.remove(replaced)
        for name in self._names(USED) - parts:
            (self.directory / f"{name}{USED}").unlink(missing_ok=True)
        for entry in os.listdir(self.directory):
            if leftover := _LEFTOVER.fullmatch(entry):
                remove_leftovers(self.directory / leftover[1])

    def set_aside_damaged(self, tell: OnTrouble) -> Generator[None, None, None]:
        """Verify the parts that were refused, piece by piece, and set those aside that are damaged.

        One of a later version, or that could not be read, is none of them.
        """
        for name in sorted(self._refused):
            path = self.directory / f"{name}{PART}"
            try:
                yield from FilePart(path, self.identity).verify()
            except DamagedPartError as error:
                self._refused.discard(name)
                self._set_aside(path, reason(error), tell)
            except (LaterPartError, OSError):
                pass

    def verify(self, part: FilePart, tell: OnTrouble) -> Generator[None, None, bool]:
        """Verify a part, piece by piece, and set it aside if it is damaged.

        Returns:
            whether it is as it was written.
        """
        try:
            yield from part.verify()
        except (DamagedPartError, OSError) as error:
            self._parts.pop(part.name, None)
            self._set_aside(part.path, reason(error), tell)
            return False
        return True

    def write(
        self, merged: Merged, parts: Iterable[FilePart], journals: Iterable[str]
    ) -> Generator[None, None, FilePart]:
        """Write a part, piece by piece, which replaces others and journals.

        Raises:
            StoreError: it cannot be written.
        """
        names = set(journals)
        for part in parts:
            names |= {part.name, *(part.replaces & self._everything())}
        new = yield from write_part(self.directory, merged, self.identity, names)
        self._parts[new.name] = new
        self.remove(names)
        return new

    def remove(self, names: Iterable[str]) -> None:
        """Remove files whose texts are in others, or shall be nowhere."""
        for name in names:
            self._parts.pop(name, None)
            for kind in (PART, USED, JOURNAL, MOVED):
                with suppress(OSError):
                    (self.directory / f"{name}{kind}").unlink()

    def _everything(self) -> set[str]:
        return self._names(PART) | self._names(JOURNAL) | self._names(MOVED)

    def _set_aside(self, path: Path, reason: str, tell: OnTrouble) -> None:
        aside = path.with_name(f"{path.name}{DAMAGED}")
        with suppress(OSError):
            path.rename(aside)
        tell(f"{path}: {reason}; it is left aside as {aside.name}")


def _locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def reason(error: Exception) -> str:
    """What an error says, without the file's name."""
    cause = error.__cause__ if isinstance(error, StoreError) else error
    return getattr(cause, "strerror", None) or str(error)
