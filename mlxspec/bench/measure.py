"""Measures decoders, which answer the same prompts in turn with one loaded model.

Outputs are compared with plain decoding's. A forward over several rows may add numbers in a
different order than a forward over one row, so logits can differ in their last bits. That changes
the chosen token only if two tokens' logits are almost equal: a near tie. Any other difference is a
bug.
"""

from __future__ import annotations

import math
import platform
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from statistics import geometric_mean, median
from time import perf_counter
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
from mlx.utils import tree_flatten
from mlx_lm.generate import GenerationResponse
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.tokenizer_utils import TokenizerWrapper

import mlxspec

from ..drafting.drafter import Drafter
from ..drafting.tree import DraftTree
from ..engine.loaded_model import LoadedModel
from ..engine.machine import machine_identity, model_identity, whole_memory
from ..engine.model_sizes import context_length
from ..engine.params import SamplingParams
from ..engine.sampling import Chooser
from ..engine.target import Progress
from ..generation.chat_prompt import conversation_prompt
from ..generation.decoder import Decoder
from ..generation.drafter_factories import Auto, DrafterFactory, Lookahead, PromptLookup
from ..generation.response import SpeculationStats
from ..models.chat_template import Messages
from ..models.heads import Head
from ..models.model import encode_prompt
from ..models.model_files import given_name
from .prompts import BenchPrompt, message

NEAR_TIE_FLOAT32 = 1e-4
"""The margin of a :class:`Difference` below which rounding explains it, in float32."""

NEAR_TIE_SPACINGS = 4
"""The same margin in half precision, as a multiple of the data type's spacing at the logits' size.

At 800 positions of the demo model, rounding every operation to half precision moved the gap between
the two best logits by up to 2.5 spacings (bfloat16) or 3.3 (float16), compared with float32.
Another order of additions can move it as much.
"""


@dataclass(frozen=True)
class Difference:
    """Where two outputs diverge.

    Attributes:
        index: the index of the first token that differs.
        margin: how far the less likely of the two tokens is below the target's best token, in
            perturbed logits (see :meth:`mlxspec.engine.sampling.Chooser.perturb`). Infinite if one
            output is a proper prefix of the other, which rounding cannot cause.
        bound: the margin below which rounding can explain the difference.
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
        model: the target. If the outputs differ, it runs once over what they have in common.
        expected: the output of plain decoding.

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
    """The margin below which rounding can explain a difference, for logits of this type and size.

    Args:
        logits: (..., vocabulary), as the model returned them.
        params: the sampling. Logits are divided by the temperature, and their rounding errors with
            them; the bound for float32 leaves room for that.
    """
    if logits.dtype == mx.float32:
        return NEAR_TIE_FLOAT32
    size = cast(float, mx.max(mx.abs(logits)).item())
    spacing = 2.0 ** math.floor(math.log2(size)) * mx.finfo(logits.dtype).eps if size else 0.0
    return NEAR_TIE_SPACINGS * spacing / (params.temp or 1.0)


PLAIN = "plain"
"""The name of the backend whose output is the reference."""

MLX_LM = "mlx-lm"
AUTO = "auto"


Stream = Callable[..., Iterator[GenerationResponse]]
"""A backend's function for generating text. All backends give the same output, at different speeds.

It takes the prompt's token ids and the keyword arguments ``max_tokens``, ``sampling`` and
``on_progress``, and yields a response for each token. It calls ``on_progress`` for the last time
when the first token's forward begins. It remembers no answers. Otherwise a repeated prompt's answer
would be drafted from the earlier one.
"""

MakeStream = Callable[[LoadedModel, TokenizerWrapper], Stream]
"""Makes a :data:`Stream` for a loaded model and its tokenizer."""


def decoding(factory: DrafterFactory) -> MakeStream:
    """mlxspec's decoder with the drafters of this factory."""
    return lambda loaded, tokenizer: Decoder(loaded, tokenizer, factory).stream


