"""Settings files: what the user has set for all commands, and how files are edited.

``mlxspec config`` writes the user's own, and ``mlxspec connect`` those of other programs. Both can
be edited by hand: settings are merged in, and all else stays.
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

from ..errors import MlxspecError, OptionError, SettingsError
from ..files import SHARED, check_writable, replaced
from ..models.model_files import DEMO
from ..process import MLX_VARIABLES, variables_in

# --- what the user has set ---

ENVIRONMENT_VARIABLE = "MLXSPEC_CONFIG_DIR"
"""Names another directory for the file than the user's configuration directory."""

MODEL_VARIABLE = "MLXSPEC_MODEL"
"""Names the default model, before the file does."""

MODEL, ALIAS, MLX_SETTINGS = "model", "alias", "mlx-settings"
ALIAS_PREFIX = f"{ALIAS}."
_ALIAS_NAME = re.compile(r"[A-Za-z0-9][\w.-]*")


class Setting(NamedTuple):
    """Something that can be set.

    Attributes:
        about: what it is.
        kind: ``str`` (not blank), ``int`` (at least 1) or ``float`` (at least 0).
        must_be: what values it takes, in words.
        commands: those whose option of this name gets it for a default.
        pattern: what a ``str`` must match.
    """

    about: str
    kind: type
    must_be: str
    commands: tuple[str, ...] = ()
    pattern: str = r"[^\0]*[^\s\0][^\0]*"

    def takes(self, value: Any) -> bool:
        """Whether it can be set to a value."""
        if self.kind is str:
            return isinstance(value, str) and bool(re.fullmatch(self.pattern, value))
        if self.kind is int:
            return type(value) is int and value >= 1
        return type(value) in (int, float) and 0 <= value < math.inf


_GENERATING = ("generate", "explain", "chat")
_OF = "of generate, explain and chat"
_VARIABLE = rf"({'|'.join(MLX_VARIABLES)})=[1-9][0-9]{{0,5}}"

KEYS = {
    MODEL: Setting("the default model", str, "a model"),
    "max-tokens": Setting(f"--max-tokens {_OF}", int, "a whole number from 1 on", _GENERATING),
    "temp": Setting(f"--temp {_OF}", float, "a number from 0 on", _GENERATING),
    "system-prompt": Setting("--system-prompt of chat", str, "a text", ("chat",)),
    MLX_SETTINGS: Setting(
        "MLX's tuning variables, from 'bench --tune'",
        str,
        f"whole numbers from 1 on for {', '.join(MLX_VARIABLES)}, such as "
        f"{','.join(f'{name}={value}' for name, value in [*MLX_VARIABLES.items()][1:])}",
        pattern=f"{_VARIABLE}(,{_VARIABLE})*",
    ),
}
"""All settings except aliases."""

KNOWN = f"{', '.join(KEYS)} and {ALIAS_PREFIX}NAME"


@dataclass(frozen=True)
class UserConfig:
    """The user's settings.

    Attributes:
        path: the file, which may be missing.
        values: by the name of the setting.
        aliases: models by the user's names for them.
    """

    path: Path
    values: Mapping[str, Any] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)

    def entries(self) -> dict[str, Any]:
        """All settings by name; aliases have names such as ``alias.fast``."""
        aliases = {ALIAS_PREFIX + name: model for name, model in self.aliases.items()}
        return {**self.values, **aliases}

    def resolved(self, name: str) -> str:
        """The model that a name stands for: an alias's model, otherwise the name itself."""
        return self.aliases.get(name, name)

    def defaults_of(self, command: str) -> dict[str, Any]:
        """The defaults that are set for a command, by the names of its parameters."""
        return {
            name.replace("-", "_"): value
            for name, value in self.values.items()
            if command in KEYS[name].commands
        }


