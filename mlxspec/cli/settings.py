"""Reads the user's settings, and edits settings files.

``mlxspec config`` edits the user's settings, and ``mlxspec connect`` those of other programs. Both
merge settings into a file that the user may edit, too, and keep its other settings and comments.
"""

from __future__ import annotations

import io
import json
import math
import re
import stat
import tomllib
from collections.abc import MutableMapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import platformdirs

from ..errors import FileError, OptionError
from ..files import SHARED, directory_in, replaced
from ..terminal import one_line

# --- the user's settings ---

ENVIRONMENT_VARIABLE = "MLXSPEC_CONFIG_DIR"
"""The environment variable that names a directory for the settings file, instead of the usual."""

MODEL_VARIABLE = "MLXSPEC_MODEL"
"""The environment variable that names the default model; it overrides the file."""

MODEL, ALIAS = "model", "alias"
ALIAS_PREFIX = f"{ALIAS}."
_ALIAS_NAME = re.compile(r"[A-Za-z0-9][\w.-]*")


KEYS: dict[str, click.ParamType] = {
    MODEL: click.STRING,
    "max-tokens": click.IntRange(1),
    "temp": click.FloatRange(0),
    "system-prompt": click.STRING,
}
"""All settings except aliases, with their types."""

KNOWN = f"{', '.join(KEYS)} or {ALIAS_PREFIX}NAME"

_DEFAULTS = {
    "generate": ("max-tokens", "temp"),
    "explain": ("max-tokens", "temp"),
    "chat": ("max-tokens", "temp", "system-prompt"),
}
"""For each command, the options whose defaults are the user's settings."""


def config_path() -> Path:
    """The path of the settings file."""
    directory = directory_in(ENVIRONMENT_VARIABLE) or platformdirs.user_config_path("mlxspec")
    return directory / "config.toml"


def load_config() -> dict[str, Any]:
    """Read the user's settings by name, such as ``temp`` or ``alias.fast``.

    Raises:
        FileError: the file cannot be read, or has an invalid setting.
    """
    path = config_path()
    try:
        document = tomllib.loads(path.read_bytes().decode("utf-8-sig"))
        if isinstance(aliases := document.get(ALIAS), dict):
            del document[ALIAS]
            document |= {ALIAS_PREFIX + name: model for name, model in aliases.items()}
        return {name: checked(name, value) for name, value in document.items()}
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise FileError(f"{path}: cannot be read ({error.strerror}); make it readable") from error
    except ValueError as error:
        raise FileError(f"{path}: {error}; correct the file") from error


def load_aliases() -> dict[str, str]:
    """The user's aliases, and the models that they stand for.

    Raises:
        FileError: as for :func:`load_config`.
    """
    entries = load_config().items()
    return {name.removeprefix(ALIAS_PREFIX): model for name, model in entries if name not in KEYS}


def resolved(name: str) -> str:
    """The model that an alias stands for; any other name is returned unchanged.

    Raises:
        FileError: as for :func:`load_config`.
    """
    model: str = load_config().get(ALIAS_PREFIX + name, name)
    return model


def defaults_of(command: str) -> dict[str, Any]:
    """The defaults that the user has set for a command, by the names of its parameters.

    Raises:
        FileError: as for :func:`load_config`.
    """
    config = load_config()
    names = [name for name in _DEFAULTS.get(command, ()) if name in config]
    return {name.replace("-", "_"): config[name] for name in names}


def checked(name: str, value: object) -> Any:
    """Convert the value of a setting to its type.

    Raises:
        OptionError: the setting is unknown, or the value or the alias is invalid.
    """
    alias = name.removeprefix(ALIAS_PREFIX)
    if name == alias and name not in KEYS:
        raise OptionError(f"unknown setting {name!r}: give one of {KNOWN}")
    if name != alias and not _ALIAS_NAME.fullmatch(alias):
        raise OptionError(f"{name}: use only letters, digits, '.', '-' and '_'")
    kind = KEYS.get(name, click.STRING)
    try:
        if kind is click.STRING and not isinstance(value, str):
            raise click.BadParameter("write it in quotes")
        converted = kind.convert(str(value), None, None)  # as text, since int(2.9) is 2
        if isinstance(converted, float) and not math.isfinite(converted):
            raise click.BadParameter("choose a finite number")
        if isinstance(converted, str):
            converted.encode()
        return converted
    except UnicodeEncodeError as error:
        raise OptionError(f"{name} is {value!r}: it is not UTF-8 text") from error
    except click.BadParameter as error:
        raise OptionError(f"{name} is {value!r}: {str(error).rstrip('.')}") from error


# --- edits of files ---

Settings = dict[str, Any]
"""Nested settings by name. None removes a setting. Entries of lists are matched by ``name``."""

JSON, TOML, YAML = "JSON without comments", "TOML", "YAML"
_KINDS = {".json": JSON, ".toml": TOML, ".yaml": YAML, ".yml": YAML}
_INDENT = re.compile(r"\n([ \t]+)\S")
_DASH = re.compile(r"^( *)- +", re.MULTILINE)