def _mlx_lm(loaded: LoadedModel, tokenizer: TokenizerWrapper) -> Stream:
    """mlx-lm's own generation. It is always greedy, since its random numbers are not mlxspec's."""

    def stream(
        prompt: list[int], *, max_tokens: int, sampling: SamplingParams, on_progress: Progress
    ) -> Iterator[GenerationResponse]:
        def before_first_token(done: int, total: int) -> None:
            if done < total:  # mlx-lm reports the whole prompt only after the first token
                on_progress(done, total)

        return mlx_lm.stream_generate(
            loaded.model,
            tokenizer,
            prompt,
            max_tokens=max_tokens,
            prompt_progress_callback=before_first_token,
        )

    return stream


BACKENDS: dict[str, MakeStream] = {
    PLAIN: decoding(DrafterFactory()),
    MLX_LM: _mlx_lm,
    "prompt-lookup": decoding(PromptLookup()),
    AUTO: decoding(Auto()),
    "lookahead": decoding(Lookahead()),
}
"""The backends, by the names that ``--decoder`` accepts."""


def backends_with(drafter: type[Drafter]) -> dict[str, MakeStream]:
    """Backends for a custom drafter: one that uses it alone, and the default one with it added."""
    alone, added = DrafterFactory(maker=drafter), Auto(extra=drafter)
    return {drafter.__name__: decoding(alone), f"{AUTO}+{drafter.__name__}": decoding(added)}


@dataclass(frozen=True)
class TimedRun:
    """One answer of a backend, and how long it took.

    Attributes:
        tokens: the output, its end token included.
        text: the output as text.
        prefill_seconds: the time from the call until the first token's forward begins.
        seconds: the time from then until the last token.
        stats: the counts of drafts and steps; None if the backend does not speculate.
    """

    tokens: tuple[int, ...]
    text: str
    prefill_seconds: float
    seconds: float
    stats: SpeculationStats | None

    @property
    def rate(self) -> float:
        """Tokens per second, not counting the prefill."""
        return len(self.tokens) / self.seconds


def run(stream: Stream, prompt: list[int], max_tokens: int, sampling: SamplingParams) -> TimedRun:
    """Let a backend answer a prompt."""
    tokens, texts, stats = list[int](), list[str](), None
    started = prefilled = ended = perf_counter()

    def on_progress(done: int, total: int) -> None:
        nonlocal prefilled
        prefilled = perf_counter()

    options = {"max_tokens": max_tokens, "sampling": sampling, "on_progress": on_progress}
    for response in stream(prompt, **options):
        ended = perf_counter()  # in the loop, since work after the last token delays no output
        tokens.append(response.token)
        texts.append(response.text)
        stats = getattr(response, "stats", None)
    text = "".join(texts)
    return TimedRun(tuple(tokens), text, prefilled - started, ended - prefilled, stats)


@dataclass(frozen=True)
class MeasuredPrompt:
    """All runs on one prompt.

    Attributes:
        category: the prompt's category.
        runs: the runs of each backend, one per repeat.
        differences: how each backend's outputs differ from plain decoding's first output. Outputs
            that are equal to it have no entry.
    """

    category: str
    runs: dict[str, list[TimedRun]]
    differences: dict[str, list[Difference]]


def in_turn(names: list[str], repeat: int) -> list[str]:
    """The order in which the backends run in a repeat.

    Steps over many rows heat the machine, which slows the backend that runs next. So the order is
    rotated from repeat to repeat, and reversed in every other one.
    """
    first = repeat % len(names)
    return (names[first:] + names[:first])[:: (-1) ** repeat]


