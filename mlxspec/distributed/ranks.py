"""The ranks of a split model: rank 0 leads, and the others repeat its forwards."""

from __future__ import annotations

import signal
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.generate import generation_stream, wired_limit

from ..drafting.drafter import DraftTree
from ..engine.capability import chunk_error, rounding_noise, row_error, tree_agrees
from ..engine.params import CacheOptions
from ..engine.target import Capability, Target, vocabulary_size
from ..errors import DistributedError, LoadError, MlxspecError, OptionError
from ..models.model import load
from .channel import Channel, meet
from .launch import end_with, uninterrupted

if TYPE_CHECKING:
    from mlx_lm.tokenizer_utils import TokenizerWrapper


def load_shard(
    path_or_repo: str | Path, group: mx.distributed.Group
) -> tuple[nn.Module, TokenizerWrapper]:
    """Load this rank's part of a model, which mlx-lm's ``shard`` splits over the ranks of a group.

    Weights are read one after another, and only this rank's part of each stays in memory.

    Args:
        path_or_repo: as for :func:`mlxspec.load`; every rank has or downloads the files.
        group: the ranks.

    Raises:
        LoadError: the model cannot be read, or cannot be split over this many ranks.
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
    """Replace a model's layers by sharded ones, without evaluating them.

    Raises:
        LoadError: mlx-lm cannot split this architecture, or its heads over this many ranks.
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
        for key, part in _numbers(model).items():
            before = whole.get(key, part)
            repeated = part == 1 and size % before == 0  # heads are copied if there are too few
            # With a remainder the model would run, but compute something else.
            if part not in (before, before / size) and not repeated:
                raise ValueError(f"{' '.join(key)}: {before} divided by {size}")
        vocabulary_size(model)  # builds a forward, which fails if other shapes do not divide
    except (AssertionError, ValueError, RuntimeError, ZeroDivisionError) as error:
        raise LoadError(
            f"{name}: its heads or layers cannot be split into {size} equal parts; use a number "
            "of ranks that divides its key-value heads"
        ) from error


def _numbers(model: nn.Module) -> dict[tuple[str, str], int]:
    """The integers of all modules, such as heads and dimensions, by module and name."""
    return {
        (path, name): value
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if type(value) is int
    }


def is_known(tree: DraftTree) -> bool:
    """Whether all ranks know the rows' tokens: a pipelined token is only in rank 0's MLX."""
    return tree.tokens[0] >= 0


def share(token: mx.array | None) -> mx.array:
    """Rank 0's choice of a pipelined token, of shape (1,), at every rank; the others pass None.

    The token is never read into Python. Ranks cannot choose for themselves, because the logits of
    different chips need not be equal.
    """
    own = mx.zeros((1,), mx.uint32) if token is None else token.astype(mx.uint32)
    return mx.distributed.all_sum(own)


def wait_for_all() -> None:
    """Wait for every rank, on the CPU: a GPU would time out while a rank reads a slow disk."""
    mx.eval(mx.distributed.all_sum(mx.array(1.0), stream=mx.cpu))


Result = TypeVar("Result")


class Leader:
    """Rank 0's end of the channel. Models that it loads have it as their ``leader``.

    Args:
        group: the ranks.
        channel: the channel to the followers.
    """

    def __init__(self, group: mx.distributed.Group, channel: Channel) -> None:
        self.group = group
        self._channel = channel
        self._numbers = count()
        self._closed: list[int] = []

    def load(self, path_or_repo: str | Path) -> tuple[nn.Module, TokenizerWrapper]:
        """Load a model split over all ranks; each rank loads its own part.

        Raises:
            LoadError: as :func:`.ranks.load_shard`.
        """
        self._channel.send("load", str(path_or_repo))
        model, tokenizer = load_shard(path_or_repo, self.group)
        wait_for_all()
        model.leader = self
        return model, tokenizer

    def target(
        self,
        model: nn.Module,
        capability: Capability,
        vocab_size: int,
        options: CacheOptions | None = None,
        cache: Sequence[Any] | None = None,
    ) -> LeadingTarget:
        """Make a target at every rank, with the arguments of :class:`Target`.

        Raises:
            OptionError: there is a prompt cache, which would hold a whole model's keys and values.
        """
        if cache is not None:
            raise OptionError(
                "a prompt cache is not split over several machines as the model is: leave it out, "
                "or run without mlx.launch"
            )
        number = next(self._numbers)
        options = options or CacheOptions()
        self.send("open", number, capability.value, vocab_size, asdict(options))
        target = LeadingTarget(self, number, model, capability, vocab_size, options)
        weakref.finalize(target, self._closed.append, number)
        return target

    def run(self, function: Callable[..., Result], model: nn.Module, *args: Any) -> Result:
        """Call a function of :data:`.ranks.TOGETHER` with the model, at every rank."""
        with uninterrupted(), mx.stream(generation_stream):
            self.send("run", function.__name__, *args)
            return function(model, *args)

    def send(self, *message: Any) -> None:
        """Send the followers a command."""
        while self._closed:
            self._channel.send("close", self._closed.pop())
        self._channel.send(*message)


