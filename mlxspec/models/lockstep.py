"""What a model does that is split over several machines, it does on all of them.

Such a model carries a ``leader``, a :class:`mlxspec.distributed.leader.Leader`; others have none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import mlx.nn as nn

from .cache_options import CacheOptions
from .target import Target
from .tier import Tier

Result = TypeVar("Result")


def target_for(
    model: nn.Module,
    tier: Tier,
    vocab_size: int,
    options: CacheOptions | None = None,
    cache: Sequence[Any] | None = None,
) -> Target:
    """A :class:`Target` of a model, on all machines over which the model is split.

    The arguments are those of :class:`Target`.

    Raises:
        OptionError: caches are lent to a model that is split.
    """
    leader = getattr(model, "leader", None)
    make = leader.target if leader else Target
    return make(model, tier, vocab_size, options, cache)


def together(function: Callable[..., Result], model: nn.Module, *args: Any) -> Result:
    """Call a function that runs forwards of a model, on all machines over which it is split.

    Args:
        function: one of :data:`mlxspec.distributed.follower.TOGETHER`.
        model: its first argument.
        args: its others, such as JSON holds.
    """
    leader = getattr(model, "leader", None)
    return leader.run(function, model, *args) if leader else function(model, *args)
