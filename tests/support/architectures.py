"""Small random models of mlx-lm's architectures, by their common names."""

from __future__ import annotations

from dataclasses import dataclass, field

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map_with_path

from mlxspec.engine.capability import Capability
from tests.support.architecture_settings import (
    COMPRESSED_DEEPSEEK,
    EXPERTS,
    GEMMA_3N,
    GEMMA_4,
    GRANITE,
    HYBRID_JAMBA,
    HYBRID_NEMOTRON,
    LATENT_ATTENTION,
    LINEAR_KIMI,
    LLAMA_4,
    MAMBA,
    QWEN_3,
    QWEN_LINEAR,
    SLIDING_LAYERS,
    WINDOW,
)
from tests.support.random_models import (
    GPT_2,
    LLAMA_3_SCALING,
    MAMBA_2,
    MINISTRAL_SCALING,
    SLIDING_COHERE_2,
    SLIDING_GEMMA_3,
    random_model,
)
from tests.support.rarer_architectures import RARER, nested


@dataclass(frozen=True)
class Architecture:
    """How to build a small model, and its expected capability.

    ``published`` names well-known models, which docs/architectures.md shows.
    """

    capability: Capability
    model_type: str
    published: str
    config: dict[str, object] = field(default_factory=dict)

    def model(self) -> nn.Module:
        """Return a random model whose output clearly depends on its context."""
        model = random_model(self.model_type, **self.config)
        model.update(tree_map_with_path(livelier, model.parameters()))
        mx.eval(model.parameters())
        return model


def livelier(name: str, weight: mx.array) -> mx.array:
    projects = weight.ndim >= 2 and not any(part in name for part in _UNSCALED)
    return 4 * weight if projects else weight


_UNSCALED = ("embed", "wte", "conv", "lm_head", "gate.weight")


