"""Measuring: decoders take turns on prompts, in one process on one loaded model.

Outputs are compared with plain decoding's. A forward over several rows may sum in another order
than a forward over one, so logits can differ in their last bits. That changes a token only where
two of them are as good as equal: a near tie. Any other difference is a bug.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import cast

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
from mlx_lm.generate import GenerationResponse
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.sample_utils import make_sampler
from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..drafting.drafter import Drafter, DraftTree, NoDraft
from ..drafting.sources import PromptLookupDrafter
from ..engine.model_sizes import context_length
from ..engine.params import SamplingParams
from ..engine.sampling import Chooser
from ..engine.target import Progress
from ..errors import OptionError, PromptError
from ..generation.decoder import AutoDecoder, CombinedDecoder, Decoder, LookaheadDecoder
from ..generation.response import SpeculationStats
from ..models.chat_template import apply_template
from ..models.model import encode_prompt
from .prompts import BenchPrompt, Messages, message

NEAR_TIE_FLOAT32 = 1e-4
"""Gap between the two best perturbed logits below which a difference in float32 is rounding."""

NEAR_TIE_SPACINGS = 4
"""The same gap for half precision, in spacings of the data type at the logits' size.

Rounding every operation to half precision moved the gap of the two best logits by up to 2.5
(bfloat16) and 3.3 spacings (float16) against the same weights in float32: 800 positions of the
demo model. Two ways to sum can differ by as much.
"""


@dataclass(frozen=True)
class Difference:
    """Where two outputs part.

    Attributes:
        index: the first token that differs, counted from the output's beginning.
        margin: how far the worse of the two tokens is below the target's best, in perturbed
            logits (see :meth:`mlxspec.engine.sampling.Chooser.perturb`). Infinite where one
            output is a proper prefix of the other: ending early is not rounding.
        bound: the margin below which rounding can have made the difference.
    """

    index: int
    margin: float
    bound: float = NEAR_TIE_FLOAT32

    @property
    def near_tie(self) -> bool:
        """Whether rounding explains the difference."""
        return self.margin < self.bound


def first_difference(
    model: nn.Module,
    prompt: Sequence[int],
    expected: Sequence[int],
    actual: Sequence[int],
    params: SamplingParams,
) -> Difference | None:
    """Compare two outputs of one prompt.

    Args:
        model: the target, run once over the common part where the outputs differ.
        prompt: token ids.
        expected: the output of plain decoding.
        actual: the output to be checked.
        params: the sampling of both.

    Returns:
        None if the outputs are equal.
    """
    if list(expected) == list(actual):
        return None
    common = min(len(expected), len(actual))
    index = next((i for i in range(common) if expected[i] != actual[i]), None)
    if index is None:
        return Difference(common, math.inf)
    context = [*prompt, *expected[:index]]
    logits = model(mx.array(context)[None], cache=make_prompt_cache(model))[0, -1:]
    chooser = Chooser(params)
    chooser.begin(context)
    contexts = chooser.contexts(DraftTree.chain(context[-1]))
    _, logprobs = chooser.choose(logits, [len(context)], contexts)
    values = chooser.perturb(logprobs, [len(context)])[0].astype(mx.float32)
    worse = mx.minimum(values[expected[index]], values[actual[index]])
    margin = cast(float, (mx.max(values) - worse).item())
    return Difference(index, margin, near_tie_bound(logits, params))


def near_tie_bound(logits: mx.array, params: SamplingParams) -> float:
    """The margin below which a difference is rounding, for logits of this type and size.

    Args:
        logits: (..., vocabulary), as the model returned them.
        params: a temperature divides the logits, and so multiplies their rounding errors; the
            bound for float32 leaves room for that.
    """
    if logits.dtype == mx.float32:
        return NEAR_TIE_FLOAT32
    size = cast(float, mx.max(mx.abs(logits)).item())
    spacing = 2.0 ** math.floor(math.log2(size)) * mx.finfo(logits.dtype).eps if size else 0.0
    return NEAR_TIE_SPACINGS * spacing / (params.temp or 1.0)


PLAIN = "plain"
"""The backend whose output is the truth."""

MLX_LM = "mlx-lm"


@dataclass(frozen=True)
class Backend:
    """One way to generate on a loaded model. All give the same output, each in its own time.

    Attributes:
        stream: called with the prompt's token ids and, by name, ``max_tokens``, ``sampling`` and
            ``on_progress``; yields a response per token. ``on_progress`` is last called when
            the first token's forward begins. Nothing is remembered from run to run, else a
            repeated prompt's answer would be at hand.
        expected_cost: the time that the planner expected of the last run's steps, in plain
            steps; 0 where it could only decode plainly, None without a planner.
        same_samples: whether it also draws plain decoding's tokens above temperature 0.
    """

    stream: Callable[..., Iterator[GenerationResponse]]
    expected_cost: Callable[[], float | None] = lambda: None
    same_samples: bool = True


MakeBackend = Callable[[nn.Module, TokenizerWrapper], Backend]


def with_drafter(make_drafter: Callable[[], Drafter]) -> MakeBackend:
    """mlxspec's loop with a new drafter for each run."""

    def make(model: nn.Module, tokenizer: TokenizerWrapper) -> Backend:
        decoder = Decoder(model, tokenizer)
        return Backend(lambda prompt, **options: decoder.decode(prompt, make_drafter(), **options))

    return make


