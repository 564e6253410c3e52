from typing import Any, cast

import pytest
from mlx_lm.models.cache import make_prompt_cache

from mlxspec.distributed.ranks import Leader
from mlxspec.errors import OptionError
from mlxspec.generation.decoder import Decoder
from tests.support.rank import PROMPT, SETTINGS


def test_a_prompt_cache_is_refused_where_the_model_is_split(small_model: Any) -> None:
    decoder = Decoder(small_model)
    decoder.model.leader = Leader(cast(Any, None), cast(Any, Silent()))
    cache = make_prompt_cache(decoder.model)
    with pytest.raises(OptionError, match="not split over several machines"):
        list(decoder.decode(PROMPT, SETTINGS["plain"].drafter(), prompt_cache=cache))


class Silent:
    """A channel to no other rank."""

    def send(self, *message: Any) -> None:
        pass
