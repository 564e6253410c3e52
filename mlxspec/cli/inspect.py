"""``mlxspec inspect``: shows a model's properties, and which drafts it verifies."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.filesize import decimal

from ..errors import OptionError
from .common.model_choice import model_argument, model_or_default, note_if_demo
from .common.notes import say
from .common.options import ADAPTERS, NAME, command, option
from .common.output import print_rows, waiting_bar, write_json

if TYPE_CHECKING:
    import mlx.nn as nn


_DRAFTS = {
    "tree": "trees: several continuations are verified in one forward",
    "chain": "chains: one continuation is verified in one forward",
    "replay": "chains; after a rejection, recurrent layers compute their states again",
    "plain": "none: the model decodes token by token",
}
_SIZES = {"hidden_size": "features", "vocab_size": "tokens", "num_hidden_layers": "layers"}


@command("inspect", short_help="Show MODEL's properties, and which drafts it verifies.")
@model_argument()
@option(*ADAPTERS, type=NAME, group="Model")
@option("--anew", "Run MODEL itself to find out which drafts it verifies.", group="Model")
@option("--json", "Write one JSON object.", "as_json", group="Output")
def inspect_command(model: str | None, adapter_path: str | None, anew: bool, as_json: bool) -> None:
    """Show MODEL's properties, and which drafts it verifies: trees, chains, or none.

    It also shows whether MODEL carries a trained head. If MODEL is itself a trained head, it shows
    the head's kind and the target that it needs.

    \b
    Examples:
      mlxspec inspect demo
      mlxspec inspect mlx-community/gemma-3-4b-it-4bit
      mlxspec inspect ./mlx_model --json | jq -r .capability

    Trial steps show which drafts MODEL verifies; the architecture's name does not matter. After a
    rejection, the caches must be as if only the accepted tokens had run. Trial steps also show
    whether several sequences can share a forward, with the same results as when each runs alone,
    and whether a prompt's result depends on the chunks in which it is processed.

    The trial steps run on a miniature, a random model with the same code and configuration but few
    layers and small sizes. The findings are kept in the cache directory, for all commands, until
    mlxspec, mlx-lm, MLX, the configuration or the quantisation changes. With --anew, about two
    hundred trial steps run on MODEL itself, and their findings replace those that are kept.
    """
    from ..models.heads import named_kind, sizes_needed
    from ..models.model_files import find_directory, read_config

    note_if_demo(model)
    model = model_or_default(model)
    directory = find_directory(model, None, weights=())
    is_head = bool(named_kind(read_config(directory)))
    if is_head and adapter_path is not None:
        raise OptionError(f"--adapter-path {adapter_path}: trained heads have no adapters")
    with waiting_bar("Loading", noted="" if is_head else f"loading and examining {model}"):
        # These import mlx-lm, which takes a second.
        from ..engine.machine import model_identity
        from ..models.heads.loading import find_head, head_directory, load_lazily, own_head
        from ..models.model import load

        if not is_head:
            examined, _ = load(model, adapter_path=adapter_path)  # downloads the head's files, too
            head = own_head(directory)
        else:
            head = find_head(head_directory(model))
            examined = load_lazily(head)
            target = {"families": list(head.kind.families), **sizes_needed(head.config)}
            report: dict[str, Any] = {"most": examined.most, "target": target}
    if not is_head:
        report = _model_report(examined, anew)
    identity = model_identity(examined)
    # The bits per weight are those in memory: on the CPU, half precision becomes float32.
    report |= {key: identity[key] for key in ("type", "parameters", "bits_per_weight")}
    report["head"] = head and {
        "kind": head.kind.title,
        "files": [path.relative_to(directory).as_posix() for path in head.files],
        "bytes": sum(tensor.nbytes for tensor in head.tensors().values()),
    }
    if as_json:
        write_json(report, indent=2)
    else:
        say(model)
        print_rows(*_rows(report))


def _model_report(model: nn.Module, anew: bool) -> dict[str, Any]:
    """A model's properties, and what trial steps have shown."""
    from mlx_lm.models.cache import make_prompt_cache

    from ..engine.loaded_model import LoadedModel
    from ..engine.machine import machine_identity
    from ..engine.model_sizes import cache_kinds, context_length

    loaded = LoadedModel(model, anew=anew)
    with waiting_bar("Examining the model"):
        (capability, reason), (joint, joint_reason) = loaded.drafts, loaded.joint
    return {
        "layers": len(model.layers),
        "vocabulary": loaded.vocab_size,
        "context": context_length(model),
        "caches": [asdict(kind) for kind in cache_kinds(loaded)],
        "capability": capability.value,
        "reason": reason,
        "joint": joint.value,
        "joint_reason": joint_reason,
        "longest_in_chunks": loaded.longest_in_chunks(make_prompt_cache(model)),
        "tried_on": loaded.findings.tried_on,
        "blas": machine_identity().get("blas"),
    }


def _rows(report: dict[str, Any]) -> list[tuple[str, object]]:
    """The report on a model, or on a head alone, as names and texts."""
    head, target = report["head"], report.get("target")
    rows: list[tuple[str, object]] = [
        ("head", f"{head['kind']}, {decimal(head['bytes'])}" if head else "none"),
        ("parameters", f"{report['parameters']:,}"),
        ("bits each", f"{report['bits_per_weight']} in memory"),
    ]
    if target:
        families = " or ".join(target["families"]) or "any architecture"
        needs = [f"{target[name]:,} {words}" for name, words in _SIZES.items() if name in target]
        drafts = f"up to {report['most']} tokens"
        return [*rows, ("drafts", drafts), ("target", ", ".join([families, *needs]))]
    context, longest = report["context"], report["longest_in_chunks"]
    prompts = "in chunks of any size" if longest != 0 else "in mlx-lm's chunks and never shared"
    if longest:
        prompts += f"; beyond {longest:,} tokens, in mlx-lm's chunks and never shared"
    return [
        ("architecture", f"{report['type']}, {report['layers']} layers"),
        *rows,
        ("vocabulary", f"{report['vocabulary']:,} tokens"),
        ("context", f"{context:,} tokens" if context else "no limit in config.json"),
        *(("cache", _cache(kind)) for kind in report["caches"]),
        ("drafts", _DRAFTS[report["capability"]]),
        ("why", report["reason"]),
        ("sequences", f"{report['joint']}: {report['joint_reason']}"),
        ("found by", f"trial steps of {report['tried_on']}"),
        ("prompts", prompts),
        # On Linux's CPU back end, the BLAS decides the cost of rows.
        *([("BLAS", report["blas"])] if report["blas"] else []),
    ]


def _cache(kind: dict[str, Any]) -> str:
    """The number of caches of a kind, and what each one holds."""
    positions, each = kind["positions"], kind["bytes_per_position"]
    if kind["state_bytes"] is not None:
        holds = f"state, {decimal(kind['state_bytes'])} however long the context"
    elif each is None:
        holds = "an unknown kind"
    else:
        span = "all positions" if positions is None else f"the latest {positions:,} positions"
        holds = f"{span}, {decimal(each)} each"
    return f"{kind['count']} × {kind['name']}: {holds}"
