"""The user's settings, and edits of settings files.

``mlxspec config`` edits the user's settings, and ``mlxspec connect`` those of other programs. Both
merge their settings into a file that the user may edit, and leave the rest unchanged.
"""

from __future__ import annotations

import json
import math
import os
import re
import stat
import tomllib
from collections.abc import Mapping, MutableMapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import platformdirs

from ..errors import FileError, MlxspecError, OptionError
from ..files import SHARED, check_writable, directory_in, replaced
from ..models.model_files import DEMO
from ..process import MLX_VARIABLES, variables_in

# --- the user's settings ---

ENVIRONMENT_VARIABLE = "MLXSPEC_CONFIG_DIR"
"""The variable that names another directory for the settings file."""

MODEL_VARIABLE = "MLXSPEC_MODEL"
"""The variable that names the default model; it overrides the file."""

MODEL, ALIAS, MLX_SETTINGS = "model", "alias", "mlx-settings"
ALIAS_PREFIX = f"{ALIAS}."
_ALIAS_NAME = re.compile(r"[A-Za-z0-9][\w.-]*")


class Setting(NamedTuple):
    """A setting.

    Attributes:
        kind: ``str`` (not blank), ``int`` (at least 1) or ``float`` (at least 0).
        must_be: its valid values, in words.
        commands: the commands whose option of this name has it as the default.
        pattern: the regular expression that a ``str`` must match.
    """

    kind: type
    must_be: str
    commands: tuple[str, ...] = ()
    pattern: str = r"[^\0]*[^\s\0][^\0]*"

    def takes(self, value: Any) -> bool:
        """Whether a value is valid."""
        if self.kind is str:
            return isinstance(value, str) and bool(re.fullmatch(self.pattern, value))
        if self.kind is int:
            return type(value) is int and value >= 1
        return type(value) in (int, float) and 0 <= value < math.inf


_GENERATING = ("generate", "explain", "chat")
_VARIABLE = rf"({'|'.join(MLX_VARIABLES)})=[1-9][0-9]{{0,5}}"

KEYS = {
    MODEL: Setting(str, "a model"),
    "max-tokens": Setting(int, "a whole number, 1 or more", _GENERATING),
    "temp": Setting(float, "a number, 0 or more", _GENERATING),
    "system-prompt": Setting(str, "a text", ("chat",)),
    MLX_SETTINGS: Setting(
        str,
        f"whole numbers, 1 or more for {', '.join(MLX_VARIABLES)}, in the form NAME=1,OTHER=512",
        pattern=f"{_VARIABLE}(,{_VARIABLE})*",
    ),
}
"""All settings except aliases."""

KNOWN = f"{', '.join(KEYS)} or {ALIAS_PREFIX}NAME"


@dataclass(frozen=True)
class UserConfig:
    """The user's settings.

    Attributes:
        path: the file, which may be missing.
        values: values by the name of the setting.
        aliases: models by alias.
    """

    path: Path
    values: Mapping[str, Any] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)

    def entries(self) -> dict[str, Any]:
        """All settings by name; aliases have names such as ``alias.fast``."""
        aliases = {ALIAS_PREFIX + name: model for name, model in self.aliases.items()}
        return {**self.values, **aliases}

    def resolved(self, name: str) -> str:
        """The model that an alias stands for; any other name is returned unchanged."""
        return self.aliases.get(name, name)

    def defaults_of(self, command: str) -> dict[str, Any]:
        """The defaults for a command, by the names of its parameters."""
        return {
            name.replace("-", "_"): value
            for name, value in self.values.items()
            if command in KEYS[name].commands
        }


def config_path() -> Path:
    """The path of the settings file."""
    directory = directory_in(ENVIRONMENT_VARIABLE) or platformdirs.user_config_path("mlxspec")
    return directory / "config.toml"


def load_config() -> UserConfig:
    """Read the user's settings; without a file they are empty.

    Raises:
        FileError: the file cannot be read, or has a wrong setting.
    """
    path = config_path()
    try:
        if path.exists() and not path.is_file():
            raise FileError(f"{path}: not a regular file; remove it")
        document = tomllib.loads(path.read_bytes().decode())
        check_settings(document)
    except FileNotFoundError:
        return UserConfig(path)
    except OptionError as error:
        raise FileError(f"{path}: {error}; correct the file") from error
    except OSError as error:
        raise FileError(f"{path}: cannot be read ({error.strerror}); make it readable") from error
    except (ValueError, RecursionError) as error:
        raise FileError(f"{path}: is not valid TOML ({error}); correct it, or remove it") from error
    aliases = document.pop(ALIAS, {})
    return UserConfig(path, document, aliases)


