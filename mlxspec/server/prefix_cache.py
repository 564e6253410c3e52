"""The prefix cache: KV caches of earlier requests, which later requests continue.

An entry holds a :class:`mlxspec.Session`. A request whose prompt continues an entry borrows the
session itself. A request that only shares a prefix with the entry gets a copy of the prefix. A lent
session can still be copied, so concurrent requests share their common prefix.

There are no locks: one thread owns the cache, its model and the generations.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import math
from array import array
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache

from ..corpus.suffix_index import common_length
from ..engine.caches import for_steps, is_trimmable_anywhere, parts
from ..engine.params import CacheOptions
from ..engine.prompt_cache import digest_of_weights, read_prompt_cache_metadata
from ..errors import FileError, MlxspecError
from ..files import is_ours_alone
from ..generation.session import Session

_log = logging.getLogger("mlxspec.server")

_LEAST = 16  # tokens; a shorter common prefix is not worth a copy
_OPENING = 16  # the most tokens at a prompt's end that open the answer; later prompts may lack them
_WORTH_WAITING = 64  # tokens of prefill; no request waits for another to save fewer
_FORMAT = 1
_FILES = "[0-9a-f]" * 64 + "*.safetensors"

_uses = itertools.count(1)  # counts uses over all models, to compare when entries were last used


@dataclass(eq=False)
class _Entry:
    """A cached context.

    Attributes:
        tokens: the session's tokens, or the prompt's while the session is lent.
        n_prompt: how many of the tokens a client has sent; the answer's follow.
        partition: a digest of the partition's name.
        nbytes: the memory of the session.
        branch: the length up to which a copy of the cache is to be kept, since earlier prompts
            diverge there; 0 for none.
        shared: whether the entry is such a copy, which is never continued itself.
        used: the number of its last use, counted over all models' entries.
    """

    tokens: array[int]
    n_prompt: int
    partition: str
    session: Session
    nbytes: int = 0
    branch: int = 0
    shared: bool = False
    used: int = 0


@dataclass(eq=False)
class PrefixCache:
    """Keeps the caches of requests to one model, until :meth:`make_room` evicts them.

    The memory of lent sessions belongs to their requests.

    Some caches (states, windows) cannot be cut to any length. With these, a prompt that diverges
    from an earlier one leaves a copy of the cache up to that point as an entry, which later prompts
    copy. So the third prompt with a common prefix is the first that need not compute it.

    Attributes:
        model: an mlx-lm model.
        options: the cache options, which all generations share.
        chunks_matter: :meth:`.LoadedModel.chunks_matter`; a prompt for which it returns True shares
            no prefix. By default, all prompts may share theirs.
        hits: how many prompts matched a cached prefix.
        misses: how many prompts did not.
        forks: how many of the hits were copies.
        evictions: how many entries were evicted.
    """

    model: nn.Module
    options: CacheOptions = field(default_factory=CacheOptions)
    chunks_matter: Callable[[int, list[Any]], bool] = lambda length, caches: False

    def __post_init__(self) -> None:
        self.hits = self.misses = self.forks = self.evictions = 0
        self._idle: dict[_Entry, None] = {}
        """Idle entries, the least recently used first."""
        self._lent: dict[Session, _Entry] = {}
        """The entries of lent sessions."""

    @property
    def nbytes(self) -> int:
        """The memory of all idle entries."""
        return sum(entry.nbytes for entry in self._idle.copy())  # read by the status page, too

    @property
    def oldest(self) -> float:
        """The last use of the entry that :meth:`make_room` evicts next, or infinity."""
        return next((entry.used for entry in self._idle), math.inf)

    @property
    def entries(self) -> int:
        """How many idle entries there are."""
        return len(self._idle)

    # --- lending ---

    def lend(
        self,
        prompt: Sequence[int],
        partition: str = "",
        make_room: Callable[[], object] = lambda: None,
    ) -> Session:
        """Lend a session that holds as much of a prompt as possible.

        The caller returns it with :meth:`give_back`.

        Args:
            partition: the partition's name, such as the client's key. Entries of other partitions
                are never used.
            make_room: called before anything is copied. It may evict idle entries; an entry that is
                being lent is no longer among them.
        """
        if self._shares_nothing(prompt):
            make_room()
            self.misses += 1
            return Session()
        tokens, name = array("i", prompt), _digest(partition)
        entry, length, moves = self._best(tokens, name)
        if entry and moves:
            del self._idle[entry]
        elif entry in self._idle:
            self._touch(entry)
        make_room()
        if entry and (moves or entry in (*self._idle, *self._lent.values())):
            session = entry.session if moves else entry.session.fork(length, room=len(tokens))
            self.hits += 1
            self.forks += 0 if moves else 1
        else:
            session, length = Session(), 0
            self.misses += 1
        lent = _Entry(tokens, len(tokens), name, session)
        if not self._cuttable:
            # Keep a copy of the cache where the prompt diverges from others, for later prompts.
            longest = max((common for common, _ in self._matches(tokens, name)), default=0)
            common = min(longest, len(tokens) - 1)
            if common - length >= _WORTH_WAITING:
                session.mark_at = lent.branch = common
        self._lent[session] = lent
        return session

    def should_wait(self, prompt: Sequence[int], partition: str = "") -> bool:
        """Whether a request should wait while a running one computes a prefix of its prompt.

        Afterwards, :meth:`lend` finds that prefix. When several requests with the same long prefix
        arrive at once, all but the first should wait.
        """
        if self._shares_nothing(prompt):
            return False
        tokens, name = array("i", prompt), _digest(partition)
        lent = (entry for entry in self._lent.values() if entry.partition == name)
        coming = max((self._coming(entry, tokens) for entry in lent), default=0)
        if coming < _WORTH_WAITING:
            return False
        return coming - self._best(tokens, name)[1] >= _WORTH_WAITING

    def _coming(self, entry: _Entry, tokens: array[int]) -> int:
        """The length of the prompt's prefix that a running request is about to compute, or 0."""
        last = entry.n_prompt - 1
        coming = min(common_length(entry.tokens, tokens), len(tokens) - 1)
        if not self._cuttable:  # it can be copied only at its marks; the last is near its end
            marks = (entry.branch, last - _OPENING)
            coming = max((mark for mark in marks if mark <= coming), default=0)
        return coming if entry.session.length < min(coming, last) else 0

    def give_back(self, session: Session) -> None:
        """Take back a session and keep its contents, however its generation ended."""
        entry = self._lent.pop(session, None)
        if entry is None:  # its prompt shares no prefix
            return
        tokens = entry.tokens = array("i", session.tokens)
        entry.nbytes = session.nbytes
        if not tokens or not self._alike(entry, len(tokens)):
            return
        entry.n_prompt = min(entry.n_prompt, len(tokens))
        for common, other in self._matches(tokens, entry.partition):
            is_prefix = common == len(other.tokens) and other in self._idle and not other.shared
            if is_prefix and session.reusable_prefix(common) == common:
                del self._idle[other]
        self._touch(entry)
        if entry.branch and session.reusable_prefix(entry.branch) == entry.branch:
            self._keep_branch(entry)

    def _keep_branch(self, entry: _Entry) -> None:
        """Keep a copy of a shared prefix, since later states cannot be trimmed to it."""
        length, name = entry.branch, entry.partition
        tokens = entry.tokens[:length]
        if not any(
            other.shared and other.tokens == tokens for _, other in self._matches(tokens, name)
        ):
            session = entry.session.fork(length)
            self._touch(_Entry(tokens, length, name, session, session.nbytes, shared=True))

    def make_room(self, nbytes: int) -> int:
        """Evict idle entries, the least recently used first.

        Returns:
            the freed bytes; fewer than ``nbytes`` if no entries are left.
        """
        freed = 0
        while freed < nbytes and self._idle:
            entry = next(iter(self._idle))
            del self._idle[entry]
            freed += entry.nbytes
            self.evictions += 1
        if freed:
            mx.clear_cache()
        return freed

    def _matches(self, tokens: array[int], partition: str) -> list[tuple[int, _Entry]]:
        """A partition's entries, each with the length of the common prefix, longest first."""
        matches = [
            (common_length(entry.tokens, tokens), entry)
            for entry in (*self._idle, *self._lent.values())
            if entry.partition == partition
        ]
        return sorted(matches, key=lambda match: -match[0])

    def _best(self, tokens: array[int], partition: str) -> tuple[_Entry | None, int, bool]:
        """Find the entry that holds the longest prefix of a prompt.

        Returns:
            the entry, the length of the prefix that can be continued, and whether the session
            itself may be lent.
        """
        best, length, moves = None, 0, False
        for common, entry in self._matches(tokens, partition):
            usable = min(common, len(tokens) - 1)  # the last token belongs to the first step
            if usable < max(1, length):
                break
            reached = entry.session.reusable_prefix(usable)
            if not self._alike(entry, reached):
                continue
            continues = self._continues(entry, common)
            least = 1 if continues else _LEAST
            if reached >= least and (reached, continues) > (length, moves):
                best, length, moves = entry, reached, continues
        return best, length, moves

    def _shares_nothing(self, prompt: Sequence[int]) -> bool:
        """Whether a prompt must run from its beginning, since its result depends on its chunks."""
        return self.chunks_matter(len(prompt) - 1, self._caches)

    def _alike(self, entry: _Entry, length: int) -> bool:
        """Whether a longer prompt would make the same cache of an entry's first ``length`` tokens.

        Where a cache is quantised depends on the length of its prompt, if the prompt is short.
        """
        first = min(entry.n_prompt - 1, length)
        return not entry.session.quantized or first >= self.options.quantized_at

    def _continues(self, entry: _Entry, common: int) -> bool:
        """Whether an entry's session may be cut to ``common`` tokens and lent, instead of copied.

        Cutting may drop only an answer that the client changed or left out, with the tokens that
        open it. It may not drop more tokens than it keeps.
        """
        if entry.shared or entry not in self._idle:
            return False
        in_prompt, rest = entry.n_prompt - common, len(entry.tokens) - common
        return in_prompt <= min(_OPENING, common // 2) and rest <= max(common, _OPENING)

    def _touch(self, entry: _Entry) -> None:
        """Make an idle entry the most recently used."""
        self._idle.pop(entry, None)
        self._idle[entry] = None
        entry.used = next(_uses)

    @cached_property
    def _cuttable(self) -> bool:
        """Whether caches can be cut to any length."""
        return all(map(is_trimmable_anywhere, parts(map(for_steps, self._caches))))

    @cached_property
    def _caches(self) -> list[Any]:
        """Empty caches, with which every prompt begins."""
        return make_prompt_cache(self.model, self.options.max_kv_size)

    # --- on disk ---

    def save(self, directory: Path) -> None:
        """Write each idle entry to a file for :meth:`load`, and remove outdated files.

        If an error prevents this, a warning is logged. Only one process may use a directory.
        """
        written: set[Path] = set()
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not self._trusts(directory):
                return
            for entry in self._idle:  # in order of use, which the files' times then show
                written.add(self._write(entry, directory))
            for pattern in (_FILES, f".{_FILES}.*"):  # also files that a killed process left behind
                for path in {*directory.glob(pattern)} - written:
                    _remove(path)
        except (OSError, MlxspecError) as error:
            reason = getattr(error, "strerror", None) or error
            _log.warning(
                "the prefix cache cannot be saved in %s (%s): name another directory with "
                "--cache-dir",
                directory,
                reason,
            )

    def _write(self, entry: _Entry, directory: Path) -> Path:
        """Write an entry's file, whose name ends with its checksum, unless a usable one exists."""
        described = {
            "model": self._fingerprint,
            "partition": entry.partition,
            "prompt_tokens": str(entry.n_prompt),
            "shared": str(int(entry.shared)),
        }
        name = _digest(f"{described} {entry.tokens.tolist()}")
        for path in directory.glob(f"{name}-*.safetensors"):
            if path.is_dir() or is_ours_alone(path):
                path.touch()
                return path
        path = directory / f"{name}.safetensors"
        entry.session.save(path, described)
        return path.rename(path.with_stem(f"{name}-{_checksum(path)}"))

    def load(self, directory: Path, max_bytes: int) -> None:
        """Load as many of the entries that :meth:`save` wrote as fit, the last used first.

        Files that belong to another model are skipped with a warning, as is any file or directory
        that other users may write to. Damaged files are removed, so that :meth:`save` does not
        keep them for the same entry.

        Args:
            max_bytes: the most bytes of all loaded entries.
        """
        if not directory.is_dir() or not self._trusts(directory):
            return
        entries: list[_Entry] = []
        for path in sorted(directory.glob(_FILES), key=lambda file: -file.lstat().st_mtime):
            if (entry := self._read(path)) and entry.nbytes <= max_bytes:
                max_bytes -= entry.nbytes
                entries.append(entry)
        for entry in reversed(entries):
            self._touch(entry)

    def _trusts(self, path: Path) -> bool:
        """Whether no other user may write to a file or directory; warns if one may.

        Raises:
            OSError: it does not exist.
        """
        if not (trusted := is_ours_alone(path)):
            _log.warning("%s: ignored, since other users may write to it; remove it", path)
        return trusted

    def _read(self, path: Path) -> _Entry | None:
        """The entry of a file; None if it cannot be used."""
        try:
            if not path.is_file():  # to open a pipe would wait for a writer
                raise FileError(f"{path}: not a regular file")
            if not self._trusts(path):
                return None
            if path.stem.rpartition("-")[2] != _checksum(path):
                raise FileError(f"{path}: damaged")
            metadata = read_prompt_cache_metadata(path)
            if metadata["model"] != self._fingerprint:
                _log.warning(
                    "%s: ignored, since it was made for another model, version or options", path
                )
                return None
            session, n_prompt = Session.load(path), int(metadata["prompt_tokens"])
            entry = _Entry(array("i", session.tokens), n_prompt, metadata["partition"], session)
            entry.nbytes, entry.shared = session.nbytes, metadata["shared"] == "1"
            return entry
        except (OSError, FileError, ValueError, KeyError):
            _log.warning("%s: ignored, since it is damaged or not from a prefix cache", path)
            with suppress(OSError):
                _remove(path)
            return None

    @cached_property
    def _fingerprint(self) -> str:
        """A digest that distinguishes models, fine-tuned ones included, and cache options."""
        options = asdict(self.options)  # the step size, too: it affects what is quantised
        versions = [version("mlx"), version("mlx-lm")]
        described = json.dumps([_FORMAT, digest_of_weights(self.model), options, versions])
        return hashlib.sha256(described.encode()).hexdigest()


def _remove(path: Path) -> None:
    """Remove a file or a link; directories stay."""
    if path.is_symlink() or not path.is_dir():
        path.unlink()


def _checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _digest(text: str) -> str:
    """An identifier for a text, such as a client's key, that does not reveal it."""
    return hashlib.sha256(text.encode()).hexdigest()
