"""Configurations of small models of less common architectures.

Each has its expected capability and the models published with it.
"""

from __future__ import annotations

from mlxspec.engine.capability import Capability
from tests.support.architecture_settings import (
    EXPERTS,
    GRANITE,
    LATENT_ATTENTION,
    LINEAR_KIMI,
    QWEN_3,
    QWEN_LINEAR,
    SLIDING_LAYERS,
    WINDOW,
)
from tests.support.random_models import COMMON, MINISTRAL_SCALING

Rarer = dict[str, tuple[Capability, str, dict[str, object]]]


def nested(model_type: str, **config: object) -> dict[str, object]:
    """Return the configuration of a vision-language model with this text model."""
    return {"text_config": {**COMMON, "model_type": model_type, **config}}


SLIDING = {"sliding_window": WINDOW, "layer_types": SLIDING_LAYERS}
NO_BIAS = {"attention_bias": False, "mlp_bias": False}
TIED = {"tie_word_embeddings": True}
SHARED_EXPERT = {"num_shared_experts": 1, "norm_topk_prob": True, "first_k_dense_replace": 1}
GROUPS = {"n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0}
ROUTED_EXPERTS = {
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
}
LATENT = {
    key: LATENT_ATTENTION[key]
    for key in (
        "num_key_value_heads",
        "kv_lora_rank",
        "q_lora_rank",
        "qk_rope_head_dim",
        "qk_nope_head_dim",
        "v_head_dim",
    )
}
LINEAR_BAILING = {"layer_group_size": 2, "group_norm_size": 2}
LONGCAT = {
    **LATENT,
    "ffn_hidden_size": 64,
    "moe_topk": 2,
    "expert_ffn_hidden_size": 16,
    "n_routed_experts": 4,
    "zero_expert_num": 2,
    "zero_expert_type": "identity",
    "num_layers": 2,
    "routed_scaling_factor": 1.0,
    "mla_scale_q_lora": True,
    "mla_scale_kv_lora": True,
    "attention_method": "MLA",
    "attention_bias": False,
}
SPARSE_MIXED_ROPE = {
    "sliding_attention": {"rope_theta": 1e4},
    "full_attention": {"rope_theta": 1e5},
}
DEFAULT_ROPE = {kind: {"rope_type": "default", **rope} for kind, rope in SPARSE_MIXED_ROPE.items()}
SPARSE_ATTENTION = {"index_head_dim": 8, "index_n_heads": 4, "index_topk": 8}
MUSE = {
    **SLIDING,
    "post_norm_eps": 1e-8,
    "rope_parameters": {"rope_theta": 1e4},
    "layer_rope_theta": [1e4, 0],
    "final_logit_softcapping": 20.0,
    "output_multiplier": 0.5,
}
NAS_BLOCKS = [
    {"attention": {"n_heads_in_group": 2}, "ffn": {"ffn_mult": 1.0}},
    {"attention": {"no_op": True}, "ffn": {"ffn_mult": 1.0}},
    {"attention": {"n_heads_in_group": 4}, "ffn": {"replace_with_linear": True}},
]

RARER: Rarer = {
    "Klear": (
        Capability.TREE,
        "Klear",
        {
            **EXPERTS,
            "attention_bias": False,
            "mlp_only_layers": [],
            "decoder_sparse_step": 1,
            "n_shared_experts": 1,
            "norm_topk_prob": True,
        },
    ),
    "afm7": (
        Capability.TREE,
        "Apple's foundation model (AFM 7)",
        {
            "hidden_dim": 32,
            "num_layers": 4,
            "num_kv_reuse_layers": 2,
            "num_heads": 4,
            "num_kv_heads": 2,
        },
    ),
    "afmoe": (
        Capability.TREE,
        "Trinity (AFMoE)",
        {**EXPERTS, **SLIDING, "num_dense_layers": 1, "num_shared_experts": 1},
    ),
    "apertus": (
        Capability.TREE,
        "Apertus",
        {**NO_BIAS, "post_norm": False, "qk_norm": True, "tie_word_embeddings": False},
    ),
    "bailing_hybrid": (
        Capability.REPLAY,
        "Ling and Ring 2.5",
        {**EXPERTS, **SHARED_EXPERT, **GROUPS, **LATENT, **LINEAR_BAILING},
    ),
    "bailing_moe": (
        Capability.TREE,
        "Ling and Ring",
        {**EXPERTS, **SHARED_EXPERT, **GROUPS},
    ),
    "bailing_moe_linear": (
        Capability.REPLAY,
        "Ring Linear",
        {**EXPERTS, **SHARED_EXPERT, **GROUPS, **LINEAR_BAILING},
    ),
    "bailing_moe_v3": (
        Capability.REPLAY,
        "Ling 3",
        {**EXPERTS, **SHARED_EXPERT, **GROUPS, **LATENT, "layer_group_size": 2},
    ),
    "cohere": (Capability.TREE, "Command R", {}),
    "dbrx": (
        Capability.TREE,
        "DBRX",
        {
            "d_model": 32,
            "n_layers": 2,
            "n_heads": 4,
            "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 1e4},
            "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2},
        },
    ),
    "deepseek": (Capability.TREE, "DeepSeek MoE", ROUTED_EXPERTS),
    "dots1": (
        Capability.TREE,
        "dots.llm1",
        {**ROUTED_EXPERTS, **GROUPS, "scoring_func": "noaux_tc"},
    ),
    "ernie4_5": (Capability.TREE, "ERNIE 4.5", {"use_bias": False, **TIED}),
    "ernie4_5_moe": (
        Capability.TREE,
        "ERNIE 4.5 MoE",
        {
            "use_bias": False,
            **TIED,
            "moe_num_experts": 4,
            "moe_k": 2,
            "moe_intermediate_size": 16,
            "moe_num_shared_experts": 1,
            "moe_layer_start_index": 1,
        },
    ),
    "exaone": (Capability.TREE, "EXAONE 3", {"num_layers": 2, "layer_norm_epsilon": 1e-5}),
    "exaone_moe": (
        Capability.TREE,
        "K-EXAONE",
        {**EXPERTS, **SLIDING, "num_shared_experts": 1, "is_moe_layer": [False, True]},
    ),
    "gear": (
        Capability.REPLAY,
        "Gear",
        {
            "num_hidden_layers": 3,
            "sliding_window": WINDOW,
            "layer_types": ["conv_mixer", *SLIDING_LAYERS],
        },
    ),
    "glm": (Capability.TREE, "GLM 4 (9B of 2024)", {}),
    "glm4_moe": (
        Capability.TREE,
        "GLM 4.5 to 4.7",
        {
            **ROUTED_EXPERTS,
            **GROUPS,
            "rope_scaling": None,
            "use_qk_norm": True,
            "tie_word_embeddings": False,
            "attention_bias": False,
            "partial_rotary_factor": 0.5,
        },
    ),
    "glm4_moe_lite": (Capability.TREE, "GLM 4.7 Flash", {**ROUTED_EXPERTS, **GROUPS, **LATENT}),
    "glm_moe_dsa": (
        Capability.TREE,
        "GLM 5",
        {
            **ROUTED_EXPERTS,
            **GROUPS,
            **LATENT,
            **SPARSE_ATTENTION,
            "topk_method": "noaux_tc",
            "scoring_func": "sigmoid",
            "moe_layer_freq": 1,
            "rope_parameters": {"rope_theta": 1e4, "rope_type": "default"},
            "attention_bias": False,
        },
    ),
    "gpt_bigcode": (
        Capability.CHAIN,
        "StarCoder",
        {
            "n_embd": 32,
            "n_layer": 2,
            "n_inner": 64,
            "n_head": 4,
            "n_positions": 256,
            "layer_norm_epsilon": 1e-5,
        },
    ),
    "gpt_neox": (
        Capability.TREE,
        "Pythia, GPT-NeoX",
        {"layer_norm_eps": 1e-5, "rotary_emb_base": 10000, "rotary_pct": 0.5},
    ),
    "gptj": (
        Capability.TREE,
        "GPT-J",
        {"n_embd": 32, "n_head": 4, "n_layer": 2, "rotary_dim": 4, "n_positions": 256},
    ),
    "granitemoe": (
        Capability.TREE,
        "Granite 3 MoE",
        {**GRANITE, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "helium": (Capability.TREE, "Helium", {**NO_BIAS, **TIED}),
    "hunyuan": (
        Capability.TREE,
        "Hunyuan Large, A13B",
        {
            "attention_bias": False,
            "moe_topk": 2,
            "num_experts": 4,
            "num_shared_expert": 1,
            "use_mixed_mlp_moe": True,
            "use_qk_norm": True,
            "use_cla": True,
            "cla_share_factor": 2,
            "rope_scaling": {"type": "dynamic", "alpha": 1000.0, "factor": 1.0},
        },
    ),
    "hunyuan_v1_dense": (
        Capability.TREE,
        "Hunyuan (dense)",
        {"rope_scaling": {"type": "dynamic", "alpha": 1000.0, "factor": 1.0}},
    ),
    "internlm2": (
        Capability.PLAIN,
        "InternLM 2 and 2.5",
        {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
    ),
    "internlm3": (
        Capability.PLAIN,
        "InternLM 3",
        {"rope_scaling": {"rope_type": "dynamic", "factor": 6.0}},
    ),
    "iquestloopcoder": (Capability.TREE, "IQuest LoopCoder", {"loop_window_size": WINDOW}),
    "kimi_k25": (Capability.TREE, "Kimi K2.5", nested("deepseek_v3", **LATENT_ATTENTION)),
    "kimi_k3": (
        Capability.REPLAY,
        "Kimi K3",
        nested(
            "kimi_linear",
            **LINEAR_KIMI,
            hidden_act="situ",
            activation_situ_beta=1.0,
            activation_situ_linear_beta=1.0,
            attn_res_block_size=2,
            q_lora_rank=16,
        ),
    ),
    "kimi_vl": (Capability.TREE, "Kimi VL", nested("deepseek_v3", **LATENT_ATTENTION)),
    "laguna": (
        Capability.TREE,
        "Laguna",
        {
            **EXPERTS,
            **SLIDING,
            "shared_expert_intermediate_size": 16,
            "rope_parameters": DEFAULT_ROPE,
        },
    ),
    "lfm2-vl": (
        Capability.REPLAY,
        "LFM 2 VL",
        nested(
            "lfm2",
            norm_eps=1e-5,
            conv_bias=False,
            conv_L_cache=3,
            block_dim=32,
            block_ff_dim=64,
            block_multiple_of=16,
            block_ffn_dim_multiplier=1.0,
            block_auto_adjust_ff_dim=False,
            layer_types=["conv", "full_attention"],
        ),
    ),
    "lfm2_moe": (
        Capability.REPLAY,
        "LFM 2 MoE",
        {
            **EXPERTS,
            "norm_topk_prob": True,
            "use_expert_bias": True,
            "num_dense_layers": 1,
            "norm_eps": 1e-5,
            "conv_bias": False,
            "conv_L_cache": 3,
            "layer_types": ["conv", "full_attention"],
        },
    ),
    "lille-130m": (
        Capability.TREE,
        "Lille 130M",
        {
            "block_size": 512,
            "layer_norm_eps": 1e-5,
            "n_embd": 128,
            "n_head": 4,
            "n_kv_heads": 2,
            "n_layer": 2,
        },
    ),
    "llama4_text": (
        Capability.TREE,
        "MobileLLM R1",
        {"intermediate_size_mlp": 64, **TIED, "no_rope_layers": [1, 0], "use_qk_norm": True},
    ),
    "longcat_flash": (Capability.TREE, "LongCat Flash", LONGCAT),
    "longcat_flash_ngram": (
        Capability.REPLAY,
        "LongCat Flash Lite (n-grams)",
        {**LONGCAT, "ngram_vocab_size_ratio": 4, "emb_neighbor_num": 3, "emb_split_num": 2},
    ),
    "mellum": (
        Capability.TREE,
        "Mellum 2",
        {**EXPERTS, **SLIDING, **TIED, "norm_topk_prob": True, "rope_parameters": DEFAULT_ROPE},
    ),
    "mimo": (Capability.TREE, "MiMo", {}),
    "mimo_v2_flash": (
        Capability.TREE,
        "MiMo V2 Flash",
        {
            **ROUTED_EXPERTS,
            **GROUPS,
            "hybrid_layer_pattern": [1, 0],
            "moe_layer_freq": [0, 1],
            "add_swa_attention_sink_bias": True,
            "add_full_attention_sink_bias": False,
            "sliding_window_size": WINDOW,
            "topk_method": "noaux_tc",
            "scoring_func": "sigmoid",
            "layernorm_epsilon": 1e-5,
            "swa_rope_theta": 1e4,
            "swa_num_attention_heads": 4,
            "swa_num_key_value_heads": 2,
            "v_head_dim": 8,
            "swa_head_dim": 8,
            "swa_v_head_dim": 8,
            "partial_rotary_factor": 0.5,
        },
    ),
    "minicpm": (
        Capability.TREE,
        "MiniCPM 1 and 2",
        {"dim_model_base": 16, "scale_depth": 1.4, "scale_emb": 2.0},
    ),
    "minicpm3": (
        Capability.TREE,
        "MiniCPM 3",
        {
            **LATENT,
            "dim_model_base": 16,
            "scale_depth": 1.4,
            "scale_emb": 2.0,
            "rope_scaling": {
                "type": "longrope",
                "original_max_position_embeddings": 8192,
                "short_factor": [1.0, 1.0],
                "long_factor": [1.1, 1.2],
            },
        },
    ),
    "minimax": (
        Capability.TREE,
        "MiniMax M2",
        {
            "num_experts_per_tok": 2,
            "num_local_experts": 4,
            "shared_intermediate_size": 0,
            "rotary_dim": 4,
        },
    ),
    "minimax_m3_vl": (
        Capability.CHAIN,
        "MiniMax M3",
        nested(
            "minimax_m3",
            num_local_experts=4,
            num_experts_per_tok=2,
            dense_intermediate_size=64,
            shared_intermediate_size=16,
            moe_layer_freq=[0, 1],
            sparse_attention_config={
                "sparse_num_index_heads": 2,
                "sparse_index_dim": 8,
                "sparse_block_size": 8,
                "sparse_topk_blocks": 2,
                "sparse_local_block": 1,
                "sparse_attention_freq": [0, 1],
            },
        ),
    ),
    "mistral3": (
        Capability.CHAIN,
        "Ministral 3 (images and text)",
        nested("ministral3", **MINISTRAL_SCALING, **SLIDING),
    ),
    "mistral4": (
        Capability.CHAIN,
        "Mistral 4",
        {**ROUTED_EXPERTS, **GROUPS, **LATENT, **MINISTRAL_SCALING},
    ),
    "muse_glimmer": (Capability.TREE, "Muse Glimmer", MUSE),
    "nanbeige": (Capability.TREE, "Nanbeige 4", {}),
    "nanochat": (Capability.CHAIN, "nanochat", {}),
    "nemotron": (
        Capability.TREE,
        "Nemotron 4, Minitron",
        {"hidden_act": "relu2", "norm_eps": 1e-5},
    ),
    "nemotron-nas": (
        Capability.TREE,
        "Nemotron Super and Ultra",
        {"num_hidden_layers": 3, "block_configs": NAS_BLOCKS},
    ),
    "olmo_hybrid": (
        Capability.REPLAY,
        "OLMo Hybrid",
        {
            **QWEN_LINEAR,
            **TIED,
            "num_hidden_layers": 2,
            "linear_allow_neg_eigval": True,
            "attention_bias": False,
            "layer_types": ["linear_attention", "full_attention"],
        },
    ),
    "olmoe": (Capability.TREE, "OLMoE", {"num_experts": 4, "num_experts_per_tok": 2}),
    "openelm": (
        Capability.TREE,
        "OpenELM",
        {
            "num_transformer_layers": 2,
            "model_dim": 32,
            "ffn_dim_divisor": 16,
            "num_query_heads": [4, 4],
            "num_kv_heads": [2, 2],
            "ffn_multipliers": [1.0, 2.0],
        },
    ),
    "phi": (Capability.TREE, "Phi 1.5 and 2", {"partial_rotary_factor": 0.5}),
    "phi3small": (
        Capability.PLAIN,
        "Phi 3 small",
        {
            "hidden_size": 16,
            "dense_attention_every_n_layers": 2,
            "ff_intermediate_size": 32,
            "gegelu_limit": 20.0,
            "layer_norm_epsilon": 1e-5,
            "blocksparse_block_size": 32,
            "blocksparse_num_local_blocks": 1,
            "blocksparse_vert_stride": 2,
            "vocab_size": 100352,  # it rules out some by their numbers
        },
    ),
    "phimoe": (
        Capability.TREE,
        "Phi 3.5 MoE",
        {
            "num_local_experts": 4,
            "rope_scaling": {
                "type": "longrope",
                "short_factor": [1.0] * 4,
                "long_factor": [1.1] * 4,
                "short_mscale": 1.2,
                "long_mscale": 1.2,
            },
        },
    ),
    "phixtral": (
        Capability.TREE,
        "Phixtral",
        {"num_vocab": 64, "model_dim": 32, "num_heads": 4, "num_layers": 2, "rotary_dim": 4},
    ),
    "pixtral": (Capability.TREE, "Pixtral", nested("llama")),
    "plamo": (Capability.TREE, "PLaMo", {"n_shared_head": 2}),
    "plamo2": (
        Capability.REPLAY,
        "PLaMo 2",
        {
            "hidden_size_per_head": 8,
            "attention_window_size": WINDOW,
            "full_attention_idx": [],
            "mamba_d_state": 8,
            "mamba_num_heads": 4,
            "mamba_chunk_size": 8,
        },
    ),
    "plamo3": (
        Capability.TREE,
        "PLaMo 3",
        {"window_size": WINDOW, "sliding_window": WINDOW, "sliding_window_pattern": 2},
    ),
    "qwen": (Capability.TREE, "Qwen 1", {"kv_channels": 8, "intermediate_size": 128}),
    "qwen2_moe": (
        Capability.TREE,
        "Qwen 1.5 and 2 MoE",
        {**EXPERTS, "shared_expert_intermediate_size": 16},
    ),
    "qwen2_vl": (Capability.TREE, "Qwen 2 and 2.5 VL", nested("qwen2")),
    "qwen3_5_moe": (
        Capability.REPLAY,
        "Qwen 3.5 MoE",
        nested("qwen3_5_moe_text", **EXPERTS, **QWEN_LINEAR),
    ),
    "qwen3_vl": (Capability.TREE, "Qwen 3 VL", nested("qwen3", **QWEN_3)),
    "qwen3_vl_moe": (
        Capability.TREE,
        "Qwen 3 VL MoE",
        nested(
            "qwen3_moe",
            **QWEN_3,
            **EXPERTS,
            decoder_sparse_step=1,
            mlp_only_layers=[],
            norm_topk_prob=True,
        ),
    ),
    "seed_oss": (Capability.TREE, "Seed OSS", {}),
    "solar_open": (
        Capability.TREE,
        "Solar Open",
        {**ROUTED_EXPERTS, **GROUPS, "tie_word_embeddings": False, "partial_rotary_factor": 1.0},
    ),
    "spark2_5": (
        Capability.TREE,
        "Spark 2.5",
        {**SLIDING, "rope_parameters": DEFAULT_ROPE},
    ),
    "stablelm": (
        Capability.TREE,
        "StableLM",
        {"use_qkv_bias": True, "partial_rotary_factor": 0.5, "layer_norm_eps": 1e-5},
    ),
    "starcoder2": (Capability.TREE, "StarCoder 2", {}),
    "step3p5": (
        Capability.TREE,
        "Step 3.5",
        {
            **SLIDING,
            "num_attention_groups": 2,
            "moe_num_experts": 4,
            "moe_top_k": 2,
            "moe_intermediate_size": 16,
            "share_expert_dim": 16,
            "moe_layers_enum": "1",
        },
    ),
    "talkie": (Capability.TREE, "Talkie", {}),
    "telechat3": (Capability.TREE, "TeleChat 3", {}),
    "youtu_llm": (Capability.TREE, "Youtu LLM", LATENT),
}

NOT_TRIED = {
    "bitnet": "its kernels need Metal",
    "muse_spark": "its kernels need Metal",
    "olmo": "needs the package ai2-olmo; OLMo 2 and 3 do not",
    "prism_hadamard_qwen35": "is Qwen 3.5, with weights that only their publisher can pack",
}
"""Architectures of which no small model can be built here, with the reason."""