def _repeated(name: str, at_followers: str = "") -> Any:
    """A method of :class:`Target` that the followers repeat; its arguments are JSON values."""

    def method(self: LeadingTarget, *args: Any) -> None:
        with self._sending(at_followers or name, *args):
            getattr(Target, name)(self, *args)

    return method


class LeadingTarget(Target):
    """A target whose forwards and cache changes the followers repeat.

    Interrupts are delayed until a command sent to the followers is also done here.
    """

    def __init__(self, leader: Leader, number: int, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._leader = leader
        self._number = number
        self._sent = False

    @contextmanager
    def _sending(self, method: str, *args: Any) -> Iterator[None]:
        """Send a call to the followers, unless it is part of a call that they already repeat."""
        if self._sent:
            yield
            return
        with uninterrupted(), mx.stream(generation_stream):
            self._leader.send(method, self._number, *args)
            self._sent = True
            try:
                yield
            finally:
                self._sent = False

    def forward(self, tokens: mx.array, tree: DraftTree) -> mx.array:
        """As :meth:`Target.forward`, but dispatched: the other ranks wait for its values."""
        with self._sending("forward", tree.tokens, tree.parents):
            if not is_known(tree):
                tokens = share(tokens)
            logits = super().forward(tokens, tree)
            mx.async_eval(logits)
        return logits

    _prefill_chunk = _repeated("_prefill_chunk")
    _change_for_steps = _repeated("_change_for_steps")
    commit_moved = _repeated("commit_moved", "commit")  # the leader has moved its rows already
    truncate = _repeated("truncate")
    flush_pending = _repeated("flush_pending")


TOGETHER: dict[str, Callable[..., Any]] = {
    function.__name__: function
    for function in (chunk_error, rounding_noise, row_error, tree_agrees)
}
"""The functions that :meth:`.ranks.Leader.run` may call."""

_FORWARDS_BETWEEN_CLEARING = 256  # as in the decoding loop: outgrown buffers go to the system
_SECONDS_TO_NOTICE = 3.0  # for the channel to notice that a rank is gone, after an error in MLX


@contextmanager
def taking_part() -> Iterator[Leader | None]:
    """Form the group of the ranks that ``mlx.launch`` has started.

    Only rank 0 runs the block. The other ranks follow it, and end when it ends.

    Yields:
        the leader, or None in a group of one.

    Raises:
        DistributedError: the ranks cannot be connected.
    """
    try:
        group = mx.distributed.init()
    except (RuntimeError, ValueError) as error:
        raise DistributedError(f"the ranks cannot be connected: {error}") from error
    if group.size() == 1:
        yield None
        return
    if group.rank() > 0:
        _follow_to_the_end(group)
    channel = meet(group)
    try:
        yield Leader(group, channel)
    except RuntimeError:
        time.sleep(_SECONDS_TO_NOTICE)
        raise
    finally:
        # The followers may still take part in a running forward.
        mx.synchronize(generation_stream)
        channel.close()


def _follow_to_the_end(group: mx.distributed.Group) -> None:
    """Follow rank 0 until the process ends, with its farewell or with an error line."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # rank 0 gets it too, and acts on it
    channel = None
    try:
        channel = meet(group)
        _follow(group, channel)
    except Exception as error:
        if channel:
            time.sleep(_SECONDS_TO_NOTICE)  # rank 0 may have the same error, and report it
        reason = "" if isinstance(error, MlxspecError) else f"{type(error).__name__}: "
        end_with(f"Error: rank {group.rank()}: {reason}{error}")


def _follow(group: mx.distributed.Group, channel: Channel) -> None:
    """Run the leader's commands on this rank's part of the model, until the process ends.

    Raises:
        LoadError: this rank cannot load its part of the model.
    """
    targets: dict[int, Target] = {}
    forwards = count(1)
    with ExitStack() as wired, mx.stream(generation_stream):
        while True:
            match channel.receive():
                case ["load", name]:
                    model, _ = load_shard(name, group)
                    wired.enter_context(wired_limit(model, [generation_stream]))
                    wait_for_all()
                case ["run", name, *args]:
                    TOGETHER[name](model, *args)
                case ["open", number, capability, vocab_size, options]:
                    targets[number] = Target(
                        model, Capability(capability), vocab_size, CacheOptions(**options)
                    )
                case ["close", number]:
                    del targets[number]
                case ["forward", number, tokens, parents]:
                    tree = DraftTree(tuple(tokens), tuple(parents))
                    rows = mx.array(tree.tokens) if is_known(tree) else share(None)
                    # The other ranks need its values; this rank does not read the logits.
                    mx.async_eval(targets[number].forward(rows, tree))
                    if next(forwards) % _FORWARDS_BETWEEN_CLEARING == 0:
                        mx.clear_cache()
                # A generation that was never closed may truncate a closed target when it is
                # garbage-collected.
                case [method, number, *args] if number in targets:
                    getattr(targets[number], method)(*args)
