"""Kept answers and added texts: a SQLite database with a row for each, and its settings."""

from __future__ import annotations

import hashlib
import json
import os
import re
import sqlite3
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import platformdirs

from ..errors import FileError, OptionError
from ..files import PRIVATE, directory_in, replaced
from ..jsonl import load_json

# --- tokenizers ---

_HUB_SNAPSHOT = re.compile(r"models--([^/\\]+?)--([^/\\]+)[/\\]snapshots[/\\]")


@dataclass(frozen=True)
class TokenizerIdentity:
    """The identity of a tokenizer.

    Attributes:
        name: a model's name without its path, for display.
        vocab_size: all token ids are below it.
        fingerprint: the SHA-256 of the vocabulary, 32 bytes. It is equal for tokenizers whose ids
            mean the same, even if they split texts differently. Texts that another such tokenizer
            has split are still correct, but less useful.
    """

    name: str
    vocab_size: int
    fingerprint: bytes

    @property
    def key(self) -> str:
        """16 hexadecimal digits that identify the tokenizer in file names."""
        return self.fingerprint.hex()[:16]

    def __str__(self) -> str:
        return f"{self.name} ({self.vocab_size:,} tokens, {self.fingerprint.hex()[:8]})"


def identify(tokenizer: Any) -> TokenizerIdentity:
    """The identity of a tokenizer, from its whole vocabulary, including added tokens.

    Args:
        tokenizer: a tokenizer of mlx-lm, transformers or tokenizers, or any object with
            ``get_vocab``.
    """
    vocabulary = sorted((index, token) for token, index in tokenizer.get_vocab().items())
    name = _short_name(getattr(tokenizer, "name_or_path", None) or "") or "unnamed"
    fingerprint = hashlib.sha256(json.dumps(vocabulary).encode()).digest()
    vocab_size = vocabulary[-1][0] + 1 if vocabulary else 0
    return TokenizerIdentity(name, vocab_size, fingerprint)


def _short_name(path: str) -> str:
    """``owner/name`` for a copy from the Hub, and the last part of any other absolute path."""
    if snapshot := _HUB_SNAPSHOT.search(path):
        return f"{snapshot[1]}/{snapshot[2]}"
    return os.path.basename(path) if os.path.isabs(path) else path


# --- the database ---

KEPT_TOKENS = 50_000_000
"""The most tokens of answers that are kept per tokenizer by default."""

ADDED_TOKENS = 50_000_000
"""The most tokens of added texts per tokenizer."""

ORIGINS = ("context", "memory", "prediction", "other")
"""Where accepted draft tokens came from."""

EARNED = ("steps", "tokens", *ORIGINS)
"""The names of a generation's figures: steps, tokens, and accepted draft tokens by origin."""

DATABASE = "answers.sqlite"
INDEX = ".index"
INDEX_FORMAT = "mlxspec answers index"

_VERSION = 5
_BUSY_SECONDS = 30.0
_PAGE = 500  # rows read at a time

