"""Options that the generating commands share, and the code that loads a model and generates.

A command with the options of :class:`GenerationSettings` gets an instance of it, which has already
checked everything that needs no model. The instance then loads the model and generates with it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass, fields, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, cast

import click

import mlxspec

from ...engine.params import CacheOptions, Constraint, SamplingParams
from ...errors import OptionError
from .model_choice import MODEL, model_or_default
from .notes import note
from .options import (
    ADAPTERS,
    COUNT,
    DRAFTER,
    HEAD,
    NAME,
    NO_HEAD,
    NO_SAVED_ANSWERS,
    Decorator,
    all_of,
    check_one,
    option_field,
    options_of,
)
from .output import waiting_bar
from .prompt import read_text

if TYPE_CHECKING:
    import mlx.nn as nn
    from rich.console import Console

    from ...distributed.ranks import Leader
    from ...drafting.drafter import Drafter
    from ...generation.chat_prompt import ChatPrompt
    from ...generation.decoder import Decoder
    from ...generation.drafter_factories import Lookahead, PromptLookup
    from ...generation.options import GenerationOptions
    from ...generation.request import Request
    from ...generation.response import GenerationResponse
    from ...models.model import OnRead
    from ..memory import Memories

API_KEY = "MLXSPEC_API_KEY"
"""The environment variable that holds a server's key, for the server and its clients."""

_DECODERS = ("auto", "prompt-lookup", "lookahead", "plain")
# Options of one decoder only. If such an option is given, that decoder is the default.
_auto = partial(option_field, of="auto")
_lookup = partial(option_field, of="prompt-lookup", group="With --decoder prompt-lookup")
_lookahead = partial(option_field, of="lookahead", group="With --decoder lookahead")


@dataclass(frozen=True)
class DraftingOptions:
    """How to draft; None for an option that is not given.

    Raises:
        OptionError: options contradict each other, or have impossible values.
    """

    decoder: str | None = option_field(
        "--decoder",
        "auto chooses each draft's length by measured costs; prompt-lookup has fixed parameters; "
        "lookahead drafts from the model's own guesses; plain does not draft.  "
        "[default: auto, or the decoder that the given options need]",
        type=click.Choice(_DECODERS),
    )
    drafter: str | None = _auto(
        DRAFTER, "With auto: also draft with your own class where that pays."
    )
    draft_model: str | None = _auto(
        "--draft-model MODEL",
        "With auto: also draft with a small model that has the same tokenizer, where that pays.",
        type=MODEL,
    )
    num_draft_tokens: int = option_field(
        "--num-draft-tokens N", "Draft at most N tokens with --draft-model.", default=2, type=COUNT
    )
    head: str | None = _auto(*HEAD, type=MODEL)
    no_head: bool = option_field(*NO_HEAD, default=False)
    no_saved_answers: bool = option_field(*NO_SAVED_ANSWERS, default=False)
    n_draft: int | None = _lookup(
        "--n-draft N", "Draft at most N tokens per step; 0 is plain decoding.  [default: 10]"
    )
    ngram_max: int | None = _lookup(
        "--ngram-max N", "Longest n-gram to look up in prompt and output.  [default: 3]"
    )
    ngram_min: int | None = _lookup("--ngram-min N", "Shortest n-gram.  [default: 1]")
    window_size: int | None = _lookahead(
        "-W --window-size W", "Columns of the window; 0 uses no window.  [default: 7]"
    )
    ngram_size: int | None = _lookahead("-N --ngram-size N", "Length of the n-grams.  [default: 5]")
    guess_set_size: int | None = _lookahead(
        "-G --guess-set-size G", "N-grams to keep per token; -1 means 64.  [default: 7]"
    )
    pool_from_prompt: bool | None = _lookahead(
        "--pool-from-prompt/--no-pool-from-prompt",
        "Start with the prompt's n-grams.  [default: yes]",
    )

    def __post_init__(self) -> None:
        for name, decoder in self._for_one_decoder().items():
            if decoder != self.kind:
                raise OptionError(
                    f"--{name.replace('_', '-')} is for --decoder {decoder}, not {self.kind}"
                )
        check_one(head=self.head, no_head=self.no_head, draft_model=self.draft_model)
        _ = self.fixed  # raises an error for a wrong value

    def _for_one_decoder(self) -> dict[str, str]:
        """The given options that belong to only one decoder, with that decoder."""
        return {
            field.name: field.metadata["of"]
            for field in fields(self)
            if "of" in field.metadata and getattr(self, field.name) is not None
        }

    @cached_property
    def kind(self) -> str:
        """The decoder's name: the requested one, or the one that the given options belong to."""
        return self.decoder or next(iter(self._for_one_decoder().values()), "auto")

    @cached_property
    def fixed(self) -> PromptLookup | Lookahead | None:
        """Prompt lookup or lookahead with the given parameters; None if the decoder is auto."""
        if self.kind == "auto":
            return None

        from ...generation.drafter_factories import Lookahead, PromptLookup

        if self.kind == "plain":
            return PromptLookup(n_draft=0)
        given = {name: getattr(self, name) for name in self._for_one_decoder()}
        if self.kind == "lookahead":
            return Lookahead(**given)
        return PromptLookup(**given)


