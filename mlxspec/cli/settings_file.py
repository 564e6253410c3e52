"""Settings files of other programs: what is to be in one goes in, and all else stays.

JSON, TOML and YAML are told apart by the file's name. Comments stay in TOML and YAML, where
libraries keep them; JSON with comments is refused, since they would be lost.
"""

from __future__ import annotations

import json
import re
import stat
from collections.abc import Callable, MutableMapping
from contextlib import suppress
from dataclasses import dataclass, field
from io import StringIO
from pathlib import Path
from typing import Any

from ..errors import SettingsError
from ..files import SHARED, check_writable, replaced

Settings = dict[str, Any]
"""Settings by name, nested. Those that are None shall not be there. A list of settings that have
a ``name`` is merged by these names."""

_INDENT = re.compile(r"\n([ \t]+)\S")


@dataclass(frozen=True)
class SettingsFile:
    """A file, and what is to be in it.

    Attributes:
        path: its place; the name's suffix says how it is written.
        settings: what is to be in it.
        defaults: what is to be in it where it says nothing of its own.
    """

    path: Path
    settings: Settings
    defaults: Settings = field(default_factory=dict)

    def text(self) -> str:
        """A new file with the settings alone."""
        return _merged_text(self.path, "", self.settings, self.defaults)

    def read(self) -> str | None:
        """What the file holds; None if there is none.

        Raises:
            SettingsError: it cannot be read or written, or is not UTF-8.
        """
        try:
            if self._place.parent.is_dir():
                check_writable(self._place, SettingsError)
            return self._place.read_bytes().decode()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise SettingsError(f"{self.path}: {error.strerror}; make it readable") from error
        except ValueError as error:
            raise SettingsError(f"{self.path}: is not UTF-8 text; convert it") from error

    def merged(self, text: str) -> str:
        """The file's text with the settings in it.

        Args:
            text: what it holds.

        Raises:
            SettingsError: something in it would be lost.
        """
        return _merged_text(self.path, text, self.settings, self.defaults)

    def write(self, text: str) -> None:
        """Replace the file in one step; its directory is made if there is none.

        Raises:
            SettingsError: it cannot be written.
        """
        place = self._place
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            mode = stat.S_IMODE(place.stat().st_mode) if place.exists() else SHARED
        except OSError as error:
            reason = error.strerror
            raise SettingsError(f"{self.path}: cannot be written ({reason}); make it") from error
        with replaced(place, SettingsError, mode) as file:
            file.write(text.encode())

    @property
    def _place(self) -> Path:
        """Where the file is, since those who keep their settings elsewhere link to them."""
        try:
            return self.path.resolve()
        except (OSError, RuntimeError) as error:
            raise SettingsError(f"{self.path}: the link leads nowhere; correct it") from error


def _merged_text(path: Path, text: str, settings: Settings, defaults: Settings) -> str:
    parse, render = _FORMATS[path.suffix]
    try:
        document, before, expected = parse(text), _plain(parse(text)), _plain(parse(text))
        for merged in (document, expected):
            _merge(merged, defaults, keep=True)
            _merge(merged, settings)
        if expected == before:
            return text
        new = render(document, text)
        kept = _plain(parse(new)) == expected
    except SettingsError as error:
        raise SettingsError(f"{path}: {error}; change it by hand") from error
    except (ValueError, RecursionError) as error:
        kind = _KINDS[path.suffix]
        raise SettingsError(f"{path}: is no {kind} ({error}); change it by hand") from error
    if not kept:
        raise SettingsError(f"{path}: not all in it would stay as it is; change it by hand")
    return new


