"""The cost of a rejection for hybrid models: recomputing states, or running tokens again.

    python benchmarks/rejected_states.py [ROUNDS]
    python benchmarks/rejected_states.py --decode [ROUNDS]

A random model like a Qwen 3.5 with 100 million parameters (three of four layers are gated delta
nets) runs steps of 8 rows, each after a step that kept a few rows. Both methods and plain steps
alternate in random order. The table shows the median time of such a pair of steps, and the number
of rows that ran through the model per kept token.

The second form decodes the demo's grounded prompts with this model. What a random model writes
soon repeats itself, and hardly ever what stands in the prompt, so there are drafts of both kinds.
The table has the speed relative to plain decoding by prompt: the fastest turn of each.
"""

from __future__ import annotations

import random
import sys
import time
from pathlib import Path
from statistics import median

import mlxspec  # before mlx.core, for OpenBLAS

# isort: split
import mlx.core as mx
import mlx.nn as nn

from mlxspec.bench.prompts import bundled_prompts
from mlxspec.drafting.drafter import DraftTree
from mlxspec.engine.target import Capability, Target, vocabulary_size

sys.path.append(str(Path(__file__).parents[1]))  # where the tests are

from tests.support.random_models import random_model

_ROWS = 8
_CONTEXT = 256
_KEPT = (1, 2, 4, 7, 8)
_TOKENS = 160


def hybrid() -> nn.Module:
    """A model with random weights; its output does not matter."""
    text = {
        "model_type": "qwen3_5_text",
        "hidden_size": 768,
        "intermediate_size": 2304,
        "num_hidden_layers": 12,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "linear_num_value_heads": 16,
        "linear_num_key_heads": 8,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
        "linear_conv_kernel_dim": 4,
        "rms_norm_eps": 1e-6,
        "vocab_size": 8192,
        "full_attention_interval": 4,
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_theta": 10000.0, "partial_rotary_factor": 0.25},
    }
    return random_model("qwen3_5", text_config=text)


def step(target: Target, rows: int, kept: int) -> int:
    """Run a step; return how many rows ran through the model."""
    rows = min(rows, 1 + target.max_depth)
    kept = min(rows, kept)
    tokens = [random.randrange(8192) for _ in range(rows)]
    ran = rows + len(target.pending)
    logits = target.forward(mx.array(tokens), DraftTree.chain(tokens[0], tokens[1:]))
    mx.eval(mx.argmax(logits, axis=-1))
    target.commit(range(kept))
    return ran


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 40
    model = hybrid()
    vocabulary = vocabulary_size(model)
    targets = {way: Target(model, way, vocabulary) for way in (Capability.TAPE, Capability.REPLAY)}
    for target in targets.values():
        target.prefill([random.randrange(8192) for _ in range(_CONTEXT)])
    print(f"{'kept':>5} {'tape ms':>9} {'replay ms':>10} {'ratio':>6} {'rows per token':>18}")
    plain = []
    for kept in _KEPT:
        times: dict[Capability, list[float]] = {way: [] for way in targets}
        ran: dict[Capability, int] = dict.fromkeys(targets, 0)
        kept_rows = ran.copy()
        for number in range(rounds + 2):
            for way in random.sample(list(targets), len(targets)):
                target = targets[way]
                length, started = target.length, time.perf_counter()
                rows = step(target, _ROWS, kept) + step(target, _ROWS, kept)
                mx.eval(target.arrays)
                seconds = time.perf_counter() - started
                if number >= 2:
                    times[way].append(seconds)
                    ran[way] += rows
                    kept_rows[way] += target.length - length
            target = targets[Capability.TAPE]
            started = time.perf_counter()
            step(target, 1, 1)
            plain.append(time.perf_counter() - started)
        tape, replay = (median(times[way]) * 1e3 for way in targets)
        per_token = " ".join(f"{ran[way] / kept_rows[way]:8.2f}" for way in targets)
        print(
            f"{kept:5} {tape:9.2f} {replay:10.2f} {tape / replay:6.2f} {per_token:>18}", flush=True
        )
    print(f"plain step: {median(plain) * 1e3:.2f} ms")


def decode(rounds: int = 5) -> None:
    """Print the speed of both ways relative to plain decoding."""
    _, tokenizer = mlxspec.load("demo")
    model = hybrid()
    plain = mlxspec.Decoder(model, tokenizer)
    decoders: dict[str, mlxspec.Decoder] = {"plain": plain}
    for way in (Capability.TAPE, Capability.REPLAY):
        model.chain_capability = way
        decoders[way.value] = mlxspec.AutoDecoder(model, tokenizer, memory_tokens=0)
        list(decoders[way.value].stream([5, 6, 7], 8))  # it measures steps
    print(f"{'prompt':>10} {'tape':>6} {'replay':>7} {'tokens per step':>16}")
    for prompt in bundled_prompts():
        if prompt.category.startswith("free"):
            continue
        messages = [dict(message) for message in prompt.messages]
        tokens = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
        speeds: dict[str, list[float]] = {name: [] for name in decoders}
        per_step = 0.0
        for _ in range(rounds):
            for name in random.sample(list(decoders), len(decoders)):
                started = time.perf_counter()
                *_, last = decoders[name].stream(tokens, _TOKENS)
                speeds[name].append(last.stats.emitted / (time.perf_counter() - started))
                per_step = last.stats.tokens_per_step if name == "tape" else per_step
        base, *others = speeds.values()
        ratios = [median(own / b for own, b in zip(way, base, strict=True)) for way in others]
        print(
            f"{prompt.category:>10} {ratios[0]:6.2f} {ratios[1]:7.2f} {per_step:16.2f}", flush=True
        )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--decode"]:
        decode(*map(int, sys.argv[2:]))
    else:
        main()
