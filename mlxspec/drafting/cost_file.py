"""Keeps step times from process to process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, get_args

from ..cache_files import cache_directory, file_name, read_kept, write_kept
from .costs import KnownTime

Identity = dict[str, str | int | float | None]
"""What a machine or a model is known by."""
Reliability = Literal["steps", "quick", "careful"]  # the most reliable comes last
_STEP_TIMES_VERSION = 3


@dataclass(frozen=True)
class CostKey:
    """The machine and the model that step times belong to.

    Attributes:
        machine: its chip, device and libraries.
        model: its configuration, data types and quantisation.
    """

    machine: Identity
    model: Identity

    def of_sequences(self, count: int) -> CostKey:
        """The key of the times of steps that ``count`` sequences share."""
        return replace(self, model={**self.model, "sequences": count}) if count > 1 else self

    @property
    def file_name(self) -> str:
        return file_name([_STEP_TIMES_VERSION, self.machine, self.model])


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


@dataclass(frozen=True)
class KnownTimes:
    """Step times at one context length.

    Attributes:
        times: T(rows), the fewest rows first.
        source: "quick" or "careful" for a measurement; "steps" if learned only from decoding.
        updated: when the times were last measured or corrected, in UTC, in ISO 8601.
        name: the model's name as the user gave it; empty if unknown.
        split: whether wide drafts were faster with split attention; see
            :func:`mlxspec.engine.patches.split_attention`. None if that was not measured.
    """

    times: list[KnownTime]
    source: Reliability
    updated: str = field(default_factory=_now)
    name: str = ""
    split: bool | None = None

    def corrected(self, times: list[KnownTime]) -> KnownTimes:
        """These times, corrected by later steps."""
        return replace(self, times=times, updated=_now())

    @property
    def rank(self) -> tuple[int, int]:
        """How reliable the times are; greater is better."""
        return get_args(Reliability).index(self.source), len(self.times)


TimesByContext = dict[int, KnownTimes]
"""Step times by context length."""


def _read_step_times(content: Any) -> tuple[CostKey, TimesByContext]:
    contexts = {
        int(context): KnownTimes(**{**known, "times": [KnownTime(**one) for one in known["times"]]})
        for context, known in content["contexts"].items()
    }
    return CostKey(content["machine"], content["model"]), contexts


class CostCache:
    """Keeps step times from process to process, in one file per machine and model.

    If several processes write at the same time, the corrections of the last one are kept, for each
    context length. A file that is damaged or from another version is ignored with a warning, and
    its times are measured again.

    Args:
        directory: the directory of the files; by default ``step_times`` in :func:`cache_directory`.
    """

    def __init__(self, directory: Path | None = None) -> None:
        self.directory = directory or cache_directory() / "step_times"

    def read(self, key: CostKey) -> TimesByContext:
        """The times that are kept for a key; empty if there are none that can be used."""
        found = read_kept("step times", self.directory / key.file_name, _read_step_times)
        return found[1] if found else {}

    def entries(self) -> list[tuple[CostKey, TimesByContext]]:
        """All times that can be used, of all machines and models."""
        paths = sorted(self.directory.glob("*.json"))
        found = [read_kept("step times", path, _read_step_times) for path in paths]
        return [one for one in found if one]

    def update(self, key: CostKey, found: Mapping[int, KnownTimes]) -> None:
        """Replace the times of these context lengths, unless those that are kept are better.

        A careful measurement is replaced only by another. Of two measurements of the same kind, the
        one with more numbers of rows is kept.
        """
        kept = self.read(key)
        for context, known in found.items():
            if context not in kept or kept[context].rank <= known.rank:
                kept[context] = known
        content = {**vars(key), "contexts": dict(sorted(kept.items()))}
        write_kept(self.directory / key.file_name, content)
