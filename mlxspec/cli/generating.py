"""What the commands that generate share: their options, and the way from these to an output.

A command with the options of a :class:`Generation` is called with one: it has been checked as
far as that goes without a model, loads the model, and generates with it.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast

import click

import mlxspec

from ..engine.constraint import Constraint
from ..engine.params import CacheOptions, SamplingParams
from ..errors import OptionError
from .model_choice import MODEL, model_or_default
from .options import (
    ADAPTERS,
    ADAPTERS_HELP,
    DRAFTER,
    NAME,
    NO_MEMORY,
    NO_MEMORY_HELP,
    check_least,
    nested,
    option_field,
)
from .outcome import note
from .output import ProgressBar

if TYPE_CHECKING:
    import mlx.nn as nn
    from rich.console import Console

    from ..distributed.leader import Leader
    from ..draft.drafter import Drafter
    from ..generation.decoder import Decoder
    from ..generation.options import GenerationOptions
    from ..generation.request import Request
    from ..generation.response import GenerationResponse
    from ..store.learner import Learner
    from .memories import Memories

# What the options set that only some decoders take.
API_KEY = "MLXSPEC_API_KEY"
"""The variable of the environment with a server's key, for the server and for who talks to it."""

LOOKUP, LOOKAHEAD, STORE, OWN = "prompt lookup", "lookahead", "store", "own drafter"


class _Choice(NamedTuple):
    """A value of ``--decoder``.

    Attributes:
        decoder: the class in :mod:`mlxspec`.
        measures: whether its drafts follow what steps cost.
        takes: the options that it takes.
        arguments: what its ``stream`` and its ``drafting_with`` get of them.
    """

    decoder: str
    measures: bool
    takes: tuple[str, ...]
    arguments: Callable[[Drafting], dict[str, Any]]


# Without --decoder, the first one that takes the given options is used.
_DECODERS = {
    "auto": _Choice("AutoDecoder", True, (STORE, OWN), lambda _: {}),
    "prompt-lookup": _Choice("PromptLookupDecoder", False, (LOOKUP,), lambda asked: asked.lookup),
    "lookahead": _Choice("LookaheadDecoder", True, (LOOKAHEAD,), lambda asked: asked.sizes),
    "combined": _Choice(
        "CombinedDecoder",
        True,
        (STORE, LOOKUP, LOOKAHEAD),
        lambda asked: {**asked.sizes, "drafter": asked.lookup_drafter},
    ),
    "plain": _Choice("PromptLookupDecoder", False, (), lambda _: {"n_draft": 0}),
}