def measure(
    model: nn.Module,
    tokenizer: TokenizerWrapper,
    makers: Mapping[str, MakeStream],
    prompts: Sequence[BenchPrompt],
    *,
    max_tokens: int,
    repeats: int,
    sampling: SamplingParams,
    on_answer: Callable[[], object] = lambda: None,
) -> Iterator[MeasuredPrompt]:
    """Measure backends on prompts, one answer at a time.

    To warm up, each backend first answers the first prompt once without being measured. A prompt's
    follow-ups are left out from where the conversation exceeds the model's context. If Ctrl-C comes
    during the first prompt, its complete repeats are yielded before the exception is raised.

    Args:
        makers: the functions that make the backends, by name. One must make plain decoding.
        repeats: how many times each backend answers each prompt.
        on_answer: called after each answer, also while warming up.

    Raises:
        PromptError: the model's chat template refuses a prompt.
    """
    loaded = LoadedModel(model)
    backends = {name: make(loaded, tokenizer) for name, make in makers.items()}
    longest = context_length(model)
    is_first = True

    def take_turns(tokens: list[int], repeats: int) -> Iterator[dict[str, TimedRun]]:
        for repeat in range(repeats):
            runs = {}
            for name in in_turn([*backends], repeat):
                runs[name] = run(backends[name], tokens, max_tokens, sampling)
                on_answer()
            yield runs

    def compared(
        category: str, tokens: list[int], turns: Sequence[dict[str, TimedRun]]
    ) -> MeasuredPrompt:
        runs = {name: [turn[name] for turn in turns] for name in backends}
        expected = runs[PLAIN][0].tokens
        differences = {
            name: [
                difference
                for output in dict.fromkeys(run.tokens for run in backend_runs)
                if (difference := first_difference(model, tokens, expected, output, sampling))
            ]
            for name, backend_runs in runs.items()
        }
        return MeasuredPrompt(category, runs, differences)

    for prompt in prompts:
        messages = list(prompt.messages)
        for question in (*prompt.follow_ups, None):
            tokens = encoded(tokenizer, messages, prompt.raw)
            if longest is not None and len(tokens) > longest:
                break
            turns: list[dict[str, TimedRun]] = []
            try:
                if is_first:
                    list(take_turns(tokens, 1))  # to warm up
                turns.extend(take_turns(tokens, repeats))
            except KeyboardInterrupt:
                if is_first and turns:
                    yield compared(prompt.category, tokens, turns)
                raise
            is_first = False
            yield compared(prompt.category, tokens, turns)
            if question is not None:
                answer = turns[0][PLAIN].text.strip()
                messages = [*messages, message("assistant", answer), message("user", question)]


def encoded(tokenizer: TokenizerWrapper, messages: Messages, raw: bool) -> list[int]:
    """The token ids of a conversation, with the chat template.

    If there is no template, or if ``raw``, the messages' texts are joined by blank lines.
    """
    if raw or not tokenizer.has_chat_template:
        return encode_prompt(tokenizer, "\n\n".join(message["content"] for message in messages))
    return conversation_prompt(tokenizer, messages, {}).tokens(tokenizer)


# --- the report ---

Report = dict[str, Any]


def machine_facts() -> Report:
    """The machine and the software versions, without the names of host and user."""
    return {
        "memory": whole_memory(),
        **machine_identity(),
        "system": _system(),
        "python": platform.python_version(),
        "mlxspec": mlxspec.__version__,
        "mlx_lm": version("mlx-lm"),
    }


def _system() -> str:
    """The operating system, the numbers of its version, and the architecture.

    A suffix of the version is left out, since the user may have chosen it.
    """
    mac = platform.mac_ver()[0]
    name, version = ("macOS", mac) if mac else (platform.system(), platform.release())
    return f"{name} {re.match('[0-9.]*', version)[0]} {platform.machine()}"  # type: ignore[index]


