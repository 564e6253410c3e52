"""The ranks of a split model: rank 0 leads, and the others do with their parts what it does."""

from __future__ import annotations

import logging
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar, cast

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.generate import generation_stream, wired_limit
from mlx_lm.models.cache import make_prompt_cache

from ..drafting.drafter import DraftTree
from ..engine.capability import (
    joint_agrees,
    rounding_noise,
    rows_agree,
    tree_agrees,
)
from ..engine.costs import forward_memory, least_free_memory
from ..engine.joint import Joint, JointMode, JointRows
from ..engine.params import CacheOptions
from ..engine.target import Capability, Target, vocabulary_size
from ..errors import DistributedError, LoadError, MlxspecError, OptionError
from ..models.model import load
from .channel import Channel, Message, meet
from .launch import end_with, uninterrupted

if TYPE_CHECKING:
    from mlx_lm.tokenizer_utils import TokenizerWrapper

_log = logging.getLogger(__name__)


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
    """Keep only this rank's part of a model, without evaluating it.

    Layers are replaced by sharded ones (tensor parallel) where mlx-lm's model has ``shard``. Where
    it has only ``pipeline``, each rank keeps some of the layers, and the ranks take turns.

    Raises:
        LoadError: mlx-lm cannot split this architecture, or its heads or layers over this many
            ranks.
    """
    size = group.size()
    model.is_pipeline = not hasattr(model, "shard")
    if model.is_pipeline and not hasattr(getattr(model, "model", None), "pipeline"):
        kind = getattr(model, "model_type", type(model).__name__)
        raise LoadError(
            f"{name}: mlx-lm cannot split the architecture {kind!r} over several machines; "
            "run it without mlx.launch"
        )
    model.split_over = group
    kinds = {type(cache) for cache in make_prompt_cache(model)}
    whole = _numbers(model)
    try:
        if model.is_pipeline:
            model.model.pipeline(group)
            # Rank 0 finds out by its own caches what all can do.
            if {type(cache) for cache in make_prompt_cache(model)} != kinds:
                raise ValueError("a part has not all kinds of layers")
        else:
            model.shard(group)
            for key, part in _numbers(model).items():
                before = whole.get(key, part)
                repeated = part == 1 and size % before == 0  # heads are copied if too few
                # With a remainder the model would run, but compute something else.
                if part not in (before, before / size) and not repeated:
                    raise ValueError(f"{' '.join(key)}: {before} divided by {size}")
        vocabulary_size(model)  # builds a forward, which fails if other shapes do not divide
    except (AssertionError, ValueError, RuntimeError, ZeroDivisionError) as error:
        what = "layers" if model.is_pipeline else "key-value heads"
        raise LoadError(
            f"{name}: its heads or layers cannot be split into {size} equal parts; use a number "
            f"of ranks that divides its {what}"
        ) from error


def _numbers(model: nn.Module) -> dict[tuple[str, str], int]:
    """The integers of all modules, such as heads and dimensions, by module and name."""
    return {
        (path, name): value
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if type(value) is int
    }


def share(trees: Sequence[DraftTree], tokens: Sequence[mx.array] = ()) -> list[mx.array]:
    """The tokens of each tree, (rows,), at every rank.

    A pipelined token is only in rank 0's MLX. It is never read into Python. Ranks cannot choose for
    themselves, because the logits of different chips need not be equal.

    Args:
        trees: with tokens that are all known, or of one row each, none of which is known.
        tokens: of each tree, at rank 0; the others pass none.
    """
    if trees[0].tokens[0] >= 0:
        return [mx.array(tree.tokens) for tree in trees]
    own = mx.concatenate([*tokens]) if tokens else mx.zeros(len(trees))
    shared = mx.distributed.all_sum(own.astype(mx.uint32))
    # In a pipeline, no value of rank 0's forward depends on it, and the others would wait.
    mx.async_eval(shared)
    return [shared[n : n + 1] for n in range(len(trees))]


def wait_for_all() -> None:
    """Wait for every rank, on the CPU: a GPU would time out while a rank reads a slow disk."""
    mx.eval(mx.distributed.all_sum(mx.array(1.0), stream=mx.cpu))


Result = TypeVar("Result")