PARAMETERS = [
    field.name
    for field in fields(DraftingOptions)
    if field.metadata.get("of") in ("prompt-lookup", "lookahead")
]
"""The options that set a fixed decoder's parameters."""

FORMS = ("json_schema", "regex", "grammar")
"""The options that set the form of the output."""

_end = partial(option_field, group="End of the output")
_form = partial(option_field, group="Form of the output")
_model = partial(option_field, group="Model and prompt")


@dataclass(frozen=True)
class GenerationSettings:
    """The options of a generation.

    A command declares ``--model`` and ``--max-tokens`` itself.

    Attributes:
        model: a directory, a repository or "demo"; None takes the default.
        max_tokens: the most tokens to generate.

    Raises:
        OptionError: the form of the output cannot be read.
    """

    model: str | None
    max_tokens: int
    drafting: DraftingOptions
    sampling: SamplingParams
    caches: CacheOptions
    stop: tuple[str, ...] = _end("--stop TEXT", "End before TEXT; repeatable.", default=())
    stop_tokens: tuple[int | str, ...] = _end(
        "--stop-token TOKEN",
        "Also end at TOKEN, given by its id or by its text; repeatable.",
        default=(),
    )
    json_schema: str | None = _form(
        "--json-schema FILE",
        "Generate JSON that is valid under the JSON Schema in FILE.",
        type=NAME,
    )
    regex: str | None = _form(
        "--regex PATTERN", "Generate text that matches PATTERN, in the syntax of Rust's regex."
    )
    grammar: str | None = _form(
        "--grammar FILE",
        "Generate text in the grammar in FILE: Lark in llguidance's variant, or llama.cpp's GBNF.",
        type=NAME,
    )
    adapter_path: str | None = _model(*ADAPTERS, type=NAME)

    def __post_init__(self) -> None:
        _ = self.constraint  # raises an error for a wrong value

    @cached_property
    def constraint(self) -> Constraint | None:
        """The required form of the output; None for any."""
        check_one(**{name: getattr(self, name) for name in FORMS})
        if self.json_schema is not None:
            return Constraint.json_schema(read_text("--json-schema", self.json_schema))
        if self.grammar is not None:
            return Constraint.grammar(read_text("--grammar", self.grammar))
        return None if self.regex is None else Constraint.regex(self.regex)

    def for_model(self, model: str, is_named: bool) -> GenerationSettings:
        """The options for a model.

        Args:
            is_named: whether the options were given for this model. If not, its options have no
                adapters, head or draft model.
        """
        if is_named:
            return replace(self, model=model)
        drafting = replace(self.drafting, head=None, draft_model=None)
        return replace(self, model=model, drafting=drafting, adapter_path=None)

    def load(
        self,
        console: Console | None,
        memories: Memories,
        leader: Leader | None = None,
        on_read: OnRead = lambda nbytes: None,
    ) -> Decoder:
        """Load the model.

        Args:
            console: shows that the model is being loaded; None shows nothing.
            leader: splits the model over its ranks; None for one process.
            on_read: as for :func:`.models.model.evaluate`.
        """
        from ...corpus.answer_index import AnswerIndex
        from ...drafting.drafter import load_drafter
        from ...engine.draft_model import DraftModel
        from ...generation.drafter_factories import Auto
        from ...models.heads.loading import load_with_head
        from ...models.model import load

        drafting = self.drafting
        if leader and (self.adapter_path is not None or drafting.head is not None):
            raise OptionError(
                "--adapter-path and --head do not work with a model that is split over several "
                "machines: leave them out, or run without mlx.launch"
            )
        name = model_or_default(self.model)
        extra: Callable[[], Drafter] | None = None
        draft_model = head = None
        if drafting.drafter is not None:
            extra = load_drafter(drafting.drafter)
        if drafting.draft_model is not None:
            draft_model = DraftModel(load(drafting.draft_model)[0], drafting.num_draft_tokens)
        with waiting_bar("Loading", console) if console else nullcontext():
            if leader:
                model, tokenizer = leader.load(name)
            else:
                # A draft model replaces the head that comes with a model.
                without = drafting.fixed or drafting.draft_model or drafting.no_head
                wanted = False if without else drafting.head
                model, tokenizer, head = load_with_head(name, wanted, self.adapter_path, on_read)
        drafts_from: Auto | PromptLookup | Lookahead
        if drafting.fixed:
            drafts_from = drafting.fixed
        else:
            memory = memories.of(tokenizer, name) or AnswerIndex()
            drafts_from = Auto(memory, extra, head=head, draft_model=draft_model)
        decoder = mlxspec.Decoder(model, tokenizer, drafts_from)
        decoder.keeps_experience = memories.keeps
        return decoder

    def request(
        self,
        decoder: Decoder,
        tokens: Sequence[int],
        *,
        max_tokens: int | None = None,
        chat: ChatPrompt | None = None,
        **more: Any,
    ) -> tuple[Request, Callable[[GenerationResponse], GenerationResponse]]:
        """Make a request to a decoder.

        Args:
            decoder: made by :meth:`load`.
            max_tokens: by default the options' own.
            chat: the prompt in the chat template, if the output is an answer in a chat. The
                required form applies only to the answer's text, after its reasoning.
            more: other arguments of :meth:`mlxspec.Decoder.stream`.

        Returns:
            the request, and a function to apply to each response before it is shown, which drops
            the space that a tokenizer may put before an answer in a chat.

        Raises:
            PromptError, OptionError: as for :meth:`mlxspec.Decoder.stream`.
        """
        from ...engine.caches import cached_length
        from ...engine.model_sizes import context_length
        from ...generation.chat_prompt import in_answer

        options: Any = {**self.options(decoder), **more}
        if chat and self.constraint is not None:
            options["constraint"] = in_answer(
                self.constraint,
                decoder.tokenizer,
                reasons=chat.reasons,
                trims_space=chat.trims_space,
            )
        n_prompt = len(tokens) + cached_length(more.get("prompt_cache") or ())
        max_tokens = self.max_tokens if max_tokens is None else max_tokens
        room = room_for(context_length(decoder.model), n_prompt, max_tokens)
        request = decoder.new_request(tokens, room, options)
        return request, without_first_space(chat is not None and chat.trims_space)

    def stream(
        self, decoder: Decoder, tokens: Sequence[int], **more: Any
    ) -> Generator[GenerationResponse, None, None]:
        """Generate one output; the arguments and errors are the same as for :meth:`request`."""
        from ...generation.scheduler import responses

        request, as_shown = self.request(decoder, tokens, **more)
        with closing(responses(request)) as generated:
            yield from map(as_shown, generated)

    def options(self, decoder: Decoder) -> GenerationOptions:
        """The options for :meth:`mlxspec.Decoder.stream`: sampling, output form, stops and
        caches.
        """
        # As on mlx-lm's command line, XTC never removes line breaks and end tokens.
        kept = [*decoder.tokenizer.encode("\n"), *decoder.tokenizer.eos_token_ids]
        sampling = replace(self.sampling, xtc_special_tokens=kept)
        options = {"sampling": sampling, "constraint": self.constraint}
        ends = {"stop": self.stop, "stop_tokens": self.stop_tokens}
        return cast("GenerationOptions", ends | vars(self.caches) | options)

    def note_if_full(self, model: nn.Module, finish_reason: str | None, generated: int) -> None:
        """Print a note if the output ended because the model's context is full."""
        from ...engine.model_sizes import context_length

        if finish_reason == "length" and generated < self.max_tokens:
            length = context_length(model)
            note(f"the model's context of {length:,} tokens is full, so the output ends here")


def generation_options(leave_out: Collection[str] = ()) -> Decorator:
    """The options of :class:`GenerationSettings`; a command gets it as ``generation``."""
    return all_of(
        options_of(DraftingOptions, "drafting", "Drafting", leave_out),
        options_of(SamplingParams, "sampling", "Sampling"),
        options_of(CacheOptions, "caches", "Memory"),
        options_of(GenerationSettings, "generation", leave_out=leave_out),
    )


def without_first_space(applies: bool) -> Callable[[GenerationResponse], GenerationResponse]:
    """Make a function that takes an answer's responses in order and drops its leading space.

    Args:
        applies: whether the tokenizer puts a space there; if not, the responses stay unchanged.
    """
    left = applies

    def trimmed(response: GenerationResponse) -> GenerationResponse:
        nonlocal left
        if left and response.text:
            left = False
            return replace(response, text=response.text.removeprefix(" "))
        return response

    return trimmed


def room_for(longest: int | None, n_prompt: int, max_tokens: int) -> int:
    """How many tokens an output may have: at least one.

    Args:
        longest: the model's context length in tokens; None if unknown.
        max_tokens: the limit that the user set.
    """
    return max_tokens if longest is None else max(1, min(max_tokens, longest - n_prompt))
