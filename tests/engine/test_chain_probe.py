"""A model whose position rule changes verifies no drafts, so the output stays mlx-lm's."""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_map_with_path
from mlx_lm import stream_generate
from mlx_lm.models import rope_utils

from mlxspec.engine.capability import Capability
from mlxspec.generation.decoder import Decoder
from mlxspec.models.model import load
from mlxspec.models.model_files import DEMO
from tests.support.architectures import ARCHITECTURES, livelier
from tests.support.drafters import PartlyRightDrafter, drafted
from tests.support.harness import examined
from tests.support.random_models import random_model, scaled_rope

pytestmark = pytest.mark.slow

END = 40
DYNAMIC = {
    "llama": scaled_rope("dynamic", factor=4.0),
    "internlm2": {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
    "internlm3": scaled_rope("dynamic", factor=6.0),
    "falcon_h1": ARCHITECTURES["falcon_h1"].config | scaled_rope("dynamic", factor=4.0),
}


def dynamic(model_type: str, end: int = END) -> nn.Module:
    config = {**DYNAMIC[model_type], "max_position_embeddings": end}
    model = random_model(model_type, **config)
    model.update(tree_map_with_path(livelier, model.parameters()))
    return model


@pytest.mark.parametrize("model_type", DYNAMIC)
@pytest.mark.parametrize("length", [4, END - 8, 2 * END])
def test_a_base_that_depends_on_the_length_changes_no_output(model_type: str, length: int) -> None:
    model, (_, tokenizer) = dynamic(model_type), load(DEMO)
    prompt = [(7 * i * i + 3 * i) % 61 + 3 for i in range(length)]
    options = {"max_tokens": 2 * END - length // 2, "prefill_step_size": 25}
    reference = list(stream_generate(model, tokenizer, prompt, **options))
    expected = [response.token for response in reference]
    drafter = PartlyRightDrafter(expected, 64, seed=1)
    responses = list(drafted(Decoder(model, tokenizer), prompt, drafter, **options))
    assert [response.token for response in responses] == expected
    for response, same in zip(responses, reference, strict=True):
        assert mx.max(mx.abs(response.logprobs - same.logprobs)).item() < 1e-4
    assert responses[-1].stats.accepted == 0


@pytest.mark.parametrize("end", [40, 4096, 5000, 32768])
@pytest.mark.parametrize("model_type", DYNAMIC)
def test_a_base_that_changes_somewhere_is_found(model_type: str, end: int) -> None:
    assert examined(dynamic(model_type, end))[0] is Capability.PLAIN


@pytest.mark.parametrize("deciding", ["first", "last"])
@pytest.mark.parametrize("end", [96, 100, 1000, 8192])
def test_a_rule_that_a_steps_first_or_last_position_decides_is_found(
    deciding: str, end: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ordinary = rope_utils.Llama3RoPE.__call__

    def switching(self: nn.Module, x: mx.array, offset: int = 0) -> mx.array:
        place = offset if deciding == "first" else offset + x.shape[-2] - 1
        return ordinary(self, x if place < end else 2 * x, offset)

    monkeypatch.setattr(rope_utils.Llama3RoPE, "__call__", switching)
    scaling = scaled_rope("llama3", factor=8.0, original_max_position_embeddings=end)
    assert examined(random_model("llama", **scaling))[0] is Capability.PLAIN


def test_a_rule_for_each_position_keeps_drafts_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    ordinary: Callable[..., mx.array] = rope_utils.Llama3RoPE.__call__

    def switching(self: nn.Module, x: mx.array, offset: int = 0) -> mx.array:
        places = offset + mx.arange(x.shape[-2])[:, None]
        return ordinary(self, mx.where(places < 1000, x, 2 * x), offset)

    monkeypatch.setattr(rope_utils.Llama3RoPE, "__call__", switching)
    scaling = scaled_rope("llama3", factor=8.0, original_max_position_embeddings=1000)
    # A branching step's rows are not consecutive positions.
    assert examined(random_model("llama", **scaling))[0] is Capability.CHAIN
