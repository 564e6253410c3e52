"""The ranks of a split model: rank 0 leads, and the others do with their parts what it does."""

from __future__ import annotations

import json
import logging
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

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
from ..errors import LoadError, MlxspecError, OptionError
from ..models.model import load
from .channel import Channel, meet
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

    All that rank 0 changes in the memory of MLX, the followers change, too. Models, targets and
    joints have numbers, which stand for them in messages. A message is the name of one of the
    functions in :data:`REPEATED`, its arguments, and the number of its result, if that is kept.

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
        self._busy: set[int] = set()
        """The numbers of what takes part in the call that is being repeated."""
        self._turn = threading.RLock()
        self._thread = threading.get_ident()
        self._dispatched = mx.array(0)

    def load(self, path_or_repo: str | Path) -> tuple[nn.Module, TokenizerWrapper]:
        """Load a model split over all ranks; each rank loads its own part.

        Raises:
            LoadError: as :func:`.ranks.load_shard`.
        """
        number = next(self._numbers)
        with self.repeating(_load, str(path_or_repo), result=number):
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
        marks: int = 0,
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
        target = LeadingTarget(model, capability, vocab_size, options, None, marks)
        own = capability.value, vocab_size, asdict(options), marks
        self.share_result(target, _new_target, model, *own)
        return target

    def joint(self, model: nn.Module, mode: JointMode, spare: int | None = None) -> LeadingJoint:
        """Make a joint at every rank, with the arguments of :class:`Joint`."""
        joint = LeadingJoint(model, mode, spare)
        self.share_result(joint, _new_joint, model, mode.value, spare)
        return joint

    def share_result(
        self, made: LeadingTarget | LeadingJoint, function: Callable[..., Any], *args: Any
    ) -> None:
        """Let the followers make what this rank has made, and repeat what is done with it."""
        number = next(self._numbers)
        self.send(function, *args, result=number)
        weakref.finalize(made, self._dropped.append, number)
        made.number = number

    def run(self, function: Callable[..., Result], model: nn.Module, *args: Any) -> Result:
        """Call a function of :data:`REPEATED` with the model, at every rank."""
        with self.repeating(function, model, *args):
            return function(model, *args)

    def leads(self, made: LeadingTarget | LeadingJoint) -> bool:
        """Whether calls are repeated: not while it is made, nor inside a repeated call."""
        return made.number >= 0 and made.number not in self._busy

    def fail(self, error: Exception) -> NoReturn:
        """End all ranks after an error in what they do together.

        The followers wait for values that will not come, and whatever is sent waits behind them.
        """
        time.sleep(_SECONDS_TO_NOTICE)
        _log.error("rank 0 has failed", exc_info=error)
        self.channel.end(_error_line(0, error))

    def dispatch(self, logits: mx.array) -> None:
        """Compute logits without waiting: the other ranks wait for values of the same forward."""
        mx.async_eval(logits)
        self._dispatched = logits

    @contextmanager
    def repeating(
        self, function: Callable[..., Any], *args: Any, result: int | None = None
    ) -> Iterator[None]:
        """Send a call; in the block it is done here, to its end even if interrupted.

        A ValueError, such as that of a window that cannot be cut, is the same at every rank, and a
        model that cannot be loaded ends the command. After other errors all end.
        """
        with uninterrupted(), self._turn, mx.stream(generation_stream):
            if self._thread != threading.get_ident():
                mx.eval(self._dispatched)
                self._thread = threading.get_ident()
            began = self.send(function, *args, result=result) - self._busy
            self._busy |= began
            try:
                yield
            except (ValueError, LoadError):
                raise
            except Exception as error:
                self.fail(error)
            finally:
                self._busy -= began

    def send(self, function: Callable[..., Any], *args: Any, result: int | None = None) -> set[int]:
        """Let the followers call a function.

        Args:
            function: one of :data:`REPEATED`.
            args: its arguments: JSON values, ranges, and what has a number.
            result: the number of its result; None if it is not kept.

        Returns:
            the numbers among the arguments.
        """
        numbers = set()

        def as_json(value: Any) -> Any:
            if isinstance(value, range):
                return [*value]
            numbers.add(value.number)
            return {"number": value.number}

        given = [as_json(one) if isinstance(one, nn.Module) else one for one in args]  # a dict, too
        message = json.dumps([function.__qualname__, given, result], default=as_json)
        with self._turn:
            while self._dropped:
                self.channel.send(json.dumps(self._dropped.pop()))
            self.channel.send(message)
        return numbers


def _repeated(method: Callable[..., None], at_followers: Callable[..., None] | None = None) -> Any:
    """A method that the followers repeat; its arguments are as for :meth:`Leader.send`."""

    def repeated(self: LeadingTarget | LeadingJoint, *args: Any) -> None:
        leader, call = self.model.leader, (at_followers or method, self, *args)
        with leader.repeating(*call) if leader.leads(self) else nullcontext():
            method(self, *args)

    return repeated


class LeadingTarget(Target):
    """A target whose forwards and cache changes the followers repeat.

    Attributes:
        number: stands for it in messages, once the followers have it.
    """

    number = -1

    def forward(self, tokens: mx.array, tree: DraftTree) -> mx.array:
        """As :meth:`Target.forward`, but dispatched."""
        leader = self.model.leader
        if not leader.leads(self):
            return super().forward(tokens, tree)
        with leader.repeating(_forward, self, [(self, tree.tokens, tree.parents)]):
            (shared,) = share([tree], [tokens])
            logits = super().forward(shared, tree)
            leader.dispatch(logits)
        return logits

    def fork(self, length: int, room: int) -> Target:
        forked = super().fork(length, room)
        assert isinstance(forked, LeadingTarget)
        self.model.leader.share_result(forked, Target.fork, self, length, room)
        return forked


