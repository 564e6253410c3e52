"""The decoders: generations in which a model verifies what a drafter proposes.

Those with a name differ only in what they draft from.
"""

from __future__ import annotations

import copy
import os
import warnings
from collections.abc import AsyncGenerator, Callable, Generator, Iterable, Sequence
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import mlx.nn as nn
from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..corpus.memory import MAX_TOKENS, Memory
from ..corpus.store import open_store
from ..corpus.tokenizer_identity import identify
from ..drafting.drafter import Drafter, checked_drafter
from ..drafting.kept import Experience
from ..drafting.sources import parse_lookup_config
from ..engine.model_sizes import context_length
from ..errors import OptionError, StoreError
from ..models.model import load
from ..terminal import TokenPrinter
from .drafting import Auto, Drafting, Lookahead, PromptLookup, drafter_maker
from .engine import EngineThread, responses
from .loaded import LoadedModel
from .options import GenerationOptions, MakeDrafter, Prompt, prompt_ids
from .request import RecordTime, Request
from .response import GenerationResponse, GenerationResult

if TYPE_CHECKING:
    from typing import Self

    from typing_extensions import Unpack


class Decoder(LoadedModel):
    """Decodes with any drafter. Each generation has a cache of its own.

    A model's weights may change at any time. After replacing its layers, to quantise or adapt
    them, make a new decoder: what the model verifies and what its steps cost may have changed.

    Args:
        model: a directory or Hub repository that :func:`mlxspec.load` takes, or a loaded
            mlx-lm model.
        tokenizer: the tokenizer of a loaded model.
        drafter: proposes what the model verifies: a :class:`mlxspec.Drafter`, which serves one
            generation at a time, or a class or function that makes one for each generation.
            None is plain decoding.
        on_measuring: called with the share done, 0 to 1, while step times are first measured.

    Raises:
        LoadError: the model cannot be found or read.
        OptionError: a loaded model comes without its tokenizer.
        DrafterError: ``drafter`` is not a drafter.
    """

    drafting = Drafting()
    """What it drafts from by default."""

    def __init__(
        self,
        model: str | Path | nn.Module = "mlx_model",
        tokenizer: TokenizerWrapper | None = None,
        drafter: Drafter | Callable[[], Drafter] | Drafting | None = None,
        *,
        on_measuring: Callable[[float], None] | None = None,
    ) -> None:
        if isinstance(drafter, Drafting):
            self.drafting = drafter
        elif drafter is not None:
            self.drafting = Drafting(maker=drafter_maker(drafter))
        if isinstance(model, (str, Path)):
            model, tokenizer = load(model)
        elif tokenizer is None:
            raise OptionError("tokenizer is None: pass the loaded model's tokenizer with it")
        super().__init__(model, tokenizer, on_measuring)

    @property
    def plans(self) -> bool:
        """Whether drafts are planned by what steps cost."""
        return self.drafting.plans

    def stream(
        self,
        prompt: Prompt,
        max_tokens: int = 250,
        **options: Unpack[GenerationOptions],
    ) -> Generator[GenerationResponse, None, None]:
        """Generate one response per token, with the decoder's drafter.

        Args:
            prompt: text, token ids, or messages, as for :meth:`decode`.
            max_tokens: how many tokens to generate at most.
            options: how to sample and where to end, as in :meth:`decode`: ``temp``, ``top_p``,
                ``seed``, ``stop`` and so on.

        Raises:
            PromptError, OptionError: as :meth:`decode`.
        """
        return responses(self.new_request(prompt, max_tokens, options))

    def astream(
        self,
        prompt: Prompt,
        max_tokens: int = 250,
        make_drafter: MakeDrafter | None = None,
        **options: Unpack[GenerationOptions],
    ) -> AsyncGenerator[GenerationResponse, None]:
        """Generate as :meth:`stream` for a task of asyncio, whose event loop goes on meanwhile.

        A thread of the decoder runs the model. Generations at once, 32 at most, share its steps as
        in ``batch_generate``, and each writes what it writes alone. One that is closed
        (``aclose``) or cancelled ends before its next step; it has given its session back when
        the call returns. After a ``break`` the event loop closes it soon;
        ``contextlib.aclosing`` does so at once. A generation runs up to 64 tokens ahead of its
        consumer, and then waits for it.

        Args:
            prompt, max_tokens: as for :meth:`stream`.
            make_drafter: what ``drafting_with`` of the decoder has returned, to draft in another
                way than by default.
            options: as for :meth:`decode`, except ``prompt_cache``. ``on_progress`` is called in
                the event loop.

        Raises:
            PromptError, OptionError, DrafterError: as :meth:`decode`, with the first response.
            OptionError: ``prompt_cache`` is given, which could not hold just what was taken.
        """
        new_request = partial(self.new_request, prompt, max_tokens, make_drafter=make_drafter)
        return self._engine_thread.stream(self, new_request, options)

    @cached_property
    def _engine_thread(self) -> EngineThread:
        return EngineThread()

    def generate(
        self,
        prompt: Prompt,
        max_tokens: int = 250,
        color: bool = True,
        **options: Unpack[GenerationOptions],
    ) -> GenerationResult:
        """Generate, write the text to standard output as it comes, and return the result.

        Args:
            prompt, max_tokens: as in :meth:`stream`.
            color: colour accepted draft tokens and the model's own, at a terminal.
            options: as for :meth:`decode`.

        Raises:
            PromptError, OptionError: as :meth:`decode`.
        """
        return self.written(self.stream(prompt, max_tokens, **options), color)

    def decode(
        self,
        prompt: Prompt,
        drafter: Drafter,
        *,
        max_tokens: int = 250,
        record_time: RecordTime | None = None,
        **options: Unpack[GenerationOptions],
    ) -> Generator[GenerationResponse, None, None]:
        """Generate with a drafter of your own, or with one of mlxspec's.

        Args:
            prompt: text or token ids, which are taken as they are, or messages, a list of
                ``{"role": ..., "content": ...}``, which the model's chat template turns into
                token ids. If the last message is the assistant's, the model continues it.
            drafter: proposes what the model verifies; it changes the speed, not the output. It
                is not used with logits processors or a sampler that are not known to be pure
                (see :class:`mlxspec.SamplingParams`), nor for a model that verifies no drafts.
            max_tokens: how many tokens to generate at most, at least 1.
            record_time: called after each step with its rows, its wall time in seconds, and whether
                it was pipelined.
            options: any of these.

        Options:
            sampling: how the model picks a token; greedy by default.
            constraint: what the output has to be, a :class:`mlxspec.Constraint`: JSON of a
                schema, or a text of a regular expression or grammar. It ends when that is
                complete. Tokens that the constraint forces are drafted.
            chat_template_kwargs: what the chat template is given besides messages, such as
                ``{"enable_thinking": False}`` or ``{"tools": [...]}``.
            stop: texts that end the output before them.
            stop_tokens: tokens that end the output, besides the tokenizer's own: ids, or texts
                of one token.
            on_progress: called during the prefill, with how many of its tokens are done and
                how many there are.
            kv_bits, kv_group_size, quantized_kv_start, max_kv_size, prefill_step_size: the
                memory of KV cache and prefill, as for mlx-lm; see
                :class:`mlxspec.engine.params.CacheOptions`.
            session: keeps the KV cache for the conversation's next turn. The prompt is the whole
                conversation; what the session's cache holds of it does not run again.
            prompt_cache: mlx-lm's caches of what precedes the prompt, from its
                ``make_prompt_cache``. As with mlx-lm they hold the prompt and the output taken
                so far whenever they are used. A generation whose caches another one has
                continued cannot go on.
            temp, top_p, seed, and all other fields of :class:`mlxspec.SamplingParams`: in place
                of those of ``sampling``. A ``sampler`` without ``sampling`` or a ``seed`` draws
                a seed from MLX's random state, so that repeated calls differ as with mlx-lm.

        Returns:
            a generator of one response per token. Closing it ends the generation. With a
            tokenizer from :func:`mlxspec.load` the output keeps its first space, which mlx-lm
            drops.

        Raises:
            PromptError: the prompt is neither text nor token ids nor messages, is empty, longer
                than the model's context, or holds an id outside the model's vocabulary; or it is
                messages, and the model has no chat template or one that does not apply to them.
            OptionError: ``max_tokens`` is below 1, a stop string is empty, a sampling parameter
                is out of range, a token is not the model's, the model's cache cannot be
                quantised as asked, or ``prompt_cache`` has too few layers. With the first
                response: the session is in the middle of another generation.
            PromptCacheError: ``prompt_cache`` holds keys and values of another model, by their
                shapes. With the first response: the session's first cache does, or the
                generation that has ``prompt_cache`` is running in another thread. With a later
                one: ``prompt_cache`` has been continued or changed since the last.
            DrafterError: ``drafter`` is not a drafter. With a response: it proposed an invalid
                draft.
            TypeError: an option is unknown.
        """
        request = self.new_request(prompt, max_tokens, options, lambda session: drafter)
        return responses(request, record_time)

    def written(
        self, responses: Iterable[GenerationResponse], color: bool = True
    ) -> GenerationResult:
        """Write a generation's text to standard output as it comes.

        Args:
            responses: from :meth:`decode` or a method that builds on it.
            color: colour accepted draft tokens and the model's own, at a terminal.
        """
        printer = TokenPrinter(color=None if color else False)
        result = GenerationResult()
        for response in responses:
            printer.write(response.text, response.from_draft)
            result.add(response)
        printer.finish()
        result.step_times = self.step_times.table()
        return result

    def drafting_with(self, **parameters: Any) -> MakeDrafter:
        """What makes the drafter of one generation, for :meth:`astream`.

        Args:
            parameters: those of the decoder's ``stream`` that say how to draft. Where drafts come
                from :class:`AutoDecoder`, ``prediction`` may also be one: token ids that the output
                is expected to follow.

        Raises:
            OptionError: one of them is out of range.
            TypeError: there is no such parameter.
        """
        return partial(replace(self.drafting, **parameters).make, self)

    def _stream(
        self, prompt: Prompt, max_tokens: int, options: GenerationOptions, **parameters: Any
    ) -> Generator[GenerationResponse, None, None]:
        make_drafter = self.drafting_with(**parameters)
        return responses(self.new_request(prompt, max_tokens, options, make_drafter))

    def apart(self, memory_tokens: int) -> Self:
        """A decoder of the same model that shares nothing learned from texts with this one.

        Neither drafts from the other's outputs, nor learns from the other's generations; they
        share only what steps cost.

        Args:
            memory_tokens: how many tokens of its outputs it remembers, in the process alone, if
                this one remembers any.
        """
        other = copy.copy(self)
        other.drafting, other.experience = self.drafting.apart(memory_tokens), Experience()
        return other

    def new_request(
        self,
        prompt: Prompt,
        max_tokens: int,
        options: GenerationOptions,
        make_drafter: MakeDrafter | None = None,
        receive: Callable[[GenerationResponse], object] = lambda response: None,
    ) -> Request:
        """A generation that has not begun, for :func:`.engine.responses` or an engine.

        Args:
            prompt, max_tokens, options: as for :meth:`decode`.
            make_drafter: makes the drafter, given the session, when the request starts and only
                where drafts can be verified; by default the decoder drafts as :meth:`stream` does.
            receive: called with each response in an engine.

        Raises:
            PromptError, OptionError, PromptCacheError, TypeError: as :meth:`decode`.
        """
        longest, template = context_length(self.model), options.get("chat_template_kwargs")
        tokens = prompt_ids(prompt, self.tokenizer, self.vocab_size, longest, template)
        make_drafter = make_drafter or self.drafting_with()
        return Request(self, tokens, max_tokens, options, make_drafter, receive)


