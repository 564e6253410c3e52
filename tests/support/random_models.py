"""Small float32 models of mlx-lm's architectures with random weights."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.utils import _get_classes

COMMON = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-5,
    "vocab_size": 64,
    "max_position_embeddings": 32768,
    "rope_theta": 1e4,
}


def random_model(model_type: str, **config: object) -> nn.Module:
    """Return a model of this type; ``config`` adds to or overrides the common sizes."""
    mx.random.seed(1)
    model_class, args_class = _get_classes({"model_type": model_type})
    model = model_class(args_class.from_dict({**COMMON, "model_type": model_type, **config}))
    mx.eval(model.parameters())
    return model


def scaled_rope(rope_type: str, **scaling: object) -> dict[str, object]:
    """Return the configuration of a Llama with this RoPE scaling."""
    return {"rope_scaling": {"rope_type": rope_type, **scaling}}


LLAMA_3_SCALING = scaled_rope(
    "llama3",
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=8192,
)
YARN_SCALING = scaled_rope("yarn", factor=4.0, original_max_position_embeddings=8192)
MINISTRAL_SCALING = {
    "rope_parameters": {
        "rope_theta": 1e4,
        "rope_type": "default",
        "llama_4_scaling_beta": 0.1,
        "original_max_position_embeddings": 8192,
    },
    "tie_word_embeddings": True,
}
SLIDING_GEMMA_3 = {"sliding_window": 16, "sliding_window_pattern": 2}
SLIDING_COHERE_2 = {
    **SLIDING_GEMMA_3,
    "layer_norm_eps": 1e-5,
    "layer_norm_bias": False,
    "logit_scale": 1.0,
    "attention_bias": False,
}
GPT_2 = {
    "n_ctx": 64,
    "n_embd": 32,
    "n_head": 4,
    "n_layer": 2,
    "n_positions": 64,
    "layer_norm_epsilon": 1e-5,
}
MAMBA_2 = {
    "num_heads": 4,
    "head_dim": 16,
    "state_size": 8,
    "conv_kernel": 4,
    "n_groups": 1,
    "expand": 2,
    "time_step_limit": (0.0, 1.0),
    "chunk_size": 8,
    "use_bias": False,
    "use_conv_bias": True,
    "layer_norm_epsilon": 1e-5,
    "time_step_rank": 4,
    "tie_word_embeddings": True,
    "residual_in_fp32": False,
}
