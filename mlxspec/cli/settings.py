"""Reads the user's settings, and edits settings files.

``mlxspec config`` edits the user's settings, and ``mlxspec connect`` those of other programs. Both
merge settings into a file that the user may edit, too, and leave the rest of it unchanged.
"""

from __future__ import annotations

import json
import re
import stat
import tomllib
from collections.abc import MutableMapping
from contextlib import suppress
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path
from textwrap import indent
from typing import TYPE_CHECKING, Any

import click
import platformdirs

from ..errors import FileError, OptionError
from ..files import SHARED, directory_in, is_special, replaced

if TYPE_CHECKING:
    from yaml import Node

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
        return kind.convert(str(value), None, None)  # as text, since int(2.9) is 2
    except click.BadParameter as error:
        raise OptionError(f"{name} is {value!r}: {str(error).rstrip('.')}") from error


# --- edits of files ---

Settings = dict[str, Any]
"""Nested settings by name. None removes a setting. Entries of lists are matched by ``name``."""

JSON, TOML, YAML = "JSON without comments", "TOML", "YAML"
_KINDS = {".json": JSON, ".toml": TOML, ".yaml": YAML, ".yml": YAML}
_BLOCK_INDICATOR = re.compile(r"^.*?[|>][-+0-9]*")
_INDENT = re.compile(r"\n([ \t]+)\S")


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
            FileError: it is a pipe or a device, or not UTF-8.
        """
        if is_special(self.path):
            raise FileError(f"{self.path}: a pipe, a socket or a device; remove it")
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
            reason = " ".join(str(error).split())
            raise FileError(
                f"{self.path}: cannot be edited as {kind} ({reason}); change it by hand"
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

    TOML and YAML keep all other text, such as comments. JSON is indented and escaped as before.
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


# --- edits of YAML ---


def _edited_yaml(text: str, settings: Settings) -> str:
    """Put settings into the text of a document, at the places that the parser reports.

    Values that were parsed could not be written back as they were: ``010`` would become 8, ``yes``
    true, and comments would be lost.
    """
    import yaml

    newline = "\r\n" if "\r\n" in text else "\n"
    if text and not text.endswith("\n"):
        return _edited_yaml(text + newline, settings).removesuffix(newline)
    root = yaml.compose(text, yaml.SafeLoader)
    if root is None:  # comments at most
        new: dict[str, Any] = {}
        _merge(new, settings)
        return text + _block(new, 0)
    edited, after = "", 0
    edits = _edits(text, root, _parse(YAML, text), settings)
    for start, end, new_text in sorted(edits, key=itemgetter(0)):
        edited += text[after:start]
        edited += new_text.replace("\n", newline)
        after = end
    return edited + text[after:]


_Edit = tuple[int, int, str]
"""The start and the end of a piece of text, and what replaces it."""


def _edits(text: str, node: Node, document: Settings, settings: Settings) -> list[_Edit]:
    """The edits that put settings into a mapping, whose values are ``document``.

    Additions follow the edits of inner blocks, which may end at the same place.
    """
    edits: list[_Edit] = []
    more: Settings = {}
    pairs = {key.value: (key, old) for key, old in node.value if isinstance(key.value, str)}
    for name, value in settings.items():
        if name not in pairs:
            _merge(more, {name: value})
            continue
        key, old = pairs[name]
        start, column = key.start_mark.index, key.start_mark.column
        if value is None:
            line = text.rfind("\n", 0, start) + 1
            first = line if text[line:start].isspace() else start
            edits.append((first, _next_line(text, old), ""))
        elif isinstance(value, dict):
            edits += _edits(text, old, document[name], value)
        elif isinstance(value, list) and any(isinstance(item, dict) for item in value):
            names = [
                item.get("name") if isinstance(item, dict) else None for item in document[name]
            ]
            new: list[Settings] = []
            for entry in value:
                if entry["name"] in names:
                    place = names.index(entry["name"])
                    edits += _edits(text, old.value[place], document[name][place], entry)
                else:
                    new.append({})
                    _merge(new[-1], entry)
            if new:
                edits.append(_addition(text, old, new))
        elif document[name] != value:
            if _last(old) is old:
                edits.append(_replacement(text, old, value))
            else:
                edits.append((start, _next_line(text, old), _block({name: value}, column)[column:]))
    if more:
        edits.append(_addition(text, node, more))
    return edits


def _replacement(text: str, node: Node, value: object) -> _Edit:
    """The edit that replaces a value that is written in one piece."""
    start, end, new = node.start_mark.index, node.end_mark.index, _flow([value])
    if start == end:  # nothing after the colon
        return start, end, f" {new}"
    if getattr(node, "style", None) in ("|", ">"):
        old = text[start:end].rstrip()  # its end mark comes after blank lines
        comment = _BLOCK_INDICATOR.sub("", old.splitlines()[0], count=1)
        return start, start + len(old), new + comment
    return start, end, new


def _addition(text: str, node: Node, more: Settings | list[Settings]) -> _Edit:
    """The edit that appends to a mapping or a sequence."""
    if not node.flow_style:
        place, new = _next_line(text, node), _block(more, node.start_mark.column)
    elif node.value:
        last = node.value[-1]
        place = (last[1] if isinstance(last, tuple) else last).end_mark.index
        new = ", " + _flow(more)
    else:
        place, new = node.end_mark.index - 1, _flow(more)
    return place, place, new


def _last(node: Node) -> Node:
    """The last node that is written in one piece. A block's own end would include comments."""
    while isinstance(node.value, list) and not node.flow_style:
        last = node.value[-1]
        node = last[1] if isinstance(last, tuple) else last
    return node


def _next_line(text: str, node: Node) -> int:
    """Where the line after a node starts."""
    end = _last(node).end_mark
    return text.index("\n", end.index) + 1 if end.column else end.index


def _block(value: object, column: int) -> str:
    """Settings as YAML, one on a line, from a column on."""
    import yaml

    new = yaml.safe_dump(value, sort_keys=False, allow_unicode=True, width=1 << 20)
    return indent(new, " " * column)


def _flow(value: object) -> str:
    """The inner text of a mapping or a list as YAML in one line, without its brackets."""
    import yaml

    new = yaml.safe_dump(
        value, default_flow_style=True, sort_keys=False, allow_unicode=True, width=1 << 20
    )
    return str(new).strip()[1:-1]