class Leader:
    """Rank 0's end of the channel. Models that it loads have it as their ``leader``.

    All that rank 0 changes in the memory of MLX, the followers change, too: models, targets and
    joints have numbers, by which the leader names them when it sends what is done with them.

    Threads take turns, since MLX runs the operations of each thread by themselves, and the
    followers have one thread only.

    Args:
        group: the ranks.
        channel: the channel to the followers.
    """

    def __init__(self, group: mx.distributed.Group, channel: Channel) -> None:
        self.group = group
        self.channel = channel
        self._numbers = count()
        self._dropped: list[int] = []
        self._turn = threading.RLock()
        self._thread = threading.get_ident()
        self._dispatched = mx.array(0)

    def load(self, path_or_repo: str | Path) -> tuple[nn.Module, TokenizerWrapper]:
        """Load a model split over all ranks; each rank loads its own part.

        Raises:
            LoadError: as :func:`.ranks.load_shard`.
        """
        number = next(self._numbers)
        with self._turn:
            mx.eval(self._dispatched)
            self.send("load", number, str(path_or_repo))
            model, tokenizer = load_shard(path_or_repo, self.group)
            wait_for_all()
        model.leader, model.number = self, number
        weakref.finalize(model, self._dropped.append, number)
        return model, tokenizer

    def target(
        self,
        model: nn.Module,
        capability: Capability,
        vocab_size: int,
        options: CacheOptions | None = None,
        cache: Sequence[Any] | None = None,
        *kept: int,
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
        options = options or CacheOptions()
        target = LeadingTarget(self, model, capability, vocab_size, options, None, *kept)
        own = capability.value, vocab_size, asdict(options), *kept
        self.open(target, "target", model.number, *own)
        return target

    def joint(self, model: nn.Module, mode: JointMode, spare: int | None = None) -> LeadingJoint:
        """Make a joint at every rank, with the arguments of :class:`Joint`."""
        joint = LeadingJoint(self, model, mode, spare)
        self.open(joint, "joint", model.number, mode.value, spare)
        return joint

    def open(self, led: LeadingTarget | LeadingJoint, *how: Any) -> None:
        """Let the followers make what has been made here, and do with it what is done here."""
        led.number = next(self._numbers)
        self.send(*how, led.number)
        weakref.finalize(led, self._dropped.append, led.number)
        led.leads = True

    def run(self, function: Callable[..., Result], model: nn.Module, *args: Any) -> Result:
        """Call a function of :data:`.ranks.TOGETHER` with the model, at every rank."""
        with self.sending("run", function.__name__, model.number, *args):
            return function(model, *args)

    def expect_loss(self) -> None:
        """After an error in MLX: wait for the channel to notice that a rank is gone, if one is."""
        time.sleep(_SECONDS_TO_NOTICE)

    def fail(self, error: Exception) -> NoReturn:
        """End all ranks after an error in what they do together.

        The followers wait for values that will not come, and whatever is sent waits behind them.
        """
        self.expect_loss()
        _log.error("rank 0 has failed", exc_info=error)
        self.channel.end(_error_line(0, error))

    def dispatch(self, logits: mx.array) -> None:
        """Compute logits without waiting: the other ranks wait for values of the same forward."""
        mx.async_eval(logits)
        self._dispatched = logits

    @contextmanager
    def sending(self, *message: Any) -> Iterator[None]:
        """Send a command; in the block it is done here, to its end even if interrupted.

        A ValueError, such as that of a window that cannot be cut, is the same at every rank. After
        other errors all end.
        """
        with uninterrupted(), self._turn, mx.stream(generation_stream):
            if self._thread != threading.get_ident():
                mx.eval(self._dispatched)
                self._thread = threading.get_ident()
            self.send(*message)
            try:
                yield
            except ValueError:
                raise
            except Exception as error:
                self.fail(error)

    def send(self, *message: Any) -> None:
        """Send the followers a command that computes nothing."""
        with self._turn:
            while self._dropped:
                self.channel.send("drop", self._dropped.pop())
            self.channel.send(*message)


class _Led:
    """What the followers have, too.

    Attributes:
        number: its number, once the followers have it.
        leads: whether calls are sent: not while it is made, nor inside a call that was sent.
    """

    number = -1
    leads = False
    _leader: Leader

    @contextmanager
    def _sending(self, others: Sequence[_Led], *message: Any) -> Iterator[None]:
        """Send a call, unless it is part of one that was sent.

        Args:
            others: what the call uses besides this.
            message: the command.
        """
        if not self.leads:
            yield
            return
        with self._leader.sending(*message):
            try:
                for one in (self, *others):
                    one.leads = False
                yield
            finally:
                for one in (self, *others):
                    one.leads = True


def _repeated(name: str, at_followers: str = "") -> Any:
    """A method of :class:`Target` that the followers repeat; its arguments are JSON values."""

    def method(self: LeadingTarget, *args: Any) -> None:
        with self._sending((), at_followers or name, self.number, *args):
            getattr(Target, name)(self, *args)

    return method


class LeadingTarget(_Led, Target):
    """A target whose forwards and cache changes the followers repeat."""

    def __init__(self, leader: Leader, *args: Any) -> None:
        super().__init__(*args)
        self._leader = leader

    def forward(self, tokens: mx.array, tree: DraftTree) -> mx.array:
        """As :meth:`Target.forward`, but dispatched."""
        with self._sending((), "forward", None, _rows([(self, tree)])):
            (tokens,) = share([tree], [tokens])
            logits = super().forward(tokens, tree)
            self._leader.dispatch(logits)
        return logits

    def fork(self, length: int, room: int) -> Target:
        forked = super().fork(length, room)
        assert isinstance(forked, LeadingTarget)
        self._leader.open(forked, "fork", self.number, length, room)
        return forked

    def _beside(self, cache: Sequence[Any]) -> Target:
        return LeadingTarget(self._leader, *self._as_this(cache))

    _prefill_chunk = _repeated("_prefill_chunk")
    _change_for_steps = _repeated("_change_for_steps")
    _quantize_if_due = _repeated("_quantize_if_due")
    mark = _repeated("mark")
    commit_moved = _repeated("commit_moved", "commit")  # the leader has moved its rows already
    truncate = _repeated("truncate")
    rewind = _repeated("rewind")


class LeadingJoint(_Led, Joint):
    """A joint whose forwards the followers repeat; its targets are leading ones."""

    def __init__(self, leader: Leader, *args: Any) -> None:
        super().__init__(*args)
        self._leader = leader

    def forward(self, members: Sequence[JointRows]) -> tuple[mx.array, list[slice]]:
        """As :meth:`Joint.forward`, but dispatched."""
        targets, tokens, trees = zip(*members, strict=True)
        named = _rows(zip(targets, trees, strict=True))
        with self._sending(targets, "forward", self.number, named):
            rows = map(JointRows, targets, share(trees, tokens), trees)
            logits, spans = super().forward([*rows])
            self._leader.dispatch(logits)
        return logits, spans

    def join(self, target: Any) -> None:
        with self._sending([target], "join", self.number, target.number):
            super().join(target)

    def leave(self, target: Any, keep: bool = True) -> None:
        with self._sending([target], "leave", self.number, target.number, keep):
            super().leave(target, keep)


def _rows(members: Iterable[tuple[Any, DraftTree]]) -> list[tuple[Any, ...]]:
    """The rows of targets, for the followers' forward."""
    return [(target.number, tree.tokens, tree.parents) for target, tree in members]


TOGETHER: dict[str, Callable[..., Any]] = {
    function.__name__: function
    for function in (
        *(joint_agrees, rounding_noise, rows_agree, tree_agrees),
        *(forward_memory, least_free_memory),
    )
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
    leader = Leader(group, channel)
    try:
        yield leader
    except RuntimeError:
        leader.expect_loss()
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
        follower = Follower(group)
        with mx.stream(generation_stream):
            while True:
                follower.obey(channel.receive())
    except Exception as error:
        if channel:
            time.sleep(_SECONDS_TO_NOTICE)  # rank 0 may have the same error, and report it
        end_with(_error_line(group.rank(), error))


def _error_line(rank: int, error: Exception) -> str:
    """What a rank says of the error that ends it."""
    kind = "" if isinstance(error, MlxspecError) else f"{type(error).__name__}: "
    return f"Error: rank {rank}: {kind}{error}"


class Follower:
    """Does on this rank's part of the models what the leader sends.

    Args:
        group: the ranks.
    """

    def __init__(self, group: mx.distributed.Group) -> None:
        self._group = group
        self.known: dict[int, Any] = {}
        """Models, targets and joints, by their numbers."""
        self._wired = ExitStack()
        self._forwards = count(1)

    def obey(self, message: Message) -> None:
        """Do what one message says.

        Raises:
            LoadError: this rank cannot load its part of a model.
        """
        known = self.known
        match message:
            case ["load", number, name]:
                model, _ = load_shard(name, self._group)
                self._wired.enter_context(wired_limit(model, [generation_stream]))
                known[number] = model
                wait_for_all()
            case ["run", name, model, *args]:
                TOGETHER[name](known[model], *args)
            case ["target", model, capability, vocab_size, options, *kept, number]:
                how = Capability(capability), vocab_size, CacheOptions(**options), None
                known[number] = Target(known[model], *how, *kept)
            case ["joint", model, mode, spare, number]:
                known[number] = Joint(known[model], JointMode(mode), spare)
            case ["fork", target, length, room, number]:
                known[number] = known[target].fork(length, room)
            case ["drop", number]:
                del known[number]
            case ["forward", joint, members]:
                # The other ranks need its values; this rank does not read the logits.
                mx.async_eval(self._forward(joint, members))
                if next(self._forwards) % _FORWARDS_BETWEEN_CLEARING == 0:
                    mx.clear_cache()
            case ["join" | "leave" as method, joint, target, *args]:
                getattr(known[joint], method)(known[target], *args)
            # A generation that was never closed may truncate a target that was dropped when it is
            # garbage-collected.
            case [method, number, *args] if number in known:
                with suppress(ValueError):  # the leader has the same, and knows what to do
                    getattr(known[number], method)(*args)

    def _forward(self, joint: int | None, members: Sequence[Any]) -> mx.array:
        """The logits of a forward."""
        targets = [self.known[number] for number, *_ in members]
        trees = [DraftTree(tuple(tokens), tuple(parents)) for _, tokens, parents in members]
        tokens = share(trees)
        if joint is None:
            return cast(mx.array, targets[0].forward(tokens[0], trees[0]))
        logits, _ = self.known[joint].forward([*map(JointRows, targets, tokens, trees)])
        return cast(mx.array, logits)
