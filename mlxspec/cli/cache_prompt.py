"""``mlxspec cache-prompt``: keeps the KV cache of a long prompt in a file for later questions."""

from __future__ import annotations

import json
import os
from collections import deque
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import click

from ..engine.params import CacheOptions
from ..errors import OptionError, PromptCacheError
from ..models.model_files import DEMO, is_downloaded, is_repository_name
from ..terminal import one_line
from .common.generation import Generation
from .common.model_choice import model_or_default, note_which_model
from .common.notes import note
from .common.options import ADAPTERS, ADAPTERS_HELP, NAME, command, option, options_of
from .common.output import at_terminal, error_console, prefill_bar
from .common.prompt import PromptOptions, in_template, model_option

if TYPE_CHECKING:
    from mlx_lm.tokenizer_utils import TokenizerWrapper

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
@option(ADAPTERS, ADAPTERS_HELP, type=NAME, group="Model and prompt")
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

    A generation that begins with this prompt need not process it again.

    \b
    Examples:
      mlxspec cache-prompt --prompt-file a.txt --prompt-cache-file a.safetensors
      mlxspec generate --prompt-cache-file a.safetensors "Who is the narrator?"

    The prompt may also come through a pipe. The file names its model and adapters, so 'generate'
    needs no --model and no --adapter-path. If the model must be downloaded, 'generate' asks you at
    a terminal; elsewhere, name the model with --model.

    "mlx_lm.generate --prompt-cache-file" reads this file, too, and 'generate' reads files of
    "mlx_lm.cache_prompt". With a chat template the prompt begins the user's message, and the later
    prompt continues it.
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

    # Check all that needs no model before a model is loaded, or even downloaded.
    source = prompt.read()
    if not prompt_cache_file.endswith(".safetensors"):
        raise OptionError(f"--prompt-cache-file {prompt_cache_file}: choose a name *.safetensors")
    path = prompt_cache_path(prompt_cache_file)
    check_replaceable(path, force)

    name = model_or_default(model)
    loaded, tokenizer = load(name, adapter_path=adapter_path)
    check_quantization(loaded, caches)
    ids, _ = prompt.encoded(source, tokenizer, ended=False)
    tokens = prompt_ids(ids, tokenizer, vocabulary_size(loaded), context_length(loaded))
    note_which_model(model)
    cache = make_prompt_cache(loaded, caches.max_kv_size)
    options: dict[str, Any] = {**asdict(caches), "prompt_cache": cache}
    with prefill_bar(error_console()) as bar:
        options["prompt_progress_callback"] = bar
        deque(generate_step(mx.array(tokens), loaded, max_tokens=0, **options), maxlen=0)
    adapters = "" if adapter_path is None else str(local_path(adapter_path).resolve())
    metadata = {"model": name, "tokenizer_config": "{}", ADAPTERS_OF_FILE: adapters}
    save_prompt_cache(path, cache, metadata, tokens=tokens)
    note(f"{path} holds {len(tokens):,} tokens, {path.stat().st_size / 1e6:,.1f} MB")


ADAPTERS_OF_FILE = "adapter_path"
"""The key of the adapters' directory in the metadata of a file; the value is "" for none."""
_LONGEST_NAME = 200  # characters of a model's name to show
_QUERY = "<query>"  # mlx-lm's placeholder, which no template contains


