"""Bench reports that users submit: their content, the GitHub issue that carries one, their files.

A report is part of the output of ``mlxspec bench --json``, plus the cost curves. Only the pydantic
models in this file protect the repository from what strangers submit. So every string in a report
is one of a fixed set or has only plain characters, and every number has bounds.
"""

from __future__ import annotations

import json
import re
from datetime import date
from pathlib import Path
from typing import Annotated, Any, Literal, Self
from urllib.parse import quote

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from ..drafting.chips import REPORT_FORM
from ..drafting.costs import WIDEST
from ..drafting.measurement import COST_PER_ROW
from ..errors import OptionError

_LONGEST_URL = 8000  # bytes; GitHub refuses more than 8191
_MOST_ENTRIES = 20  # of a list or object
_PLAIN = "A-Za-z0-9 ()@.,+-"  # characters without meaning in Markdown and HTML
_REPOSITORY = "[A-Za-z0-9][A-Za-z0-9_.-]{0,63}/[A-Za-z0-9][A-Za-z0-9_.-]{0,95}"

_Name = Annotated[str, Field(pattern=f"^[A-Za-z0-9][{_PLAIN}]{{0,59}}$")]
_Version = Annotated[str, Field(pattern="^[0-9][0-9a-z.]{0,19}$")]
_SETTING = "MLX_[A-Z_]{1,40}=[0-9]{1,9}"
_Setting = Annotated[str, Field(pattern=f"^{_SETTING}(,{_SETTING}){{0,9}}$")]
_Count = Annotated[int, Field(ge=0, le=10**15)]
_Figure = Annotated[
    float,
    Field(ge=0, le=1e9, allow_inf_nan=False),
    AfterValidator(lambda value: float(f"{value:.3g}")),  # further digits are noise
]
_RowCount = Annotated[int, Field(ge=1, le=WIDEST)]
_FEW = Field(min_length=1, max_length=_MOST_ENTRIES)
_COLUMN = Field(min_length=1, max_length=WIDEST)


class _Part(BaseModel):
    """A part of a report.

    Fields that are not named here are dropped, so nothing unforeseen is sent or filed.
    """

    model_config = ConfigDict(strict=True, frozen=True, extra="ignore")


class Machine(_Part):
    """Chip and libraries. ``cores`` and ``blas`` are given only for CPUs."""

    chip: _Name
    device: Literal["cpu", "gpu"]
    memory_gb: _Count
    system: Annotated[str, Field(pattern="^[A-Za-z]{1,20} [0-9.]{0,20} [A-Za-z0-9_]{1,20}$")]
    python: _Version
    mlxspec: _Version
    mlx: _Version
    mlx_lm: _Version
    cores: _Count | None = None
    blas: Literal["OpenBLAS", "own", "other"] | None = None
    mlx_settings: _Setting | None = None


class Model(_Part):
    """The model. It has a name only if that name is public: a Hub repository, or demo."""

    name: Annotated[str, Field(pattern=f"^(demo|{_REPOSITORY})$")] | None = None
    type: Annotated[str, Field(pattern="^[A-Za-z0-9_.-]{1,40}$")]
    parameters: _Count
    bits_per_weight: _Figure
    dtype: Literal["float32", "float16", "bfloat16"]
    digest: Annotated[str, Field(pattern="^[0-9a-f]{32}$")]
    head: _Name | None = None

    @property
    def label(self) -> str:
        """The model's name, or its type and size if it has no name."""
        return self.name or f"{self.type}, {self.parameters / 1e9:.2g} B parameters"


class CategoryFigures(_Part):
    """A decoder's figures in a category; see :func:`mlxspec.bench.measure.figures`."""

    tokens_per_second: _Figure
    speedup: _Figure | None = None
    rows_per_step: _Figure | None = None


class DecoderFigures(CategoryFigures):
    """A decoder's figures over all categories."""

    vs_mlx_lm: _Figure | None = None
    tokens_per_step: _Figure | None = None
    acceptance_rate: _Figure | None = None


class Curve(_Part):
    """T(M)/T(1) after a context, as ``mlxspec calibrate`` measures it.

    Attributes:
        context: the context's length in tokens.
        plain_ms: T(1) in milliseconds.
        rows: M, ascending from 1.
        cost: T(M)/T(1).
        error: for each cost, half the width of its 95 % interval, relative to the cost.
        split_attention: whether splitting the attention of wide drafts was faster.
    """

    context: _Count
    plain_ms: _Figure
    rows: Annotated[list[_RowCount], _COLUMN]
    cost: Annotated[list[_Figure], _COLUMN]
    error: Annotated[list[_Figure], _COLUMN]
    split_attention: bool | None = None

    @model_validator(mode="after")
    def _is_a_curve(self) -> Self:
        low, high = COST_PER_ROW
        points = [*zip(self.rows, self.cost, self.error, strict=True)]
        bounded = all(low <= cost <= high * rows for rows, cost, _ in points)
        if self.rows != sorted({1, *self.rows}) or self.cost[0] != 1 or not bounded:
            raise ValueError("rows, cost and error do not form a cost curve")
        return self


