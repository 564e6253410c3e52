"""The public names and their modules: ``__init__.py`` reads this list, as type checkers do."""

from .compat import Augmentation as Augmentation
from .compat import augment as augment
from .compat import batch_generate as batch_generate
from .compat import generate as generate
from .compat import stream_generate as stream_generate
from .corpus.answer_index import AnswerIndex as AnswerIndex
from .drafting.accept import VerifiedStep as VerifiedStep
from .drafting.drafter import Drafter as Drafter
from .drafting.lookahead import LookaheadDrafter as LookaheadDrafter
from .drafting.prompt_lookup import PromptLookupDrafter as PromptLookupDrafter
from .drafting.tree import DraftTree as DraftTree
from .engine.params import Constraint as Constraint
from .engine.params import SamplingParams as SamplingParams
from .engine.params import pure as pure
from .engine.prompt_cache import load_prompt_cache as load_prompt_cache
from .engine.prompt_cache import save_prompt_cache as save_prompt_cache
from .errors import FileError as FileError
from .errors import LoadError as LoadError
from .errors import MlxspecError as MlxspecError
from .errors import OptionError as OptionError
from .errors import PromptError as PromptError
from .generation.decoder import AutoDecoder as AutoDecoder
from .generation.decoder import Decoder as Decoder
from .generation.decoder import LookaheadDecoder as LookaheadDecoder
from .generation.decoder import PromptLookupDecoder as PromptLookupDecoder
from .generation.options import GenerationOptions as GenerationOptions
from .generation.response import GenerationResponse as GenerationResponse
from .generation.response import GenerationResult as GenerationResult
from .generation.response import SpeculationStats as SpeculationStats
from .generation.response import TokenLogprobs as TokenLogprobs
from .generation.session import Session as Session
from .models.model import load as load

__version__: str
