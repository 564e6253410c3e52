"""``mlxspec inspect``: shows a model's properties, and which drafts it verifies."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.filesize import decimal

from ..errors import OptionError
from .common.model_choice import ABOUT, DEFAULT, model_argument, needed_model
from .common.notes import say
from .common.options import ADAPTERS, NAME, command, option
from .common.output import print_rows, write_json

if TYPE_CHECKING:
    import mlx.nn as nn

    from ..models.heads.loading import HeadFiles

_DRAFTS = {
    "tree": "trees: several continuations are verified in one forward",
    "chain": "chains: one continuation is verified in one forward",
    "replay": "chains; after a rejection the states of recurrent layers are computed again",
    "plain": "none: the model decodes token by token",
}
_SIZES = {"hidden_size": "features", "vocab_size": "tokens", "num_hidden_layers": "layers"}


@command("inspect", short_help="Show what MODEL is, and which drafts it verifies.")
@model_argument(ABOUT + DEFAULT)
@option(*ADAPTERS, type=NAME, group="Model")
@option("--json", "Write one JSON object.", "as_json", group="Output")
def inspect_command(model: str | None, adapter_path: str | None, as_json: bool) -> None:
    """Show what MODEL is, and which drafts it verifies: trees, chains, or none.

    It says whether MODEL carries a trained head. If MODEL is a trained head itself, it shows the
    kind of the head, and which target it needs.

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
    from ..models.heads import named_kind
    from ..models.heads.loading import find_head, head_directory, own_head
    from ..models.model import load
    from ..models.model_files import find_directory, read_config

    model = needed_model(model)
    directory = find_directory(model, None, weights=())
    if named_kind(read_config(directory)):
        if adapter_path is not None:
            raise OptionError(f"--adapter-path {adapter_path}: a trained head takes no adapters")
        report = _head_report(find_head(head_directory(model)))
        rows = _head_rows(report)
    else:
        report = _report(load(model, adapter_path=adapter_path)[0])
        own = own_head(directory)
        report["head"] = None if own is None else _where(own, directory)
        rows = _rows(report)
    if as_json:
        write_json(report, indent=2)
        return
    say(model)
    print_rows(*rows)


def _where(found: HeadFiles, directory: Path) -> dict[str, Any]:
    """A head's kind, its files in the model's folder, and the size of its tensors."""
    files = [path.relative_to(directory).as_posix() for path in found.files]
    nbytes = sum(tensor.nbytes for tensor in found.tensors().values())
    return {"kind": found.kind.title, "files": files, "bytes": nbytes}


def _head_report(found: HeadFiles) -> dict[str, Any]:
    """Examine a head. ``bits_per_weight`` is the average in its files, including scales."""
    from mlx_lm.utils import compute_bits_per_weight, get_total_parameters

    from ..models.heads import sizes_needed
    from ..models.heads.loading import load_lazily

    head = load_lazily(found)
    return {
        "head": _where(found, found.directory),
        "parameters": get_total_parameters(head),
        "bits_per_weight": round(compute_bits_per_weight(head), 2),
        "quantisation": _quantised_layers(head),
        "most": head.most,
        "reads": len(head.reads),  # which ones may depend on the target
        "target": {"families": list(found.kind.families), **sizes_needed(found.config)},
    }


def _report(model: nn.Module) -> dict[str, Any]:
    """Examine a model with about two hundred small forwards.

    ``bits_per_weight`` is the average in memory, including scales. On the CPU it exceeds the
    checkpoint's, since weights and scales in half precision become float32.
    """
    from ..engine.capability import examine, examine_joint
    from ..engine.costs import machine_identity, model_identity
    from ..engine.model_sizes import cache_kinds, context_length
    from ..engine.target import vocabulary_size

    identity, (capability, reason) = model_identity(model), examine(model)
    joint, joint_reason = examine_joint(model, capability)
    return {
        "type": identity["type"],
        "parameters": identity["parameters"],
        "bits_per_weight": identity["bits_per_weight"],
        "quantisation": _quantised_layers(model),
        "layers": len(model.layers),
        "vocabulary": vocabulary_size(model),
        "context": context_length(model),
        "caches": [asdict(kind) for kind in cache_kinds(model)],
        "tier": capability.value,
        "reason": reason,
        "joint": joint.value,
        "joint_reason": joint_reason,
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


def _quantisation(report: dict[str, Any]) -> str:
    quantised = [
        f"{kind['layers']} layers with {kind['bits']} bits in groups of {kind['group_size']}"
        for kind in report["quantisation"]
    ]
    return ", ".join(quantised) or "none"


def _rows(report: dict[str, Any]) -> list[tuple[str, object]]:
    context, head = report["context"], report["head"]
    size = f"{report['parameters'] / 1e6:,.1f} M, {report['bits_per_weight']} bits each in memory"
    plain = report["tier"] == "plain"
    rows: list[tuple[str, object]] = [
        ("architecture", f"{report['type']}, {report['layers']} layers"),
        ("parameters", size),
        ("quantisation", _quantisation(report)),
        ("vocabulary", f"{report['vocabulary']:,} tokens"),
        ("context", f"{context:,} tokens" if context else "no limit in config.json"),
        *(("" if row else "cache", _holds(kind)) for row, kind in enumerate(report["caches"])),
        ("drafts", _DRAFTS[report["tier"]]),
        ("why", report["reason"]),
        ("sequences", f"{report['joint']}: {report['joint_reason']}"),
        ("prompts", "in mlx-lm's chunks and never shared" if plain else "in chunks of any size"),
        ("head", f"{head['kind']}, {decimal(head['bytes'])}" if head else "none"),
    ]
    if report["blas"]:  # on Linux's CPU back end it decides what rows cost
        rows.append(("BLAS", report["blas"]))
    return rows


def _head_rows(report: dict[str, Any]) -> list[tuple[str, object]]:
    head, target, reads = report["head"], report["target"], report["reads"]
    size = f"{report['parameters'] / 1e6:,.1f} M, {report['bits_per_weight']} bits each"
    families = " or ".join(target["families"]) or "any architecture"
    needs = [f"{target[name]:,} {words}" for name, words in _SIZES.items() if name in target]
    return [
        ("head", f"{head['kind']}, drafts up to {report['most']} tokens"),
        ("parameters", size),
        ("quantisation", _quantisation(report)),
        ("reads", f"the outputs of {reads} layers" if reads else "the states after the final norm"),
        ("target", ", ".join([families, *needs])),
    ]


def _holds(kind: dict[str, Any]) -> str:
    """The number of caches of a kind, and what each one holds."""
    positions, each = kind["positions"], kind["bytes_per_position"]
    if kind["state_bytes"] is not None:
        holds = f"state, {decimal(kind['state_bytes'])} however long the context"
    elif each is None:
        holds = "an unknown kind"
    elif positions is None:
        holds = f"all positions, {decimal(each)} each"
    else:
        holds = f"the latest {positions:,} positions, {decimal(positions * each)} at most"
    return f"{kind['count']} × {kind['name']}: {holds}"
