"""What the user has set for all commands: a default model, aliases of models, defaults of options.

It stands in a file that ``mlxspec config`` writes, and that can be edited by hand.
"""

from __future__ import annotations

import math
import os
import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import platformdirs

from ..errors import OptionError, SettingsError
from ..models.model_files import DEMO

ENVIRONMENT_VARIABLE = "MLXSPEC_CONFIG_DIR"
"""Names another directory for the file than the user's configuration directory."""

MODEL_VARIABLE = "MLXSPEC_MODEL"
"""Names the default model, before the file does."""

MODEL, ALIAS = "model", "alias"
ALIAS_PREFIX = f"{ALIAS}."
_ALIAS_NAME = re.compile(r"[A-Za-z0-9][\w.-]*")


class Setting(NamedTuple):
    """Something that can be set.

    Attributes:
        about: what it is.
        must_be: what values it takes.
        of_text: makes its value of what stands on a command line.
        is_right: whether a value is one of them.
        commands: those whose option of this name gets it for a default.
    """

    about: str
    must_be: str
    of_text: Callable[[str], Any]
    is_right: Callable[[Any], bool]
    commands: tuple[str, ...] = ()


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip()) and "\0" not in value


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 1


def _is_temperature(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value < math.inf


_GENERATING = ("generate", "explain", "chat")
_OF = "of generate, explain and chat"

KEYS = {
    MODEL: Setting("the default model", "a model", str, _is_text),
    "max-tokens": Setting(
        f"--max-tokens {_OF}", "a whole number from 1 on", int, _is_count, _GENERATING
    ),
    "temp": Setting(f"--temp {_OF}", "a number from 0 on", float, _is_temperature, _GENERATING),
    "system-prompt": Setting("--system-prompt of chat", "a text", str, _is_text, ("chat",)),
}
"""All settings except aliases."""

KNOWN = f"{', '.join(KEYS)} and {ALIAS_PREFIX}NAME"


@dataclass(frozen=True)
class UserConfig:
    """What is set.

    Attributes:
        path: the file, which need not be there.
        values: by the name of the setting.
        aliases: models by the user's names for them.
    """

    path: Path
    values: Mapping[str, Any] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)

    def entries(self) -> dict[str, Any]:
        """All of it, with the aliases under names such as ``alias.fast``."""
        aliases = {ALIAS_PREFIX + name: model for name, model in self.aliases.items()}
        return {**self.values, **aliases}

    def resolved(self, name: str) -> str:
        """The model that a name stands for: an alias's model, otherwise the name itself."""
        return self.aliases.get(name, name)

    def defaults_of(self, command: str) -> dict[str, Any]:
        """What is set of a command's options, by the names of its parameters."""
        return {
            name.replace("-", "_"): value
            for name, value in self.values.items()
            if command in KEYS[name].commands
        }


def config_path() -> Path:
    """Where the file is.

    Raises:
        OptionError: the environment variable names no directory that there can be.
    """
    chosen = os.environ.get(ENVIRONMENT_VARIABLE)
    if not chosen:
        return platformdirs.user_config_path("mlxspec") / "config.toml"
    try:
        return Path(chosen).expanduser() / "config.toml"
    except RuntimeError:
        raise OptionError(
            f"{ENVIRONMENT_VARIABLE} is {chosen!r}: that user's home directory is not known; "
            "name another directory"
        ) from None


def load_config() -> UserConfig:
    """What the user has set; nothing where there is no file.

    Raises:
        OptionError: as :func:`config_path`.
        SettingsError: the file cannot be read, or holds what cannot be set.
    """
    path = config_path()
    try:
        if path.exists() and not path.is_file():
            raise SettingsError(f"{path}: no regular file; remove it")
        return _parsed(path, tomllib.loads(path.read_bytes().decode()))
    except FileNotFoundError:
        return UserConfig(path)
    except OSError as error:
        raise SettingsError(
            f"{path}: cannot be read ({error.strerror}); make it a file that you can read"
        ) from error
    except (ValueError, RecursionError) as error:
        raise SettingsError(
            f"{path}: is not valid TOML ({error}); correct it, or remove it"
        ) from error


def _parsed(path: Path, document: Mapping[str, Any]) -> UserConfig:
    values = {name: value for name, value in document.items() if name != ALIAS}
    aliases = document.get(ALIAS, {})
    try:
        for name, value in values.items():
            check_value(name, value)
        if not isinstance(aliases, Mapping):
            raise OptionError(f"{ALIAS} is {aliases!r}: it is a table of models by their aliases")
        for name, value in aliases.items():
            check_alias(name, value, aliases)
    except OptionError as error:
        raise SettingsError(f"{path}: {error}; correct the file") from error
    return UserConfig(path, values, aliases)


def check_value(name: str, value: Any) -> None:
    """Refuse a setting that there is not, or a value that it does not take.

    Raises:
        OptionError: it is one.
    """
    setting = KEYS.get(name)
    if setting is None:
        raise OptionError(f"there is no setting {name!r}: there are {KNOWN}")
    if not setting.is_right(value):
        raise OptionError(f"{name} is {value!r}: give {setting.must_be}")


def check_alias(name: str, model: Any, aliases: Mapping[str, Any]) -> None:
    """Refuse an alias that cannot be one, or that stands for no model.

    Args:
        name: the alias.
        model: what it stands for.
        aliases: all of them.

    Raises:
        OptionError: it is one.
    """
    if not _ALIAS_NAME.fullmatch(name) or name == DEMO:
        raise OptionError(
            f"{ALIAS_PREFIX}{name}: an alias has letters, digits, '.', '-' and '_', and is not "
            f"{DEMO!r}"
        )
    if not _is_text(model):
        raise OptionError(f"{ALIAS_PREFIX}{name} is {model!r}: give a model")
    if model in aliases:
        raise OptionError(f"{ALIAS_PREFIX}{name} is {model!r}, an alias itself: give its model")
