"""One model split over several machines by MLX's distributed engine.

``mlx.launch`` starts the same command once per machine, as ranks 0, 1, and so on. Rank 0, the
leader, works as it would alone: it plans, drafts, samples, prints and serves. Each operation on a
model or its caches is first sent to the other ranks, the followers, which repeat it on their own
parts: forwards of one or several sequences, commits, rewinds, copies of prefixes. Only rank 0 makes
decisions: the followers know nothing of requests, drafters and sampling.

Inside a forward, mlx-lm's layers exchange values: sharded models in each layer (tensor parallel),
pipelines between the ranks' layers. The leader's messages use TCP connections of their own. So they
do not wait for a running forward, and a dead or hanging rank is noticed even while MLX waits for
it.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

from .launch import launched_rank

if TYPE_CHECKING:
    from .ranks import Leader


def leading() -> AbstractContextManager[Leader | None]:
    """Join the ranks that ``mlx.launch`` has started; only rank 0 runs the block.

    Returns:
        a context with the leader, or with None in a process that ``mlx.launch`` did not start.
        Entering it raises MlxspecError if the ranks cannot be connected.
    """
    if launched_rank() is None:
        return nullcontext()
    from .ranks import taking_part

    return taking_part()