_OPTIONS = """
PRAGMA secure_delete = ON;
PRAGMA synchronous = NORMAL;
PRAGMA temp_store = MEMORY;
PRAGMA trusted_schema = OFF;
"""
# An added text has a `name`, an answer has none. Columns with figures have the prefix `earned_`.
# `stamp` is a random number that changes whenever a row of the tokenizer is deleted. So an index
# with the current stamp has no deleted texts.
_TABLES = f"""
BEGIN IMMEDIATE;
CREATE TABLE IF NOT EXISTS tokenizers (
    id INTEGER PRIMARY KEY, fingerprint BLOB UNIQUE NOT NULL, name TEXT NOT NULL,
    vocab_size INTEGER NOT NULL, model TEXT NOT NULL, stamp INTEGER DEFAULT (random()));
CREATE TABLE IF NOT EXISTS answers (
    id INTEGER PRIMARY KEY AUTOINCREMENT, tokenizer INTEGER NOT NULL, hash BLOB NOT NULL,
    ended INTEGER NOT NULL, {", ".join(f"earned_{name} INTEGER NOT NULL" for name in EARNED)},
    tokens BLOB NOT NULL, name TEXT, UNIQUE (tokenizer, hash));
CREATE TRIGGER IF NOT EXISTS deleted AFTER DELETE ON answers BEGIN
    UPDATE tokenizers SET stamp = random() WHERE id = OLD.tokenizer;
END;
PRAGMA user_version = {_VERSION};
COMMIT;
"""
_TOKENIZERS = """
SELECT CAST(name AS TEXT), CAST(vocab_size AS INTEGER), CAST(fingerprint AS BLOB),
    CAST(model AS TEXT)
FROM tokenizers ORDER BY name
"""
_ADD_TOKENIZER = """
INSERT INTO tokenizers (fingerprint, name, vocab_size, model) VALUES (?, ?, ?, ?)
ON CONFLICT DO UPDATE SET model = excluded.model WHERE excluded.model NOT IN ('', model)
"""
_STAMP = "SELECT CAST(stamp AS INTEGER) FROM tokenizers WHERE id = ?"
# Without "+", SQLite would use the index over hashes, and sort the rows again for each page.
_READ = f"""
SELECT id, tokens, CAST(ended AS INTEGER), CAST(name AS TEXT) FROM answers
WHERE +tokenizer = ? AND id > ? AND typeof(tokens) = 'blob' AND length(tokens) % 4 = 0
ORDER BY id LIMIT {_PAGE}
"""
_ADD = f"""
INSERT INTO answers (tokenizer, hash, tokens, ended, name,
    {", ".join(f"earned_{name}" for name in EARNED)})
VALUES ({", ".join("?" * (5 + len(EARNED)))})
ON CONFLICT (tokenizer, hash) DO UPDATE SET ended = excluded.ended,
    {", ".join(f"earned_{name} = earned_{name} + excluded.earned_{name}" for name in EARNED)}
RETURNING id
"""
_REMOVE = "DELETE FROM answers WHERE tokenizer = ? AND name = ?"
_COUNT = """
SELECT name, count(*), sum(length(tokens)) / 4, min(ended), max(ended)
FROM answers WHERE tokenizer = ? GROUP BY name ORDER BY name
"""
_EARNED_BY_DAY = f"""
SELECT date(ended, 'unixepoch', 'localtime') AS day, count(*),
    {", ".join(f"sum(earned_{name})" for name in EARNED)}
FROM answers WHERE tokenizer = ? AND name IS NULL GROUP BY day ORDER BY day
"""
# Deletes the oldest answers, so that the others have at most a given number of tokens.
_EVICT = """
DELETE FROM answers WHERE id IN (SELECT id FROM (
    SELECT id, sum(length(tokens) / 4 + 1) OVER (ORDER BY ended DESC, id DESC) AS total
    FROM answers WHERE tokenizer = ? AND name IS NULL) WHERE total > ?)
RETURNING id
"""


