"""Decoders generate text: a drafter proposes tokens, and the model verifies them.

The named decoders differ only in what they draft from.
"""

from __future__ import annotations

import copy
import os
import threading
from collections.abc import AsyncGenerator, Callable, Generator
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlx.nn as nn
from mlx_lm.tokenizer_utils import StreamingDetokenizer, TokenizerWrapper

from ..corpus.answer_index import MAX_TOKENS, AnswerIndex
from ..corpus.answers import SWITCH, identify
from ..drafting.costs import LiveCosts
from ..drafting.drafter import Drafter
from ..drafting.experience import Experience, experience_path
from ..drafting.p_accept import TokenClasses
from ..engine.calibration import costs_for, with_long_context
from ..engine.draft_model import DraftModel
from ..engine.loaded_model import LoadedModel
from ..engine.machine import model_identity
from ..engine.model_sizes import context_length
from ..engine.target import evaluate_constants
from ..errors import FileError, OptionError
from ..models.heads.loading import head_for, load_with_head
from ..models.model import load
from ..models.tokenizer import VocabularyClasses, detokenizer_of
from ..terminal import TokenPrinter
from .asynchronous import astream
from .drafter_factories import Auto, DrafterFactory, Lookahead, PromptLookup, drafter_maker
from .options import DraftingParameters, GenerationOptions, Prompt, prompt_ids
from .request import Request
from .response import GenerationResponse, GenerationResult
from .scheduler import responses

if TYPE_CHECKING:
    from typing import Self

    from typing_extensions import Unpack

    from ..models.heads import Head