class AutoDecoder(Decoder):
    """Chooses each draft by what it costs and what it will probably gain; nothing to tune.

    What a step costs is measured at first use, kept in the user's cache directory and
    corrected by every step. Which drafts are right is learned from every output and kept there
    too, without any text, unless ``MLXSPEC_MEMORY=off``. Outputs are remembered, and later outputs
    are drafted from them: in the process alone, unless a ``memory`` is passed that is kept on disk.

    Args:
        model, tokenizer, on_measuring: as for :class:`Decoder`.
        memory_tokens: how many tokens of outputs the decoder remembers in a memory of its own,
            :data:`mlxspec.corpus.MAX_TOKENS` by default. With 0 there is no memory, and nothing
            that one generation teaches is known in the next.
        memory: remembers the outputs instead. Several decoders of one tokenizer may share it.
        store: a file of ``mlxspec store build`` to draft from.
        extra_drafter: drafts as well, wherever that pays: a :class:`mlxspec.Drafter`, which
            serves one generation at a time, or a class or function that makes one for each
            generation. How likely its tokens are right is learned from the output.

    Raises:
        LoadError, OptionError, DrafterError: as :class:`Decoder`; OptionError as well where both
            ``memory`` and ``memory_tokens`` are given.
        StoreError: the store cannot be read, or it or what ``memory`` keeps is another
            tokenizer's.
    """

    drafting: Auto = Auto()

    def __init__(
        self,
        model: str | Path | nn.Module = "mlx_model",
        tokenizer: TokenizerWrapper | None = None,
        *,
        memory_tokens: int | None = None,
        memory: Memory | None = None,
        store: str | os.PathLike[str] | None = None,
        extra_drafter: Drafter | Callable[[], Drafter] | None = None,
        on_measuring: Callable[[float], None] | None = None,
    ) -> None:
        super().__init__(model, tokenizer, on_measuring=on_measuring)
        if memory is None:
            most = MAX_TOKENS if memory_tokens is None else memory_tokens
            memory = Memory(most) if most else None
        elif memory_tokens is not None:
            raise OptionError("memory and memory_tokens are given together: choose one")
        elif memory.kept:
            kept, own = memory.kept.identity, identify(self.tokenizer)
            if kept.fingerprint != own.fingerprint:
                raise StoreError(
                    f"memory keeps tokens of {kept}, the model's tokenizer is {own}: open one for "
                    "it"
                )
        self.drafting = replace(
            self.drafting,
            memory=memory,
            store=None if store is None else open_store(store, self.tokenizer),
            extra=None if extra_drafter is None else drafter_maker(extra_drafter),
        )

    @property
    def memory(self) -> Memory | None:
        """Of the outputs."""
        return self.drafting.memory


