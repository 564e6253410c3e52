"""Objects that make a drafter for each generation, one class for each kind of decoder.

Importing this module does not import MLX, so the command line can check options quickly.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, ClassVar

from ..corpus.answer_index import AnswerIndex
from ..drafting.candidates import Source
from ..drafting.drafter import Drafter, checked_drafter
from ..drafting.experience import Experience
from ..drafting.lookahead import LookaheadDrafter
from ..drafting.p_accept import TokenClasses
from ..drafting.planner import Planner, trees_pay
from ..drafting.prompt_lookup import PromptLookupDrafter
from ..drafting.sources import DrafterSource
from ..drafting.suffix_source import SuffixSource

if TYPE_CHECKING:
    from typing import Self

    from mlx_lm.tokenizer_utils import TokenizerWrapper

    from ..engine.draft_model import DraftModel
    from ..engine.grammar import Grammar
    from ..engine.loaded_model import LoadedModel
    from ..models.heads import Head
    from .decoder import Decoder


@dataclass(frozen=True)
class DrafterFactory:
    """Makes a drafter for each generation; by default none, which is plain decoding.

    Attributes:
        maker: returns a generation's drafter; None for plain decoding.
    """

    maker: Callable[[], Drafter] | None = field(default=None, kw_only=True)
    short_names: ClassVar[Mapping[str, str]] = {}
    """Parameters that :meth:`mlxspec.Decoder.stream` takes by a second name, too."""

    def new(self) -> Drafter | None:
        """A new drafter; None for plain decoding."""
        return checked_drafter(self.maker()) if self.maker else None

    def make(self, decoder: Decoder, grammar: Grammar | None) -> Drafter | Planner | None:
        """Make the drafter of one generation.

        Args:
            decoder: the decoder whose model verifies the drafts.
            grammar: the grammar of a constrained output, or None. Planners draft the tokens that it
                forces.

        Returns:
            None for plain decoding.

        Raises:
            MlxspecError: ``maker`` did not return a drafter.
        """
        return self.new()

    def with_separate_memory(self, memory_tokens: int) -> Self:
        """A copy with an empty memory of ``memory_tokens`` tokens; itself if it has no memory."""
        return self

    def model_to_run(self, loaded: LoadedModel, tokenizer: TokenizerWrapper) -> LoadedModel:
        """The model that a decoder of ``loaded`` runs; both share their weights.

        Raises:
            LoadError, OptionError: a trained head or a draft model does not suit the model.
        """
        return loaded


@dataclass(frozen=True)
class PromptLookup(DrafterFactory):
    """Drafts from earlier occurrences of the last n-gram; see :class:`mlxspec.PromptLookupDecoder`.

    Raises:
        OptionError: a number is out of range.
    """

    n_draft: int = 10
    ngram_max: int = 3
    ngram_min: int = 1

    def __post_init__(self) -> None:
        self.new()

    def new(self) -> Drafter | None:
        if self.n_draft == 0:
            return None
        return PromptLookupDrafter(self.n_draft, self.ngram_max, self.ngram_min)


@dataclass(frozen=True)
class Lookahead(DrafterFactory):
    """Drafts the model's own guesses of the tokens ahead; see :class:`mlxspec.LookaheadDecoder`.

    Raises:
        OptionError: a size is out of range.
    """

    window_size: int = 7
    ngram_size: int = 5
    guess_set_size: int = 7
    pool_from_prompt: bool = True
    short_names: ClassVar[Mapping[str, str]] = {
        "W": "window_size",
        "N": "ngram_size",
        "G": "guess_set_size",
    }

    def __post_init__(self) -> None:
        self.new()

    def new(self) -> LookaheadDrafter:
        return LookaheadDrafter(
            self.window_size, self.ngram_size, self.guess_set_size, self.pool_from_prompt
        )


@dataclass(frozen=True)
class Auto(DrafterFactory):
    """Drafts text that repeats, and whatever else pays; see :class:`mlxspec.AutoDecoder`.

    Attributes:
        memory: the memory of earlier outputs, if outputs are remembered.
        extra: makes a further drafter for each generation.
        prediction: token ids that the output is expected to follow.
        head: a trained head for the decoder's model, which drafts where text drafts are unlikely to
            be right.
        draft_model: a small model that drafts there instead.
    """

    memory: AnswerIndex | None = None
    extra: Callable[[], Drafter] | None = None
    prediction: Sequence[int] = ()
    head: Head | None = None
    draft_model: DraftModel | None = None

    def model_to_run(self, loaded: LoadedModel, tokenizer: TokenizerWrapper) -> LoadedModel:
        from ..engine.heads import attach_head

        if self.draft_model:
            self.draft_model.check_vocabulary(loaded.vocab_size, len(tokenizer))
            _ = self.draft_model.experience  # measured before threads can disturb each other

        trained = attach_head(self.head, loaded.model) if self.head else None
        return trained.new_model() if trained else loaded

    def sources(
        self, classes: TokenClasses, experience: Experience, extra: Drafter | None = None
    ) -> list[Source]:
        """What a generation drafts from, including ``extra``, a drafter of the user's own."""
        look_ups = SuffixSource(classes, experience, memory=self.memory, prediction=self.prediction)
        return [look_ups] if extra is None else [look_ups, DrafterSource(extra)]

    def with_separate_memory(self, memory_tokens: int) -> Self:
        return replace(self, memory=AnswerIndex(memory_tokens)) if self.memory else self

    def make(self, decoder: Decoder, grammar: Grammar | None) -> Planner:
        from ..engine.draft_model import DraftModelDrafts
        from ..engine.heads import HeadDrafts
        from ..engine.target import Capability

        if self.memory:
            self.memory.refresh()
        experience = decoder.experience if self.memory else Experience()
        costs = decoder.next_costs()
        planner = Planner(
            costs,
            self.sources(decoder.token_classes, experience, self.extra() if self.extra else None),
            branching=trees_pay(costs.curve) and decoder.loaded.capability is Capability.TREE,
            experience=experience,
        )
        planner.guide = grammar
        if self.draft_model:
            planner.head = DraftModelDrafts(self.draft_model)
        elif trained := decoder.loaded.trained_head:
            planner.head = HeadDrafts(trained, trained.experience)
        return planner


def drafter_maker(drafter: Drafter | Callable[[], Drafter]) -> Callable[[], Drafter]:
    """A function that returns a generation's drafter.

    Args:
        drafter: a class or function that makes drafters, or one drafter for all generations.

    Raises:
        MlxspecError: ``drafter`` is neither.
    """
    if callable(drafter) and not isinstance(drafter, Drafter):
        return drafter
    drafter = checked_drafter(drafter)
    return lambda: drafter