class Decoder:
    """Generates with any drafter. Each generation has its own cache.

    A model's weights may change at any time. After replacing its layers, to quantise or adapt them,
    make a new decoder: its capability and the costs of its steps may have changed.

    Args:
        model: a directory or Hub repository, as for :func:`mlxspec.load`, or a loaded mlx-lm
            model. Decoders that are made from one :class:`.LoadedModel` share what is known about
            it.
        tokenizer: the tokenizer of a loaded model.
        drafter: a :class:`mlxspec.Drafter`, which serves one generation at a time, or a class or
            function that makes one for each generation. None means plain decoding.

    Raises:
        LoadError: the model cannot be found or read.
        OptionError: a loaded model is passed without its tokenizer.
        MlxspecError: ``drafter`` is not a drafter.
    """

    drafter_factory = DrafterFactory()
    """Makes the drafter of each generation."""

    keeps_experience = True
    """Whether the experience of planned generations is kept on disk; see :class:`.Experience`."""

    def __init__(
        self,
        model: str | Path | nn.Module | LoadedModel = "mlx_model",
        tokenizer: TokenizerWrapper | None = None,
        drafter: Drafter | Callable[[], Drafter] | DrafterFactory | None = None,
    ) -> None:
        if isinstance(drafter, DrafterFactory):
            self.drafter_factory = drafter
        elif drafter is not None:
            self.drafter_factory = DrafterFactory(maker=drafter_maker(drafter))
        if isinstance(model, (str, Path)):
            model, tokenizer = load(model)
        elif tokenizer is None:
            raise OptionError("tokenizer is None: pass the loaded model's tokenizer with it")
        self.loaded = self.drafter_factory.model_to_run(LoadedModel.of(model), tokenizer)
        """The model that generations run, with what mlxspec knows about it."""
        self.tokenizer = tokenizer
        evaluate_constants(self.model)
        self._measuring = threading.Lock()

    @property
    def model(self) -> nn.Module:
        """The mlx-lm model that generations run."""
        return self.loaded.model

    @cached_property
    def token_classes(self) -> TokenClasses:
        """The class of each token."""
        return VocabularyClasses(self.tokenizer)

    def new_detokenizer(self) -> StreamingDetokenizer:
        """A detokenizer for one output."""
        return detokenizer_of(self.tokenizer)

    @cached_property
    def costs(self) -> LiveCosts:
        """The costs of steps, read from the cost file, or begun with a few plain steps now."""
        with self._measuring:  # threads must not disturb each other's measurements
            if "costs" not in vars(self):
                self.costs = costs_for(self.loaded)
            return self.costs

    def next_costs(self) -> LiveCosts:
        """The costs for a new generation.

        If an earlier one had a long context, and steps after one have never been measured, they are
        measured first.
        """
        if self.costs.wants_long_context:
            with self._measuring:
                if self.costs.wants_long_context:  # no other thread has measured meanwhile
                    self.costs = with_long_context(self.loaded, self.costs)
        return self.costs.for_generation()

    @cached_property
    def experience(self) -> Experience:
        """The experience of planned generations."""
        if not self.keeps_experience or os.environ.get(SWITCH) == "off":
            return Experience()
        return Experience(experience_path(model_identity(self.model)))

    def stream(
        self, prompt: Prompt, max_tokens: int = 250, **options: Unpack[GenerationOptions]
    ) -> Generator[GenerationResponse, None, None]:
        """Generate one response per token, with the decoder's drafter.

        Drafts change the speed, not the output. A model that verifies no drafts gets none. Nor does
        a generation whose logits processors or sampler may be impure (see
        :class:`mlxspec.SamplingParams`).

        Args:
            prompt: text, token ids, or messages, a list of ``{"role": ..., "content": ...}``. The
                model's chat template turns messages into token ids; a trailing assistant message
                is continued. Text and ids are used unchanged.
            max_tokens: the most tokens to generate, at least 1.
            options: see below, and the drafting parameters of the decoder's class.

        Options:
            sampling: how to pick tokens; greedy by default.
            constraint: a :class:`mlxspec.Constraint` that the output must match: a JSON Schema, a
                regular expression or a grammar. The output ends once it is complete. The default
                decoder, :class:`mlxspec.AutoDecoder`, drafts tokens that the constraint forces.
            chat_template_kwargs: arguments of the chat template besides the messages, such as
                ``{"enable_thinking": False}`` or ``{"tools": [...]}``.
            stop: strings that end the output and are not part of it.
            stop_tokens: tokens that end the output, in addition to the tokenizer's own: ids, or
                texts that are a single token.
            on_progress: called during the prefill with the number of tokens processed, and the
                total.
            kv_bits, kv_group_size, quantized_kv_start: quantise the KV cache to this many bits,
                with one scale per group of this many values, once it holds this many positions.
            max_kv_size: the most positions to cache, the first 4 and the latest; models with caches
                of their own kind ignore it.
            prefill_step_size: the prompt tokens per forward.
            session: keeps the KV cache for the conversation's next turn. Pass the whole
                conversation as the prompt: the part that is in the cache does not run again.
            prompt_cache: mlx-lm's caches of the text before the prompt, from its
                ``make_prompt_cache``. Once the generation has ended or is closed (leaving a ``for``
                loop closes it), they also hold the prompt, and the output up to the last response
                taken. Until then, any use of them is an error.
            temp, top_p, seed, and all other fields of :class:`mlxspec.SamplingParams`: override
                those of ``sampling``. A ``sampler`` without ``sampling`` or ``seed`` draws a seed
                from MLX's random state, so repeated calls differ, as with mlx-lm.

        Returns:
            a generator of one response per token. Closing it ends the generation. With a tokenizer
            from :func:`mlxspec.load`, the output keeps its first space, which mlx-lm drops.

        Raises:
            PromptError: the prompt is not text, token ids or messages; it is empty, longer than
                the model's context, or holds an unknown id; or the model has no chat template for
                the messages, or its template fails with them.
            OptionError: ``max_tokens`` is below 1, a stop string is empty, a sampling parameter
                is out of range, a token is unknown to the model, the model's cache cannot be
                quantised as requested, or ``prompt_cache`` has too few layers. With the first
                response: another generation is using the session.
            FileError: ``prompt_cache`` was made by another model. With the first response:
                another model made the session's initial cache, or another generation is using
                ``prompt_cache``.
            MlxspecError: with a response, a drafter of your own is invalid or proposed an invalid
                draft.
            TypeError: an option is unknown.
        """
        return responses(self.new_request(prompt, max_tokens, options))

    def astream(
        self, prompt: Prompt, max_tokens: int = 250, **options: Unpack[GenerationOptions]
    ) -> AsyncGenerator[GenerationResponse, None]:
        """Generate like :meth:`stream`, in an asyncio task, without blocking its event loop.

        The model runs in a separate thread. Up to 32 concurrent generations share its steps as in
        ``batch_generate``, and each has the same output as alone. A generation runs up to 64 tokens
        ahead of its consumer, then waits.

        Closing (``aclose``) or cancelling a generation ends it before its next step, and releases
        its session before the call returns. After a ``break``, the event loop closes it soon;
        ``contextlib.aclosing`` closes it immediately.

        Args:
            prompt, max_tokens, options: as for :meth:`stream`, except ``prompt_cache``.
                ``on_progress`` is called in the event loop.

        Raises:
            PromptError, OptionError, MlxspecError: as :meth:`stream`, with the first response.
            OptionError: ``prompt_cache`` is given, which does not work, since the generation runs
                ahead of its consumer.
        """
        new_request = partial(self.new_request, prompt, max_tokens)
        return astream(self, new_request, options)

    def generate(
        self,
        prompt: Prompt,
        max_tokens: int = 250,
        color: bool = True,
        **options: Unpack[GenerationOptions],
    ) -> GenerationResult:
        """Generate, writing the text to standard output as it is generated, and return the result.

        Args:
            prompt, max_tokens, options: as for :meth:`stream`.
            color: whether to colour accepted draft tokens and the model's own, at a terminal.

        Raises:
            PromptError, OptionError: as :meth:`stream`.
        """
        printer = TokenPrinter(color=None if color else False)
        result = GenerationResult()
        for response in self.stream(prompt, max_tokens, **options):
            printer.write(response.text, response.from_draft)
            result.add(response)
        printer.finish()
        return result

    def with_separate_memory(self, memory_tokens: int) -> Self:
        """A decoder of the same model that remembers and learns separately from this one.

        Neither drafts from the other's outputs or learns from them. Both begin with the same
        measured costs of steps.

        Args:
            memory_tokens: how many tokens of outputs the new decoder remembers, in the process
                only; unused if this decoder has no memory.
        """
        other = copy.copy(self)
        other.drafter_factory = self.drafter_factory.with_separate_memory(memory_tokens)
        other.experience = Experience()
        return other

    def new_request(
        self,
        prompt: Prompt,
        max_tokens: int,
        options: GenerationOptions,
        drafter_factory: DrafterFactory | None = None,
        receive: Callable[[GenerationResponse], object] = lambda response: None,
    ) -> Request:
        """Make a request that has not started, for :func:`.scheduler.responses` or a scheduler.

        Args:
            prompt, max_tokens, options: as for :meth:`stream`.
            drafter_factory: makes the drafter, instead of the decoder's factory.
            receive: a scheduler calls it with each response.

        Raises:
            PromptError, OptionError, FileError, TypeError: as :meth:`stream`.
        """
        longest, template = context_length(self.model), options.get("chat_template_kwargs")
        tokens = prompt_ids(prompt, self.tokenizer, self.loaded.vocab_size, longest, template)
        given: Any = {**options}
        factory = drafter_factory or self.drafter_factory
        for short, name in factory.short_names.items():
            if short in given:
                if name in given:
                    raise OptionError(f"{short} and {name} are the same option: give one of them")
                given[name] = given.pop(short)
        parameters = vars(factory).keys() & DraftingParameters.__annotations__.keys()
        given_parameters = {name: given.pop(name) for name in parameters & given.keys()}
        make_drafter = partial(replace(factory, **given_parameters).make, self)
        return Request(self, tokens, max_tokens, given, make_drafter, receive)


