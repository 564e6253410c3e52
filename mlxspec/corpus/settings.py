"""Where answers are kept, and whether."""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import platformdirs

from ..errors import OptionError, StoreError
from ..files import replaced
from ..jsonl import load_json
from .kept import KEPT_TOKENS, KeptTexts, OnTrouble, reason
from .tokenizer_identity import TokenizerIdentity

ENVIRONMENT_VARIABLE = "MLXSPEC_DATA_DIR"
"""Names another directory for what is kept than the user's data directory."""

SWITCH = "MLXSPEC_MEMORY"
"""Goes before the user's settings: "on", "off", or a directory to keep answers in."""

_SETTINGS = "settings.json"
_ABOUT = "about.json"
_NAME = re.compile(r"[0-9a-f]{16}")
_MOST_BYTES = 1 << 20
_ELSEWHERE = f"{SWITCH} may name another directory"
_REMEDY = "set it again with `mlxspec memory`"


@dataclass(frozen=True)
class Settings:
    """What is kept, and how much of it.

    Attributes:
        everything: whether answers are kept with every tokenizer.
        tokenizers: those with which they are, or with ``everything`` those with which they are
            not, by the names of their directories.
        max_tokens: how many tokens are kept for a tokenizer.
    """

    everything: bool = False
    tokenizers: frozenset[str] = frozenset()
    max_tokens: int = KEPT_TOKENS

    @property
    def keeps_some(self) -> bool:
        """Whether answers are kept with any tokenizer."""
        return self.everything or bool(self.tokenizers)

    def keeps(self, identity: TokenizerIdentity) -> bool:
        """Whether answers of this tokenizer's tokens are kept."""
        return (directory_name(identity) in self.tokenizers) != self.everything


@dataclass(frozen=True)
class About:
    """Of which tokenizer the answers in a directory are.

    Attributes:
        directory: where they are.
        identity: the tokenizer.
        model: the name or path from which it can be loaded again; "" where there is none.
    """

    directory: Path
    identity: TokenizerIdentity
    model: str

    def open(self, max_tokens: int = KEPT_TOKENS) -> KeptTexts:
        """The answers.

        Raises:
            StoreError: the directory cannot be read.
        """
        return _opened(self.directory, self.identity, max_tokens)


def memory_directory() -> Path:
    """Where the directories of all tokenizers are, and the settings.

    Raises:
        OptionError: an environment variable names no directory that there can be.
    """
    if switched := _switched_to():
        return _home_of(SWITCH, switched)
    return data_directory() / "memory"


def data_directory() -> Path:
    """Where all is that is kept over runs, by default the user's data directory.

    Raises:
        OptionError: :data:`ENVIRONMENT_VARIABLE` names no directory that there can be.
    """
    if chosen := os.environ.get(ENVIRONMENT_VARIABLE):
        return _home_of(ENVIRONMENT_VARIABLE, chosen)
    return platformdirs.user_data_path("mlxspec")


def _home_of(variable: str, directory: str) -> Path:
    try:
        return Path(directory).expanduser()
    except RuntimeError:
        raise OptionError(
            f"{variable} is {directory!r}: that user's home directory is not known; "
            "name another directory"
        ) from None


def _switched_to() -> str | None:
    """The directory that :data:`SWITCH` names.

    Raises:
        OptionError: it names none, and is neither "on" nor "off".
    """
    switch = os.environ.get(SWITCH)
    if not switch or switch in ("on", "off"):
        return None
    if os.sep not in switch:
        raise OptionError(
            f"{SWITCH} is {switch!r}: set it to on, off, or a directory with a {os.sep} in its name"
        )
    return switch


def directory_name(identity: TokenizerIdentity) -> str:
    """The name of a tokenizer's directory: 16 hexadecimal digits."""
    return identity.fingerprint.hex()[:16]


def load_settings(tell: OnTrouble) -> Settings:
    """The user's settings. Where they cannot be read, nothing is kept.

    Args:
        tell: called with a line if they cannot be.
    """
    path = memory_directory() / _SETTINGS
    try:
        return _parsed(_read_json(path))
    except FileNotFoundError:
        return Settings()
    except (OSError, ValueError, RecursionError) as error:
        tell(f"{path}: {reason(error)}; no answer is kept; {_REMEDY}")
        return Settings()


def settings_in_force(tell: OnTrouble) -> Settings:
    """The user's settings, or what :data:`SWITCH` says instead.

    Args:
        tell: called with a line if they cannot be read.

    Raises:
        OptionError: as :func:`memory_directory`.
    """
    switch = os.environ.get(SWITCH)
    if switch == "off":
        return Settings()
    settings = load_settings(tell)
    return replace(settings, everything=True, tokenizers=frozenset()) if switch else settings


