"""What every decoder is: a model, a drafter, and the loop between them."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Generator, Iterable, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast, runtime_checkable

import mlx.nn as nn
from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..draft.combined import CombinedDrafter
from ..draft.drafter import Drafter, NoDraft
from ..draft.lookahead import LookaheadDrafter
from ..engine.caches import cached_length
from ..engine.capability import (
    capability_with,
    chain_capability,
    draft_end,
    find_capability,
    first_crossing,
)
from ..engine.chooser import Chooser
from ..engine.costs import KeptCosts, costs_for
from ..engine.draft_model import DraftModelDrafter
from ..engine.positions import context_length
from ..engine.prompt_cache import Loan, reclaim
from ..engine.step import RecordTime
from ..engine.target import Capability, Target, target_for, vocabulary_size
from ..errors import OptionError
from ..loading.detokenizer import detokenizer_of
from ..loading.model import load
from ..plan.cost_curve import CostCurve
from ..plan.live_costs import StepTimes
from ..plan.policy import PlainSteps
from ..process import await_at_exit
from ..terminal import TokenPrinter
from .options import GenerationOptions, Prompt, check_options, prompt_ids, sampling_of
from .response import GenerationResponse, GenerationResult, Transcript
from .responses import on_loan, responses
from .text import Detokenizer, OutputText

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
    def capability(self) -> Capability:
        """What drafts the model can verify; found out on first use, with a few forwards."""
        return find_capability(self.model, self.draft_end).capability

    @cached_property
    def chain_capability(self) -> Capability:
        """What drafts in a row the model can verify, found out with fewer forwards."""
        return chain_capability(self.model)

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
            record_time: called after each step; see :func:`mlxspec.engine.step.decode`.
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
                :class:`mlxspec.engine.caches.CacheOptions`.
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
        capability = self.capability if drafter.branching else self.chain_capability
        if (session := options.get("session")) is not None:
            return session.run(
                generation, tokens, self.model, capability, self.vocab_size, checked.cache
            )
        if checked.lent is None:
            return generation(target_for(self.model, capability, self.vocab_size, checked.cache))

        def continued(caches: Sequence[Any]) -> Target:
            with_them = capability_with(caches, capability)
            return target_for(self.model, with_them, self.vocab_size, checked.cache, caches)

        loan = Loan(checked.lent, self.model)
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


@runtime_checkable
class Planner(Protocol):
    """What is told the costs between steps: a drafter, or a part of one."""

    curve: CostCurve
    waiting_cost: float
    plain_steps: PlainSteps


class MeasuredDecoder(Decoder):
    """Measures the steps of its model, at first use and whenever one runs.

    Args:
        model, tokenizer: as for :class:`Decoder`.
        on_measuring: called with the share that is done while step times are first measured.

    Raises:
        LoadError, OptionError: as :class:`Decoder`.
    """

    def __init__(
        self,
        model: str | Path | nn.Module = "mlx_model",
        tokenizer: TokenizerWrapper | None = None,
        *,
        on_measuring: Callable[[float], None] | None = None,
    ) -> None:
        super().__init__(model, tokenizer)
        self._on_measuring = on_measuring
        self._measuring = threading.Lock()
        self.foreseen_cost = 0.0
        """What the steps of the last generation should have taken, in plain tokens' times."""

    @cached_property
    def costs(self) -> KeptCosts:
        """What steps cost, from the cache or measured now, which takes a few seconds."""
        with self._measuring:  # else threads would disturb each other's measurements
            if "costs" not in vars(self):
                vars(self)["costs"] = costs_for(self.model, on_progress=self._on_measuring)
            return cast(KeptCosts, vars(self)["costs"])

    def _decode_with(
        self,
        make_drafter: Callable[[], Drafter],
        prompt: Prompt,
        max_tokens: int,
        **options: Unpack[GenerationOptions],
    ) -> Generator[GenerationResponse, None, None]:
        """As :meth:`Decoder.decode`, with a drafter that may need the costs.

        Args:
            make_drafter: called once the options are known to be good, since it may measure.
                What can only be decoded plainly gets no drafter.
        """
        tokens = self._prompt_tokens(prompt)
        if "costs" not in vars(self):  # else nothing is measured, and `decode` refuses in time
            check_options(self.model, self.tokenizer, self.vocab_size, max_tokens, options)
        if (
            self.chain_capability is Capability.PLAIN
            or not sampling_of(options, self.vocab_size).allows_drafts
        ):
            return self.decode(tokens, NoDraft(), max_tokens=max_tokens, **options)
        drafter = make_drafter()
        if not _follows_costs(drafter):
            return self.decode(tokens, drafter, max_tokens=max_tokens, **options)
        return self._decode_planned(tokens, drafter, max_tokens, **options)

    def _decode_planned(
        self,
        prompt: Sequence[int],
        drafter: Drafter,
        max_tokens: int,
        **options: Unpack[GenerationOptions],
    ) -> Generator[GenerationResponse, None, None]:
        """As :meth:`Decoder.decode`, with planners that are told the costs; these learn too."""
        costs = self.costs.for_generation()
        planners = _planners(drafter)
        foreseen = self.foreseen_cost = 0.0

        def tell() -> None:
            for planner in planners:
                planner.curve, planner.waiting_cost = costs.curve, costs.waiting_cost
                planner.plain_steps.sought = costs.wants_plain_steps

        def record(rows: int, seconds: float, pipelined: bool) -> None:
            nonlocal foreseen
            waiting = costs.waiting_cost if rows == 1 and not pipelined else 0.0
            foreseen += costs.cost(rows) + waiting
            self.foreseen_cost = foreseen
            costs.record(rows, seconds, pipelined)
            tell()

        def begin() -> int:
            lent = options.get("prompt_cache") or ()
            reclaim(lent)
            held = cached_length(lent)
            costs.move_to(held + len(prompt))
            tell()
            return held

        responses = self.decode(
            prompt, drafter, max_tokens=max_tokens, record_time=record, **options
        )
        return self._kept(responses, costs, begin)

    def _kept(
        self,
        responses: Generator[GenerationResponse, None, None],
        costs: KeptCosts,
        begin: Callable[[], int],
    ) -> Generator[GenerationResponse, None, None]:
        """Tell the costs how long the context has become, and keep them at the end.

        Args:
            responses: of a generation.
            costs: the generation's own; the decoder's go on from them.
            begin: called before the first step; returns the length of what precedes the prompt.
        """
        try:
            held = begin()
            for response in responses:
                costs.move_to(held + response.prompt_tokens + response.generation_tokens)
                yield response
        finally:
            responses.close()
            costs.save()
            self.costs = costs


def _follows_costs(drafter: Drafter) -> bool:
    """Whether its drafts depend on what steps cost, and its steps show what rows cost."""
    # The sizes of lookahead's are fixed, and a draft model's forwards are in the steps' times.
    return not isinstance(drafter, LookaheadDrafter) and not any(
        isinstance(part, DraftModelDrafter) for part in _parts(drafter)
    )


def _planners(drafter: Drafter) -> list[Planner]:
    """The parts of a drafter that follow the costs."""
    return [part for part in _parts(drafter) if isinstance(part, Planner)]


def _parts(drafter: Drafter) -> list[Drafter]:
    return [drafter.first, drafter.second] if isinstance(drafter, CombinedDrafter) else [drafter]