class AutoDecoder(Decoder):
    """Chooses each draft by its cost and its expected gain, with nothing to tune.

    The costs of steps begin with a few plain steps and typical costs of drafts. Every step corrects
    them, and they are kept in the user's cache directory. The decoder also learns from every output
    which drafts tend to be right. These statistics are kept in the same place, without any text,
    unless ``MLXSPEC_MEMORY=off``. Outputs are remembered, as texts to draft later outputs from.
    They stay in the process unless you pass a ``memory`` on disk.

    Args:
        model, tokenizer: as for :class:`Decoder`.
        memory_tokens: how many tokens of outputs the decoder remembers in its own memory,
            :data:`mlxspec.corpus.answer_index.MAX_TOKENS` by default. With 0 it has no memory, and
            generations learn nothing from earlier ones.
        memory: a memory to use instead. Several decoders with the same tokenizer may share it.
        extra_drafter: a further drafter, used when it pays: a :class:`mlxspec.Drafter`, which
            serves one generation at a time, or a class or function that makes one for each
            generation. The decoder learns how often its tokens are right.
        head: a directory or Hub repository with a trained head, or a loaded head. It drafts where
            text drafts are unlikely to be right. By default, a head that comes with the model is
            used, unless you pass a loaded model; False uses none.
        draft_model: a small mlx-lm model with the same tokenizer, which drafts instead of a head.
        num_draft_tokens: the most tokens that ``draft_model`` drafts.

    Options:
        prediction: token ids that the output of a generation is expected to follow.

    Raises:
        LoadError, OptionError, MlxspecError: as :class:`Decoder`.
        LoadError: ``head`` cannot draft for the model. (A head that comes with the model is left
            out instead, with a warning.)
        OptionError: ``memory`` and ``memory_tokens`` are both given, or ``head`` and
            ``draft_model``; or the draft model has another vocabulary.
        FileError: ``memory`` was made with another tokenizer.
    """

    drafter_factory: Auto = Auto()

    def __init__(
        self,
        model: str | Path | nn.Module | LoadedModel = "mlx_model",
        tokenizer: TokenizerWrapper | None = None,
        *,
        memory_tokens: int | None = None,
        memory: AnswerIndex | None = None,
        extra_drafter: Drafter | Callable[[], Drafter] | None = None,
        head: str | Path | Head | bool | None = None,
        draft_model: nn.Module | LoadedModel | None = None,
        num_draft_tokens: int = 2,
    ) -> None:
        drafts = None
        if draft_model is not None:
            if head:
                raise OptionError("head and draft_model are given together: choose one")
            head, drafts = False, DraftModel(draft_model, num_draft_tokens)
        if isinstance(model, (str, Path)):
            model, tokenizer, trained_head = load_with_head(model, head)
        else:
            model = LoadedModel.of(model)
            trained_head = head_for(model.model, head)
        factory = replace(self.drafter_factory, head=trained_head, draft_model=drafts)
        super().__init__(model, tokenizer, factory)
        if memory is not None and memory_tokens is not None:
            raise OptionError("memory and memory_tokens are given together: choose one")
        if memory is None and memory_tokens != 0:
            memory = AnswerIndex(memory_tokens or MAX_TOKENS)
        if memory and memory.kept:
            kept, identity = memory.kept.identity, identify(self.tokenizer)
            if kept.fingerprint != identity.fingerprint:
                raise FileError(
                    f"memory keeps tokens of {kept}, but the model's tokenizer is {identity}: open "
                    "a memory with this tokenizer"
                )
        self.drafter_factory = replace(
            self.drafter_factory,
            memory=memory,
            extra=None if extra_drafter is None else drafter_maker(extra_drafter),
        )

    @property
    def memory(self) -> AnswerIndex | None:
        """The memory of outputs, if the decoder has one."""
        return self.drafter_factory.memory