def _planned(make_decoder: Callable[..., AutoDecoder | LookaheadDecoder]) -> MakeBackend:
    """A decoder whose drafts follow the measured cost of steps."""

    def make(model: nn.Module, tokenizer: TokenizerWrapper) -> Backend:
        decoder = make_decoder(model, tokenizer)
        return Backend(decoder.stream, lambda: decoder.predicted_cost)

    return make


def _mlx_lm(model: nn.Module, tokenizer: TokenizerWrapper) -> Backend:
    """mlx-lm's own generation."""

    def stream(
        prompt: list[int], *, max_tokens: int, sampling: SamplingParams, on_progress: Progress
    ) -> Iterator[GenerationResponse]:
        def before_first_token(done: int, total: int) -> None:
            if done < total:  # it reports the whole prompt only after the first token
                on_progress(done, total)

        if sampling.seed is not None:
            mx.random.seed(sampling.seed)
        return mlx_lm.stream_generate(
            model,
            tokenizer,
            prompt,
            max_tokens=max_tokens,
            sampler=make_sampler(sampling.temp),
            prompt_progress_callback=before_first_token,
        )

    return Backend(stream, same_samples=False)


BACKENDS: dict[str, MakeBackend] = {
    PLAIN: with_drafter(NoDraft),
    MLX_LM: _mlx_lm,
    "prompt-lookup": with_drafter(PromptLookupDrafter),
    "auto": _planned(partial(AutoDecoder, memory_tokens=0)),
    "lookahead": _planned(LookaheadDecoder),
    "combined": _planned(partial(CombinedDecoder, memory_tokens=0)),
}
"""By the names of ``--decoder``; each is made from a loaded model and its tokenizer."""


def backends_with(drafter: type[Drafter]) -> dict[str, MakeBackend]:
    """A custom drafter class, alone and together with the default decoder's look-ups."""
    auto = partial(AutoDecoder, memory_tokens=0, extra_drafter=drafter)
    name = drafter.__name__
    return {name: with_drafter(drafter), f"auto+{name}": _planned(auto)}


def chosen_backends(names: str | None) -> dict[str, MakeBackend]:
    """The backends in a comma-separated list, or all without one; plain decoding comes first.

    Raises:
        OptionError: one of them is unknown.
    """
    wanted = list(BACKENDS) if names is None else [name.strip() for name in names.split(",")]
    try:
        return {name: BACKENDS[name] for name in [PLAIN, *wanted]}
    except KeyError as error:
        raise OptionError(
            f"no decoder is named {error.args[0]!r}: choose among {', '.join(BACKENDS)}"
        ) from None


Clock = Callable[[], float]
"""Seconds since some moment."""


@dataclass(frozen=True)
class Run:
    """One answer of a backend, and how long it took.

    Attributes:
        tokens: the output, its end token included.
        text: the output as text.
        prefill_seconds: from the call to the first token's forward.
        seconds: from there to the last token.
        stats: what speculation did; None without speculation.
        predicted_speed: what the planner expected, against plain decoding; None without one.
    """

    tokens: tuple[int, ...]
    text: str
    prefill_seconds: float
    seconds: float
    stats: SpeculationStats | None
    predicted_speed: float | None

    @property
    def rate(self) -> float:
        """Tokens per second, the prefill not counted."""
        return len(self.tokens) / self.seconds


def run(
    backend: Backend,
    prompt: list[int],
    max_tokens: int,
    sampling: SamplingParams,
    clock: Clock = time.perf_counter,
) -> Run:
    """Let a backend answer a prompt."""
    tokens, texts, stats = list[int](), list[str](), None
    started = prefilled = ended = clock()

    def on_progress(done: int, total: int) -> None:
        nonlocal prefilled
        prefilled = clock()

    for response in backend.stream(
        prompt, max_tokens=max_tokens, sampling=sampling, on_progress=on_progress
    ):
        ended = clock()  # work after the last token delays no output
        tokens.append(response.token)
        texts.append(response.text)
        stats = getattr(response, "stats", None)
    cost, predicted_speed = backend.expected_cost(), None
    if stats and cost is not None:
        predicted_speed = stats.emitted / cost if cost else 1.0
    return Run(
        tokens=tuple(tokens),
        text="".join(texts),
        prefill_seconds=prefilled - started,
        seconds=ended - prefilled,
        stats=stats,
        predicted_speed=predicted_speed,
    )