@dataclass(eq=False)
class KeptAnswers:
    """The kept answers and added texts of one tokenizer.

    Only one thread at a time may use an object; several processes may open the same database.

    Attributes:
        directory: the database's directory, created if missing. None keeps the answers in the
            process's memory.
        identity: the tokenizer.
        model: the name or path from which the tokenizer can be loaded again.

    Raises:
        FileError: the database cannot be made or opened.
    """

    directory: Path | None
    identity: TokenizerIdentity
    model: str = ""

    def __post_init__(self) -> None:
        identity, self._db = self.identity, connect(self.directory)
        values = identity.fingerprint, identity.name, identity.vocab_size, self.model
        self._run(_ADD_TOKENIZER, *values)
        which = "SELECT id FROM tokenizers WHERE fingerprint = ?"
        ((self._tokenizer,),) = self._run(which, identity.fingerprint)

    def add(self, text: bytes, earned: Mapping[str, int], name: str | None = None) -> int:
        """Keep an answer as the newest; if it is already kept, add to its figures.

        Args:
            text: the bytes of its tokens, as int32.
            earned: the figures of its generation, by the names in EARNED.
            name: the name of an added text, which stays until it is forgotten.
        """
        figures = [max(0, int(earned.get(name, 0))) for name in EARNED]
        # The same text may be added under several names, and be an answer, too.
        hashed = hashlib.blake2b(text, digest_size=16)
        hashed.update(b"" if name is None else b"\0" + name.encode("utf-8", "surrogateescape"))
        ((row,),) = self._run(
            _ADD, self._tokenizer, hashed.digest(), text, int(time.time()), name, *figures
        )
        return int(row)

    def add_texts(self, texts_by_name: Mapping[str, Iterable[bytes]]) -> None:
        """Keep texts until they are forgotten, instead of those that had the same names.

        Args:
            texts_by_name: for each name, texts as the bytes of their tokens.

        Raises:
            OptionError: all added texts together would have more than ADDED_TOKENS.
            FileError: they cannot be written. In both cases nothing has changed.
        """
        with self.locked():
            for name, texts in texts_by_name.items():
                self._run(_REMOVE, self._tokenizer, name)
                for text in texts:
                    self.add(text, {}, name)
            tokens = sum(figures["tokens"] for figures in self.count()["added"].values())
            if tokens > ADDED_TOKENS:
                raise OptionError(
                    f"the added texts would have {tokens:,} tokens: add fewer, or forget some, so "
                    f"that there are at most {ADDED_TOKENS:,}"
                )

    def stamp(self) -> int:
        """A number that changes when answers are deleted."""
        ((stamp,),) = self._run(_STAMP, self._tokenizer)
        return int(stamp)

    def read(self, after: int = 0) -> Iterator[tuple[int, np.ndarray, int, str | None]]:
        """Read the rows after ``after``, in order.

        Yields:
            the row's number, the tokens, (n,) of int32, the time when the generation ended or the
            text was added, in seconds since 1970, and the name of an added text. Rows with tokens
            outside the vocabulary are skipped.
        """
        page: list[Any] = [None] * _PAGE
        while len(page) == _PAGE:
            page = self._run(_READ, self._tokenizer, after)
            for after, text, ended, name in page:
                tokens = np.frombuffer(text, np.int32)
                if len(tokens) > 1 and 0 <= tokens.min() <= tokens.max() < self.identity.vocab_size:
                    yield after, tokens, ended, name

    def evict(self, max_tokens: int) -> bool:
        """Delete the oldest answers until at most ``max_tokens`` of their tokens remain; return
        whether any were deleted.
        """
        return bool(self._run(_EVICT, self._tokenizer, max_tokens))

    def forget(self, rows: Iterable[int]) -> None:
        """Delete rows, and the index files, so that no file keeps the answers' text.

        Other processes drop these texts from their memory when they next add an answer.

        Raises:
            FileError: they cannot be deleted, or another process keeps the database busy.
        """
        with self.locked():
            self._db.executemany("DELETE FROM answers WHERE id = ?", zip(rows))
        if self.directory:
            # The pattern also matches a file that was only partly written.
            for file in self.directory.glob(f"*{self.identity.key}{INDEX}*"):
                file.unlink(missing_ok=True)
        self._run("VACUUM")
        ((busy, *_),) = self._run("PRAGMA wal_checkpoint(TRUNCATE)")
        if busy:
            raise FileError("another process is reading the kept answers; run the command again")

    def count(self) -> dict[str, Any]:
        """The number of "texts" that are answers, and of their "tokens"; "added" has the same for
        added texts by name, and "bytes" the size of everything with the index file.

        "oldest" and "newest" are the times when the first and the last answer ended, in seconds
        since 1970. They are None if there is no answer.
        """
        names = "texts", "tokens", "oldest", "newest"
        counted: dict[str | None, dict[str, Any]]
        counted = {None: dict(zip(names, (0, 0, None, None), strict=True))}
        for name, *figures in self._run(_COUNT, self._tokenizer):
            counted[name] = dict(zip(names, figures, strict=True))
        size = 4 * sum(group["tokens"] for group in counted.values())
        if self.index_file and self.index_file.exists():
            size += self.index_file.stat().st_size
        return counted.pop(None) | {"bytes": size, "added": counted}

    def earned_by_day(self) -> dict[str, dict[str, int]]:
        """The number of "answers" and the sums of EARNED, by the local day on which the answers
        ended.
        """
        days = self._run(_EARNED_BY_DAY, self._tokenizer)
        return {day: dict(zip(("answers", *EARNED), sums, strict=True)) for day, *sums in days}

    def close(self) -> None:
        """Close the database."""
        self._db.close()

    @property
    def index_file(self) -> Path | None:
        """The file with the index of this tokenizer's answers; None without a directory."""
        return self.directory / f"{self.identity.key}{INDEX}" if self.directory else None

    @contextmanager
    def locked(self) -> Iterator[int]:
        """Keep other processes from changing answers during the ``with`` block; yield the stamp."""
        with errors_of(self.directory), self._db:
            self._db.execute("BEGIN IMMEDIATE")
            yield self.stamp()

    def _run(self, statement: str, *values: Any) -> list[Any]:
        with errors_of(self.directory):
            return self._db.execute(statement, values).fetchall()


