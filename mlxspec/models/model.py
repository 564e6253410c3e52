"""Loads a model and its tokenizer from a directory, the Hub, or this package.

mlx-lm and transformers take a second to import, so they are only imported to load a model.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from ..errors import LoadError, PromptError, printable
from ..process import collector_paused, open_standard_streams
from ..terminal import one_line
from .heads import NO_MODEL, named_kind
from .heads.settings import text_of
from .model_files import (
    check_weights,
    check_weights_file,
    find_directory,
    local_path,
    read_config,
    read_json_object,
)

_log = logging.getLogger(__name__)

OnRead = Callable[[int], object]
"""Called after each array is read, with the array's number of bytes."""


def load(
    path_or_hf_repo: str | Path,
    tokenizer_config: dict[str, Any] | None = None,
    model_config: dict[str, Any] | None = None,
    adapter_path: str | Path | None = None,
    lazy: bool = False,
    return_config: bool = False,
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> tuple[Any, ...]:
    """Load a model with mlx-lm's classes, and its tokenizer; the arguments are as in mlx-lm.

    Code from a model's repository is never run. On the CPU back end, which emulates half precision,
    half-precision weights become float32.

    Args:
        path_or_hf_repo: ``"demo"`` for the bundled model (``"./demo"`` is a directory of that
            name), a local directory with ``config.json`` and ``model*.safetensors``, or a
            repository on the Hugging Face Hub, which is downloaded once: ``owner/name``, or the
            address of its page.
        tokenizer_config: settings of the tokenizer that override its own.
        model_config: settings of the model that override those in ``config.json``.
        adapter_path: a directory of LoRA adapters trained by mlx-lm.
        lazy: leave the weights on disk until they are used.
        return_config: also return the model's settings.
        revision: branch, tag or commit of the repository.
        trust_remote_code: has no effect, here or in ``tokenizer_config``; mlx-lm has this argument.
            A model that needs code from its repository is refused.

    Returns:
        The model, mlx-lm's tokenizer wrapper, and the settings if ``return_config``. With this
        tokenizer, decoders keep all spaces of an output. mlx-lm's functions, and mlxspec's
        replacements for them, drop a space at its start.

    Raises:
        LoadError: a file is missing, damaged or not supported; the message says how to fix it.
    """
    adapters = None if adapter_path is None else find_adapters(adapter_path)
    directory = find_directory(path_or_hf_repo, revision)
    on_read = None if lazy else _unheard
    model, tokenizer, config = load_parts(
        directory, tokenizer_config, model_config, adapters=adapters, on_read=on_read
    )
    return (model, tokenizer, config) if return_config else (model, tokenizer)


def _unheard(nbytes: int) -> None:
    """Ignore the progress of reading."""


def load_parts(
    directory: Path,
    tokenizer_config: dict[str, Any] | None = None,
    model_config: dict[str, Any] | None = None,
    adapters: Path | None = None,
    on_read: OnRead | None = _unheard,
) -> tuple[nn.Module, Any, dict[str, Any]]:
    """Load a model, its tokenizer, and its settings from a directory; see :func:`load`.

    Args:
        directory, tokenizer_config, model_config: as for :func:`load`.
        adapters: the result of :func:`find_adapters`.
        on_read: reports progress; None leaves the weights on disk.
    """
    from .tokenizer import load_tokenizer

    open_standard_streams()  # for programs that have closed them
    started = time.perf_counter()
    with ThreadPoolExecutor(1) as beside:
        model, config = load_lazily(directory, read_config(directory), model_config)
        if adapters is not None:
            model = _with_adapters(model, adapters)
        widen(model)
        # Weights wait for the disk, while a tokenizer keeps Python busy for about as long.
        tokenizer = beside.submit(
            collector_paused()(load_tokenizer),
            *(directory, config.get("eos_token_id"), tokenizer_config),
        )
        if on_read is not None:
            evaluate(model, directory, on_read)
        loaded = model, tokenizer.result(), config
    _log.info("loaded %s in %.1f s", directory, time.perf_counter() - started)
    return loaded


def load_lazily(
    directory: Path, config: dict[str, Any], changes: dict[str, Any] | None = None
) -> tuple[nn.Module, dict[str, Any]]:
    """Load a model without evaluating its weights; return it with its settings.

    Args:
        config: the settings, from :func:`read_config`.
        changes: settings that override those in ``config``.

    Raises:
        LoadError: a file is missing, damaged or not supported.
    """
    from mlx_lm.utils import load_model

    check_weights(directory)
    try:
        model, config = load_model(directory, lazy=True, model_config=changes or {})
        check_scales(model)
        _try(model)
    except LoadError as error:
        raise LoadError(f"{directory}: {error}") from error
    except SystemExit as error:  # mlx-lm's OLMo 1 exits, and prints the package's name
        raise LoadError(f"{directory}: the model needs a package that is not installed") from error
    except Exception as error:  # a wrong configuration or file makes mlx-lm raise anything
        problem = NO_MODEL if named_kind(config) else reason(error)
        method = _quantised_by(config)
        if method and "not supported" not in one_line(error):
            # Other errors, such as UnboundLocalError, mean nothing to a user.
            why = f" ({one_line(error)})" if isinstance(error, ValueError) else ""
            problem = (
                f"the weights are quantised by {printable(method)}, which mlx-lm cannot read{why}; "
                "use the original in 16 bits, and quantise it with `mlxspec convert -q`"
            )
        raise LoadError(f"{directory}: {problem}") from error
    return model, config


def _quantised_by(config: dict[str, Any]) -> str | None:
    """The method other than MLX's that has quantised a model, if ``config.json`` names one."""
    settings = config.get("quantization_config") or text_of(config).get("quantization_config")
    return settings.get("quant_method") if isinstance(settings, dict) else None


def check_scales(model: nn.Module) -> None:
    """Check that a model has no weights of 8 bits, or of whole numbers, without scales.

    MLX would compute with these numbers as they are. It reads FP8 as ``uint8``.

    Raises:
        LoadError: it has some.
    """
    parameters = dict(tree_flatten(model.parameters()))
    for name, array in parameters.items():
        module = name.rpartition(".")[0]
        scales = {f"{module}.scales", f"{module}.weight_scale"}
        if mx.issubdtype(array.dtype, mx.floating) or scales & parameters.keys():
            continue
        # Other parameters, such as tables of experts, may be whole numbers.
        if array.dtype in (mx.int8, mx.uint8) or name.endswith((".weight", ".bias")):
            kind = str(array.dtype).rpartition(".")[2]
            held = "8 bits" if kind in ("int8", "uint8") else f"numbers of type {kind}"
            raise LoadError(
                f"the weights {name} have {held}, but no scales that mlx-lm reads; use the "
                "original in 16 bits, and quantise it with `mlxspec convert -q`"
            )


def _try(model: nn.Module) -> None:
    """Build a small forward, without evaluating it, to detect settings of a wrong type."""
    from mlx_lm.models.cache import make_prompt_cache

    model(mx.array([[0]]), cache=make_prompt_cache(model))


def reason(error: Exception) -> str:
    """One line on why mlx-lm's class or a head's class cannot load a model."""
    text = one_line(error)
    if re.search(r"[Mm]odel type .* not supported", text):
        return f"{text.rstrip('.')} by this version of mlx-lm; update it"
    return (
        "config.json does not fit this kind of model, or the weights do not fit config.json: "
        f"{text or type(error).__name__}"
    )


_ADAPTERS = "name a directory that mlx_lm.lora wrote for this model"


def find_adapters(path: str | Path) -> Path:
    """Check a directory of adapters as far as possible without a model, and return it."""
    directory = local_path(path)
    if (directory / "adapter_model.safetensors").is_file():
        raise LoadError(
            f"{directory}: PEFT's adapters, which mlx-lm does not read; merge them into their "
            "model (merge_and_unload) and convert the result"
        )
    try:
        read_json_object(directory / "adapter_config.json")
        check_weights_file(directory / "adapters.safetensors")
    except LoadError as error:
        raise LoadError(f"{error}; {_ADAPTERS}") from error
    return directory


def _with_adapters(model: nn.Module, directory: Path) -> nn.Module:
    """Apply LoRA or DoRA adapters to a model, or replace all of its weights."""
    from mlx_lm.utils import load_adapters

    try:
        model = load_adapters(model, str(directory))
        given = cast(dict[str, mx.array], mx.load(str(directory / "adapters.safetensors")))
        # mlx-lm leaves these at their first values: zeros for lora_b, so that nothing is adapted.
        for name, _ in tree_flatten(model.parameters()):
            if name.rpartition(".")[2] in ("lora_a", "lora_b") and name not in given:
                raise ValueError(f"the file has no {name}")
    except Exception as error:  # a wrong file makes mlx-lm raise anything
        reason = one_line(error).rstrip(".")
        raise LoadError(
            f"{directory}: the adapters do not fit the model ({reason}); {_ADAPTERS}"
        ) from error
    model.eval()
    return model


def widen(model: nn.Module) -> None:
    """Convert half precision to float32 on the CPU back end, which only emulates half precision."""
    if mx.default_device().type == mx.cpu:
        half = (mx.float16, mx.bfloat16)
        model.apply(lambda p: p.astype(mx.float32) if p.dtype in half else p)


def evaluate(model: nn.Module, source: str | Path, on_read: OnRead = _unheard) -> None:
    """Read the weights one array at a time, so that memory never holds all of them twice.

    Args:
        model: the model, loaded lazily.
        source: the path or name of the model, for errors.

    Raises:
        LoadError: the weights cannot be read.
    """
    try:
        for _, parameter in tree_flatten(model.parameters()):
            mx.eval(parameter)
            on_read(parameter.nbytes)
    except RuntimeError as error:
        raise LoadError(f"{source}: the weights cannot be read ({error})") from error


def encode_prompt(tokenizer: Any, text: str, templated: bool = False) -> list[int]:
    """The token ids of a prompt, as in mlx-lm.

    BOS is added, unless ``text`` starts with the name of that token, or comes from a chat template.
    An empty text gives only BOS, or no ids if the tokenizer has no BOS.

    Raises:
        PromptError: the text has a lone surrogate, which cannot be encoded.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise PromptError(
            f"the prompt has half a character, {text[error.start]!a}, at position "
            f"{error.start}: send text that UTF-8 can encode"
        ) from error
    bos = tokenizer.bos_token
    has_bos = templated or (bos is not None and text.startswith(bos))
    return tokenizer.encode(text, add_special_tokens=not has_bos)