@dataclass(frozen=True)
class SettingsFile:
    """A settings file, and the settings to put into it.

    Attributes:
        path: the file; its suffix determines the format.
        settings: the values to set.
        first: values to set as well if the file is new.
        remedy: what the user can do if the file cannot be written, for the error.
    """

    path: Path
    settings: Settings
    first: Settings = field(default_factory=dict)
    remedy: str = "make it writable, or change it by hand"

    def read(self) -> str:
        """The file's text; empty if the file does not exist.

        Raises:
            OSError: it cannot be read.
            FileError: it is not UTF-8.
        """
        try:
            return self.path.read_bytes().decode()
        except FileNotFoundError:
            return ""
        except UnicodeDecodeError as error:
            raise FileError(f"{self.path}: not UTF-8 text; convert it to UTF-8") from error

    def merged(self, text: str) -> str:
        """The file's text with the settings in it.

        Args:
            text: the file's current text; empty for a new file.

        Raises:
            FileError: part of the text would be lost.
        """
        kind, mark = _KINDS[self.path.suffix], text[: text.startswith("\ufeff")]
        text = text.removeprefix(mark)  # a byte order mark, which stays
        settings = self.settings if text else {**self.first, **self.settings}
        try:
            wanted = _parse(kind, text)
            _merge(wanted, settings)
            if wanted == _parse(kind, text):
                return mark + text
            new = _render(kind, wanted, settings, text)
            if not _holds(kind, new, wanted):
                raise ValueError("the edit would change other settings")
        except (ValueError, RecursionError) as error:
            raise FileError(
                f"{self.path}: cannot be edited as {kind} ({one_line(error)}); change it by hand"
            ) from error
        return mark + new

    def write(self, text: str) -> None:
        """Replace the file in one step; create its directory if it is missing.

        Raises:
            FileError: it cannot be written.
        """
        place = self.path.resolve()
        mode = stat.S_IMODE(place.stat().st_mode) if place.exists() else SHARED
        with replaced(place, mode, parents=0o777, remedy=self.remedy) as file:
            file.write(text.encode())


def _parse(kind: str, text: str) -> Any:
    """Parse a document; an empty text is an empty document.

    Raises:
        ValueError: it is not a document of this kind, or an edit would lose parts of it.
    """
    import yaml

    if kind == TOML:
        return tomllib.loads(text)
    if kind == JSON:
        return json.loads(text.strip() or "{}")
    try:
        if any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text)):
            raise ValueError("an edit could change every place where an alias stands")
        document = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(error) from error
    return {} if document is None else document


def _holds(kind: str, text: str, document: Any) -> bool:
    """Whether a text is this document."""
    with suppress(ValueError):
        return bool(_parse(kind, text) == document)
    return False


def _merge(document: Any, settings: Settings) -> None:
    """Put settings into a document, in place.

    Raises:
        ValueError: nested settings would replace a value of another type.
    """
    if not isinstance(document, MutableMapping):
        raise ValueError("the settings belong in an object, but the file has another value there")
    for name, value in settings.items():
        if value is None:
            document.pop(name, None)
        elif isinstance(value, dict):
            _merge(document.setdefault(name, {}), value)
        elif isinstance(value, list) and any(isinstance(item, dict) for item in value):
            entries = document.setdefault(name, [])
            if not isinstance(entries, list):
                raise ValueError(f"{name} must be a list")
            for entry in value:
                dicts = (item for item in entries if isinstance(item, dict))
                match = next((item for item in dicts if item.get("name") == entry["name"]), None)
                if match is None:
                    entries.append(match := {})
                _merge(match, entry)
        elif document.get(name) != value:
            document[name] = value


def _render(kind: str, document: Any, settings: Settings, text: str) -> str:
    """Write a document as text, in the style of the original text.

    TOML and YAML keep their comments. JSON is indented and escaped as before.
    """
    if kind == TOML:
        import tomlkit

        edited = tomlkit.parse(text)
        _merge(edited, settings)
        return tomlkit.dumps(edited)
    if kind == YAML:
        return _edited_yaml(text, settings)
    found = _INDENT.search(text)
    indent = found[1] if found else 2
    ascii_alone = text.isascii()
    return json.dumps(document, indent=indent, ensure_ascii=ascii_alone, allow_nan=False) + "\n"


def _edited_yaml(text: str, settings: Settings) -> str:
    """Put settings into a document. Its comments and the spelling of its other values stay.

    Raises:
        ValueError: a comment would be lost, or ruamel.yaml cannot read the document.
    """
    from ruamel.yaml import YAML as RoundTrip
    from ruamel.yaml import YAMLError

    lines, new = text.replace("\r\n", "\n"), io.StringIO()
    yaml = RoundTrip()
    yaml.preserve_quotes, yaml.width = True, 1 << 20
    if dash := _DASH.search(lines):
        yaml.indent(sequence=len(dash[0]), offset=len(dash[1]))
    try:
        if (document := yaml.load(lines)) is None:  # comments at most
            new.write(lines)
            document = {}
        _merge(document, settings)
        yaml.dump(document, new)
    except YAMLError as error:
        raise ValueError(error) from error
    edited = new.getvalue()
    if edited.count("#") < text.count("#"):  # ruamel.yaml keeps a comment with the value before it
        raise ValueError("a comment would be lost")
    return edited.replace("\n", "\r\n" if "\r\n" in text else "\n")
