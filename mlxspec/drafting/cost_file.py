"""Keeps step times from process to process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, get_args

from ..cache_files import cache_directory, file_name, read_kept, write_kept

Identity = dict[str, str | int | float | None]
"""What a machine or a model is known by."""
Reliability = Literal["steps", "quick", "careful"]  # the most reliable comes last
_STEP_TIMES_VERSION = 3


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


@dataclass(frozen=True)
class StepTime:
    """T(rows) and how well it is known.

    Attributes:
        rows: the rows of a step; 1 is a pipelined plain step.
        seconds: its wall time.
        uncertainty: the relative standard error of ``seconds``.
        steps: the number of steps that were measured, if the time comes from a measurement.
    """

    rows: int
    seconds: float
    uncertainty: float
    steps: int = field(default=0, compare=False)


@dataclass(frozen=True)
class Calibration:
    """The step times of a model on a machine, at one context length.

    Attributes:
        times: T(rows), the fewest rows first.
        source: "quick" or "careful" for a measurement; "steps" if learned only from decoding.
        updated: when the times were last measured or corrected, in UTC, in ISO 8601.
        name: the model's name as the user gave it; empty if unknown.
        split: whether wide drafts were faster with split attention; see
            :func:`mlxspec.engine.patches.split_attention`. None if that was not measured.
    """

    times: list[StepTime]
    source: Reliability = "steps"
    updated: str = field(default_factory=_now)
    name: str = ""
    split: bool | None = None

    def corrected(self, times: list[StepTime]) -> Calibration:
        """The same, with times that later steps have corrected."""
        return replace(self, times=times, updated=_now())

    @property
    def rank(self) -> tuple[int, int]:
        """How reliable the times are; greater is better."""
        return get_args(Reliability).index(self.source), len(self.times)


def _step_times_directory() -> Path:
    return cache_directory() / "step_times"


@dataclass(frozen=True)
class CostFile:
    """The file that keeps the step times of a model on a machine.

    If several processes write at the same time, the corrections of the last one are kept, for each
    context length. A file that is damaged or from another version is ignored with a warning, and
    its times are measured again.

    Attributes:
        machine: the machine's chip, device and libraries.
        model: the model's configuration, data types and quantisation.
        directory: the directory of such files; by default in :func:`cache_directory`.
    """

    machine: Identity
    model: Identity
    directory: Path = field(default_factory=_step_times_directory)

    def of_sequences(self, count: int) -> CostFile:
        """The file for steps that ``count`` sequences share."""
        return replace(self, model={**self.model, "sequences": count}) if count > 1 else self

    @property
    def path(self) -> Path:
        return self.directory / file_name([_STEP_TIMES_VERSION, self.machine, self.model])

    def read(self) -> dict[int, Calibration]:
        """What is known, by context length; empty if there is nothing that can be used."""
        kept = read_kept("step times", self.path, _read_step_times)
        return kept[1] if kept else {}

    def update(self, calibrations: Mapping[int, Calibration]) -> None:
        """Replace the times at these context lengths, unless those that are kept are better.

        A careful measurement is replaced only by another. Of two measurements of the same kind, the
        one with more numbers of rows is kept.
        """
        kept = self.read()
        for context, known in calibrations.items():
            if context not in kept or kept[context].rank <= known.rank:
                kept[context] = known
        contexts = dict(sorted(kept.items()))
        content = {"machine": self.machine, "model": self.model, "contexts": contexts}
        write_kept(self.path, content)


def cost_files() -> list[tuple[CostFile, dict[int, Calibration]]]:
    """The files of all machines and models, as far as they can be used, and what they keep."""
    paths = sorted(_step_times_directory().glob("*.json"))
    kept = [read_kept("step times", path, _read_step_times) for path in paths]
    return [entry for entry in kept if entry]


def _read_step_times(content: Any) -> tuple[CostFile, dict[int, Calibration]]:
    contexts = {
        int(context): Calibration(**{**known, "times": [StepTime(**row) for row in known["times"]]})
        for context, known in content["contexts"].items()
    }
    return CostFile(content["machine"], content["model"]), contexts
