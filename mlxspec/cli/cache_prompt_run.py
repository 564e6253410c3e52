"""What ``mlxspec cache-prompt`` does: read, load, process, save."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import make_prompt_cache

from ..engine.capability import check_quantization
from ..engine.params import CacheOptions
from ..engine.positions import context_length
from ..engine.prompt_cache_file import check_replaceable, prompt_cache_path, save_prompt_cache
from ..engine.target import vocabulary_size
from ..errors import OptionError
from ..generation.options import prompt_ids as checked_ids
from ..loading.model import load
from .answer import default_model, tell_of_default
from .consoles import error_console
from .memory_options import take_memory
from .outcome import note
from .prefill_progress import PrefillProgress
from .prompt_source import read_prompt
from .prompt_tokens import opening_tokens, uses_template


def cache_prompt(
    *,
    model: str | None,
    prompt: str | None,
    prompt_file: str | None,
    prompt_ids: str | None,
    chat: bool | None,
    prompt_cache_file: str,
    force: bool,
    **options: Any,
) -> None:
    """Process a prompt; the arguments are the options of the command line.

    ``options`` are those of :func:`.memory_options.memory_options`.

    Raises:
        MlxspecError: an option, the prompt, the model or the file is at fault.
    """
    # All that needs no model is checked before one is loaded, or even downloaded.
    source = read_prompt(prompt, prompt_file, prompt_ids)
    memory = take_memory(options)
    if not prompt_cache_file.endswith(".safetensors"):
        raise OptionError(f"--prompt-cache-file {prompt_cache_file}: name a file *.safetensors")
    path = prompt_cache_path(prompt_cache_file)
    check_replaceable(path, force)
    name = model or default_model()
    loaded, tokenizer = load(name)
    check_quantization(loaded, CacheOptions(**memory))
    templated = uses_template(source, tokenizer, chat)
    ids = opening_tokens(source, tokenizer, templated)
    tokens = checked_ids(ids, tokenizer, vocabulary_size(loaded), context_length(loaded))

    tell_of_default(model)
    cache = make_prompt_cache(loaded, memory.pop("max_kv_size"))
    with PrefillProgress(error_console(None)) as progress:
        processing = generate_step(
            mx.array(tokens),
            loaded,
            max_tokens=0,
            prompt_cache=cache,
            prompt_progress_callback=progress,
            **memory,
        )
        for _ in processing:
            pass
    metadata = {"model": name, "tokenizer_config": "{}"}
    save_prompt_cache(path, cache, metadata, tokens=tokens)
    note(f"{path} holds {len(tokens):,} tokens, {path.stat().st_size / 1e6:,.1f} MB")
