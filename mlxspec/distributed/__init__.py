"""One model split over several machines by MLX's distributed engine.

``mlx.launch`` starts the same command once per machine, as ranks 0, 1, and so on. Rank 0, the
leader, works as it would alone: it plans, drafts, samples, prints and serves. Whatever it does with
a model or its caches, it first sends to the other ranks, the followers, which do it with their own
parts: forwards of one or several sequences, commits, rewinds, copies of prefixes. Only rank 0
decides anything: the followers know no request, no drafter and no sampling.

Inside a forward mlx-lm's layers exchange the values: sharded ones in each layer (tensor parallel),
those of a pipeline between the ranks' layers. The leader's messages have separate TCP connections.
So they do not wait behind a running forward, and a rank that dies or stops is noticed, whatever MLX
is waiting for.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

from .launch import launched_rank

if TYPE_CHECKING:
    from .ranks import Leader


def leading() -> AbstractContextManager[Leader | None]:
    """Take part in the ranks that ``mlx.launch`` has started; only rank 0 runs the block.

    Returns:
        a context with the leader; with None in a process that ``mlx.launch`` has not started.
        Entering it raises MlxspecError if the ranks cannot be connected.
    """
    if launched_rank() is None:
        return nullcontext()
    from .ranks import taking_part

    return taking_part()