class PromptLookupOptions(GenerationOptions, total=False):
    """What :meth:`PromptLookupDecoder.prompt_lookup` takes besides its named arguments."""

    prompt_lookup_num_tokens: int | None
    max_matching_ngram_size: int | None
    prompt_lookup_config: str | Sequence[object] | None


class PromptLookupDecoder(Decoder):
    """Speculates on text that repeats: code edits, summaries, quotations, structured output.

    The draft is what followed the context's last n-gram earlier in prompt or output; see
    :class:`mlxspec.PromptLookupDrafter`.
    """

    drafting = PromptLookup()

    def stream(
        self,
        prompt: Prompt,
        max_tokens: int = 250,
        n_draft: int = 10,
        ngram_max: int = 3,
        ngram_min: int = 1,
        *,
        prompt_lookup_num_tokens: int | None = None,
        max_matching_ngram_size: int | None = None,
        prompt_lookup_config: str | Sequence[object] | None = None,
        **options: Unpack[GenerationOptions],
    ) -> Generator[GenerationResponse, None, None]:
        """Generate one response per token.

        Args:
            prompt: text, token ids, or messages, as for :meth:`Decoder.decode`.
            max_tokens: how many tokens to generate at most.
            n_draft: draft tokens per step at most; 0 is plain decoding.
            ngram_max: the longest n-gram looked up.
            ngram_min: the shortest.
            prompt_lookup_num_tokens: transformers' and TensorRT-LLM's name for ``n_draft``
                (TensorRT-LLM's default is 4).
            max_matching_ngram_size: their name for ``ngram_max`` (TensorRT-LLM's default is 2).
            prompt_lookup_config: TensorRT-LLM's form for both, ``"[10,2,[0]]"``; a device list
                is ignored with a warning.
            options: how to sample and where to end, as in :meth:`Decoder.decode`: ``temp``,
                ``top_p``, ``seed``, ``stop`` and so on.

        Raises:
            PromptError, OptionError: as :meth:`Decoder.decode`.
        """
        if prompt_lookup_num_tokens is not None:
            n_draft = prompt_lookup_num_tokens
        if max_matching_ngram_size is not None:
            ngram_max = max_matching_ngram_size
        if prompt_lookup_config is not None:
            n_draft, ngram_max, note = parse_lookup_config(prompt_lookup_config)
            if note:
                warnings.warn(note, stacklevel=2)
        sizes = {"n_draft": n_draft, "ngram_max": ngram_max, "ngram_min": ngram_min}
        return self._stream(prompt, max_tokens, options, **sizes)

    def prompt_lookup(
        self,
        prompt: Prompt,
        max_tokens: int = 250,
        n_draft: int = 10,
        ngram_max: int = 3,
        ngram_min: int = 1,
        color: bool = True,
        **options: Unpack[PromptLookupOptions],
    ) -> GenerationResult:
        """Generate, write the text to standard output as it comes, and return the result.

        Args:
            prompt, max_tokens, n_draft, ngram_max, ngram_min: as in :meth:`stream`.
            color: colour accepted draft tokens and the model's own, at a terminal.
            options: :meth:`stream`'s other options.

        Raises:
            PromptError, OptionError: as :meth:`Decoder.decode`.
        """
        stream = self.stream(prompt, max_tokens, n_draft, ngram_max, ngram_min, **options)
        return self.written(stream, color)