def model_facts(model: nn.Module, name: str, head: Head | None = None) -> Report:
    """The facts about a model that a report has.

    Args:
        name: the name that the user gave. If it is a path, only its last part is reported.
    """
    # Quantised weights take part in computations in the type of their scales.
    weights = (weight for _, weight in tree_flatten(model.parameters()))
    floating = (weight for weight in weights if mx.issubdtype(weight.dtype, mx.floating))
    dtype = max(floating, key=lambda weight: weight.nbytes).dtype
    return {
        "name": given_name(name),
        **model_identity(model),
        "dtype": str(dtype).removeprefix("mlx.core."),
        **({} if head is None else {"head": head.title}),
    }


def bench_report(prompts: Sequence[MeasuredPrompt], facts: Report) -> Report:
    """Sum up a measurement.

    Args:
        prompts: what was measured, at least one.
        facts: facts about the model, the machine and the settings, to include in the report.

    Returns:
        ``decoders``: each backend's figures over all prompts (see :func:`figures`). Its overall
        speed-up is the geometric mean of its speed-ups in the categories, and ``lowest`` and
        ``highest`` are those of single repeats (see :func:`_spread`). ``categories``: each
        backend's figures in each category. ``exactness``: how many ``outputs`` were compared with
        plain decoding's (one for each prompt and each backend except plain), how many ``differ``,
        and the largest margin where they do. ``wrong``: a sentence for each difference that is not
        a near tie.
    """
    grouped: dict[str, list[MeasuredPrompt]] = {}
    for prompt in prompts:
        grouped.setdefault(prompt.category, []).append(prompt)
    categories: dict[str, Report] = {
        category: {"prompts": len(members), "decoders": _by_backend(members)}
        for category, members in grouped.items()
    }
    over_all = _by_backend(prompts)
    for name, entry in over_all.items():
        for ratio in ("speedup", "vs_mlx_lm"):  # each category has the same weight
            values = [of["decoders"][name][ratio] for of in categories.values()]
            entry[ratio] = None if None in values else geometric_mean(values)
        entry["lowest"], entry["highest"] = _spread([*grouped.values()], name, entry["speedup"])
    return {
        **facts,
        "decoders": over_all,
        "categories": categories,
        "exactness": _exactness(prompts),
        "wrong": [*_wrong(prompts)],
    }


def _by_backend(prompts: Sequence[MeasuredPrompt]) -> Report:
    return {name: figures(prompts, name) for name in prompts[0].runs}


def figures(prompts: Sequence[MeasuredPrompt], name: str) -> Report:
    """Sum up a backend's runs.

    Args:
        prompts: at least one.

    Returns:
        ``tokens_per_second`` (without the prefill) and ``prefill_seconds``: medians over all runs.
        ``speedup``: the speed relative to plain decoding. For each prompt, it is the median of the
        runs' ratios; over prompts, the geometric mean of these medians. ``vs_mlx_lm``: the same
        relative to mlx-lm. ``tokens_per_step``, ``rows_per_step``, ``acceptance_rate``: over all
        steps. A figure that is unknown is None. So is a ratio if an output of either backend was
        wrong, since the backends then wrote different texts.
    """
    runs = [run for prompt in prompts for run in prompt.runs[name]]
    stats = sum((run.stats for run in runs if run.stats), SpeculationStats())
    return {
        "tokens_per_second": median(run.rate for run in runs),
        "prefill_seconds": median(run.prefill_seconds for run in runs),
        "speedup": _ratio(prompts, name, PLAIN),
        "vs_mlx_lm": _ratio(prompts, name, MLX_LM),
        "tokens_per_step": stats.tokens_per_step if stats.steps else None,
        "rows_per_step": stats.rows / stats.steps if stats.steps else None,
        "acceptance_rate": stats.acceptance_rate if stats.drafted else None,
    }


def _ratios(prompt: MeasuredPrompt, name: str, base: str) -> list[float]:
    """The ratio of two backends' speeds in each repeat; a slow moment affects both alike."""
    pairs = zip(prompt.runs[name], prompt.runs[base], strict=True)
    return [run.rate / base_run.rate for run, base_run in pairs]


