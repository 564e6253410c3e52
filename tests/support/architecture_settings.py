"""Configurations of the small test models, with mlx-lm's names."""

from __future__ import annotations

WINDOW = 16
"""Positions in a sliding window, shorter than the tests' generations."""


def alternating(first: str, second: str, layers: int) -> list[str]:
    return [first, second] * (layers // 2)


SLIDING_LAYERS = alternating("sliding_attention", "full_attention", 2)
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
QWEN_3 = {"tie_word_embeddings": True}
QWEN_LINEAR = {
    "num_hidden_layers": 4,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
    "decoder_sparse_step": 1,
    "shared_expert_intermediate_size": 16,
    "mlp_only_layers": [],
    "partial_rotary_factor": 0.5,
}
LATENT_ATTENTION = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
}
GRANITE = {
    "logits_scaling": 1.0,
    "attention_multiplier": 0.35,
    "embedding_multiplier": 1.0,
    "residual_multiplier": 1.0,
    "attention_bias": False,
    "mlp_bias": False,
}
MAMBA = {
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_proj_bias": False,
    "mamba_d_state": 8,
    "mamba_d_conv": 4,
    "mamba_n_groups": 1,
    "mamba_conv_bias": True,
}
LLAMA_4 = {
    "attention_bias": False,
    "attention_chunk_size": WINDOW,
    "interleave_moe_layer_step": 1,
    "intermediate_size_mlp": 64,
    "model_type": "llama4_text",
    "num_experts_per_tok": 1,
    "num_local_experts": 2,
    "rope_scaling": None,
    "use_qk_norm": True,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e4,
    "vocab_size": 64,
    "max_position_embeddings": 32768,
    "floor_scale": 8,
}
GEMMA_3N = {
    "model_type": "gemma3n_text",
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-5,
    "vocab_size": 64,
    "vocab_size_per_layer_input": 64,
    "num_kv_shared_layers": 2,
    "sliding_window": WINDOW,
    "max_position_embeddings": 32768,
    "rope_local_base_freq": 1e4,
    "rope_theta": 1e4,
    "final_logit_softcapping": 30.0,
    "layer_types": alternating("sliding_attention", "full_attention", 4),
    "activation_sparsity_pattern": [0.0] * 4,
    "hidden_size_per_layer_input": 8,
    "altup_num_inputs": 2,
    "altup_coef_clip": 120.0,
    "altup_correct_scale": True,
    "altup_active_idx": 0,
    "laurel_rank": 8,
}
HYBRID_NEMOTRON = {
    "attention_bias": False,
    "mamba_num_heads": 4,
    "mamba_head_dim": 16,
    "mamba_proj_bias": False,
    "ssm_state_size": 8,
    "conv_kernel": 4,
    "n_groups": 1,
    "mlp_bias": False,
    "layer_norm_epsilon": 1e-5,
    "use_bias": False,
    "use_conv_bias": True,
    "hybrid_override_pattern": "M*-",
    "num_hidden_layers": 3,
    "time_step_limit": [0.0, 10.0],
}
HYBRID_JAMBA = {
    "attn_layer_offset": 1,
    "attn_layer_period": 2,
    "expert_layer_offset": 1,
    "expert_layer_period": 2,
    "mamba_d_conv": 4,
    "mamba_d_state": 8,
    "mamba_expand": 2,
    "num_experts": 4,
    "num_experts_per_tok": 2,
}
LINEAR_KIMI = {
    "num_key_value_heads": 4,
    "linear_attn_config": {
        "kda_layers": [1],
        "full_attn_layers": [2],
        "num_heads": 4,
        "head_dim": 8,
        "short_conv_kernel_size": 4,
    },
    "model_max_length": 32768,
    "num_experts": 4,
    "moe_intermediate_size": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "num_experts_per_token": 2,
    "num_shared_experts": 1,
    "first_k_dense_replace": 1,
}
GEMMA_4 = {
    "num_hidden_layers": 4,
    "global_head_dim": 16,
    "vocab_size_per_layer_input": 64,
    "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 8,
    "sliding_window": WINDOW,
    "sliding_window_pattern": 2,
}
COMPRESSED_DEEPSEEK = {
    "o_groups": 2,
    "o_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 4,
    "moe_intermediate_size": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": WINDOW,
    "index_n_heads": 2,
    "index_head_dim": 8,
    "index_topk": 4,
    "hc_mult": 2,
    "compress_ratios": (1, 4),
    "kv_source_layer_ids": (0, 1),
    "index_source_layer_ids": (0, 1),
}