@dataclass(frozen=True)
class Drafting:
    """How to draft, as the user asked for it; None where an option is not given.

    Raises:
        OptionError: options contradict each other, or have impossible values.
    """

    decoder: str | None = option_field(
        "--decoder",
        "auto chooses each draft by its measured cost; prompt-lookup has fixed parameters; "
        "lookahead drafts from the model's own guesses; combined is auto with lookahead.  "
        "[default: auto, or the one whose option is given]",
        type=click.Choice(list(_DECODERS)),
    )
    store: str | None = option_field(
        "--store FILE",
        "With auto and combined: draft from a file of 'mlxspec store' too.",
        type=NAME,
        of=STORE,
    )
    drafter: str | None = option_field(
        DRAFTER,
        "With auto: draft with a class of your own, too, wherever that pays.",
        of=OWN,
    )
    draft_model: str | None = option_field(
        "--draft-model MODEL",
        "With auto: draft with a small model of the same tokenizer, too, where no text repeats.",
        type=MODEL,
        of=OWN,
    )
    num_draft_tokens: int | None = option_field(
        "--num-draft-tokens N", "Tokens that --draft-model drafts at most.  [default: 2]"
    )
    learn: bool = option_field("--learn", "Add the output to the --store file.", default=False)
    no_memory: bool = option_field(NO_MEMORY, NO_MEMORY_HELP, default=False)
    n_draft: int | None = option_field(
        "--n-draft --prompt-lookup-num-tokens N",
        "Draft tokens per step at most; 0 is plain decoding.  [default: 10]",
        of=LOOKUP,
    )
    ngram_max: int | None = option_field(
        "--ngram-max --max-matching-ngram-size N",
        "Longest n-gram that is looked up in prompt and output.  [default: 3]",
        of=LOOKUP,
    )
    ngram_min: int | None = option_field(
        "--ngram-min N", "Shortest n-gram.  [default: 1]", of=LOOKUP
    )
    prompt_lookup_config: str | None = option_field(
        "--prompt-lookup-config [N,N,[0]]",
        "TensorRT-LLM's form of --n-draft and --ngram-max, in their place.",
        of=LOOKUP,
    )
    window_size: str | None = option_field(
        "-W --window-size --WINDOW_SIZE W",
        "Lookahead: columns of the window, 0 for none, or auto: all sizes follow their measured "
        "cost.  [default: auto]",
        of=LOOKAHEAD,
    )
    ngram_size: int | None = option_field(
        "-N --ngram-size --LEVEL N",
        "Lookahead: length of the n-grams; with auto, at most.  [default: 5]",
        of=LOOKAHEAD,
    )
    guess_set_size: int | None = option_field(
        "-G --guess-set-size --GUESS_SET_SIZE G",
        "Lookahead: n-grams kept for a token, -1 for 64.  [default: W, or 16 with auto]",
        of=LOOKAHEAD,
    )
    pool_from_prompt: bool | None = option_field(
        "--pool-from-prompt/--no-pool-from-prompt --POOL_FROM_PROMPT",
        "Lookahead: start with the prompt's n-grams.  [default: yes]",
        of=LOOKAHEAD,
    )

    def __post_init__(self) -> None:
        for name, of in self._given():
            takers = [kind for kind, choice in _DECODERS.items() if of in choice.takes]
            if self.kind not in takers:
                option = "--" + name.replace("_", "-")
                raise OptionError(
                    f"{option} is for --decoder {' and '.join(takers)}, not {self.kind}"
                )
        check_least(1, num_draft_tokens=self.num_draft_tokens)
        if self.num_draft_tokens is not None and self.draft_model is None:
            raise OptionError("--num-draft-tokens is of a draft model: name it with --draft-model")
        if self.draft_model is not None and self.drafter is not None:
            raise OptionError("--drafter and --draft-model are given together: choose one")
        if self.learn and self.store is None:
            raise OptionError("--learn adds to a store: name it with --store FILE")
        _ = self.lookup_drafter, self.sizes  # which are checked

    def _given(self) -> list[tuple[str, str]]:
        """The given options that only some decoders take, and what they set."""
        own = [(one.name, one.metadata.get("of")) for one in fields(self)]
        return [(name, of) for name, of in own if of and getattr(self, name) is not None]

    @cached_property
    def kind(self) -> str:
        """The decoder's name: the one that was asked for, or one that takes the given options."""
        given = {of for _, of in self._given()} - {STORE}
        fitting = (kind for kind, choice in _DECODERS.items() if given <= {*choice.takes})
        return self.decoder or next(fitting, "auto")

    @cached_property
    def lookup(self) -> dict[str, Any]:
        """The parameters of prompt lookup."""
        from ..draft.prompt_lookup import parse_lookup_config

        n_draft, ngram_max = _or(self.n_draft, 10), _or(self.ngram_max, 3)
        if self.prompt_lookup_config is not None:
            n_draft, ngram_max, _ = parse_lookup_config(self.prompt_lookup_config)
        return {"n_draft": n_draft, "ngram_max": ngram_max, "ngram_min": _or(self.ngram_min, 1)}

    @property
    def lookup_drafter(self) -> Drafter | None:
        """Prompt lookup with its parameters, if any was given; a new one for each generation."""
        from ..draft.prompt_lookup import lookup_drafter

        given = any(of == LOOKUP for _, of in self._given())
        return lookup_drafter(**self.lookup)[0] if given else None

    @cached_property
    def sizes(self) -> dict[str, Any]:
        """The parameters of lookahead."""
        from ..draft.lookahead import LookaheadDrafter

        sizes: dict[str, Any] = {
            "window_size": _columns(self.window_size or "auto"),
            "ngram_size": _or(self.ngram_size, 5),
            "guess_set_size": self.guess_set_size,
            "pool_from_prompt": self.pool_from_prompt is not False,
        }
        LookaheadDrafter(**sizes)  # checks them
        return sizes

    def load_draft_model(self) -> tuple[nn.Module, Callable[[], Drafter]]:
        """The draft model, and what makes a drafter of it for each generation.

        Raises:
            LoadError: it cannot be found or read.
        """
        from ..engine.draft_model import DraftModelDrafter

        assert self.draft_model is not None
        model, _ = mlxspec.load(self.draft_model)
        return model, partial(DraftModelDrafter, model, _or(self.num_draft_tokens, 2))

    def tell_what_has_no_effect(self, max_tokens: int) -> None:
        """Say so where a device list is ignored, or lookahead's window never runs.

        The window needs drafts as deep as itself, W + N - 3 tokens in its first step, and no
        draft reaches beyond the output's last token.
        """
        from ..draft.prompt_lookup import parse_lookup_config

        if self.prompt_lookup_config is not None:
            *_, ignored = parse_lookup_config(self.prompt_lookup_config)
            if ignored:
                note(ignored)
        columns, ngram_size = self.sizes["window_size"], self.sizes["ngram_size"]
        widest = max_tokens + 2 - ngram_size
        wanted = LOOKAHEAD in _DECODERS[self.kind].takes and columns not in ("auto", 0)
        if wanted and columns > widest:
            note(
                f"--window-size is {columns}: the window looks beyond the output's end and does "
                f"not run; with --max-tokens {max_tokens} and n-grams of {ngram_size} choose "
                f"{max(widest, 0)} at most"
            )