def apply_mlx_settings() -> None:
    """Put MLX's settings into the environment; variables that are already set override them.

    This must happen before MLX first uses a GPU.
    """
    with suppress(MlxspecError):  # the command reports it
        for name, value in variables_in(load_config().values.get(MLX_SETTINGS, "")).items():
            os.environ.setdefault(name, value)


def check_settings(document: Mapping[str, Any]) -> None:
    """Check all settings, in the form that they have in the file.

    Raises:
        OptionError: a setting is unknown or has a wrong value, or an alias or its model is invalid.
    """
    for name, value in document.items():
        if name not in (*KEYS, ALIAS):
            raise OptionError(f"unknown setting {name!r}: give one of {KNOWN}")
        if name in KEYS and not KEYS[name].takes(value):
            raise OptionError(f"{name} is {value!r}: give {KEYS[name].must_be}")
    aliases = document.get(ALIAS, {})
    if not isinstance(aliases, Mapping):
        raise OptionError(f"{ALIAS} is {aliases!r}: make it a table of models by alias")
    for name in aliases:
        if not _ALIAS_NAME.fullmatch(name) or name == DEMO:
            raise OptionError(
                f"{ALIAS_PREFIX}{name}: name it with letters, digits, '.', '-' and '_', and not "
                f"{DEMO!r}"
            )
    for name, model in aliases.items():
        if not KEYS[MODEL].takes(model):
            raise OptionError(f"{ALIAS_PREFIX}{name} is {model!r}: give a model")
        if model in aliases:
            raise OptionError(f"{ALIAS_PREFIX}{name} is {model!r}, another alias: give its model")


# --- edits of files ---

Settings = dict[str, Any]
"""Nested settings by name. None removes a setting. Lists of settings with a ``name`` are merged by
name."""

_INDENT = re.compile(r"\n([ \t]+)\S")


@dataclass(frozen=True)
class SettingsFile:
    """A settings file, and the settings to put into it.

    Attributes:
        path: the file; its suffix determines the format.
        settings: the values to set.
        defaults: values at the top to set only if the file has none.
    """

    path: Path
    settings: Settings
    defaults: Settings = field(default_factory=dict)

    def read(self) -> str:
        """The file's text; empty if the file does not exist.

        Raises:
            FileError: it cannot be read or written, or is not UTF-8.
        """
        try:
            place = self.path.resolve()
            if place.parent.is_dir():
                check_writable(place)
            return place.read_bytes().decode()
        except FileNotFoundError:
            return ""
        except UnicodeDecodeError as error:
            raise FileError(f"{self.path}: is not UTF-8 text; convert it") from error
        except (OSError, RuntimeError) as error:
            reason = getattr(error, "strerror", None) or "the link leads nowhere"
            raise FileError(f"{self.path}: {reason}; make it readable") from error

    def merged(self, text: str) -> str:
        """Merge the settings into a text of the file; the text of a new file is empty.

        Raises:
            FileError: something in the text would be lost.
        """
        kind = _KINDS[self.path.suffix]
        try:
            document = _parse(kind, text)
            before = _plain(document)
            for name, value in self.defaults.items():
                document.setdefault(name, value)
            _merge(document, self.settings)
            expected = _plain(document)
            if expected == before:
                return text
            new = _render(kind, document, text)
            if _plain(_parse(kind, new)) != expected:
                raise FileError("the edit would change other parts of it")
        except FileError as error:
            raise FileError(f"{self.path}: {error}; change it by hand") from error
        except (ValueError, RecursionError) as error:
            reason = " ".join(str(error).split())
            raise FileError(
                f"{self.path}: cannot be edited as {kind} ({reason}); change it by hand"
            ) from error
        return new

    def write(self, text: str) -> None:
        """Replace the file in one step; create its directory if it is missing.

        Raises:
            FileError: it cannot be written.
        """
        try:
            place = self.path.resolve()
            place.parent.mkdir(parents=True, exist_ok=True)
            mode = stat.S_IMODE(place.stat().st_mode) if place.exists() else SHARED
        except OSError as error:
            reason = error.strerror
            raise FileError(
                f"{self.path}: cannot be written ({reason}); create its directory"
            ) from error
        with replaced(place, mode) as file:
            file.write(text.encode())


