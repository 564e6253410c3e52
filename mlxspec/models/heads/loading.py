"""Finds and loads trained heads, whether they come with their target or in a separate folder.

Finding a head reads only the headers of files. The keys read from ``config.json`` are those that
transformers, speculators, SGLang and mlx-vlm write.
"""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import mlx.nn as nn

from ...errors import LoadError, printable
from ..model import OnRead, check_scales, evaluate, find_adapters, load_parts, reason, widen
from ..model_files import (
    BESIDE,
    WEIGHTS,
    check_weights,
    check_weights_file,
    find_directory,
    local_path,
    read_config,
    read_weight_map,
)
from ..torch_file import read_torch_file
from . import Head, named_kind, sizes_needed
from .blocks import DFlash, DSpark
from .chains import Eagle3, Gemma4Assistant, QwenMTP
from .settings import Config, args_of, check_settings, settings_of, text_of

if TYPE_CHECKING:
    from mlx_lm.tokenizer_utils import TokenizerWrapper

_log = logging.getLogger(__name__)

_KINDS: dict[str, type[Head]] = {
    "gemma4_assistant": Gemma4Assistant,
    "gemma4_unified_assistant": Gemma4Assistant,
    "qwen3_5_mtp": QwenMTP,
    "eagle3": Eagle3,
    "dflash": DFlash,
    "dspark": DSpark,
}

LEFT_OUT = "the head that comes with the model is not used: %s"
"""The warning about a head that comes with the model but cannot be used."""

CONVERTED = "mlxspec_converted"
"""A key in the ``config.json`` of converted heads of Qwen, whose norms must not change again."""

_ANY_LAYERS = 1 << 20  # for a target of unknown depth
_TORCH_FILES = "pytorch_model*.bin"  # the only weights of some EAGLE-3 heads
_OWN = re.compile(r"(?:model\.|language_model\.)*mtp\.")  # prefixes the names of a head's tensors
_FOLDERS = ("mtp", "assistant", "head")  # for a head in its target's folder
_SUPPORTED = (
    "supported are Gemma 4's assistants, the MTP heads of Qwen 3 Next and 3.5 or later, EAGLE-3, "
    "DFlash and DSpark"
)


@dataclass(frozen=True)
class HeadFiles:
    """A head's files.

    Attributes:
        directory: the folder of the head, or of the target that carries it.
        kind: the head's class.
        config: the head's settings, as in its own ``config.json``.
        files: the files with the head's tensors; they may be the target's own files.
        raw: whether they are known to be an original checkpoint's, with norms centred at zero.
    """

    directory: Path
    kind: type[Head]
    config: Config = field(repr=False)
    files: tuple[Path, ...]
    raw: bool = False

    def tensors(self) -> dict[str, mx.array]:
        """The head's unevaluated tensors, by their names in the files."""
        tensors: dict[str, mx.array] = {}
        for path in self.files:
            if path.suffix == ".bin":
                loaded = dict(read_torch_file(path))
            else:
                loaded = check_weights_file(path)
            # If no name has this prefix, all of the file's tensors are the head's.
            tensors |= {name: loaded[name] for name in loaded if _OWN.match(name)} or loaded
        return tensors


def find_head(directory: Path) -> HeadFiles:
    """The head in a folder, either the head's own or that of a model that carries it.

    Raises:
        LoadError: there is no head of a supported kind, or a file is damaged.
    """
    config = read_config(directory)
    if (name := named_kind(config)) is None:
        if (head_files := own_head(directory)) is not None:
            return head_files
        raise LoadError(
            f"{directory}: neither a trained head nor a model with one (most converted "
            f"models do not): name the original model or a published head; {_SUPPORTED}"
        )
    if name not in _KINDS:
        raise LoadError(f"{directory}: a head of unknown kind, {printable(name)}; {_SUPPORTED}")
    files = sorted(directory.glob(WEIGHTS))
    if not files:
        files = sorted(directory.glob(_TORCH_FILES))
    if not files or files[0].suffix != ".bin":
        check_weights(directory)
    return HeadFiles(directory, _KINDS[name], config, tuple(files))


def own_head(directory: Path) -> HeadFiles | None:
    """The head that comes with a model, or None.

    Its tensors are in the model's files, with ``mtp.`` in their names, or in ``mtp.safetensors``
    next to these files, or in a folder ``mtp``, ``assistant`` or ``head`` there.

    Raises:
        LoadError: a file is damaged.
    """
    config = read_config(directory)
    if _belongs(QwenMTP, config):
        paths = sorted(directory.glob(WEIGHTS))
        tensors = {path: check_weights_file(path) for path in paths}
        files = [path for path in paths if any(map(_OWN.match, tensors[path]))]
        raw = bool(files) and any(map(_is_original, tensors.values()))
        if files := files or [*directory.glob("mtp.safetensors")]:
            head_config = {"model_type": "qwen3_5_mtp", "text_config": text_of(config)}
            return HeadFiles(directory, QwenMTP, head_config, tuple(files), raw)
    for name in _FOLDERS:
        if (directory / name / "config.json").is_file():
            return find_head(directory / name)
    return None


def _is_original(tensors: dict[str, mx.array]) -> bool:
    """Whether these tensors have a convolution in PyTorch's layout, (channels, 1, kernel).

    Converters move its last axis, and add 1 to the norms in the same step.
    """
    return any(
        name.endswith("conv1d.weight") and array.ndim == 3 and array.shape[-1] != 1
        for name, array in tensors.items()
    )