def _columns(text: str) -> int | Literal["auto"]:
    """Understand ``--window-size``.

    Raises:
        OptionError: it is neither a number nor "auto".
    """
    if text == "auto":
        return "auto"
    try:
        return int(text)
    except ValueError:
        raise OptionError(f"--window-size is {text!r}: give a number, or auto") from None


def _or(value: int | None, default: int) -> int:
    return default if value is None else value


@dataclass(frozen=True)
class Ends:
    """What ends the output before it is full."""

    stop: tuple[str, ...] = option_field("--stop TEXT", "End before TEXT; repeatable.", default=())
    stop_tokens: tuple[int | str, ...] = option_field(
        "--stop-token --extra-eos-token TOKEN",
        "End at this token too, an id or a text of one token; repeatable.",
        default=(),
    )


def _biases(texts: Sequence[str]) -> dict[int, float]:
    parsed = {}
    for text in texts:
        token, _, value = text.partition("=")
        try:
            parsed[int(token)] = float(value)
        except ValueError:
            raise OptionError(
                f"--logit-bias is {text!r}: write it as ID=VALUE, for example 42=-5"
            ) from None
    return parsed


def _ids_or_texts(tokens: Sequence[str]) -> tuple[int | str, ...]:
    return tuple(int(token) if token.isdecimal() else token for token in tokens)


@dataclass(frozen=True)
class Form:
    """What the output has to be; None where an option is not given.

    Raises:
        OptionError: several are given, or a file cannot be read or is none.
    """

    json_schema: str | None = option_field(
        "--json-schema FILE",
        "Let the output be JSON that is valid under the JSON Schema in FILE.",
        type=NAME,
    )
    regex: str | None = option_field(
        "--regex PATTERN", "Let the output match PATTERN as a whole, in the syntax of Rust's regex."
    )
    grammar: str | None = option_field(
        "--grammar FILE",
        "Let the output be of the grammar in FILE: Lark, in llguidance's variant, or llama.cpp's "
        "GBNF.",
        type=NAME,
    )

    def __post_init__(self) -> None:
        given = [own.name for own in fields(self) if getattr(self, own.name) is not None]
        if len(given) > 1:
            named = " and ".join(f"--{name.replace('_', '-')}" for name in given)
            raise OptionError(f"{named} are given together: choose one")
        _ = self.constraint

    @cached_property
    def constraint(self) -> Constraint | None:
        """What was asked for, read."""
        if self.json_schema is not None:
            return _read_from(f"--json-schema {self.json_schema}", Constraint.json_schema)
        if self.grammar is not None:
            return _read_from(f"--grammar {self.grammar}", Constraint.grammar)
        return None if self.regex is None else Constraint.regex(self.regex)