def _ratio(prompts: Sequence[MeasuredPrompt], name: str, base: str) -> float | None:
    compared = (prompt.differences.get(backend) for prompt in prompts for backend in (name, base))
    if not all(
        differences is not None and all(difference.near_tie for difference in differences)
        for differences in compared
    ):
        return None
    return geometric_mean(median(_ratios(prompt, name, base)) for prompt in prompts)


def _spread(
    categories: Sequence[Sequence[MeasuredPrompt]], name: str, speedup: float | None
) -> tuple[float | None, float | None]:
    """The lowest and the highest speed-up over all prompts in single repeats.

    Medians of prompts may all be from good repeats, so the range is widened to include ``speedup``.
    """
    if speedup is None:
        return None, None
    by_category = [
        [geometric_mean(repeat) for repeat in zip(*ratios, strict=True)]
        for members in categories
        for ratios in [[_ratios(prompt, name, PLAIN) for prompt in members]]
    ]
    speedups = [speedup, *map(geometric_mean, zip(*by_category, strict=True))]
    return min(speedups), max(speedups)


def _exactness(prompts: Sequence[MeasuredPrompt]) -> Report:
    by_backend = (item for prompt in prompts for item in prompt.differences.items())
    outputs = [differences for name, differences in by_backend if name != PLAIN]
    margins = (difference.margin for differences in outputs for difference in differences)
    return {
        "outputs": len(outputs),
        "differ": sum(map(bool, outputs)),
        "largest_margin": max(filter(math.isfinite, margins), default=None),
    }


def _wrong(prompts: Sequence[MeasuredPrompt]) -> Iterator[str]:
    """A sentence for each difference that rounding does not explain."""
    for number, prompt in enumerate(prompts, start=1):
        for name, differences in prompt.differences.items():
            for difference in differences:
                if difference.near_tie:
                    continue
                how = "one output ended before the other"
                if math.isfinite(difference.margin):
                    how = (
                        f"the gap is {difference.margin:.2g}, but rounding explains only "
                        f"{difference.bound:.2g}"
                    )
                yield (
                    f"{name} differs from {PLAIN} decoding on prompt {number} "
                    f"({prompt.category}) at token {difference.index}: {how}"
                )


def exactness(report: Report) -> str:
    """Say how many outputs equal plain decoding's, and the largest gap where the others diverge."""
    of = report["exactness"]
    said = (
        f"{of['outputs'] - of['differ']} of {of['outputs']} outputs are identical to {PLAIN} "
        f"decoding's, in {report['model']['dtype']}."
    )
    if of["largest_margin"] is not None:
        said += (
            " Where an output diverges from plain decoding's, the two tokens' logits are at most "
            f"{of['largest_margin']:.2g} apart."
        )
    return said


def verdict(report: Report) -> str:
    """A sentence that says which backend is fastest, if that is beyond the repeats' scatter."""
    decoders = {name: of for name, of in report["decoders"].items() if of["speedup"] is not None}
    if len(report["decoders"]) < 2:
        return f"Only {PLAIN} decoding was measured."
    if len(decoders) < 2:
        return "No speed-up is given: no two decoders had the same output."
    best = max(decoders, key=lambda name: float(decoders[name]["speedup"]))
    speed = f"{decoders[best]['speedup']:.2f} times the speed of {PLAIN}"
    if report["settings"]["repeats"] < 2:
        return f"{shown(best)} had {speed} in one repeat, which shows no scatter."
    equal = [
        shown(name)
        for name, of in decoders.items()
        if name != best and of["highest"] >= decoders[best]["lowest"]
    ]
    if equal:
        return (
            f"{shown(best)} had {speed}; within the scatter of the repeats, {' and '.join(equal)} "
            f"had as much."
        )
    return f"{shown(best)} is fastest: {speed}."


def shown(name: str) -> str:
    """A backend's name in tables and sentences."""
    return f"{name} (default)" if name == AUTO else name
