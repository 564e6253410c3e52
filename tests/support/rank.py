"""The script that tests run as two ranks, and its generations, which one process must reproduce.

Rank 0 prints a JSON object.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
from mlx_lm.models.llama import Model, ModelArgs

from mlxspec.distributed import ranks as distributed
from mlxspec.distributed.launch import silence_followers
from mlxspec.drafting.drafter import Drafter, NoDraft
from mlxspec.drafting.lookahead import LookaheadDrafter
from mlxspec.drafting.prompt_lookup import PromptLookupDrafter
from mlxspec.engine.capability import chain_capability
from mlxspec.engine.loaded_model import LoadedModel
from mlxspec.errors import LoadError
from mlxspec.generation.decoder import Decoder
from tests.support.architectures import ARCHITECTURES
from tests.support.drafters import PartlyRightDrafter, drafted
from tests.support.harness import run

_NEXT = ARCHITECTURES["qwen3_next"]
HYBRIDS = {
    "tensor parallel": ARCHITECTURES["qwen3_5"],
    "pipeline": replace(_NEXT, config={**_NEXT.config, "full_attention_interval": 2}),
}
"""Models whose state cannot be trimmed: after a rejection it is recomputed."""
ARCHITECTURE_PROMPT = [5, 9, 3, 5, 9]

_load_shard = distributed.load_shard

PROMPT = [1, *range(300, 320), *range(300, 306)]


@dataclass(frozen=True)
class Settings:
    """One generation: a new drafter, and the options of :meth:`mlxspec.Decoder.stream`."""

    drafter: Callable[[], Drafter]
    options: dict[str, Any]


SETTINGS = {
    "plain": Settings(NoDraft, {"max_tokens": 12}),
    "lookup": Settings(lambda: PromptLookupDrafter(4, 2, 1), {"max_tokens": 18}),
    "lookahead": Settings(lambda: LookaheadDrafter(3, 3, 3), {"max_tokens": 12}),
    "sampled": Settings(
        lambda: PromptLookupDrafter(3, 2, 1),
        {"max_tokens": 14, "temp": 0.2, "top_p": 0.9, "seed": 5, "repetition_penalty": 1.05},
    ),
    "quantised": Settings(
        lambda: PromptLookupDrafter(3, 2, 1),
        {"max_tokens": 12, "kv_bits": 8, "kv_group_size": 32, "quantized_kv_start": 30},
    ),
}


def main() -> None:
    silence_followers()
    model = sys.argv[1]
    distributed.load_shard = load_shard
    report: dict[str, object] = {"unsplittable": unsplittable()}
    with distributed.taking_part() as rank_0:
        assert rank_0
        decoder = Decoder(*rank_0.load(model))
        report["interrupted"] = interrupted(decoder)
        abandoned = drafted(decoder, PROMPT, SETTINGS["lookup"].drafter(), max_tokens=20)
        next(abandoned)
        report["outputs"] = {}
        for name, settings in SETTINGS.items():
            responses = list(drafted(decoder, PROMPT, settings.drafter(), **settings.options))
            report["outputs"][name] = [response.token for response in responses]
            report[name] = vars(responses[-1].stats)
        for name in HYBRIDS:
            report[name] = hybrid(rank_0, name)
        print(json.dumps(report))


def hybrid(rank_0: distributed.Leader, name: str) -> dict[str, object]:
    """Return the output of a hybrid model, which has no directory to load from."""
    loaded, _ = rank_0.load(name)
    capability = chain_capability(loaded)
    drafter = PartlyRightDrafter(json.loads(sys.argv[2])[name], 64, seed=1)
    outcome = run(loaded, ARCHITECTURE_PROMPT, drafter, max_tokens=12, capability=capability)
    return {"capability": capability.value, "tokens": outcome.tokens, "accepted": outcome.accepted}


def load_shard(name: str, ranks: mx.distributed.Group) -> tuple[LoadedModel, Any]:
    """Load a model's shard; accept the names of the hybrid models, too."""
    if name not in HYBRIDS:
        return _load_shard(name, ranks)
    loaded = LoadedModel(HYBRIDS[name].model())
    distributed.split(loaded, ranks, name)
    mx.eval(loaded.model.parameters())
    return loaded, None


def unsplittable() -> str:
    """Return the error for a model whose attention heads two ranks cannot split."""
    model = Model(
        ModelArgs(
            model_type="llama",
            hidden_size=48,
            num_hidden_layers=1,
            intermediate_size=16,
            num_attention_heads=3,
            num_key_value_heads=3,
            rms_norm_eps=1e-5,
            vocab_size=16,
        )
    )
    try:
        distributed.split(LoadedModel(model), mx.distributed.init(), "three")
    except LoadError as error:
        return str(error)
    return "split"


def interrupted(decoder: Decoder) -> int:
    """Interrupt a generation in the middle of a step; return the number of tokens before."""
    tokens = 0
    try:
        for _ in drafted(decoder, PROMPT, SETTINGS["lookup"].drafter(), max_tokens=100_000):
            tokens += 1
            if tokens == 3:
                threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT)).start()
    except KeyboardInterrupt:
        pass
    return tokens


if __name__ == "__main__":
    main()