def _merge(document: MutableMapping[str, Any], settings: Settings) -> None:
    """Put settings into a document, which is changed in place.

    Raises:
        FileError: nested settings meet a value of another type.
    """
    for name, value in settings.items():
        there = document.get(name)
        if value is None:
            document.pop(name, None)
        elif there is None or there in ([], {}):  # TOML would write ours on the line of an `[]`
            document[name] = _given(value)
        elif isinstance(value, dict):
            if not isinstance(there, MutableMapping):
                raise FileError(f"{name} must be an object")
            _merge(there, value)
        elif isinstance(value, list) and any(isinstance(one, dict) for one in value):
            if not isinstance(there, list):
                raise FileError(f"{name} must be a list")
            for entry in value:
                named = (one for one in there if isinstance(one, MutableMapping))
                same = next((one for one in named if one.get("name") == entry["name"]), None)
                if same is None:
                    there.append(_given(entry))
                else:
                    _merge(same, entry)
        elif there != value:
            document[name] = value


def _given(value: Any) -> Any:
    """A copy of a setting without entries that are None."""
    if isinstance(value, dict):
        return {name: _given(one) for name, one in value.items() if one is not None}
    return [_given(one) for one in value] if isinstance(value, list) else value


def _plain(value: Any) -> Any:
    """A copy as plain dictionaries and lists."""
    if isinstance(value, MutableMapping):
        return {name: _plain(one) for name, one in value.items()}
    return [_plain(one) for one in value] if isinstance(value, list) else value


_KINDS = {".json": "JSON without comments", ".toml": "TOML", ".yaml": "YAML", ".yml": "YAML"}


def _parse(kind: str, text: str) -> Any:
    """Parse a document; an empty text is an empty document.

    Raises:
        ValueError: it is not a document of this kind, or its comments would be lost.
    """
    if kind == "TOML":
        import tomlkit
        from tomlkit.exceptions import TOMLKitError

        try:
            return tomlkit.parse(text)
        except TOMLKitError as error:
            raise ValueError(error) from error
    if kind == "YAML":
        document = _plain(_parse_yaml(text))  # this also copies shared parts
    else:
        document = json.loads(text or "{}", object_pairs_hook=_without_repetition)
    if not isinstance(document, dict):
        raise ValueError("it must be an object")
    return document


def _parse_yaml(text: str) -> Any:
    import yaml

    class Loader(yaml.SafeLoader):
        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            found = super().construct_mapping(node, deep)
            if len(found) < len(node.value):
                raise ValueError("a name occurs twice, or is merged with <<")
            return found

    try:
        tokens = yaml.scan(text, Loader)
        end = 0
        for token in tokens:  # between tokens are white space and comments
            if "#" in text[end : token.start_mark.index]:
                raise ValueError(f"line {token.start_mark.line}: a comment would be lost")
            end = token.end_mark.index
        return yaml.load(text, Loader) or {}
    except yaml.YAMLError as error:
        raise ValueError(error) from error


def _without_repetition(pairs: list[tuple[str, Any]]) -> Settings:
    settings = dict(pairs)
    if len(settings) < len(pairs):
        raise ValueError("a name occurs twice")
    return settings


def _render(kind: str, document: Any, text: str) -> str:
    """Write a document as text; JSON is indented and escaped as in the earlier ``text``."""
    if kind == "TOML":
        import tomlkit

        return tomlkit.dumps(document)
    if kind == "YAML":
        import yaml

        return str(yaml.safe_dump(document, sort_keys=False, allow_unicode=True, width=1 << 20))
    found = _INDENT.search(text)
    indent = found[1] if found else 2
    written = json.dumps(document, indent=indent, ensure_ascii=text.isascii(), allow_nan=False)
    written.encode()  # raises an error for a lone surrogate, which UTF-8 cannot encode
    return written + "\n"