def kept_answers(directory: Path) -> list[KeptAnswers]:
    """The answers of all tokenizers in a directory, sorted by the tokenizers' names.

    Raises:
        FileError: the database cannot be read.
    """
    if not (directory / DATABASE).exists():
        return []
    with closing(connect(directory)) as database, errors_of(directory):
        rows = database.execute(_TOKENIZERS).fetchall()
    return [
        KeptAnswers(directory, TokenizerIdentity(*identity), model) for *identity, model in rows
    ]


def connect(directory: Path | None) -> sqlite3.Connection:
    """Open the database in a directory, which is created if missing.

    Args:
        directory: the directory; None makes a database in memory.

    Raises:
        FileError: the database cannot be made or opened, or another version of mlxspec made it.
    """
    with errors_of(directory):
        if directory:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            # SQLite gives its files next to the database the same mode.
            (directory / DATABASE).touch(PRIVATE)
        path = directory / DATABASE if directory else ":memory:"
        database = sqlite3.connect(path, _BUSY_SECONDS, check_same_thread=False)
        database.isolation_level = None  # transactions are explicit
        database.executescript(_OPTIONS)
        ((version,),) = database.execute("PRAGMA user_version").fetchall()
        if version == 0:
            database.execute("PRAGMA journal_mode = WAL")
            database.executescript(_TABLES)
        elif version != _VERSION:
            raise sqlite3.DatabaseError(f"made by another version of mlxspec, {version}")
        return database


@contextmanager
def errors_of(directory: Path | None) -> Iterator[None]:
    """Turn SQLite's and the system's errors into FileError."""
    try:
        yield
    except (OSError, sqlite3.Error, UnicodeError) as error:
        path = directory / DATABASE if directory else "memory"
        reason = getattr(error, "strerror", None) or error
        raise FileError(
            f"{path}: cannot be used ({reason}); set MLXSPEC_MEMORY to another directory, or "
            "remove a damaged file"
        ) from error


# --- settings ---

ENVIRONMENT_VARIABLE = "MLXSPEC_DATA_DIR"
"""The environment variable that names a directory to use instead of the user's data directory."""

SWITCH = "MLXSPEC_MEMORY"
"""The environment variable that overrides the user's settings: "on", "off", or a directory."""

_SETTINGS = "settings.json"


@dataclass(frozen=True)
class Settings:
    """Whether answers are kept, and how many.

    Attributes:
        on: whether answers are kept.
        max_tokens: the most tokens to keep per tokenizer.
    """

    on: bool = False
    max_tokens: int = KEPT_TOKENS


def memory_directory() -> Path:
    """The directory of the kept answers and their settings.

    Raises:
        OptionError: an environment variable does not name a valid directory.
    """
    switch, directory = os.environ.get(SWITCH), directory_in(SWITCH)
    if directory is None or switch in ("on", "off"):
        return data_directory() / "memory"
    if os.sep not in str(switch):
        raise OptionError(
            f"{SWITCH} is {switch!r}: set it to on, off, or a directory with a {os.sep} in its name"
        )
    return directory


def data_directory() -> Path:
    """The directory of all data kept between runs; by default in the user's data directory."""
    return directory_in(ENVIRONMENT_VARIABLE) or platformdirs.user_data_path("mlxspec")


def load_settings() -> Settings:
    """The user's settings.

    Raises:
        FileError: they cannot be read.
    """
    path = memory_directory() / _SETTINGS
    if not path.exists():
        return Settings()
    with suppress(OSError, ValueError, RecursionError):
        match load_json(path.read_bytes()):
            case {"on": bool(on), "max_tokens": int(n)} if n > 0:
                return Settings(on, n)
    raise FileError(f"{path}: cannot be read; remove it, and use `mlxspec memory` to set it again")


def settings_in_force() -> Settings:
    """The user's settings, overridden by :data:`SWITCH`.

    Raises:
        OptionError: as for :func:`memory_directory`.
        FileError: as for :func:`load_settings`.
    """
    switch = os.environ.get(SWITCH)
    if switch == "off":
        return Settings()
    settings = load_settings()
    return replace(settings, on=True) if switch else settings


def save_settings(settings: Settings) -> None:
    """Write the user's settings, completely or not at all.

    Raises:
        FileError: they cannot be written.
    """
    value = {"on": settings.on, "max_tokens": settings.max_tokens}
    path, remedy = (
        memory_directory() / _SETTINGS,
        f"set {ENVIRONMENT_VARIABLE} to another directory",
    )
    with replaced(path, parents=0o700, remedy=remedy) as file:
        file.write(json.dumps(value, indent=1).encode() + b"\n")
