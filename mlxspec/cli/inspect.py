"""``mlxspec inspect``: shows a model's properties, and which drafts it verifies."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from ..terminal import one_line, visible
from .common.model_choice import ABOUT, DEFAULT, model_argument, needed_model
from .common.options import ADAPTERS, ADAPTERS_HELP, NAME, command, option
from .common.output import output_console, size_in_words, write_json

if TYPE_CHECKING:
    import mlx.nn as nn

_DRAFTS = {
    "tree": "trees: several continuations are verified in one forward",
    "chain": "chains: one continuation is verified in one forward",
    "tape": "chains; after a rejection the states of recurrent layers are computed again",
    "replay": "chains; after a rejection the accepted tokens run again with the next step",
    "plain": "none: the model decodes token by token",
}


@command("inspect", short_help="Show what MODEL is, and which drafts it verifies.")
@model_argument(ABOUT + DEFAULT)
@option(ADAPTERS, ADAPTERS_HELP, type=NAME, group="Model")
@option("--json", "Write one JSON object.", "as_json", group="Output")
def inspect_command(model: str | None, adapter_path: str | None, as_json: bool) -> None:
    """Show what MODEL is, and which drafts it verifies: trees, chains, or none.

    \b
    Examples:
      mlxspec inspect demo
      mlxspec inspect mlx-community/gemma-3-4b-it-4bit
      mlxspec inspect ./mlx_model --json | jq -r .tier

    The model is run to find out which drafts it verifies; its name does not matter. After part of a
    draft is rejected, the caches must be as if only the accepted tokens had run. The command also
    tests how several sequences can share a forward, in which each must get the same result as
    alone, and whether the result of a prompt depends on its chunks.
    """
    from ..models.model import load

    model = needed_model(model)
    report = _report(load(model, adapter_path=adapter_path)[0])
    if as_json:
        write_json(report, indent=2)
        return
    console = output_console()
    console.print(Text(one_line(model), style="bold"))
    console.print(_table(report))


def _report(model: nn.Module) -> dict[str, Any]:
    """Examine a model with about two hundred small forwards.

    ``bits_per_weight`` is the average in memory, including scales. On the CPU it exceeds the
    checkpoint's, since weights and scales in half precision become float32.
    """
    from ..engine.capability import examine, examine_chunks, examine_joint
    from ..engine.costs import machine_identity, model_identity
    from ..engine.model_sizes import cache_kinds, context_length
    from ..engine.target import vocabulary_size

    identity, finding = model_identity(model), examine(model)
    joint, joint_reason = examine_joint(model, finding.capability)
    chunk_end, chunk_reason = examine_chunks(model, finding.capability, finding.draft_end)
    return {
        "type": identity["type"],
        "parameters": identity["parameters"],
        "bits_per_weight": identity["bits_per_weight"],
        "quantisation": _quantised_layers(model),
        "layers": len(model.layers),
        "vocabulary": vocabulary_size(model),
        "context": context_length(model),
        "caches": [asdict(kind) for kind in cache_kinds(model)],
        "tier": finding.capability.value,
        "draft_end": finding.draft_end,
        "reason": finding.reason,
        "joint": joint.value,
        "joint_reason": joint_reason,
        "chunk_end": chunk_end,
        "chunk_reason": chunk_reason,
        "blas": machine_identity().get("blas"),
    }


def _quantised_layers(model: nn.Module) -> list[dict[str, int]]:
    """The number of layers for each pair of bits and group size, the most frequent first."""
    found = Counter(
        (module.bits, module.group_size)
        for module in model.modules()
        if hasattr(module, "bits") and hasattr(module, "group_size")
    )
    return [
        {"bits": bits, "group_size": size, "layers": count}
        for (bits, size), count in found.most_common()
    ]


def _table(report: dict[str, Any]) -> Table:
    quantised = [
        f"{kind['layers']} layers with {kind['bits']} bits in groups of {kind['group_size']}"
        for kind in report["quantisation"]
    ]
    context = report["context"]
    size = f"{report['parameters'] / 1e6:,.1f} M, {report['bits_per_weight']} bits each in memory"
    rows: list[tuple[str, str | Text]] = [
        ("architecture", f"{visible(report['type'])}, {report['layers']} layers"),
        ("parameters", size),
        ("quantisation", ", ".join(quantised) or "none"),
        ("vocabulary", f"{report['vocabulary']:,} tokens"),
        ("context", f"{context:,} tokens" if context else "no limit in config.json"),
        *(("" if row else "cache", _holds(kind)) for row, kind in enumerate(report["caches"])),
        ("drafts", Text(_DRAFTS[report["tier"]], style="bold")),
        ("why", report["reason"]),
        ("sequences", f"{report['joint']}: {report['joint_reason']}"),
        ("prompts", _chunks(report["chunk_end"], report["chunk_reason"])),
    ]
    if report["blas"]:  # on Linux's CPU back end it decides what rows cost
        own = "from MLX's wheel, with which each row costs a plain step"
        rows.append(("BLAS", own if report["blas"] == "own" else report["blas"]))
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column()
    for row in rows:
        table.add_row(*row)
    return table


def _chunks(end: int | None, reason: str) -> str:
    """The chunks in which prompts run."""
    if end is None:
        return f"in any chunks: {reason}"
    longer = f"beyond {end:,} tokens " if end else ""
    return f"{longer}in mlx-lm's chunks and never shared: {reason}"


def _holds(kind: dict[str, Any]) -> str:
    """The number of caches of a kind, and what each one holds."""
    positions, each = kind["positions"], kind["bytes_per_position"]
    if kind["state_bytes"] is not None:
        holds = f"state, {size_in_words(kind['state_bytes'])} however long the context"
    elif each is None:
        holds = "an unknown kind"
    elif positions is None:
        holds = f"all positions, {size_in_words(each)} each"
    else:
        holds = f"the latest {positions:,} positions, {size_in_words(positions * each)} at most"
    return f"{kind['count']} × {kind['name']}: {holds}"