def config_path() -> Path:
    """Where the file is.

    Raises:
        OptionError: the environment variable names the home directory of an unknown user.
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
    """Read the user's settings; without a file there are none.

    Raises:
        OptionError: as :func:`config_path`.
        SettingsError: the file cannot be read, or has a wrong setting.
    """
    path = config_path()
    try:
        if path.exists() and not path.is_file():
            raise SettingsError(f"{path}: not a regular file; remove it")
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


def apply_mlx_settings() -> None:
    """Put the setting for MLX into the environment, whose own variables override it.

    It works until MLX first uses a GPU.
    """
    with suppress(MlxspecError):  # which the command reports
        for name, value in variables_in(load_config().values.get(MLX_SETTINGS, "")).items():
            os.environ.setdefault(name, value)


def _parsed(path: Path, document: Mapping[str, Any]) -> UserConfig:
    try:
        check_settings(document)
    except OptionError as error:
        raise SettingsError(f"{path}: {error}; correct the file") from error
    values = {name: value for name, value in document.items() if name != ALIAS}
    return UserConfig(path, values, document.get(ALIAS, {}))


def check_settings(document: Mapping[str, Any]) -> None:
    """Check all settings, as they stand in the file.

    Raises:
        OptionError: a setting is unknown or has a wrong value, or an alias or its model is not
            valid.
    """
    for name, value in document.items():
        if name not in (*KEYS, ALIAS):
            raise OptionError(f"there is no setting {name!r}: there are {KNOWN}")
        if name in KEYS and not KEYS[name].takes(value):
            raise OptionError(f"{name} is {value!r}: give {KEYS[name].must_be}")
    aliases = document.get(ALIAS, {})
    if not isinstance(aliases, Mapping):
        raise OptionError(f"{ALIAS} is {aliases!r}: it is a table of models by their aliases")
    for name in aliases:
        if not _ALIAS_NAME.fullmatch(name) or name == DEMO:
            raise OptionError(
                f"{ALIAS_PREFIX}{name}: an alias has letters, digits, '.', '-' and '_', and is not "
                f"{DEMO!r}"
            )
    for name, model in aliases.items():
        if not KEYS[MODEL].takes(model):
            raise OptionError(f"{ALIAS_PREFIX}{name} is {model!r}: give a model")
        if model in aliases:
            raise OptionError(f"{ALIAS_PREFIX}{name} is {model!r}, an alias itself: give its model")


# --- files that are edited ---

Settings = dict[str, Any]
"""Settings by name, nested. None means: remove it. A list of settings that have
a ``name`` is merged by these names."""

_INDENT = re.compile(r"\n([ \t]+)\S")


@dataclass(frozen=True)
class SettingsFile:
    """A settings file, and what to put into it.

    Attributes:
        path: where it is; its suffix gives the format.
        settings: the values to set.
        defaults: values to set only where the file has none.
    """

    path: Path
    settings: Settings
    defaults: Settings = field(default_factory=dict)

    def read(self) -> str:
        """The file's text; empty without a file.

        Raises:
            SettingsError: it cannot be read or written, or is not UTF-8.
        """
        try:
            place = self.path.resolve()
            if place.parent.is_dir():
                check_writable(place, SettingsError)
            return place.read_bytes().decode()
        except FileNotFoundError:
            return ""
        except UnicodeDecodeError as error:
            raise SettingsError(f"{self.path}: is not UTF-8 text; convert it") from error
        except (OSError, RuntimeError) as error:
            reason = getattr(error, "strerror", None) or "the link leads nowhere"
            raise SettingsError(f"{self.path}: {reason}; make it readable") from error

    def merged(self, text: str) -> str:
        """Merge the settings into the text of the file, which is empty for a new file.

        Raises:
            SettingsError: something in the text would be lost.
        """
        kind = _KINDS[self.path.suffix]
        try:
            document = _parse(kind, text)
            before = _plain(document)
            _merge(document, self.defaults, keep=True)
            _merge(document, self.settings)
            expected = _plain(document)
            if expected == before:
                return text
            new = _render(kind, document, text)
            if _plain(_parse(kind, new)) != expected:
                raise SettingsError("part of it would be changed")
        except SettingsError as error:
            raise SettingsError(f"{self.path}: {error}; change it by hand") from error
        except (ValueError, RecursionError) as error:
            reason = " ".join(str(error).split())
            raise SettingsError(
                f"{self.path}: cannot be edited as {kind} ({reason}); change it by hand"
            ) from error
        return new

    def write(self, text: str) -> None:
        """Replace the file in one step; its directory is made if there is none.

        Raises:
            SettingsError: it cannot be written.
        """
        try:
            place = self.path.resolve()
            place.parent.mkdir(parents=True, exist_ok=True)
            mode = stat.S_IMODE(place.stat().st_mode) if place.exists() else SHARED
        except OSError as error:
            reason = error.strerror
            raise SettingsError(f"{self.path}: cannot be written ({reason}); make it") from error
        with replaced(place, SettingsError, mode) as file:
            file.write(text.encode())


def _merge(document: MutableMapping[str, Any], settings: Settings, keep: bool = False) -> None:
    """Put settings into a document.

    Args:
        document: changed in place.
        settings: the values to set.
        keep: leave a value that is already there.

    Raises:
        SettingsError: the document has another type where settings are nested.
    """
    for name, value in settings.items():
        there = document.get(name)
        if value is None:
            document.pop(name, None)
        elif there is None or there in ([], {}):  # `[]` in a line would keep ours in that line
            document[name] = _given(value)
        elif isinstance(value, dict):
            if not isinstance(there, MutableMapping):
                raise SettingsError(f"{name} is not an object there")
            _merge(there, value, keep)
        elif isinstance(value, list) and any(isinstance(one, dict) for one in value):
            if not isinstance(there, list):
                raise SettingsError(f"{name} is not a list there")
            for entry in value:
                same = [one for one in there if _name_of(one) == entry["name"]]
                if same:
                    _merge(same[0], entry, keep)
                else:
                    there.append(_given(entry))
        elif not keep and there != value:
            document[name] = value


def _name_of(entry: Any) -> Any:
    return entry.get("name") if isinstance(entry, MutableMapping) else None


def _given(value: Any) -> Any:
    """A copy of a setting without the entries to remove."""
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
    """The document in a text, empty for an empty text.

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
        document = _plain(_parse_yaml(text))  # what it shares is copied
    else:
        document = json.loads(text or "{}", object_pairs_hook=_without_repetition)
    if not isinstance(document, dict):
        raise ValueError("no object")
    return document