def head_directory(path_or_repo: str | Path, revision: str | None = None) -> Path:
    """The folder with a head's files, downloaded if needed.

    From a repository, only those weights files are downloaded that have the head's tensors.

    Args:
        path_or_repo: a head or a model that carries one, as for :func:`mlxspec.load`.
        revision: branch, tag or commit of a repository.

    Raises:
        LoadError: no folder or repository has this name, or the download fails.
    """
    directory = find_directory(path_or_repo, revision, weights=())
    if local_path(path_or_repo).is_dir():
        return directory
    wanted = {WEIGHTS}
    if named_kind(read_config(directory)) is None and (names := read_weight_map(directory)):
        wanted = {file for name, file in names.items() if _OWN.match(name)}
    try:
        return find_directory(path_or_repo, revision, weights=(*wanted, *BESIDE))
    except LoadError as error:
        if not wanted and error.__cause__ is None:  # no such files: find_head then says so
            return directory
        if named_kind(read_config(directory)) is None:
            raise
    return find_directory(path_or_repo, revision, weights=(_TORCH_FILES,))


def load_with_head(
    path_or_repo: str | Path,
    head: str | Path | Head | bool | None = None,
    adapter_path: str | Path | None = None,
    on_read: OnRead = lambda nbytes: None,
) -> tuple[nn.Module, TokenizerWrapper, Head | None]:
    """Load a model, its tokenizer, and the head to use with it, if any.

    Args:
        path_or_repo, adapter_path: as for :func:`mlxspec.load`.
        head: as for :func:`head_for`.
        on_read: as for :func:`.model.evaluate`, for the weights of the model.

    Raises:
        LoadError: the model or the head cannot be used. A wrong path of a head or of adapters is
            refused before the model is downloaded.
    """
    adapters = None if adapter_path is None else find_adapters(adapter_path)
    if isinstance(head, str | Path):
        head = head_directory(head)
        find_head(head)
    directory = find_directory(path_or_repo, None)
    model, tokenizer, _ = load_parts(directory, adapters=adapters, on_read=on_read)
    return model, tokenizer, head_for(model, head, directory)


def head_for(
    model: nn.Module, head: str | Path | Head | bool | None, directory: Path | None = None
) -> Head | None:
    """The loaded head to use with a model, or None.

    Args:
        head: a loaded head, or a head as for :func:`head_directory`; False uses none; None or True
            uses the head that comes with the model, if any.
        directory: the model's directory, which may have its head.

    Raises:
        LoadError: the named head cannot be used. (A head that comes with the model is left out
            instead, with a warning.)
    """
    if isinstance(head, Head):
        return head
    if isinstance(head, str | Path):
        return load_head(find_head(head_directory(head)), vars(args_of(model)))
    if head is False or directory is None:
        return None
    try:
        if (files := own_head(directory)) is None:
            return None
        loaded = load_head(files, vars(args_of(model)))
    except LoadError as error:
        _log.warning(LEFT_OUT, error)
        return None
    loaded.requested = False
    return loaded


def load_head(files: HeadFiles, target_config: Config) -> Head:
    """Load a head for a target, without binding it.

    On the CPU back end, half-precision weights become float32, like those of models.

    Args:
        target_config: the target's settings, as in its ``config.json``.

    Raises:
        LoadError: the head does not belong to the target, or its files are damaged.
    """
    if not _belongs(files.kind, target_config):
        has = printable(target_config.get("model_type"))
        raise LoadError(
            f"{files.directory}: {files.kind.title} is a head for targets of another architecture "
            f"than {has}; name a head that was trained for this target"
        )
    head = load_lazily(files, target_config)
    widen(head)
    evaluate(head, files.directory)
    return head


def load_lazily(files: HeadFiles, target_config: Config | None = None) -> Head:
    """Load a head without evaluating its weights.

    Args:
        target_config: the target's settings; None assumes a target that fits.

    Raises:
        LoadError: a file is damaged, or the weights do not fit the settings.
    """
    from mlx_lm.utils import infer_quant_config

    config, weights = files.config, files.tensors()
    if target_config is None:
        layers = {"num_hidden_layers": _ANY_LAYERS}
        target_config = text_of(settings_of(config)) | layers | sizes_needed(config)

    def quantised(path: str, module: nn.Module) -> bool | dict[str, Any]:
        # The tensors show this. The paths in config.json may be those of the target's modules.
        if not hasattr(module, "to_quantized") or f"{path}.scales" not in weights:
            return False
        return infer_quant_config(path, module, weights)

    try:
        if files.kind is not QwenMTP:
            weights = files.kind.sanitize(weights)
        elif not config.get(CONVERTED):
            weights = QwenMTP.sanitize(weights, files.raw)
        check_settings(config, files.kind.used | _known_of(files, target_config), files.kind.only)
        head = files.kind(config, target_config)
        head.fit(weights.keys())
        nn.quantize(head, class_predicate=quantised)
        head.eval()
        head.load_weights(list(weights.items()))
        check_scales(head)
    except LoadError as error:
        raise LoadError(f"{files.directory}: {error}") from error
    except Exception as error:  # a wrong configuration or file makes MLX raise anything
        raise LoadError(f"{files.directory}: {reason(error)}") from error
    return head


def _known_of(files: HeadFiles, target_config: Config) -> frozenset[str]:
    """The settings of Qwen's MTP that its target has, too: it is one of the target's layers."""
    return frozenset(text_of(target_config)) if files.kind is QwenMTP else frozenset()


def _belongs(kind: type[Head], target_config: Config) -> bool:
    """Whether heads of this kind support targets of this architecture."""
    types = (target_config.get("model_type"), text_of(target_config).get("model_type"))
    return not kind.families or any(str(name).startswith(kind.families) for name in types)