def save_settings(settings: Settings) -> None:
    """Write the user's settings, whole or not at all.

    Raises:
        StoreError: they cannot be written.
    """
    names = sorted(settings.tokenizers)
    keep = {"keep": True, "except": names} if settings.everything else {"keep": names}
    _write_json(
        memory_directory() / _SETTINGS, {"version": 1, **keep, "max_tokens": settings.max_tokens}
    )


def open_kept(
    identity: TokenizerIdentity,
    model: str = "",
    max_tokens: int = KEPT_TOKENS,
    root: Path | None = None,
) -> KeptTexts:
    """Open a tokenizer's directory; it is made if it is not there.

    Args:
        identity: the tokenizer.
        model: the name or path from which it can be loaded again.
        max_tokens: how many tokens are kept.
        root: where the directories of all tokenizers are; by default :func:`memory_directory`.

    Raises:
        StoreError: it cannot be made or written.
    """
    root = root or memory_directory()
    _make_private(root)
    directory = root / directory_name(identity)
    kept = _opened(directory, identity, max_tokens)
    about = {
        "version": 1,
        "tokenizer": identity.name,
        "vocab_size": identity.vocab_size,
        "fingerprint": identity.fingerprint.hex(),
        "model": model,
    }
    path = directory / _ABOUT
    try:
        known = _read_json(path)
    except (OSError, ValueError, RecursionError):
        known = None
    if known != about and (model or known is None):
        _write_json(path, about)
    return kept


def kept_directories(tell: OnTrouble) -> list[About]:
    """All tokenizers of which answers are kept, in the order of their names.

    Args:
        tell: called with a line for each directory that cannot be read.
    """
    found: list[About] = []
    root = memory_directory()
    try:
        names = sorted(entry for entry in os.listdir(root) if _NAME.fullmatch(entry))
    except FileNotFoundError:
        return []
    except OSError as error:
        tell(f"{root}: {reason(error)}")
        return []
    for name in names:
        path = root / name / _ABOUT
        try:
            found.append(_about(root / name, _read_json(path)))
        except (OSError, ValueError, RecursionError) as error:
            tell(
                f"{path}: {reason(error)}; what is kept there cannot be shown; generate with its "
                f"model once, or remove {root / name}"
            )
    return sorted(found, key=lambda about: about.identity.name)


def _opened(directory: Path, identity: TokenizerIdentity, max_tokens: int) -> KeptTexts:
    try:
        return KeptTexts(directory, identity, max_tokens)
    except OSError as error:
        raise StoreError(f"{directory}: cannot be made ({reason(error)}); {_ELSEWHERE}") from error


def _read_json(path: Path) -> object:
    """Raises OSError, ValueError or RecursionError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ValueError("is no regular file")
        try:
            value: object = load_json(file.read(_MOST_BYTES))
        except (ValueError, RecursionError):
            raise ValueError("is no JSON") from None
        return value


def _make_private(directory: Path) -> None:
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise StoreError(f"{directory}: cannot be made ({reason(error)}); {_ELSEWHERE}") from error


def _write_json(path: Path, value: object) -> None:
    _make_private(path.parent)
    with replaced(path, StoreError) as file:
        file.write(json.dumps(value, indent=1).encode() + b"\n")


def _parsed(value: object) -> Settings:
    """Raises ValueError."""
    if not isinstance(value, dict) or value.get("version") != 1:
        raise ValueError("holds no settings of this version")
    keep, max_tokens = value.get("keep"), value.get("max_tokens")
    if type(max_tokens) is not int or max_tokens < 2:
        raise ValueError("max_tokens is no number from 2 on")
    names = value.get("except", []) if keep is True else [] if keep is False else keep
    if not isinstance(names, list) or not _are_names(names):
        raise ValueError("keep is neither true nor false nor a list of directories")
    return Settings(keep is True, frozenset(names), max_tokens)


def _are_names(values: Iterable[object]) -> bool:
    return all(isinstance(value, str) and _NAME.fullmatch(value) for value in values)


def _about(directory: Path, value: object) -> About:
    """Raises ValueError."""
    if isinstance(value, dict) and value.get("version") == 1:
        name, vocab_size = value.get("tokenizer"), value.get("vocab_size")
        fingerprint, model = value.get("fingerprint"), value.get("model")
        if (
            isinstance(name, str)
            and isinstance(model, str)
            and type(vocab_size) is int
            and vocab_size > 0
            and isinstance(fingerprint, str)
            and re.fullmatch("[0-9a-f]{64}", fingerprint)
            and fingerprint.startswith(directory.name)
        ):
            identity = TokenizerIdentity(name, vocab_size, bytes.fromhex(fingerprint))
            return About(directory, identity, model)
    raise ValueError("does not say of which tokenizer")
