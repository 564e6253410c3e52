"""``mlxspec cache-prompt``: keeps the KV cache of a long prompt in a file for later questions."""

from __future__ import annotations

import os
from collections import deque
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from ..engine.params import CacheOptions
from ..errors import FileError, OptionError
from ..models.model_files import DEMO, DEMO_DIRECTORY, absolute_name, local_path
from ..terminal import one_line
from .common.model_choice import model_option, model_or_default, note_if_demo
from .common.notes import note
from .common.options import ADAPTERS, NAME, command, option, options_of
from .common.output import error_console, prefill_bar
from .common.prompt import PromptOptions

if TYPE_CHECKING:
    from mlx_lm.tokenizer_utils import TokenizerWrapper

    from ..generation.chat_prompt import ChatPrompt
    from ..generation.decoder import Decoder


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
@option(*ADAPTERS, type=NAME, group="Model and prompt")
@options_of(CacheOptions, "caches", "Memory")
@option("--force", "Replace an existing prompt cache.", group="Output")
def cache_prompt_command(
    model: str | None,
    prompt: PromptOptions,
    prompt_cache_file: str,
    adapter_path: str | None,
    caches: CacheOptions,
    force: bool,
) -> None:
    """Process a prompt and keep its KV cache in a file.

    Generations that continue this prompt then need not process it again.

    \b
    Examples:
      mlxspec cache-prompt --prompt-file a.txt --prompt-cache-file a.safetensors
      mlxspec generate --prompt-cache-file a.safetensors "Who is the narrator?"

    The prompt may also come through a pipe. 'generate' needs the same --model and --adapter-path,
    or copies of them.

    "mlx_lm.generate --prompt-cache-file" reads this file, too, and 'generate' reads files of
    "mlx_lm.cache_prompt". With a chat template, this prompt is the beginning of the user's message,
    and the prompt of 'generate' is the rest.
    """
    import mlx.core as mx
    from mlx_lm.generate import generate_step
    from mlx_lm.models.cache import make_prompt_cache

    from ..engine.capability import check_quantization
    from ..engine.loaded_model import LoadedModel
    from ..engine.model_sizes import context_length
    from ..engine.prompt_cache import (
        check_replaceable,
        check_savable,
        digest_of_weights,
        prompt_cache_path,
        save_prompt_cache,
    )
    from ..generation.options import prompt_ids
    from ..models.model import load

    # Check what can be checked without a model before a model is loaded or downloaded.
    source = prompt.read()
    if not prompt_cache_file.endswith(".safetensors"):
        raise OptionError(f"--prompt-cache-file {prompt_cache_file}: choose a name *.safetensors")
    path = prompt_cache_path(prompt_cache_file)
    check_replaceable(path, force)

    name = model_or_default(model)
    loaded, tokenizer = load(name, adapter_path=adapter_path)
    check_quantization(loaded, caches)
    ids, _ = prompt.encoded(source, tokenizer, ended=False)
    tokens = prompt_ids(ids, tokenizer, LoadedModel(loaded).vocab_size, context_length(loaded))
    note_if_demo(model)
    cache = make_prompt_cache(loaded, caches.max_kv_size)
    check_savable(cache)
    options: dict[str, Any] = {**asdict(caches), "prompt_cache": cache}
    with prefill_bar(error_console()) as bar:
        options["prompt_progress_callback"] = bar
        deque(generate_step(mx.array(tokens), loaded, max_tokens=0, **options), maxlen=0)
    adapters = "" if adapter_path is None else absolute_name(adapter_path)
    metadata = {"model": name, "tokenizer_config": "{}", ADAPTERS_OF_FILE: adapters}
    metadata[_WEIGHTS] = digest_of_weights(loaded)
    save_prompt_cache(path, cache, metadata, tokens=tokens)
    note(f"{path} holds {len(tokens):,} tokens, {path.stat().st_size / 1e6:,.1f} MB")


ADAPTERS_OF_FILE = "adapter_path"
"""The key of the adapters' directory in a file's metadata; the value is "" without adapters."""
_WEIGHTS = "weights"  # the key of their digest, which mlx-lm's files lack
_QUERY = "<query>"  # mlx-lm's placeholder, which no template contains


class CachedPrompt:
    """The content of a prompt cache file, which other prompts can continue.

    A file of ``mlxspec cache-prompt`` fits its model wherever that is now, as a digest of the
    weights shows. A file of mlx-lm only names its model.

    Args:
        file: the file, made by ``mlxspec cache-prompt`` or ``mlx_lm.cache_prompt``.
        model: the model that will continue the prompt.

    Raises:
        FileError: the file is missing, damaged or of another kind, or made with another model or
            other adapters.
    """

    def __init__(self, file: str, model: str, adapter_path: str | None) -> None:
        from ..engine.prompt_cache import load_prompt_cache, tokens_in

        self.file = file
        self._cache, metadata = load_prompt_cache(file, return_metadata=True)
        self._tokens = tokens_in(metadata, self._cache)
        self._weights = metadata.get(_WEIGHTS)
        self._otherwise = "was made with other weights: make it again with 'mlxspec cache-prompt'"
        for key, given in (("model", model), (ADAPTERS_OF_FILE, adapter_path or "")):
            recorded = metadata.get(key, given)
            if given == recorded or _place(given) == _place(recorded):
                continue
            made = one_line(recorded) or "none"
            self._otherwise = f"was made with --{key.replace('_', '-')} {made}: give the same here"
            may_be_a_copy = given and recorded and os.path.exists(_place(given))
            if not (self._weights and may_be_a_copy):
                raise FileError(f"{file} {self._otherwise}")

    def continued(
        self, prompt: str | list[int], options: PromptOptions, decoder: Decoder
    ) -> tuple[list[int], dict[str, Any]]:
        """The whole prompt's tokens, and options for :meth:`.GenerationSettings.request`.

        If the file lists the tokens in its cache, drafts can be taken from these, too.

        Raises:
            FileError: the file was made with another model.
            PromptError: the chat template fails.
        """
        from ..engine.prompt_cache import check_fits, digest_of_weights
        from ..generation.session import Session

        if self._weights not in (None, digest_of_weights(decoder.model)):
            raise FileError(f"{self.file} {self._otherwise}")
        check_fits(self._cache, decoder.model, self.file)
        following, chat = _following(prompt, options, decoder.tokenizer)
        how: dict[str, Any] = {"chat": chat, "prompt_cache": self._cache}
        if self._tokens:
            how = {"chat": chat, "session": Session(self._cache, self._tokens)}
        return [*self._tokens, *following], how


def _place(name: str) -> str:
    """A model's directory, so that the bundled one is the same under its path; or the name."""
    path = DEMO_DIRECTORY if name == DEMO else local_path(name)
    return os.path.realpath(path) if os.path.exists(path) else name


def _following(
    prompt: str | list[int], options: PromptOptions, tokenizer: TokenizerWrapper
) -> tuple[list[int], ChatPrompt | None]:
    """The tokens of a text that continues the user's message in the cache, as for ``encoded``."""
    from ..models.model import encode_prompt

    if not isinstance(prompt, str):
        return prompt, None
    _, chat = options.encoded(prompt, tokenizer)
    _, opening = options.encoded(_QUERY, tokenizer)
    if chat and opening:
        prompt = chat.text[len(opening.text.partition(_QUERY)[0]) :]
    return encode_prompt(tokenizer, prompt, templated=True), chat