class BenchReport(_Part):
    """A report. Fields have the same meaning as in ``mlxspec bench --json``."""

    format: Literal["mlxspec bench report"]
    version: Literal[1]
    machine: Machine
    model: Model
    max_tokens: _Count
    repeats: _Count
    temperature: _Figure
    rough: bool
    outputs: _Count
    differ: _Count
    decoders: Annotated[dict[_Name, DecoderFigures], _FEW]
    categories: Annotated[dict[_Name, Annotated[dict[_Name, CategoryFigures], _FEW]], _FEW]
    curves: Annotated[list[Curve], _FEW]

    @staticmethod
    def of(report: dict[str, Any]) -> BenchReport:
        """The part of a bench report that is submitted.

        Args:
            report: from :func:`mlxspec.bench.measure.bench_report`, with the ``curves`` of
                ``mlxspec calibrate``.

        Raises:
            OptionError: a value is not allowed in a report.
        """
        curves = [
            {
                **curve,
                "plain_ms": 1000 * curve["times"][0]["seconds"],
                **{of: [time[of] for time in curve["times"]] for of in ("rows", "cost", "error")},
            }
            for curve in report["curves"]
        ]
        categories = {name: entry["decoders"] for name, entry in report["categories"].items()}
        name = report["model"]["name"]  # a folder's name may be private
        known = name if name == "demo" or re.fullmatch(_REPOSITORY, name) else None
        content = {
            **{**report, "format": "mlxspec bench report", "version": 1},
            **{**report["settings"], **report["exactness"], "rough": bool(report["rough"])},
            "machine": _public_machine(report["machine"]),
            "model": {**report["model"], "name": known},
            "categories": categories,
            "curves": curves,
        }
        return read(json.dumps(content))

    @property
    def chip(self) -> str:
        """The chip's name, by which :func:`mlxspec.drafting.chips.known_chip` finds it."""
        name = self.machine.chip.removeprefix("Apple ")
        return name if self.machine.device == "gpu" else f"{name} CPU"

    def text(self) -> str:
        """The report as readable JSON: lists and objects of plain values are on one line."""
        text = json.dumps(self.model_dump(exclude_none=True), indent=2)
        return re.sub(r"[\[{][^\[\]{}]*[\]}]", lambda part: " ".join(part[0].split()), text) + "\n"


def read(text: str | bytes) -> BenchReport:
    """Parse a report from JSON that anybody may have written.

    Raises:
        OptionError: it is invalid. The message quotes nothing from the text.
    """
    try:
        return BenchReport.model_validate_json(text)
    except ValidationError as error:
        wrong = error.errors(include_url=False, include_context=False, include_input=False)[0]
        names = (str(part) for part in wrong["loc"])
        place = ".".join(name for name in names if re.fullmatch(r"[a-z_]{1,20}|\d{1,3}", name))
        raise OptionError(f"invalid report: {place or 'the report'}: {wrong['msg']}") from None


def _public_machine(machine: dict[str, Any]) -> dict[str, Any]:
    """The facts about the machine, without names that users may have chosen.

    Such names can be in the names of libraries, in versions and in settings.
    """
    settings = machine.get("mlx_settings", "").split(",")
    public = {
        **machine,
        "chip": re.sub(f"[^{_PLAIN}]+", " ", machine["chip"]).strip()[:60],
        "memory_gb": round(machine["memory"] / 2**30),
        "mlx_settings": ",".join(one for one in settings if re.fullmatch(_SETTING, one)) or None,
    }
    if "blas" in machine and machine["blas"] != "own":
        public["blas"] = "OpenBLAS" if "openblas" in machine["blas"].lower() else "other"
    for name in ("python", "mlxspec", "mlx", "mlx_lm"):
        public[name] = machine[name].partition("+")[0]
    return public


# --- the issue ---


def issue_url(report: BenchReport) -> str:
    """The address of the issue form, with the report filled in.

    GitHub refuses long addresses. If this one would be too long, it leaves out the report, which
    the user then pastes into the form.
    """
    title = f"Report: {report.chip}, {report.machine.memory_gb} GB, {report.model.label}"
    empty = f"{REPORT_FORM}&title={quote(title)}"
    compact = report.model_dump_json(exclude_none=True)
    filled = f"{empty}&report={quote(compact, safe=',:/')}"
    return filled if len(filled) <= _LONGEST_URL else empty


# --- the files ---


def filed_reports(directory: Path) -> list[tuple[date, int, BenchReport]]:
    """The reports in a directory's files ``CHIP/DATE-ISSUE.json``, newest first.

    Each comes with its date and the number of its issue. Raises the errors of :func:`read`.
    """
    found = []
    for path in directory.glob("*/*.json"):
        day, issue = path.stem[:10], path.stem[11:]
        found.append((date.fromisoformat(day), int(issue), read(path.read_bytes())))
    return sorted(found, key=lambda one: one[:2], reverse=True)
