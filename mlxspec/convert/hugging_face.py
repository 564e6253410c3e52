"""Parts that only Hugging Face checkpoints have: tokenizers in several files, and trained heads."""

import shutil
from pathlib import Path
from typing import Any

from ..models.heads import Head
from ..models.heads import loading as heads
from ..models.heads.chains import QwenMTP, norms_centred_at_zero
from ..models.model_files import read_json_object, without_byte_order_marks

# Never *.py, since a repository's code is not trusted.
_COPIED = (
    *("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt"),
    *("vocab.txt", "*.tiktoken", "*.jinja", "chat_template.json", "generation_config.json"),
    "LICENSE*",
)


def copy_tokenizer(source: Path, target: Path) -> None:
    """Copy the tokenizer's files, or make ``tokenizer.json`` from SentencePiece's model.

    Byte order marks are left out. mlx-lm's ``save`` would write the tokenizer as transformers does,
    and copy Python files.

    Raises:
        LoadError: there is no tokenizer, a file is damaged, or its SentencePiece model is of an
            unsupported kind.
    """
    from ..models.tokenizer import HUGGING_FACE_FILES, write_tokenizer

    with without_byte_order_marks(source) as plain:
        for pattern in _COPIED:
            for path in plain.glob(pattern):
                if path.is_file() and path.suffix != ".py":
                    if path.suffix == ".json":
                        read_json_object(source / path.name)  # raises if it is damaged
                    shutil.copyfile(path, target / path.name)
    if not any((source / name).is_file() for name in HUGGING_FACE_FILES):
        write_tokenizer(source, target)


# --- trained heads ---


def load_head_alone(directory: Path) -> tuple[Head, dict[str, Any], str]:
    """Load a head with unevaluated weights.

    Args:
        directory: the folder of a head, or of a model that carries one.

    Returns:
        the head, its configuration, and a text on its kind and on its changed norms. (Norms may be
        centred at zero in the checkpoint, but the head expects them centred at one.)

    Raises:
        LoadError: there is no head of a supported kind, or a file is damaged.
    """
    head_files = heads.find_head(directory)
    head, config, about = heads.load_lazily(head_files), head_files.config, head_files.kind.title
    if head_files.kind is QwenMTP and not config.get(heads.CONVERTED):
        tensors = head_files.tensors()
        norms = sum("norm" in name and array.ndim == 1 for name, array in tensors.items())
        centred = len(norms_centred_at_zero(tensors, head_files.raw))
        about += f" ({centred} of its {norms} norms were centred at zero, so 1.0 was added to them)"
    return head, {**config, heads.CONVERTED: True}, about