class LeadingJoint(Joint):
    """A joint whose forwards the followers repeat; its targets are leading ones."""

    number = -1

    def forward(self, members: Sequence[JointRows]) -> tuple[mx.array, list[slice]]:
        """As :meth:`Joint.forward`, but dispatched."""
        leader = self.model.leader
        targets, tokens, trees = zip(*members, strict=True)
        rows = [(target, tree.tokens, tree.parents) for target, _, tree in members]
        with leader.repeating(_forward, self, rows):
            shared = [*zip(targets, share(trees, tokens), trees, strict=True)]
            logits, spans = super().forward(shared)
            leader.dispatch(logits)
        return logits, spans


_OF_TARGETS: Sequence[Callable[..., Any]] = (
    *(Target._prefill_chunk, Target._change_for_steps, Target._quantize_if_due, Target.mark),
    *(Target.truncate, Target.rewind),
)
_OF_JOINTS: Sequence[Callable[..., Any]] = (Joint.join, Joint.leave)
for kind, methods in ((LeadingTarget, _OF_TARGETS), (LeadingJoint, _OF_JOINTS)):
    for method in methods:
        setattr(kind, method.__name__, _repeated(method))
# The leader has moved its rows already.
LeadingTarget.commit_moved = _repeated(Target.commit_moved, Target.commit)  # type: ignore[method-assign]


# --- the followers ---


def _load(name: str) -> nn.Module:
    model, _ = load_shard(name, mx.distributed.init())
    wait_for_all()
    return model


def _new_target(
    model: nn.Module, capability: str, vocab_size: int, options: dict[str, Any], marks: int
) -> Target:
    return Target(model, Capability(capability), vocab_size, CacheOptions(**options), None, marks)


def _new_joint(model: nn.Module, mode: str, spare: int | None) -> Joint:
    return Joint(model, JointMode(mode), spare)


def _forward(
    runs: Target | Joint, members: Sequence[tuple[Target, Sequence[int], Sequence[int]]]
) -> None:
    """Run a follower's part of a forward of a target, or of a joint."""
    targets = [target for target, *_ in members]
    trees = [DraftTree(tuple(tokens), tuple(parents)) for _, tokens, parents in members]
    tokens = share(trees)
    if isinstance(runs, Joint):
        logits, _ = runs.forward([*zip(targets, tokens, trees, strict=True)])
    else:
        logits = runs.forward(tokens[0], trees[0])
    mx.async_eval(logits)  # the other ranks need its values; this rank does not read the logits


_FUNCTIONS: Sequence[Callable[..., Any]] = (
    *(joint_agrees, rounding_noise, rows_agree, tree_agrees),
    *(forward_memory, least_free_memory, _load, _new_target, _new_joint, _forward),
    *_OF_TARGETS,
    *_OF_JOINTS,
    *(Target.fork, Target.commit),
)
REPEATED = {function.__qualname__: function for function in _FUNCTIONS}
"""What the leader may let the followers call, by name."""

_CALLS_BETWEEN_CLEARING = 512  # outgrown buffers then go to the system, as in the decoding loop
_SECONDS_TO_NOTICE = 3.0  # for the channel to notice that a rank is gone, after an error in MLX


@contextmanager
def taking_part() -> Iterator[Leader]:
    """Form the group of the ranks that ``mlx.launch`` has started.

    Only rank 0 runs the block. The other ranks follow it, and end when it ends.

    Raises:
        MlxspecError: the ranks cannot be connected.
    """
    try:
        group = mx.distributed.init()
    except (RuntimeError, ValueError) as error:
        raise MlxspecError(f"the ranks cannot be connected: {error}") from error
    if group.rank() > 0:
        _follow_to_the_end(group)
    channel = meet(group)
    try:
        yield Leader(group, channel)
    except RuntimeError:
        time.sleep(_SECONDS_TO_NOTICE)  # if a rank is gone, the channel says so and ends
        raise
    finally:
        # The followers may still take part in a running forward.
        mx.synchronize(generation_stream)
        channel.close()


def _follow_to_the_end(group: mx.distributed.Group) -> NoReturn:
    """Follow rank 0 until the process ends, with its farewell or with an error line."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # rank 0 gets it too, and acts on it
    channel = None
    try:
        channel = meet(group)
        follower = Follower()
        with mx.stream(generation_stream), wired_limit(nn.Module(), [generation_stream]):
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

    Attributes:
        known: models, targets and joints, by their numbers.
    """

    def __init__(self) -> None:
        self.known: dict[int, Any] = {}
        self._calls = count(1)

    def obey(self, message: str) -> None:
        """Do what one message says: forget what has a number, or call a function.

        Raises:
            LoadError: this rank cannot load its part of a model.
        """
        said = json.loads(message, object_hook=self._meant)
        if isinstance(said, int):
            del self.known[said]
            return
        name, args, result = said
        # When a generation that was never closed is garbage-collected, it may still truncate its
        # target, which the followers have dropped.
        if args[0] is None:
            return
        with suppress(ValueError):  # the leader has the same, and knows what to do
            made = REPEATED[name](*args)
            if result is not None:
                self.known[result] = made
        if next(self._calls) % _CALLS_BETWEEN_CLEARING == 0:
            mx.clear_cache()

    def _meant(self, value: dict[str, Any]) -> Any:
        """What a number stands for; None if it was dropped. Other objects stay as they are."""
        return self.known.get(value["number"]) if "number" in value else value