ARCHITECTURES = {
    "llama3": Architecture(Capability.TREE, "llama", "Llama 2 and 3", LLAMA_3_SCALING),
    "mistral": Architecture(
        Capability.TREE,
        "llama",
        "Mistral 7B v0.1 with its window",
        {"sliding_window": WINDOW, "layer_types": SLIDING_LAYERS},
    ),
    "ministral3": Architecture(
        Capability.CHAIN,
        "ministral3",
        "Ministral 3",
        {**MINISTRAL_SCALING, "sliding_window": WINDOW, "layer_types": SLIDING_LAYERS},
    ),
    "mistral_small3": Architecture(
        Capability.TREE, "mistral3", "Mistral Small 3.1 and 3.2", nested("mistral")
    ),
    "mixtral": Architecture(
        Capability.TREE, "mixtral", "Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}
    ),
    "qwen2": Architecture(Capability.TREE, "qwen2", "Qwen 2 and 2.5"),
    "qwen3": Architecture(Capability.TREE, "qwen3", "Qwen 3", QWEN_3),
    "qwen3_moe": Architecture(
        Capability.TREE,
        "qwen3_moe",
        "Qwen 3 MoE",
        {
            **QWEN_3,
            **EXPERTS,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "norm_topk_prob": True,
        },
    ),
    "qwen3_next": Architecture(
        Capability.REPLAY, "qwen3_next", "Qwen 3 Next", EXPERTS | QWEN_LINEAR
    ),
    "qwen3_5": Architecture(
        Capability.REPLAY,
        "qwen3_5",
        "Qwen 3.5",
        {
            "text_config": {
                **QWEN_LINEAR,
                "model_type": "qwen3_5_text",
                "hidden_size": 32,
                "intermediate_size": 64,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "head_dim": 8,
                "vocab_size": 64,
                "max_position_embeddings": 32768,
            }
        },
    ),
    "gemma": Architecture(Capability.TREE, "gemma", "Gemma"),
    "gemma2": Architecture(Capability.TREE, "gemma2", "Gemma 2"),
    "gemma3": Architecture(Capability.TREE, "gemma3_text", "Gemma 3", SLIDING_GEMMA_3),
    "gemma3_images": Architecture(
        Capability.TREE,
        "gemma3",
        "Gemma 3 (images and text)",
        nested("gemma3_text", **SLIDING_GEMMA_3),
    ),
    "gemma3n": Architecture(Capability.TREE, "gemma3n", "Gemma 3n", {"text_config": GEMMA_3N}),
    "phi3": Architecture(Capability.TREE, "phi3", "Phi 3 and 4"),
    "gpt_oss": Architecture(
        Capability.TREE,
        "gpt_oss",
        "gpt-oss",
        {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": WINDOW,
            "layer_types": SLIDING_LAYERS,
        },
    ),
    "deepseek_v2": Architecture(
        Capability.TREE,
        "deepseek_v2",
        "DeepSeek V2",
        {
            **LATENT_ATTENTION,
            "topk_method": "greedy",
            "rope_scaling": {"factor": 4, "original_max_position_embeddings": 8192},
        },
    ),
    "deepseek_v3": Architecture(
        Capability.TREE, "deepseek_v3", "DeepSeek V3 and R1", LATENT_ATTENTION
    ),
    "deepseek_v32": Architecture(
        Capability.TREE,
        "deepseek_v32",
        "DeepSeek V3.2",
        {**LATENT_ATTENTION, "index_head_dim": 8, "index_n_heads": 4, "index_topk": 8},
    ),
    "olmo2": Architecture(Capability.TREE, "olmo2", "OLMo 2"),
    "olmo3": Architecture(
        Capability.TREE,
        "olmo3",
        "OLMo 3",
        {"sliding_window": WINDOW, "layer_types": SLIDING_LAYERS},
    ),
    "granite": Architecture(Capability.TREE, "granite", "Granite 3 (dense)", GRANITE),
    "granitemoehybrid": Architecture(
        Capability.REPLAY,
        "granitemoehybrid",
        "Granite 4 (hybrid)",
        {**GRANITE, **MAMBA, "layer_types": ["mamba", "attention"]},
    ),
    "smollm3": Architecture(Capability.TREE, "smollm3", "SmolLM 3"),
    "mamba": Architecture(
        Capability.REPLAY,
        "mamba",
        "Mamba",
        {
            "state_size": 8,
            "conv_kernel": 4,
            "use_bias": False,
            "use_conv_bias": True,
            "time_step_rank": 4,
        },
    ),
    "mamba2": Architecture(Capability.REPLAY, "mamba2", "Mamba 2", MAMBA_2),
    "lfm2": Architecture(
        Capability.REPLAY,
        "lfm2",
        "LFM 2",
        {
            "norm_eps": 1e-5,
            "conv_bias": False,
            "conv_L_cache": 3,
            "block_dim": 32,
            "block_ff_dim": 64,
            "block_multiple_of": 16,
            "block_ffn_dim_multiplier": 1.0,
            "block_auto_adjust_ff_dim": False,
            "layer_types": ["conv", "full_attention"],
        },
    ),
    "rwkv7": Architecture(
        Capability.REPLAY,
        "rwkv7",
        "RWKV 7",
        {
            "norm_eps": 1e-5,
            "a_low_rank_dim": 8,
            "v_low_rank_dim": 8,
            "gate_low_rank_dim": 8,
            "decay_low_rank_dim": 8,
        },
    ),
    "cohere2": Architecture(Capability.TREE, "cohere2", "Command A, Command R7B", SLIDING_COHERE_2),
    "llama4": Architecture(Capability.CHAIN, "llama4", "Llama 4", {"text_config": LLAMA_4}),
    "gpt2": Architecture(
        Capability.CHAIN, "gpt2", "GPT-2", {**GPT_2, "n_ctx": 256, "n_positions": 256}
    ),
    "glm4": Architecture(
        Capability.TREE, "glm4", "GLM 4", {"attention_bias": False, "partial_rotary_factor": 0.5}
    ),
    "exaone4": Architecture(
        Capability.TREE,
        "exaone4",
        "EXAONE 4",
        {
            "tie_word_embeddings": True,
            "rope_scaling": None,
            "sliding_window": WINDOW,
            "sliding_window_pattern": "LG",
        },
    ),
    "falcon_h1": Architecture(
        Capability.REPLAY,
        "falcon_h1",
        "Falcon H1",
        {**MAMBA, "mamba_d_ssm": 64, "mamba_expand": 2, "mamba_chunk_size": 8},
    ),
    "recurrent_gemma": Architecture(
        Capability.REPLAY,
        "recurrent_gemma",
        "RecurrentGemma",
        {
            "attention_bias": False,
            "conv1d_width": 4,
            "logits_soft_cap": 30.0,
            "attention_window_size": WINDOW,
            "block_types": ["recurrent", "attention"],
        },
    ),
    "gemma4": Architecture(Capability.TREE, "gemma4_text", "Gemma 4", GEMMA_4),
    "gemma4_images": Architecture(
        Capability.TREE, "gemma4", "Gemma 4 (images and text)", nested("gemma4_text", **GEMMA_4)
    ),
    "deepseek_v41": Architecture(
        Capability.REPLAY, "deepseek_v41", "DeepSeek V4.1", COMPRESSED_DEEPSEEK
    ),
    "nemotron_h": Architecture(
        Capability.REPLAY, "nemotron_h", "Nemotron H and 3", HYBRID_NEMOTRON
    ),
    "jamba": Architecture(Capability.REPLAY, "jamba", "Jamba", HYBRID_JAMBA),
    "kimi_linear": Architecture(Capability.REPLAY, "kimi_linear", "Kimi Linear", LINEAR_KIMI),
    "baichuan_m1": Architecture(
        Capability.REPLAY,
        "baichuan_m1",
        "Baichuan M1",
        {"sliding_window": WINDOW, "sliding_window_layers": [1], "conv_window": 2},
    ),
} | {
    model_type: Architecture(capability, model_type, published, config)
    for model_type, (capability, published, config) in RARER.items()
}

KINDS_OF_CACHES = {
    "plain": "llama3",
    "sliding and full": "gemma3",
    "latent": "deepseek_v3",
    "lists": "deepseek_v32",
    "chunked": "llama4",
    "state": "mamba2",
    "state that is replayed": "mamba",
    "state and window": "recurrent_gemma",
    "state and full": "lfm2",
}
"""One architecture for each kind of cache that sessions keep."""