def _read_from(option: str, read: Callable[[str], Constraint]) -> Constraint:
    """The constraint in the file of an option.

    Raises:
        OptionError: there is no such file, or none of this kind.
    """
    try:
        with open(option.partition(" ")[2], "rb") as file:
            return read(file.read(_LONGEST_FILE).decode("utf-8-sig"))
    except OSError as error:
        raise OptionError(
            f"{option} cannot be read ({error.strerror}): name a readable text file"
        ) from error
    except UnicodeDecodeError as error:
        raise OptionError(f"{option} is not UTF-8 text: convert it to UTF-8") from error
    except OptionError as error:
        raise OptionError(f"{option}: {error}") from error


_LONGEST_FILE = 4_000_000  # bytes; a constraint's text is shorter, and some devices never end


@dataclass(frozen=True)
class Generation:
    """A generation as the user asked for it.

    A command declares ``--model`` and ``--max-tokens`` itself.

    Attributes:
        model: a directory, a repository or "demo"; None takes the default.
        max_tokens: how many tokens to generate at most.

    Raises:
        OptionError: ``max_tokens`` is below 1.
    """

    model: str | None
    max_tokens: int
    drafting: Drafting = field(metadata=nested(Drafting, "Drafting"))
    ends: Ends = field(metadata=nested(Ends, "End of the output", stop_tokens=_ids_or_texts))
    sampling: SamplingParams = field(
        metadata=nested(SamplingParams, "Sampling", logit_bias=_biases)
    )
    caches: CacheOptions = field(metadata=nested(CacheOptions, "Memory"))
    form: Form = field(default=Form(), metadata=nested(Form, "Form of the output"))
    adapter_path: str | None = option_field(
        ADAPTERS, ADAPTERS_HELP, type=NAME, group="Model and prompt"
    )

    def __post_init__(self) -> None:
        check_least(1, max_tokens=self.max_tokens)

    @property
    def plans(self) -> bool:
        """Whether each draft is chosen by its cost."""
        return STORE in _DECODERS[self.drafting.kind].takes

    def load(self, console: Console, memories: Memories, leader: Leader | None = None) -> Decoder:
        """Load the model, and measure what its steps cost if that matters and is not known.

        Args:
            console: where a bar shows how far the measurement is.
            memories: have the earlier answers that are drafted from.
            leader: splits the model over its ranks.
        """
        from ..draft.custom import load_drafter
        from ..engine.draft_model import check_vocabularies
        from ..loading.model import load

        if leader and self.adapter_path is not None:
            raise OptionError(
                "--adapter-path: adapters are not split over several machines; put them into the "
                "model with mlx_lm.fuse, or run without mlx.launch"
            )

        drafting, choice = self.drafting, _DECODERS[self.drafting.kind]
        drafting.tell_what_has_no_effect(self.max_tokens)
        name = model_or_default(self.model)
        options: dict[str, Any] = {}
        if drafting.drafter is not None:
            options["extra_drafter"] = load_drafter(drafting.drafter)
        draft_model = None
        if drafting.draft_model is not None:
            draft_model, options["extra_drafter"] = drafting.load_draft_model()
        with ProgressBar("Measuring step times", console=console) as bar:
            if choice.measures:
                options["on_measuring"] = bar
            if self.plans:
                options["store"] = None if self._begins_store() else drafting.store
            if leader:
                model, tokenizer = leader.load(name)
            else:
                model, tokenizer = load(name, adapter_path=self.adapter_path)
            if self.plans and (memory := memories.of(tokenizer, name)):
                options["memory"] = memory
            decoder = getattr(mlxspec, choice.decoder)(model, tokenizer, **options)
            if not memories.keeps:
                decoder.keeps_experience = False
            if draft_model is not None:
                check_vocabularies(draft_model, decoder.vocab_size, len(decoder.tokenizer))
            if self.plans or (choice.measures and drafting.sizes["window_size"] == "auto"):
                _ = decoder.costs
        return decoder

    def _begins_store(self) -> bool:
        """Whether this output is to be the store's first.

        Another process that learns makes an empty file before it writes.
        """
        store = Path(self.drafting.store or "")
        is_empty = not store.exists() or (store.is_file() and store.stat().st_size == 0)
        return self.drafting.learn and is_empty

    def learner(self, decoder: Decoder) -> AbstractContextManager[Learner | None]:
        """What adds outputs to the store, where that is wanted."""
        from ..store.learner import Learner

        if not self.drafting.learn or self.drafting.store is None:
            return nullcontext()
        return Learner(self.drafting.store, decoder.tokenizer)

    def stream(
        self,
        decoder: Any,
        tokens: Sequence[int],
        max_tokens: int,
        *,
        templated: bool = False,
        begun: str | None = None,
        **more: Any,
    ) -> Generator[GenerationResponse, None, None]:
        """Generate with the decoder of :meth:`load`.

        Args:
            decoder: the decoder.
            tokens: the prompt.
            max_tokens: how many tokens there is room for; see :meth:`room`.
            templated: the output is a chat's answer.
            begun: the beginning of that answer, with which the prompt ends.
            more: what :meth:`mlxspec.Decoder.decode` takes besides.
        """
        options = {**self.options(decoder, tokens if templated else None, begun), **more}
        return decoder.stream(tokens, max_tokens, **self.drafter_arguments(), **options)

    def request(
        self,
        decoder: Any,
        tokens: Sequence[int],
        max_tokens: int,
        on_response: Callable[[GenerationResponse], object],
        templated: bool = False,
        begun: str | None = None,
    ) -> Request:
        """A request to the decoder of :meth:`load`, for its engine.

        Args:
            decoder, tokens, max_tokens, templated, begun: as for :meth:`stream`.
            on_response: called with each response.

        Raises:
            PromptError, OptionError: as :meth:`mlxspec.Decoder.decode`.
        """
        make_drafter = decoder.drafting_with(**self.drafter_arguments())
        options = self.options(decoder, tokens if templated else None, begun)
        request: Request = decoder.new_request(
            tokens, max_tokens, options, make_drafter, on_response
        )
        return request

    def options(
        self,
        decoder: Decoder,
        conversation: Sequence[int] | None = None,
        begun: str | None = None,
    ) -> GenerationOptions:
        """Sampling, form, ends and memory, as :meth:`mlxspec.Decoder.decode` takes them.

        Args:
            decoder: of :meth:`load`.
            conversation: the prompt's tokens, where the output is a chat's answer.
            begun: the beginning of that answer; the form is that of what follows.
        """
        from ..generation.constrained import ends_in_reasoning, in_answer, leaves_reasoning_open
        from ..loading.detokenizer import detokenizer_of

        # XTC keeps line breaks and end tokens, as on mlx-lm's command line.
        kept = [*decoder.tokenizer.encode("\n"), *decoder.tokenizer.eos_token_ids]
        sampling = replace(self.sampling, xtc_special_tokens=kept)
        constraint: Any = self.form.constraint
        if constraint is not None and conversation is not None:
            tokenizer = decoder.tokenizer
            if begun is None:
                reasons = ends_in_reasoning([*conversation], tokenizer)
                trims = detokenizer_of(tokenizer).prefix_space
            else:
                reasons, trims = leaves_reasoning_open(begun, tokenizer), False
            constraint = in_answer(constraint, tokenizer, reasons=reasons, trims_space=trims)
        shape = {"sampling": sampling, "constraint": constraint}
        options = {**vars(self.ends), **vars(self.caches), **shape}
        return cast("GenerationOptions", options)

    def drafter_arguments(self) -> dict[str, Any]:
        """What the decoder's ``stream`` and ``drafting_with`` get of how to draft."""
        return _DECODERS[self.drafting.kind].arguments(self.drafting)

    def room(self, model: nn.Module, n_prompt: int) -> int:
        """How many tokens the output may have, at least one, after so many of the prompt."""
        from ..engine.positions import context_length

        return room_for(context_length(model), n_prompt, self.max_tokens)

    def tell_if_full(self, model: nn.Module, room: int, finish_reason: str | None) -> None:
        """Say so where the output ends because the model's context is full."""
        from ..engine.positions import context_length

        if finish_reason == "length" and room < self.max_tokens:
            length = context_length(model)
            note(f"the model's context of {length:,} tokens is full: the output ends there")


def room_for(longest: int | None, n_prompt: int, max_tokens: int) -> int:
    """How many tokens an output may have, at least one.

    Args:
        longest: the model's context in tokens, where it is known.
        n_prompt: tokens of the prompt.
        max_tokens: how many it may have in an empty context.
    """
    return max_tokens if longest is None else max(1, min(max_tokens, longest - n_prompt))