class LookaheadDecoder(Decoder):
    """Speculates on the model's own guesses of the tokens ahead, so it needs no text to copy.

    In rows of each step, a window runs Jacobi iterations over the next positions. The n-grams
    that it passes through go into a pool, from which drafts are taken. (Fu et al., ICML 2024,
    arXiv 2402.02057.) Its parameters in the paper and in the reference implementation:

    | paper | reference | here |
    |---|---|---|
    | W | WINDOW_SIZE | ``window_size``, columns of the window |
    | N | LEVEL | ``ngram_size``, tokens of an n-gram; the window has N - 1 levels |
    | G | GUESS_SET_SIZE | ``guess_set_size``, n-grams kept for one token and verified at once |
    | | POOL_FROM_PROMPT | ``pool_from_prompt``, whether the pool starts with the prompt's n-grams |

    A step has up to (N - 1)(W + G) rows, which only pays where rows are cheap. With
    ``window_size="auto"`` there is no window: the drafts are look-ups in the context, as many
    as pay by the measured cost of rows, down to plain decoding.
    """

    drafting = Lookahead()

    def stream(
        self,
        prompt: Prompt,
        max_tokens: int = 250,
        window_size: int | Literal["auto"] = "auto",
        ngram_size: int = 5,
        guess_set_size: int | None = None,
        pool_from_prompt: bool = True,
        **options: Unpack[GenerationOptions],
    ) -> Generator[GenerationResponse, None, None]:
        """Generate one response per token.

        Args:
            prompt: text, token ids, or messages, as for :meth:`Decoder.decode`.
            max_tokens: how many tokens to generate at most.
            window_size: W, the reference's WINDOW_SIZE; 0 and "auto" run no window.
            ngram_size: N, the reference's LEVEL. With "auto" it and the next two have no effect.
            guess_set_size: G, the reference's GUESS_SET_SIZE. By default it is W; -1, the
                reference's "no limit", is 64, since more would take longer than they save.
            pool_from_prompt: the reference's POOL_FROM_PROMPT.
            options: how to sample and where to end, as in :meth:`Decoder.decode`: ``temp``,
                ``top_p``, ``seed``, ``stop`` and so on.

        Raises:
            PromptError, OptionError: as :meth:`Decoder.decode`.
        """
        return self._stream(
            *(prompt, max_tokens, options),
            window_size=window_size,
            ngram_size=ngram_size,
            guess_set_size=guess_set_size,
            pool_from_prompt=pool_from_prompt,
        )

    def lookahead(
        self,
        prompt: Prompt,
        max_tokens: int = 250,
        window_size: int | Literal["auto"] = "auto",
        ngram_size: int = 5,
        guess_set_size: int | None = None,
        pool_from_prompt: bool = True,
        color: bool = True,
        **options: Unpack[GenerationOptions],
    ) -> GenerationResult:
        """Generate, write the text to standard output as it comes, and return the result.

        Args:
            prompt, max_tokens: as in :meth:`stream`.
            window_size, ngram_size, guess_set_size, pool_from_prompt: as in :meth:`stream`.
            color: colour accepted draft tokens and the model's own, at a terminal.
            options: :meth:`stream`'s other options.

        Raises:
            PromptError, OptionError: as :meth:`Decoder.decode`.
        """
        sizes = window_size, ngram_size, guess_set_size, pool_from_prompt
        stream = self.stream(prompt, max_tokens, *sizes, **options)
        return self.written(stream, color)


