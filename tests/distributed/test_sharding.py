from types import SimpleNamespace
from typing import Any, cast

import pytest
from mlx_lm.models.gpt2 import Model, ModelArgs

from mlxspec.distributed.ranks import split
from mlxspec.engine.loaded_model import LoadedModel
from mlxspec.errors import LoadError


def test_an_architecture_that_mlx_lm_cannot_split_is_refused_by_name() -> None:
    args = ModelArgs("gpt2", 32, 16, 2, 1, 32, 1e-5, 8)
    two_ranks = cast(Any, SimpleNamespace(size=lambda: 2, rank=lambda: 0))
    with pytest.raises(LoadError, match=r"^some/model: .*'gpt2'.*; run it without mlx\.launch$"):
        split(LoadedModel(Model(args)), two_ranks, "some/model")
