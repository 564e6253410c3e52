"""What every decoder is: a model, a drafter, and the loop between them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Iterable, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import mlx.nn as nn
from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..decoding import Chooser, RecordTime
from ..decoding.thread_end import await_at_exit
from ..drafting import Drafter, NoDraft
from ..errors import OptionError
from ..models.chain_probe import draft_end, first_crossing
from ..models.detokenizer import detokenizer_of
from ..models.loading import load
from ..models.lockstep import target_for
from ..models.positions import context_length
from ..models.prompt_cache import Loan, fitting_caches, tier_with
from ..models.prompt_cache_file import check_lengths
from ..models.target import Target, vocabulary_size
from ..models.tier import Tier
from ..models.tiers import chain_tier, find_tier
from ..output import Detokenizer, OutputText
from ..planning import StepTimes
from ..response import GenerationResponse, GenerationResult, Transcript
from ..terminal import TokenPrinter
from .options import GenerationOptions, check_options
from .prompt import Prompt, prompt_ids
from .responses import on_loan, responses

if TYPE_CHECKING:
    from typing_extensions import Unpack


_NEAR = 64  # positions; drafts are cut, but hardly one is deeper


class Decoder:
    """Decodes with any drafter. Each generation has a cache of its own.

    A model's weights may change at any time; layers that are replaced, to quantise or adapt them,
    need a new decoder, since other ones verify and cost otherwise.

    Args:
        model: a directory or Hub repository that :func:`mlxspec.load` takes, or a loaded
            mlx-lm model.
        tokenizer: the tokenizer of a loaded model.

    Raises:
        LoadError: the model cannot be found or read.
        OptionError: a loaded model comes without its tokenizer.
    """

    def __init__(
        self,
        model: str | Path | nn.Module = "mlx_model",
        tokenizer: TokenizerWrapper | None = None,
    ) -> None:
        if isinstance(model, (str, Path)):
            model, tokenizer = load(model)
        elif tokenizer is None:
            raise OptionError("tokenizer is None: pass the loaded model's tokenizer with it")
        self.model = model
        self.tokenizer = tokenizer
        self.step_times = StepTimes()
        """Wall time of this decoder's steps by their number of rows."""
        self.wrap_drafter: Callable[[Drafter], Drafter] | None = None
        """Put around the drafter of each generation, to watch what it does; None leaves it bare."""

    @cached_property
    def tier(self) -> Tier:
        """What drafts the model can verify; found out on first use, with a few forwards."""
        return find_tier(self.model, self.draft_end)

    @cached_property
    def chain_tier(self) -> Tier:
        """What drafts in a row the model can verify, found out with fewer forwards."""
        return chain_tier(self.model)

    @cached_property
    def draft_end(self) -> int | None:
        """The position from which on there are no drafts, since the model verifies none there.

        None for all models but those whose RoPE changes with a context's length (dynamic NTK).
        Found out with a few forwards, once a context comes near where such a change might be.
        """
        return draft_end(self.model)

    @cached_property
    def _first_crossing(self) -> int:
        return first_crossing(self.model)

    def _deepest_draft(self, length: int) -> int:
        """How many tokens deep a draft may be that follows so many positions."""
        room = self._first_crossing - 1 - length
        if room < _NEAR:
            room = sys.maxsize if self.draft_end is None else self.draft_end - 1 - length
        return max(0, room)

    @cached_property
    def vocab_size(self) -> int:
        """The number of token ids that the model knows."""
        return vocabulary_size(self.model)

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
            prompt: text, or token ids that are taken as they are.
            drafter: proposes what the model verifies; it changes the speed, not the output. It
                is not used with logits processors or a sampler that are not known to be pure;
                see :class:`mlxspec.SamplingParams`.
            max_tokens: how many tokens to generate at most, at least 1.
            record_time: called after each step; see :func:`mlxspec.decoding.decode`.
            options: any of these.

        Options:
            sampling: how the model picks a token; greedy by default.
            stop: texts that end the output before them.
            stop_tokens: tokens that end the output, beside the tokenizer's own: ids, or texts
                of one token.
            on_progress: called with prompt tokens done and prompt tokens in all, of those that
                are run before the first step.
            kv_bits, kv_group_size, quantized_kv_start, max_kv_size, prefill_step_size: the
                memory of KV cache and prefill, as for mlx-lm; see
                :class:`mlxspec.models.cache_options.CacheOptions`.
            session: keeps the KV cache for the conversation's next turn. The prompt is the whole
                conversation; what the session's cache holds of it is not run again.
            prompt_cache: mlx-lm's caches of what precedes the prompt, from its
                ``make_prompt_cache``. As with mlx-lm they hold the prompt and the output taken
                so far whenever they are used. A generation whose caches another one has
                continued cannot go on.
            temp, top_p, seed, and all other fields of :class:`mlxspec.SamplingParams`: in place
                of those of ``sampling``. A ``sampler`` without ``sampling`` or a ``seed`` draws
                a seed from MLX's random state, so that repeated calls differ as with mlx-lm.

        Returns:
            a generator of one response per token. Closing it ends the generation. With a
            tokenizer from :func:`mlxspec.load` their texts join to what follows the prompt, its
            first space included, which mlx-lm drops.

        Raises:
            PromptError: the prompt is neither text nor token ids, is empty, longer than the
                model's context, or holds an id that is no token of the model.
            OptionError: ``max_tokens`` is below 1, a stop string is empty, a value or a
                token of the sampling or the stop tokens makes no sense, the model's cache
                cannot be quantised as asked, or ``prompt_cache`` has too few layers. With the
                first response: the session is in the middle of another generation.
            PromptCacheError: ``prompt_cache`` holds keys and values of another model, as far as
                shapes tell. With the first response: the session's first cache does, or the
                generation that has ``prompt_cache`` is running in another thread. With a later
                one: ``prompt_cache`` has been continued or changed since the last.
            TypeError: there is no such option.
        """
        tokens = self._prompt_tokens(prompt)
        checked = check_options(self.model, self.tokenizer, self.vocab_size, max_tokens, options)
        if not checked.sampling.allows_drafts:
            drafter = NoDraft()
        if self.wrap_drafter:
            drafter = self.wrap_drafter(drafter)
        output = OutputText(self._new_detokenizer(), checked.stop_tokens, checked.stop, max_tokens)

        def record(rows: int, seconds: float, pipelined: bool) -> None:
            await_at_exit()
            self.step_times.record(rows, seconds, pipelined)
            if record_time:
                record_time(rows, seconds, pipelined)

        generation = partial(
            responses,
            prompt=tokens,
            drafter=drafter,
            chooser=Chooser(checked.sampling),
            output=output,
            max_tokens=max_tokens,
            deepest_draft=self._deepest_draft,
            on_progress=options.get("on_progress"),
            record_time=record,
        )
        # What the model can verify of this drafter's drafts.
        tier = self.tier if drafter.branching else self.chain_tier
        session, prompt_cache = options.get("session"), options.get("prompt_cache")
        if session is not None:
            return session.run(generation, tokens, self.model, tier, self.vocab_size, checked.cache)
        if prompt_cache is None:
            return generation(target_for(self.model, tier, self.vocab_size, checked.cache))

        def continued(caches: Sequence[Any]) -> Target:
            lent = fitting_caches(caches, self.model)
            check_lengths(lent, "prompt_cache")
            with_them = tier_with(lent, tier)
            return target_for(self.model, with_them, self.vocab_size, checked.cache, lent)

        loan = Loan(prompt_cache)
        return on_loan(loan, tokens, lambda: generation(loan.take(continued)))

    def _new_detokenizer(self) -> Detokenizer:
        return cast(Detokenizer, detokenizer_of(self.tokenizer))

    def _prompt_tokens(self, prompt: Prompt) -> list[int]:
        return prompt_ids(prompt, self.tokenizer, self.vocab_size, context_length(self.model))

    def written(
        self, responses: Iterable[GenerationResponse], color: bool = True
    ) -> GenerationResult:
        """Write a generation's text to standard output as it comes.

        Args:
            responses: from :meth:`decode` or a method that builds on it.
            color: colour accepted draft tokens and the model's own, at a terminal.
        """
        printer = TokenPrinter(color=None if color else False)
        transcript = Transcript()
        for response in responses:
            printer.write(response.text, response.from_draft)
            transcript.add(response)
        printer.finish()
        return transcript.result(self.step_times)
