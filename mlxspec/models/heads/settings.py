"""Which settings of a head's ``config.json`` are used, which have no effect, which are refused.

A setting that is neither known nor without effect may change what a head computes. Its drafts would
be wrong without a word, so the head is refused. The names are those that transformers, speculators,
SGLang, vLLM, NVIDIA's ModelOpt and mlx-vlm write.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import mlx.nn as nn

from ...errors import LoadError, printable

Config = dict[str, Any]

NESTED = ("text_config", "transformer_layer_config", "eagle_config", "dflash_config")
"""Dictionaries in which checkpoints keep some of a head's settings."""

_INNER = ("eagle_config", "dflash_config")  # vLLM and mlx-vlm let these override the outer settings


def text_of(config: Config) -> Config:
    """The settings of the language model in a configuration, which may be multimodal."""
    text: Config = config.get("text_config") or config
    return text if isinstance(text, dict) else text.__dict__  # of mlx-lm's settings object


def args_of(model: nn.Module) -> Any:
    """mlx-lm's settings object of a model; a few models have a ``config`` and no ``args``."""
    return getattr(model, "args", None) or getattr(model, "config", None)


def settings_of(config: Config) -> Config:
    """A head's settings in one flat dictionary; of those with several names, one name."""
    nested = {name: value for name in NESTED if isinstance(value := config.get(name), dict)}
    settings: Config = {}
    for name, of_part in nested.items():
        if name not in _INNER:
            settings |= of_part
    settings |= config
    for name in _INNER:
        settings |= nested.get(name, {})
    if settings.get("draft_vocab_size") is None and settings.get("truncated_vocab_size"):
        settings["draft_vocab_size"] = settings["truncated_vocab_size"]
    return settings


_WITHOUT_EFFECT = frozenset(
    {
        # how the file was written
        *("architectures", "auto_map", "model_type", "name_or_path", "_name_or_path"),
        *("transformers_version", "torch_dtype", "dtype", "attn_implementation"),
        *("_attn_implementation", "_attn_implementation_autoset", "use_cache"),
        *("speculators_model_type", "speculators_version", "speculators_config"),
        *("quantization", "mlxspec_converted"),
        # training, and old defaults of transformers
        *("initializer_range", "attention_dropout", "embed_requires_grad", "ttt_steps"),
        *("ttt_length", "loss_config", "confidence_head_alpha", "router_aux_loss_coef"),
        *("output_router_logits", "target_model_type", "modal_type", "max_window_layers"),
        *("chunk_size_feed_forward", "is_encoder_decoder", "is_decoder", "pruned_heads"),
        *("output_attentions", "output_hidden_states", "problem_type", "return_dict"),
        *("finetuning_task", "id2label", "label2id", "task_specific_params"),
        *("tf_legacy_loss", "torchscript", "use_bfloat16", "tokenizer_class", "prefix"),
        *("tie_encoder_decoder", "add_cross_attention", "cross_attention_hidden_size"),
        # generation by transformers
        *("begin_suppress_tokens", "bad_words_ids", "decoder_start_token_id"),
        *("diversity_penalty", "do_sample", "early_stopping", "encoder_no_repeat_ngram_size"),
        *("exponential_decay_length_penalty", "forced_bos_token_id", "forced_eos_token_id"),
        *("length_penalty", "max_length", "min_length", "no_repeat_ngram_size"),
        *("num_beam_groups", "num_beams", "num_return_sequences", "output_scores"),
        *("remove_invalid_values", "repetition_penalty", "return_dict_in_generate"),
        *("suppress_tokens", "temperature", "top_k", "top_p", "typical_p"),
        # special tokens, and other parts of the target
        *("vision_config", "audio_config"),
        *("bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "unk_token_id"),
        *("image_token_id", "video_token_id", "audio_token_id", "vision_start_token_id"),
        *("vision_end_token_id", "boi_token_id", "eoi_token_id", "boa_token_id"),
        *("eoa_token_id", "eoa_token_index"),
        # when and how much another engine drafts
        *("enable_confidence_head", "confidence_head_with_markov", "runtime_block_size"),
        *("block_size_policy", "dflash_initial_block_size", "prefer_requested_block_size"),
        *("draft_window_size", "adaptive_max_block_size", "verify_mode", "num_draft_tokens"),
        *("num_assistant_tokens",),
    }
)

# Settings that a head may state, but with these values only. None and absence are always accepted.
_REQUIRED: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish"),
    "hidden_activation": ("gelu_pytorch_tanh",),
    "pretraining_tp": (1,),
    "logit_scale": (1,),
    "output_multiplier": (1,),
    "attention_mode": ("gqa", "mha"),
    "markov_head_type": ("vanilla",),
    "is_neox_style": (True,),
    "rope_is_neox_style": (True,),
    "use_aux_hidden_state": (True,),
    "use_input_layernorm_in_first_layer": (True,),
    "use_last_layernorm": (True,),
    "next_layer_regular": (True,),
    "use_mtp_layernorm": (False,),
    "parallel_drafting": (False,),
    "parallel_draft_step": (1,),
    "attention_sink_bias": (False,),
    "add_swa_attention_sink_bias": (False,),
    "use_bidirectional_attention": (False,),
    "num_nextn_predict_layers": (1,),
    "mtp_num_hidden_layers": (1,),
}


