"""What ``bench`` runs: plain decoding, mlx-lm, and mlxspec's drafters."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
from mlx_lm.generate import GenerationResponse
from mlx_lm.sample_utils import make_sampler
from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..drafting.drafter import Drafter, NoDraft
from ..drafting.sources import PromptLookupDrafter
from ..engine.params import SamplingParams
from ..engine.target import Progress
from ..errors import OptionError
from ..generation.decoder import Decoder
from ..generation.decoders import AutoDecoder, CombinedDecoder, LookaheadDecoder

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
    """A drafter class of the user's, alone and beside the default decoder's look-ups."""
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