def _parse_yaml(text: str) -> Any:
    import yaml

    class Loader(yaml.SafeLoader):
        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            found = super().construct_mapping(node, deep)
            if len(found) < len(node.value):
                raise ValueError("a name is there twice, or merged with <<")
            return found

    try:
        tokens = yaml.scan(text, Loader)
        end = 0
        for token in tokens:  # what is between tokens is white space or a comment
            if "#" in text[end : token.start_mark.index]:
                raise ValueError(f"line {token.start_mark.line}: a comment would be lost")
            end = token.end_mark.index
        return yaml.load(text, Loader) or {}
    except yaml.YAMLError as error:
        raise ValueError(error) from error


def _without_repetition(pairs: list[tuple[str, Any]]) -> Settings:
    settings = dict(pairs)
    if len(settings) < len(pairs):
        raise ValueError("a name is there twice")
    return settings


def _render(kind: str, document: Any, text: str) -> str:
    """A document as text; JSON with the indentation and the escapes of the earlier ``text``."""
    if kind == "TOML":
        import tomlkit

        return tomlkit.dumps(document)
    if kind == "YAML":
        import yaml

        return str(yaml.safe_dump(document, sort_keys=False, allow_unicode=True, width=1 << 20))
    found = _INDENT.search(text)
    indent = found[1] if found else 2
    written = json.dumps(document, indent=indent, ensure_ascii=text.isascii(), allow_nan=False)
    written.encode()  # raises for a lone surrogate, which UTF-8 cannot encode
    return written + "\n"