class CachedPrompt:
    """The content of a prompt cache file, to be continued by other prompts.

    Args:
        file: made by ``mlxspec cache-prompt`` or ``mlx_lm.cache_prompt``.

    Raises:
        PromptCacheError: the file is missing, damaged, empty or of another kind.
    """

    def __init__(self, file: str) -> None:
        from ..engine.caches import parts
        from ..engine.prompt_cache_file import load_prompt_cache, tokens_in

        self.file = file
        self._cache, self._metadata = load_prompt_cache(file, return_metadata=True)
        self._tokens = tokens_in(self._cache, self._metadata)
        if all(part.empty() for part in parts(self._cache)):
            raise PromptCacheError(f"{file} holds an empty cache: leave out --prompt-cache-file")

    def completed(self, generation: Generation) -> Generation:
        """Complete a generation with the file's model, adapters and end token.

        Raises:
            PromptCacheError: the generation has another model or quantisation, or the model is not
                on this machine.
        """
        self._check_quantization(generation.caches)
        ends = generation.ends
        return replace(
            generation,
            model=self._model(generation.model),
            adapter_path=self._adapters(generation.adapter_path),
            ends=replace(ends, stop_tokens=(*ends.stop_tokens, *self._end_tokens())),
        )

    def _model(self, asked: str | None) -> str | None:
        """The model that made the file, which must be the model that the user named, if any.

        The file may come from anybody: its model is downloaded only if the user agrees.
        """
        own = self._metadata.get("model") or None
        if own is None or asked == own or (asked is not None and _same_directory(asked, own)):
            return asked
        made = f"{self.file} was made by the model {one_line(own[:_LONGEST_NAME])}"
        if asked is not None:
            raise PromptCacheError(
                f"{made}, not {asked}: leave out --model, or make the file again"
            )
        if own == DEMO or _is_directory(own):
            return own
        if is_repository_name(own):
            question = f"{one_line(made)}, which is not on this machine. Download it?"
            if is_downloaded(own) or (at_terminal() and click.confirm(question, err=True)):
                return own
        raise PromptCacheError(f"{made}, which is not on this machine: name the model with --model")

    def _adapters(self, asked: str | None) -> str | None:
        """The adapters that the file was made with; ``asked`` if the file does not name them."""
        own = self._metadata.get(ADAPTERS_OF_FILE)
        if own is None or (asked is not None and _same_directory(asked, own)):
            return asked
        if asked is None and (not own or _is_directory(own)):
            return own or None
        named = f"the adapters {one_line(own[:_LONGEST_NAME])}: name them with"
        made = named if own else "no adapters: leave out"
        raise PromptCacheError(f"{self.file} was made with {made} --adapter-path")

    def _check_quantization(self, options: CacheOptions) -> None:
        """Raise an error if options would quantise the cache differently."""
        from mlx_lm.models.cache import QuantizedKVCache

        from ..engine.caches import parts

        bits, size = options.kv_bits, options.kv_group_size
        for cache in parts(self._cache):
            quantized = isinstance(cache, QuantizedKVCache) and bits is not None
            if quantized and (cache.bits, cache.group_size) != (bits, size):
                raise PromptCacheError(
                    f"{self.file} is quantised to {cache.bits} bits in groups of "
                    f"{cache.group_size}: leave out --kv-bits and --kv-group-size"
                )

    def _end_tokens(self) -> tuple[str, ...]:
        """The end token with which mlx-lm made the file, if any."""
        try:
            config = json.loads(self._metadata.get("tokenizer_config", "{}"))
        except (ValueError, RecursionError):
            return ()
        token = config.get("eos_token") if isinstance(config, dict) else None
        return (token,) if isinstance(token, str) and token else ()

    def continued(
        self, prompt: str | list[int], options: PromptOptions, decoder: Decoder, templated: bool
    ) -> tuple[list[int], dict[str, Any]]:
        """The tokens to generate from, and the option with their cache.

        If the file lists its tokens, they can be drafted from, too.

        Raises:
            PromptCacheError: the file belongs to another model.
            OptionError: the chat template does not apply.
        """
        from ..engine.prompt_cache_file import check_fits, check_lengths
        from ..generation.session import Session

        check_fits(self._cache, decoder.model, self.file)
        check_lengths(self._cache, self.file)
        following = _following(prompt, options, decoder.tokenizer, templated)
        if self._tokens:
            session = Session(self._cache, self._tokens)
            return [*self._tokens, *following], {"session": session}
        return following, {"prompt_cache": self._cache}


def _following(
    prompt: str | list[int], options: PromptOptions, tokenizer: TokenizerWrapper, templated: bool
) -> list[int]:
    """The tokens of a text that continues the user's message in the cache."""
    if not isinstance(prompt, str):
        return prompt
    if templated:
        texts = []
        for content in (_QUERY, prompt):
            messages, how = options.turns([{"role": "user", "content": content}])
            how["tokenize"] = False
            texts.append(in_template(messages, tokenizer, **how))
        opening, prompt = texts
        prompt = prompt[len(opening.partition(_QUERY)[0]) :]
    return tokenizer.encode(prompt, add_special_tokens=False)


def _same_directory(*names: str) -> bool:
    return all(map(_is_directory, names)) and os.path.samefile(*map(os.path.expanduser, names))


def _is_directory(name: str) -> bool:
    return os.path.isdir(os.path.expanduser(name))