def _merge(document: MutableMapping[str, Any], settings: Settings, keep: bool = False) -> None:
    """Put settings into a document.

    Args:
        document: changed in place.
        settings: what is to be in it.
        keep: leave what it has for a setting.

    Raises:
        SettingsError: it has something of another kind where settings are nested.
    """
    for name, value in settings.items():
        there = document.get(name)
        if value is None:
            document.pop(name, None)
        elif there is None or there in ([], {}):  # `[]` in a line would keep ours in that line
            document[name] = _given(value)
        elif isinstance(value, dict):
            if not isinstance(there, MutableMapping):
                raise SettingsError(f"{name} is no object there")
            _merge(there, value, keep)
        elif isinstance(value, list) and any(isinstance(one, dict) for one in value):
            if not isinstance(there, list):
                raise SettingsError(f"{name} is no list there")
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
    """A copy of a setting without what shall not be there."""
    if isinstance(value, dict):
        return {name: _given(one) for name, one in value.items() if one is not None}
    return [_given(one) for one in value] if isinstance(value, list) else value


def _plain(value: Any) -> Any:
    """What a library has read as Python's own objects and lists."""
    if isinstance(value, MutableMapping):
        return {name: _plain(one) for name, one in value.items()}
    return [_plain(one) for one in value] if isinstance(value, list) else value


# --- the three ways of writing; what they cannot read is a ValueError ---


def _parse_json(text: str) -> Any:
    document = json.loads(
        text if text.strip() else "{}",
        object_pairs_hook=_without_repetition,
        parse_constant=_refuse_constant,
    )
    if not isinstance(document, dict):
        raise ValueError("no object")
    return document


def _without_repetition(pairs: list[tuple[str, Any]]) -> Settings:
    settings = dict(pairs)
    if len(settings) < len(pairs):
        raise ValueError("a name is there twice")
    return settings


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON")


def _render_json(document: Any, text: str) -> str:
    indent = _INDENT.search(text)
    # Escaped or not, as it was.
    written = json.dumps(document, indent=indent[1] if indent else 2, ensure_ascii=text.isascii())
    written.encode()  # half of a surrogate pair is none that UTF-8 has
    return written + "\n"


def _parse_toml(text: str) -> Any:
    import tomlkit
    from tomlkit.exceptions import TOMLKitError

    try:
        return tomlkit.parse(text)
    except TOMLKitError as error:
        raise ValueError(error) from error


def _render_toml(document: Any, text: str) -> str:
    import tomlkit

    return tomlkit.dumps(document)


def _yaml(text: str) -> Any:
    """A parser and writer that keeps comments, quotes and the indentation of a text."""
    from ruamel.yaml import YAML
    from ruamel.yaml.util import load_yaml_guess_indent

    yaml = YAML(typ="rt")
    yaml.preserve_quotes = True
    yaml.width = 1 << 20  # lines stay as long as they are
    indent = offset = None
    if text.strip():
        with suppress(IndexError):  # at an entry of a list that has nothing in it
            _, indent, offset = load_yaml_guess_indent(text)
    yaml.indent(mapping=2, sequence=indent or 4, offset=2 if offset is None else offset)
    return yaml


def _parse_yaml(text: str) -> Any:
    from ruamel.yaml.error import YAMLError

    try:
        document = _yaml(text).load(text)
    except YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f"line {mark.line + 1}: " if mark else ""
        raise ValueError(f"{line}{getattr(error, 'problem', error)}") from error
    if document is None:
        return {}
    if not isinstance(document, MutableMapping):
        raise ValueError("no mapping")
    return document


def _render_yaml(document: Any, text: str) -> str:
    stream = StringIO()
    _yaml(text).dump(document, stream)
    # A text of comments alone is an empty document, which has no place for them.
    lead = text if type(document) is dict and text.strip() else ""
    return lead + stream.getvalue()


_KINDS = {
    ".json": "JSON without comments",
    **{".toml": "TOML", ".yaml": "YAML", ".yml": "YAML"},
}
_Format = tuple[Callable[[str], Any], Callable[[Any, str], str]]
_FORMATS: dict[str, _Format] = {
    ".json": (_parse_json, _render_json),
    ".toml": (_parse_toml, _render_toml),
    ".yaml": (_parse_yaml, _render_yaml),
    ".yml": (_parse_yaml, _render_yaml),
}