@dataclass(frozen=True)
class MeasuredPrompt:
    """All runs on one prompt.

    Attributes:
        category: the prompt's.
        messages: the conversation that was answered.
        prompt_tokens: how many tokens the conversation has.
        runs: by backend, one per repeat.
        differences: by backend, how its distinct outputs differ from plain decoding's first
            one; empty where all are equal, None where they cannot be compared because the
            backend draws other random numbers.
    """

    category: str
    messages: Messages
    prompt_tokens: int
    runs: dict[str, list[Run]]
    differences: dict[str, list[Difference] | None]


class Measurement:
    """Measures backends on prompts.

    Args:
        model, tokenizer: as :func:`mlxspec.load` returns them.
        backends: by name; plain decoding among them.
        max_tokens: per answer.
        repeats: how often each backend answers each prompt.
        sampling: how the target picks tokens.
        clock: in seconds.

    Attributes:
        skipped: conversations left out, or cut short, that are longer than the model's context.
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: TokenizerWrapper,
        backends: Mapping[str, MakeBackend],
        *,
        max_tokens: int,
        repeats: int,
        sampling: SamplingParams,
        clock: Clock = time.perf_counter,
    ) -> None:
        self.skipped = 0
        self._model = model
        self._tokenizer = tokenizer
        self._backends = {name: make(model, tokenizer) for name, make in backends.items()}
        self._repeats = repeats
        self._sampling = sampling
        self._run = partial(run, max_tokens=max_tokens, sampling=sampling, clock=clock)
        self._warm = False

    def measure(
        self,
        prompts: Sequence[BenchPrompt],
        on_progress: Callable[[float], None] = lambda share: None,
    ) -> Iterator[MeasuredPrompt]:
        """Measure prompt by prompt; every backend warms up on the first one.

        Args:
            prompts: the questions.
            on_progress: called after every run with the share that is done.

        Raises:
            PromptError: the model's chat template refuses a prompt.
        """
        answers = sum(1 + len(prompt.follow_ups) for prompt in prompts)
        total = len(self._backends) * (1 + answers * self._repeats)
        done = itertools.count(1)
        self._on_run = lambda: on_progress(next(done) / total)
        for prompt in prompts:
            yield from self._converse(prompt)

    def _converse(self, prompt: BenchPrompt) -> Iterator[MeasuredPrompt]:
        """Measure the first answer, then each follow-up after plain decoding's answer."""
        messages = list(prompt.messages)
        longest = context_length(self._model)
        for question in (*prompt.follow_ups, None):
            tokens = self._encode(prompt, messages)
            if longest is not None and len(tokens) > longest:
                self.skipped += 1
                return
            runs = self._take_turns(tokens)
            differences = {name: self._compare(name, tokens, runs) for name in runs}
            yield MeasuredPrompt(prompt.category, messages, len(tokens), runs, differences)
            if question is not None:
                answer = runs[PLAIN][0].text.strip()
                messages = [*messages, message("assistant", answer), message("user", question)]

    def _take_turns(self, tokens: list[int]) -> dict[str, list[Run]]:
        names = list(self._backends)
        order = [] if self._warm else names.copy()
        for repeat in range(self._repeats):
            # Each backend is first in turn, and its neighbours change: a wide step leaves a
            # hotter machine.
            first = repeat % len(names)
            order += (names[first:] + names[:first])[:: (-1) ** repeat]
        runs: dict[str, list[Run]] = {name: [] for name in names}
        for name in order:
            runs[name].append(self._run(self._backends[name], tokens))
            self._on_run()
        self._warm = True
        return {name: warm[-self._repeats :] for name, warm in runs.items()}

    def _compare(
        self, name: str, prompt: list[int], runs: dict[str, list[Run]]
    ) -> list[Difference] | None:
        """How the distinct outputs of a backend differ from plain decoding's first one."""
        if self._sampling.temp > 0 and not self._backends[name].same_samples:
            return None
        expected = runs[PLAIN][0].tokens
        compared = (
            first_difference(self._model, prompt, expected, output, self._sampling)
            for output in dict.fromkeys(one.tokens for one in runs[name])
        )
        return [difference for difference in compared if difference]

    def _encode(self, prompt: BenchPrompt, messages: Messages) -> list[int]:
        """The conversation's tokens; without a chat template its texts, a blank line between."""
        if prompt.raw or not self._tokenizer.has_chat_template:
            return encode_prompt(self._tokenizer, "\n\n".join(m["content"] for m in messages))
        try:
            return apply_template(self._tokenizer, messages, add_generation_prompt=True)
        except PromptError as error:
            raise PromptError(
                f"a prompt of the category {prompt.category!r}: {error}: change its messages"
            ) from error
