"""``mlxspec cache-prompt``: the KV cache of a long prompt, in a file for later questions."""

from __future__ import annotations

from dataclasses import asdict

from ..engine.params import CacheOptions
from ..errors import OptionError
from .common.model_choice import model_or_default, tell_of_model
from .common.notes import note
from .common.options import ADAPTERS, ADAPTERS_HELP, NAME, command, option, options_of
from .common.output import error_console
from .common.prompt import PromptOptions, model_option
from .generate import prefill_bar


@command("cache-prompt")
@model_option
@options_of(PromptOptions, "prompt", "Model and prompt", leave_out=("prefill_response",))
@option(
    "--prompt-cache-file FILE",
    "Write the cache to this file, *.safetensors.",
    type=NAME,
    required=True,
    group="Model and prompt",
)
@option(ADAPTERS, ADAPTERS_HELP, type=NAME, group="Model and prompt")
@options_of(CacheOptions, "caches", "Memory")
@option("--force", "Replace a prompt cache that is there.", group="Output")
def cache_prompt_command(
    model: str | None,
    prompt: PromptOptions,
    prompt_cache_file: str,
    adapter_path: str | None,
    caches: CacheOptions,
    force: bool,
) -> None:
    """Process a prompt and keep its KV cache in a file.

    Generations that begin with this prompt need not process it again.

    \b
    Examples:
      mlxspec cache-prompt --prompt-file a.txt --prompt-cache-file a.safetensors
      mlxspec generate --prompt-cache-file a.safetensors "Who is the narrator?"

    The prompt may come through a pipe, too. The file names its model and adapters, which then
    answer without --model and --adapter-path. If the model has to be downloaded, you are asked at
    a terminal, and elsewhere name it with --model.

    The file is also one for "mlx_lm.generate --prompt-cache-file", and those of
    "mlx_lm.cache_prompt" serve here. With a chat template the prompt is the beginning of a user's
    message, which the later prompt goes on with.
    """
    import mlx.core as mx
    from mlx_lm.generate import generate_step
    from mlx_lm.models.cache import make_prompt_cache

    from ..engine.capability import check_quantization
    from ..engine.model_sizes import context_length
    from ..engine.prompt_cache_file import check_replaceable, prompt_cache_path, save_prompt_cache
    from ..engine.target import vocabulary_size
    from ..generation.options import prompt_ids
    from ..models.model import load
    from ..models.model_files import local_path
    from .cached_prompt import ADAPTERS_OF_FILE

    # All that needs no model is checked before one is loaded, or even downloaded.
    source = prompt.read()
    if not prompt_cache_file.endswith(".safetensors"):
        raise OptionError(f"--prompt-cache-file {prompt_cache_file}: name a file *.safetensors")
    path = prompt_cache_path(prompt_cache_file)
    check_replaceable(path, force)

    name = model_or_default(model)
    loaded, tokenizer = load(name, adapter_path=adapter_path)
    check_quantization(loaded, caches)
    templated = prompt.uses_template(source, tokenizer)
    ids = prompt.tokens(source, tokenizer, templated, ended=False)
    tokens = prompt_ids(ids, tokenizer, vocabulary_size(loaded), context_length(loaded))

    tell_of_model(model)
    cache = make_prompt_cache(loaded, caches.max_kv_size)
    options = {**asdict(caches), "prompt_cache": cache}
    with prefill_bar(error_console()) as progress:
        processing = generate_step(
            mx.array(tokens), loaded, max_tokens=0, prompt_progress_callback=progress, **options
        )
        for _ in processing:
            pass
    adapters = "" if adapter_path is None else str(local_path(adapter_path).resolve())
    metadata = {"model": name, "tokenizer_config": "{}", ADAPTERS_OF_FILE: adapters}
    save_prompt_cache(path, cache, metadata, tokens=tokens)
    note(f"{path} holds {len(tokens):,} tokens, {path.stat().st_size / 1e6:,.1f} MB")