class PromptLookupDecoder(Decoder):
    """Speculates on text that repeats: code edits, summaries, quotations, structured output.

    It looks for an earlier occurrence of the context's last n-gram in prompt and output, and drafts
    the tokens that followed; see :class:`mlxspec.PromptLookupDrafter`.

    Options:
        n_draft: the most draft tokens per step, 10 by default; 0 is plain decoding.
        ngram_max: the longest n-gram to look up, 3 by default.
        ngram_min: the shortest n-gram to look up, 1 by default.
    """

    drafter_factory = PromptLookup()

    prompt_lookup = Decoder.generate
    """As :meth:`Decoder.generate`."""


class LookaheadDecoder(Decoder):
    """Speculates on the model's own guesses of the tokens ahead, so it needs no text to copy.

    Additional rows of each step run Jacobi iterations over a window of the next positions. The
    n-grams that they produce go into a pool, from which drafts are taken (Fu et al., ICML 2024,
    arXiv 2402.02057); see :class:`mlxspec.LookaheadDrafter`. A step has up to (N - 1)(W + G) rows,
    56 by default, which pays only if rows are cheap. :class:`AutoDecoder` drafts only what pays.

    Options:
        window_size, W: the columns of the window, the reference implementation's WINDOW_SIZE; 7 by
            default. 0 runs no window.
        ngram_size, N: the tokens of an n-gram, the reference's LEVEL; 5 by default. The window has
            N - 1 levels.
        guess_set_size, G: the most n-grams that are kept for a token and verified at once, the
            reference's GUESS_SET_SIZE; 7 by default. -1, the reference's "no limit", means 64,
            since more guesses cost more time than they save.
        pool_from_prompt: the reference's POOL_FROM_PROMPT: whether the pool starts with the
            prompt's n-grams; true by default.
    """

    drafter_factory = Lookahead()

    lookahead = Decoder.generate
    """As :meth:`Decoder.generate`."""
