"""What ``mlxspec inspect`` does: load a model, look it over, show it."""

from __future__ import annotations

import json
from typing import Any

import click
from rich.table import Table
from rich.text import Text

from ..engine.facts import CacheFacts, ModelFacts, facts_of
from ..engine.target import Capability
from ..loading.model import load
from ..terminal import one_line, visible
from .consoles import output_console

_DRAFTS = {
    Capability.TREE: "trees: several continuations are verified in one forward",
    Capability.CHAIN: "chains: one continuation is verified in one forward",
    Capability.REPLAY: "chains; after a rejection accepted tokens run again with the next step",
    Capability.PLAIN: "none: it is decoded token by token",
}


def run(model: str, as_json: bool) -> None:
    """Show a model, as a table or as one JSON object.

    Raises:
        LoadError: the model cannot be found or read.
    """
    loaded, _ = load(model)
    facts = facts_of(loaded)
    if as_json:
        click.echo(json.dumps(_as_json(facts), indent=2))
        return
    console = output_console()
    console.print(Text(one_line(model), style="bold"))
    console.print(_table(facts))


def _table(facts: ModelFacts) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column()
    context = f"{facts.context:,} tokens" if facts.context else "no bound in config.json"
    table.add_row("architecture", f"{visible(facts.type)}, {facts.layers} layers")
    size = f"{_number(facts.parameters)}, {facts.bits_per_weight} bits each in memory"
    table.add_row("parameters", size)
    table.add_row("quantisation", _quantisation(facts))
    table.add_row("vocabulary", f"{facts.vocabulary:,} tokens")
    table.add_row("context", context)
    for row, cache in enumerate(facts.caches):
        table.add_row("cache" if row == 0 else "", _cache(cache))
    table.add_row("drafts", Text(_DRAFTS[facts.finding.capability], style="bold"))
    table.add_row("why", facts.finding.reason)
    return table


def _quantisation(facts: ModelFacts) -> str:
    kinds = [
        f"{count} layers with {bits} bits in groups of {size}"
        for (bits, size), count in facts.quantised_layers.items()
    ]
    return ", ".join(kinds) or "none"


def _cache(cache: CacheFacts) -> str:
    if cache.state_bytes is not None:
        holds = f"state, {_size(cache.state_bytes)} however long the context"
    elif cache.positions is not None and cache.bytes_per_position is not None:
        most = _size(cache.positions * cache.bytes_per_position)
        holds = f"the latest {cache.positions:,} positions, {most} at most"
    elif cache.bytes_per_position is not None:
        holds = f"all positions, {_size(cache.bytes_per_position)} each"
    else:
        holds = "a kind of its own"
    return f"{cache.count} × {cache.name}: {holds}"


def _number(count: int) -> str:
    return f"{count / 1e9:.1f} B" if count >= 1e9 else f"{count / 1e6:.1f} M"


def _size(count: int) -> str:
    size = float(count)
    for unit in ("bytes", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.4g} {unit}"
        size /= 1024
    return f"{size:.4g} GiB"


def _as_json(facts: ModelFacts) -> dict[str, Any]:
    quantised = [
        {"bits": bits, "group_size": size, "layers": count}
        for (bits, size), count in facts.quantised_layers.items()
    ]
    return {
        "type": facts.type,
        "parameters": facts.parameters,
        "bits_per_weight": facts.bits_per_weight,
        "quantisation": quantised,
        "layers": facts.layers,
        "vocabulary": facts.vocabulary,
        "context": facts.context,
        "caches": [vars(cache) for cache in facts.caches],
        "tier": facts.finding.capability.value,
        "draft_end": facts.finding.draft_end,
        "reason": facts.finding.reason,
    }
