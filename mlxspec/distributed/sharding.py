"""What every rank does alike: load its share of the weights, exchange a token, wait."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from ..drafting.drafter import DraftTree
from ..engine.target import vocabulary_size
from ..errors import LoadError
from ..models.model import load

if TYPE_CHECKING:
    from mlx_lm.tokenizer_utils import TokenizerWrapper


def load_shard(
    path_or_repo: str | Path, group: mx.distributed.Group
) -> tuple[nn.Module, TokenizerWrapper]:
    """Load a model split over the ranks of a group, as mlx-lm's ``shard`` splits it.

    Weights are read one after another, and only this rank's part of each stays in memory.

    Args:
        path_or_repo: as for :func:`mlxspec.load`; every rank has or downloads the files.
        group: the ranks.

    Raises:
        LoadError: the model cannot be read, or not be split into so many parts.
    """
    model, tokenizer = load(path_or_repo, lazy=True)
    split(model, group, str(path_or_repo))
    try:
        for _, parameter in tree_flatten(model.parameters()):
            mx.eval(parameter)
    except RuntimeError as error:
        raise LoadError(f"{path_or_repo}: the weights cannot be read ({error})") from error
    return model, tokenizer


def split(model: nn.Module, group: mx.distributed.Group, name: str) -> None:
    """Replace a model's layers by sharded ones; nothing is evaluated.

    Raises:
        LoadError: mlx-lm cannot split this architecture, or its heads not into so many parts.
    """
    size = group.size()
    if not hasattr(model, "shard"):
        kind = getattr(model, "model_type", type(model).__name__)
        raise LoadError(
            f"{name}: mlx-lm cannot split the architecture {kind!r} over several machines; "
            "run it without mlx.launch"
        )
    whole = _numbers(model)
    try:
        model.shard(group)
        _check_numbers(whole, _numbers(model), size)
        vocabulary_size(model)  # builds a forward, whose shapes show what else does not divide
    except (AssertionError, ValueError, RuntimeError, ZeroDivisionError) as error:
        raise LoadError(
            f"{name}: its heads or layers cannot be split into {size} equal parts; use a number "
            "of ranks that divides its key-value heads"
        ) from error


def _numbers(model: nn.Module) -> dict[tuple[str, str], int]:
    """The whole numbers that the modules hold by module and name: heads, groups, dimensions."""
    return {
        (path, name): value
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if type(value) is int
    }


def _check_numbers(
    whole: dict[tuple[str, str], int], part: dict[tuple[str, str], int], size: int
) -> None:
    """Refuse what mlx-lm has divided with a remainder: the model would run with other results.

    Raises:
        ValueError: there was a remainder.
    """
    for key in whole.keys() & part.keys():
        before, after = whole[key], part[key]
        repeated = after == 1 and size % before == 0  # fewer heads than ranks, and copies of them
        if after not in (before, before / size) and not repeated:
            raise ValueError(f"{' '.join(key)}: {before} divided by {size}")


def is_known(tree: DraftTree) -> bool:
    """Whether the rows' tokens are known to all ranks: a pipelined one is only in rank 0's MLX."""
    return tree.tokens[0] >= 0


def share(token: mx.array | None) -> mx.array:
    """Rank 0's choice of a pipelined token, (1,), at every rank; the others pass None.

    It never becomes a number in Python on its way. Ranks cannot choose for themselves, because
    the logits of different chips need not be equal.
    """
    own = mx.zeros((1,), mx.uint32) if token is None else token.astype(mx.uint32)
    return mx.distributed.all_sum(own)


def wait_for_all() -> None:
    """Wait until every rank has come here: a GPU gives up earlier than a slow disk is done."""
    mx.eval(mx.distributed.all_sum(mx.array(1.0), stream=mx.cpu))
