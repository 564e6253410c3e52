"""Which decoder the command line asks for, and its parameters."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypedDict

from ..draft.drafter import Drafter, NoDraft
from ..draft.lookahead import check_sizes
from ..draft.prompt_lookup import lookup_drafter
from ..errors import OptionError
from ..generation.decoder import Decoder, Prompt
from ..generation.decoders import AutoDecoder, CombinedDecoder, LookaheadDecoder
from ..generation.options import GenerationOptions
from ..generation.response import GenerationResponse
from ..store.learner import Learner
from .lookahead_options import parse_window_size
from .outcome import note

if TYPE_CHECKING:
    import mlx.nn as nn
    from mlx_lm.tokenizer_utils import TokenizerWrapper
    from typing_extensions import Unpack


@dataclass(frozen=True)
class DecoderOptions:
    """The options of the command line that say how to draft; None where not given."""

    decoder: str | None
    n_draft: int | None
    ngram_max: int | None
    ngram_min: int | None
    prompt_lookup_config: str | None
    window_size: str | None
    ngram_size: int | None
    guess_set_size: int | None
    pool_from_prompt: bool | None
    store: str | None
    learn: bool


class DecodingChoice:
    """A decoder with its parameters, from the options of the command line.

    Raises:
        OptionError: options contradict each other, or have impossible values.
    """

    def __init__(self, options: DecoderOptions) -> None:
        lookup = {
            "--n-draft": options.n_draft,
            "--ngram-max": options.ngram_max,
            "--ngram-min": options.ngram_min,
            "--prompt-lookup-config": options.prompt_lookup_config,
        }
        lookahead = {
            "--window-size": options.window_size,
            "--ngram-size": options.ngram_size,
            "--guess-set-size": options.guess_set_size,
            "--pool-from-prompt": options.pool_from_prompt,
        }
        self.kind = options.decoder or _kind_of(_given(lookup), _given(lookahead))
        self._options = options
        for given, kind in ((_given(lookup), "prompt-lookup"), (_given(lookahead), "lookahead")):
            if given and self.kind not in (kind, "combined"):
                raise OptionError(f"{given[0]} is for --decoder {kind}, not {self.kind}")
        if options.store is not None and self.kind not in ("auto", "combined"):
            raise OptionError(f"--store is for --decoder auto and combined, not {self.kind}")
        if options.learn and options.store is None:
            raise OptionError("--learn adds to a store: name it with --store FILE")
        self._lookup = self._lookup_drafter() if _given(lookup) else None
        self._sizes = _sizes(options)

    def check_room(self, max_tokens: int) -> None:
        """Say so where lookahead's window is too wide to run even once.

        It goes with drafts as deep as itself, W + N - 3 tokens in its first step, and no draft
        reaches beyond the output's last token.
        """
        width, ngram_size = self._sizes["window_size"], self._sizes["ngram_size"]
        if self.kind not in ("lookahead", "combined") or width == "auto" or not width:
            return
        widest = max_tokens + 2 - ngram_size
        if width > widest:
            note(
                f"--window-size is {width}: the window looks beyond the output's end and does not "
                f"run; with --max-tokens {max_tokens} and n-grams of {ngram_size} choose "
                f"{max(widest, 0)} at most"
            )

    def load(
        self,
        model: str | nn.Module,
        on_measuring: Callable[[float], None],
        tokenizer: TokenizerWrapper | None = None,
    ) -> Decoder:
        """Load the model, and measure what its steps cost if that matters and is not known.

        A model that is loaded already comes with its tokenizer.
        """
        if self.kind == "lookahead":
            decoder: Decoder = LookaheadDecoder(model, tokenizer, on_measuring=on_measuring)
            if self._sizes["window_size"] == "auto":
                _ = decoder.costs
            return decoder
        if self.kind not in ("auto", "combined"):
            return Decoder(model, tokenizer)
        store = self._options.store
        if self._options.learn and store is not None and _is_empty(Path(store)):
            store = None  # it begins with this output
        made_by = CombinedDecoder if self.kind == "combined" else AutoDecoder
        decoder = made_by(model, tokenizer, store=store, on_measuring=on_measuring)
        _ = decoder.costs
        return decoder

    def learner(self, decoder: Decoder) -> AbstractContextManager[Learner | None]:
        """What adds the output to the store, where that is wanted."""
        if not self._options.learn or self._options.store is None:
            return nullcontext()
        return Learner(self._options.store, decoder.tokenizer)

    def stream(
        self,
        decoder: Decoder,
        prompt: Prompt,
        max_tokens: int,
        **options: Unpack[GenerationOptions],
    ) -> Generator[GenerationResponse, None, None]:
        """Generate with the decoder from :meth:`load`."""
        if isinstance(decoder, CombinedDecoder):
            return decoder.stream(
                prompt, max_tokens, drafter=self._lookup, **self._sizes, **options
            )
        if isinstance(decoder, LookaheadDecoder):
            return decoder.stream(prompt, max_tokens, **self._sizes, **options)
        if isinstance(decoder, AutoDecoder):
            return decoder.stream(prompt, max_tokens, **options)
        drafter = NoDraft() if self.kind == "plain" else self._lookup or self._lookup_drafter()
        return decoder.decode(prompt, drafter, max_tokens=max_tokens, **options)

    def _lookup_drafter(self) -> Drafter:
        options = self._options
        drafter, ignored = lookup_drafter(
            _or(options.n_draft, 10),
            _or(options.ngram_max, 3),
            _or(options.ngram_min, 1),
            options.prompt_lookup_config,
        )
        if ignored:
            note(ignored)
        return drafter


def _given(options: Mapping[str, object]) -> list[str]:
    """The names of those that were given."""
    return [name for name, value in options.items() if value is not None]


def _kind_of(lookup: list[str], lookahead: list[str]) -> str:
    """The decoder that options ask for where none is named."""
    if lookup:
        return "combined" if lookahead else "prompt-lookup"
    return "lookahead" if lookahead else "auto"


class _Sizes(TypedDict):
    window_size: int | Literal["auto"]
    ngram_size: int
    guess_set_size: int | None
    pool_from_prompt: bool


def _sizes(options: DecoderOptions) -> _Sizes:
    """Lookahead's parameters, which are checked before a model is loaded."""
    window_size = parse_window_size(options.window_size or "auto")
    ngram_size, guess_set_size = _or(options.ngram_size, 5), options.guess_set_size
    check_sizes(0 if window_size == "auto" else window_size, ngram_size, _or(guess_set_size, -1))
    return {
        "window_size": window_size,
        "ngram_size": ngram_size,
        "guess_set_size": guess_set_size,
        "pool_from_prompt": options.pool_from_prompt is not False,
    }


def _is_empty(store: Path) -> bool:
    """Whether there is no store yet: another process that learns makes an empty file first."""
    return not store.exists() or (store.is_file() and store.stat().st_size == 0)


def _or(value: int | None, default: int) -> int:
    return default if value is None else value