def check_settings(config: Config, used: Collection[str], only: Mapping[str, Any]) -> None:
    """Check that every setting of a head is used, or has no effect.

    Args:
        used: the names of the settings that its class reads.
        only: settings that this class supports with one value only.

    Raises:
        LoadError: a setting is unknown, or has a value that is not supported.
    """
    required = _REQUIRED | {name: (value,) for name, value in only.items()}
    known = {*used, *_WITHOUT_EFFECT, *NESTED, *required}
    for name, value in _all_settings(config):
        if value is None:
            continue
        if name == "quantization_config" and isinstance(value, dict) and "quant_method" in value:
            stated = f'quantization_config (quant_method "{value["quant_method"]}")'
        elif name not in known and name != "quantization_config":
            stated = name
        elif name in required and value not in required[name]:
            stated = f"{name}: {value}"
        else:
            continue
        raise LoadError(
            f"config.json has a setting that is not supported, {printable(stated)}; name another "
            "head, or report this one"
        )


def _all_settings(config: Config) -> Iterator[tuple[str, Any]]:
    yield from config.items()
    for name in NESTED:
        if isinstance(nested := config.get(name), dict):
            yield from nested.items()


def layer_windows(settings: Config, count: int, unless_stated: bool = True) -> list[int | None]:
    """For each layer of a head, its sliding window, or None if it attends to all positions.

    Args:
        settings: from :func:`settings_of`.
        unless_stated: whether a ``sliding_window`` applies without ``use_sliding_window``.

    Raises:
        LoadError: the kind of a layer is unknown, or a window is missing.
    """
    window = settings.get("swa_window_size") or settings.get("sliding_window")
    kinds = list(settings.get("layer_types") or [])[:count]
    for kind in kinds:
        if kind not in ("full_attention", "sliding_attention"):
            raise LoadError(f"config.json has an unknown kind in layer_types, {printable(kind)}")
    slides = [kind == "sliding_attention" for kind in kinds]
    if settings.get("use_swa") and not any(slides):
        slides = [True] * count
    elif not kinds:
        used = settings.get("use_sliding_window")
        applies = bool(window) and (unless_stated if used is None else used)
        first = settings.get("max_window_layers") if used else None  # as transformers' Qwen 3 reads
        slides = [applies and i >= (first or 0) for i in range(count)]
    if len(slides) != count or (any(slides) and not window):
        raise LoadError("config.json states no sliding_window, or too few layer_types")
    return [window if slide else None for slide in slides]


def checked_layers(layers: Sequence[int], target_layers: int) -> tuple[int, ...]:
    """Indices of the target's layers.

    Raises:
        LoadError: the target has no such layer.
    """
    for layer in layers:
        if not 0 <= layer < target_layers:
            raise LoadError(
                f"the head reads the output of layer {layer}, but this model has {target_layers} "
                "layers; use a head that was made for this model"
            )
    return tuple(layers)


def rope_of(settings: Config) -> Config:
    """The dictionary of RoPE settings, which may be empty.

    speculators may keep one for each kind of layer, and uses the one for sliding windows.

    Raises:
        LoadError: only a part of each head's width is rotated.
    """
    rope: Config = settings.get("rope_parameters") or settings.get("rope_scaling") or {}
    rope = rope.get("sliding_attention") or rope.get("full_attention") or rope
    if rope.get("partial_rotary_factor") not in (None, 1):
        raise LoadError(
            f"config.json has a setting that is not supported, partial_rotary_factor: "
            f"{printable(rope['partial_rotary_factor'])}; name another head, or report this one"
        )
    return rope
