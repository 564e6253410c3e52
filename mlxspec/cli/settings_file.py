"""Settings files of other programs: settings are merged in, and all else stays.

The file's name says whether it is JSON, TOML or YAML. Comments stay in TOML, where tomlkit keeps
them; JSON and YAML with comments are refused, since the comments would be lost.
"""

from __future__ import annotations

import json
import re
import stat
from collections.abc import MutableMapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import SettingsError
from ..files import SHARED, check_writable, replaced

Settings = dict[str, Any]
"""Settings by name, nested. None means: remove it. A list of settings that have
a ``name`` is merged by these names."""

_INDENT = re.compile(r"\n([ \t]+)\S")


@dataclass(frozen=True)
class SettingsFile:
    """A settings file, and what to put into it.

    Attributes:
        path: its place; the name's suffix says how it is written.
        settings: the values to set.
        defaults: values to set only where the file has none.
    """

    path: Path
    settings: Settings
    defaults: Settings = field(default_factory=dict)

    def text(self) -> str:
        """A new file with the settings alone."""
        return self.merged("")

    def read(self) -> str | None:
        """The file's text; None without a file.

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
        kind = _KINDS[self.path.suffix]
        try:
            document, before = _parse(kind, text), _plain(_parse(kind, text))
            expected = _plain(document)
            for merged in (document, expected):
                _merge(merged, self.defaults, keep=True)
                _merge(merged, self.settings)
            if expected == before:
                return text
            new = _render(kind, document if kind == "TOML" else expected, text)
            kept = _plain(_parse(kind, new)) == expected
        except SettingsError as error:
            raise SettingsError(f"{self.path}: {error}; change it by hand") from error
        except (ValueError, RecursionError) as error:
            reason = " ".join(str(error).split())
            raise SettingsError(
                f"{self.path}: cannot be edited as {kind} ({reason}); change it by hand"
            ) from error
        if not kept:
            raise SettingsError(
                f"{self.path}: not all in it would stay as it is; change it by hand"
            )
        return new

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


def _merge(document: MutableMapping[str, Any], settings: Settings, keep: bool = False) -> None:
    """Put settings into a document.

    Args:
        document: changed in place.
        settings: the values to set.
        keep: leave a value that is already there.

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
    """What a library has read as Python's own objects and lists."""
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
    document = _parse_yaml(text) if kind == "YAML" else json.loads(text or "{}", **_STRICT)
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


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")


_STRICT: dict[str, Any] = {
    "object_pairs_hook": _without_repetition,
    "parse_constant": _refuse_constant,
}


def _render(kind: str, document: Any, text: str) -> str:
    """A document as text; JSON with the indentation and the escapes of the earlier ``text``."""
    if kind == "TOML":
        import tomlkit

        return tomlkit.dumps(document)
    if kind == "YAML":
        import yaml

        return str(yaml.safe_dump(document, sort_keys=False, allow_unicode=True, width=1 << 20))
    indent = _INDENT.search(text)
    written = json.dumps(document, indent=indent[1] if indent else 2, ensure_ascii=text.isascii())
    written.encode()  # raises for a lone surrogate, which UTF-8 cannot encode
    return written + "\n"