class CombinedDecoder(AutoDecoder):
    """Speculates on text that repeats and, in the rows that are left, by lookahead.

    Its arguments are those of :class:`AutoDecoder`; what lookahead earns is known in the next
    generation even with ``memory_tokens=0``. To combine other drafters, pass a
    :class:`mlxspec.CombinedDrafter` to :meth:`Decoder.decode`.
    """

    drafting = Auto(lookahead=Lookahead())

    def stream(
        self,
        prompt: Prompt,
        max_tokens: int = 250,
        window_size: int | Literal["auto"] = "auto",
        ngram_size: int = 5,
        guess_set_size: int | None = None,
        pool_from_prompt: bool = True,
        drafter: Drafter | None = None,
        **options: Unpack[GenerationOptions],
    ) -> Generator[GenerationResponse, None, None]:
        """Generate one response per token.

        Args:
            prompt: text, token ids, or messages, as for :meth:`Decoder.decode`.
            max_tokens: how many tokens to generate at most.
            window_size, ngram_size, guess_set_size, pool_from_prompt: lookahead's, as for
                :class:`mlxspec.LookaheadDecoder`.
            drafter: goes first, with lookahead as its fallback; by default the look-ups that
                :class:`mlxspec.AutoDecoder` plans.
            options: how to sample and where to end, as in :meth:`Decoder.decode`: ``temp``,
                ``top_p``, ``seed``, ``stop`` and so on.

        Raises:
            PromptError, OptionError: as :meth:`Decoder.decode`.
        """
        return self._stream(
            *(prompt, max_tokens, options),
            window_size=window_size,
            ngram_size=ngram_size,
            guess_set_size=guess_set_size,
            pool_from_prompt=pool_from_prompt,
            drafter=drafter,
        )

    def drafting_with(
        self, *, drafter: Drafter | None = None, prediction: Sequence[int] = (), **parameters: Any
    ) -> MakeDrafter:
        first = None if drafter is None else partial(checked_drafter, drafter)
        lookahead = Lookahead(**parameters, first=first)
        return super().drafting_with(lookahead=lookahead, prediction=prediction)
