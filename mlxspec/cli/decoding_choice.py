"""Which decoder the command line asks for, and its parameters."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path

from ..decoders import AutoDecoder, Decoder, Prompt
from ..decoding import SamplingParams
from ..drafting import Drafter, NoDraft
from ..drafting.lookup_names import lookup_drafter
from ..errors import OptionError
from ..models.target import Progress
from ..response import GenerationResponse
from ..store import Learner
from .outcome import note


@dataclass(frozen=True)
class DecoderOptions:
    """The options of the command line that say how to draft; None where not given."""

    decoder: str | None
    n_draft: int | None
    ngram_max: int | None
    ngram_min: int | None
    prompt_lookup_config: str | None
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
        given = [name for name, value in lookup.items() if value is not None]
        self._kind = options.decoder or ("prompt-lookup" if given else "auto")
        self._options = options
        if given and self._kind != "prompt-lookup":
            raise OptionError(f"{given[0]} is for --decoder prompt-lookup, not {self._kind}")
        if options.store is not None and self._kind != "auto":
            raise OptionError(f"--store is for --decoder auto, not {self._kind}")
        if options.learn and options.store is None:
            raise OptionError("--learn adds to a store: name it with --store FILE")
        self._drafter = self._fixed_drafter()

    def load(self, model: str, on_measuring: Callable[[float], None]) -> Decoder:
        """Load the model, and measure what its steps cost if that matters and is not known."""
        if self._kind != "auto":
            return Decoder(model)
        store = self._options.store
        if self._options.learn and store is not None and _is_empty(Path(store)):
            store = None  # it begins with this output
        decoder = AutoDecoder(model, store=store, on_measuring=on_measuring)
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
        *,
        max_tokens: int,
        sampling: SamplingParams,
        stop: tuple[str, ...],
        on_progress: Progress,
    ) -> Generator[GenerationResponse, None, None]:
        """Generate with the decoder from :meth:`load`."""
        if isinstance(decoder, AutoDecoder):
            return decoder.stream(
                prompt, max_tokens, stop=stop, on_progress=on_progress, **asdict(sampling)
            )
        return decoder.decode(
            prompt,
            self._drafter,
            max_tokens=max_tokens,
            sampling=sampling,
            stop=stop,
            on_progress=on_progress,
        )

    def _fixed_drafter(self) -> Drafter:
        if self._kind != "prompt-lookup":
            return NoDraft()
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


def _is_empty(store: Path) -> bool:
    """Whether there is no store yet: another process that learns makes an empty file first."""
    return not store.exists() or (store.is_file() and store.stat().st_size == 0)


def _or(value: int | None, default: int) -> int:
    return default if value is None else value
