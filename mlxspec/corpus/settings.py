"""Settings of the memory: which answers are kept, and where."""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass, replace
from pathlib import Path

import platformdirs

from ..errors import OptionError, StoreError
from ..files import directory_in, replaced
from ..jsonl import load_json
from .answers import KEPT_TOKENS, OnTrouble
from .tokenizer_identity import TokenizerIdentity

ENVIRONMENT_VARIABLE = "MLXSPEC_DATA_DIR"
"""Names a data directory other than the user's."""

SWITCH = "MLXSPEC_MEMORY"
"""Overrides the user's settings: "on", "off", or a directory to keep answers in."""

_KEY = re.compile(r"[0-9a-f]{16}")
_MOST_BYTES = 1 << 20


@dataclass(frozen=True)
class Settings:
    """Which answers are kept, and how many.

    Attributes:
        everything: whether answers are kept with every tokenizer.
        tokenizers: keys of the tokenizers that are exceptions to ``everything``.
        max_tokens: how many tokens to keep per tokenizer.
    """

    everything: bool = False
    tokenizers: frozenset[str] = frozenset()
    max_tokens: int = KEPT_TOKENS

    @property
    def keeps_some(self) -> bool:
        """Whether answers are kept with any tokenizer."""
        return self.everything or bool(self.tokenizers)

    def keeps(self, identity: TokenizerIdentity) -> bool:
        """Whether answers of this tokenizer are kept."""
        return (identity.key in self.tokenizers) != self.everything

    def with_tokenizer(self, identity: TokenizerIdentity, keeps: bool) -> Settings:
        """The settings that keep, or do not keep, answers of one tokenizer."""
        if self.keeps(identity) == keeps:
            return self
        return replace(self, tokenizers=self.tokenizers ^ {identity.key})


def memory_directory() -> Path:
    """The directory of the answers and the settings.

    Raises:
        OptionError: an environment variable names an impossible directory.
    """
    switch, named = os.environ.get(SWITCH), directory_in(SWITCH)
    if named is None or switch in ("on", "off"):
        return data_directory() / "memory"
    if os.sep not in str(switch):
        raise OptionError(
            f"{SWITCH} is {switch!r}: set it to on, off, or a directory with a {os.sep} in its name"
        )
    return named


def data_directory() -> Path:
    """The directory of all data kept between runs, by default the user's data directory.

    Raises:
        OptionError: :data:`ENVIRONMENT_VARIABLE` begins with ``~`` and an unknown user name.
    """
    return directory_in(ENVIRONMENT_VARIABLE) or platformdirs.user_data_path("mlxspec")


def load_settings(on_trouble: OnTrouble) -> Settings:
    """The user's settings; if they cannot be read, those that keep nothing.

    Args:
        on_trouble: called with a line if they cannot be read.
    """
    path = memory_directory() / "settings.json"
    try:
        with path.open("rb") as file:
            return _parsed(load_json(file.read(_MOST_BYTES)))
    except FileNotFoundError:
        return Settings()
    except OSError as error:
        reason = error.strerror
    except (ValueError, RecursionError) as error:
        reason = f"is damaged ({error})"
    on_trouble(f"{path}: {reason}; answers are not kept; set it again with `mlxspec memory`")
    return Settings()


def settings_in_force(on_trouble: OnTrouble) -> Settings:
    """The user's settings, overridden by :data:`SWITCH`.

    Args:
        on_trouble: called with a line if they cannot be read.

    Raises:
        OptionError: as :func:`memory_directory`.
    """
    switch = os.environ.get(SWITCH)
    if switch == "off":
        return Settings()
    settings = load_settings(on_trouble)
    return replace(settings, everything=True, tokenizers=frozenset()) if switch else settings


def save_settings(settings: Settings) -> None:
    """Write the user's settings, whole or not at all.

    Raises:
        StoreError: they cannot be written.
    """
    value = {
        "version": 1,
        "everything": settings.everything,
        "except": sorted(settings.tokenizers),
        "max_tokens": settings.max_tokens,
    }
    directory = memory_directory()
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise StoreError(f"{directory}: cannot be made ({error.strerror})") from error
    with replaced(directory / "settings.json", StoreError) as file:
        file.write(json.dumps(value, indent=1).encode() + b"\n")


def _parsed(value: object) -> Settings:
    """Parse the content of the settings file; raises ValueError for other content."""
    match value:
        case {
            "version": 1,
            "everything": bool(everything),
            "except": list(names),
            "max_tokens": int(max_tokens),
        } if max_tokens >= 2 and all(isinstance(n, str) and _KEY.fullmatch(n) for n in names):
            return Settings(everything, frozenset(names), max_tokens)
    raise ValueError("its settings are of another version")
