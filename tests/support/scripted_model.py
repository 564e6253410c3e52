"""Write a model that generates a given script."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.models.llama import Model, ModelArgs
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

BOS, EOS = 1, 2
_WIDTH = 64  # the vocabulary's size; hidden states are twice as wide
_CHAT_TEMPLATE = """\
{% for message in messages %}{% if message.role == 'assistant' %} {{ message.content }}\
{% else %}[INST] {{ message.content }} [/INST]{% endif %}{% endfor %}"""


def write_scripted_model(
    directory: Path, script: Sequence[str], *, ends: bool = False, template: bool = True
) -> Path:
    """Write a Llama that, after any prompt, generates the pieces of ``script`` in order.

    Each piece is one token. The next token is a function of the last one: the embeddings are
    one-hot, the layer is zero, and the output matrix maps each token to its successor. After the
    last piece comes EOS, or the script again. "</s>" among the pieces divides the script into
    parts. A prompt that ends with a piece is continued from that piece.
    """
    directory.mkdir(parents=True)
    vocabulary = {"<unk>": 0, "<s>": BOS, "</s>": EOS}
    for piece in script:
        vocabulary.setdefault(piece, len(vocabulary))
    ids = [vocabulary[piece] for piece in script]
    _write_model(directory, ids, EOS if ends else ids[0])
    _write_tokenizer(directory, vocabulary, template)
    return directory


def _write_model(directory: Path, script: list[int], after_script: int) -> None:
    args = {
        "model_type": "llama",
        "hidden_size": 2 * _WIDTH,
        "num_hidden_layers": 1,
        "intermediate_size": 8,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "rms_norm_eps": 1e-5,
        "vocab_size": _WIDTH,
        "max_position_embeddings": 1_000_000,
        "tie_word_embeddings": False,
    }
    model = Model(ModelArgs.from_dict(args))
    weights = {name: mx.zeros_like(value) for name, value in tree_flatten(model.parameters())}
    weights["model.embed_tokens.weight"] = mx.eye(_WIDTH, 2 * _WIDTH)
    weights["model.norm.weight"] = mx.full(2 * _WIDTH, 0.5**0.5)
    successors = dict.fromkeys(range(_WIDTH), script[0])
    successors |= dict(zip(script, [*script[1:], after_script], strict=True))
    output = mx.zeros((_WIDTH, 2 * _WIDTH))
    for token, successor in successors.items():
        output[successor, token] = 1.0
    weights["lm_head.weight"] = output
    mx.save_safetensors(str(directory / "model.safetensors"), weights)
    (directory / "config.json").write_text(json.dumps(args))


def _write_tokenizer(directory: Path, vocabulary: dict[str, int], template: bool) -> None:
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.Fuse()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", BOS)]
    )
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
    }
    if template:
        config["chat_template"] = _CHAT_TEMPLATE
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
