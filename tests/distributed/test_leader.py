"""A follower repeats every operation of the leader on its own part of a model."""

import gc
import pickle
import random
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NoReturn, cast

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from mlx_lm.generate import generation_stream
from mlx_lm.models.cache import make_prompt_cache

from mlxspec.distributed import ranks
from mlxspec.distributed.ranks import Follower, Leader
from mlxspec.drafting.prompt_lookup import PromptLookupDrafter
from mlxspec.drafting.tree import DraftTree
from mlxspec.engine.caches import parts
from mlxspec.engine.params import CacheOptions
from mlxspec.engine.target import Target
from mlxspec.errors import OptionError
from mlxspec.generation.decoder import Decoder
from mlxspec.generation.request import Request
from mlxspec.generation.scheduler import Scheduler
from mlxspec.server.prefix_cache import PrefixCache
from tests.support.architectures import ARCHITECTURES
from tests.support.demo import endless_tokenizer
from tests.support.drafters import drafted
from tests.support.rank import PROMPT, SETTINGS


def test_a_prompt_cache_is_refused_where_the_model_is_split(small_model: Any) -> None:
    decoder = Decoder(small_model)
    led(decoder.loaded, Silent())
    cache = make_prompt_cache(decoder.model)
    with pytest.raises(OptionError, match="cannot be split over several machines"):
        list(drafted(decoder, PROMPT, SETTINGS["plain"].drafter(), prompt_cache=cache))


def test_an_error_in_what_the_ranks_do_together_ends_them(
    small_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the followers, and the next request, would wait for rank 0's values forever."""
    monkeypatch.setattr(ranks, "_SECONDS_TO_NOTICE", 0)
    decoder = Decoder(small_model)
    led(decoder.loaded, Silent())
    monkeypatch.setattr(Target, "forward", fails)
    with pytest.raises(SystemExit, match=r"^Error: rank 0: TypeError: no layer$"):
        list(drafted(decoder, PROMPT, SETTINGS["plain"].drafter()))


def led(loaded: Any, channel: Any) -> Leader:
    """Have a channel's ranks repeat what is done with a model."""
    loaded.leader, loaded.number = Leader(cast(Any, None), channel), 0
    return cast(Leader, loaded.leader)


def fails(*_: Any, **__: Any) -> None:
    raise TypeError("no layer")


REPEATED = {
    *("_forward", "Joint.join", "Joint.leave", "Target.fork"),
    *(f"Target.{name}" for name in ("commit", "truncate", "rewind")),
}


def test_a_message_names_only_what_is_in_mlxspec() -> None:
    """Otherwise a message could call any function."""
    leader = Leader(cast(Any, None), cast(Any, Received()))
    leader._send(print, ["hello"], None)
    with pytest.raises(pickle.UnpicklingError, match="is not part of mlxspec"):
        Follower().obey(cast(Any, leader.channel).message)


class Received:
    """A channel that stores the last message."""

    def send(self, message: bytes) -> None:
        self.message = message


class Silent:
    """A channel without other ranks."""

    def send(self, message: bytes) -> None:
        pass

    def end(self, line: str) -> NoReturn:
        raise SystemExit(line)


class Echo:
    """A channel to a follower in this process with the same model, one message behind."""

    def __init__(self, model: Any) -> None:
        self.follower = Follower()
        self.follower.known[0] = model
        self.tokens: deque[list[mx.array]] = deque()
        self.names: set[str] = set()
        self._last = b""

    def send(self, message: bytes) -> None:
        self.flush()
        self._last = message

    def flush(self) -> None:
        """Let the follower catch up with the leader."""
        last, self._last = self._last, b""
        if last:
            self.names |= {name for name in REPEATED if name.encode() in last}
            with mx.stream(generation_stream):
                self.follower.obey(last)

    def share(self, trees: Sequence[DraftTree], tokens: Sequence[mx.array] = ()) -> list[mx.array]:
        if tokens:
            self.tokens.append([*tokens])
            return [*tokens]
        return self.tokens.popleft()


class Checked(Scheduler):
    """A leader whose caches are compared with the follower's after each turn."""

    def __init__(self, decoder: Decoder, echo: Echo, cache: PrefixCache) -> None:
        super().__init__(decoder, stall=1e-9, max_active=3)
        self._echo, self._cache = echo, cache

    def turn(self, hurried: bool = False) -> bool:
        busy = super().turn(hurried)
        self._echo.flush()
        targets: list[Any] = [one.sequence.target for one in self._running if one.sequence]
        targets += [entry.session._target for entry in self._cache._idle if entry.session]
        for target in targets:
            other = self._echo.follower.known[target.number]
            for name in ("length", "chunks_from", "quantized"):
                assert getattr(other, name) == getattr(target, name)
            assert len(other._marks) == len(target._marks)
            for own, same in zip(parts(target.cache), parts(other.cache), strict=True):
                assert type(own) is type(same)
                for (_, one), (_, two) in zip(held(own), held(same), strict=True):
                    assert mx.array_equal(one, two) if isinstance(one, mx.array) else one == two
        return busy


def held(cache: Any) -> Any:
    if getattr(cache, "keys", 0) is None:
        return []
    return tree_flatten(cache.state)


KINDS = {**ARCHITECTURES, "wide": replace(ARCHITECTURES["llama3"], config={"head_dim": 32})}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("llama3", {}),
        ("wide", {"kv_bits": 8, "kv_group_size": 32, "quantized_kv_start": 30}),
        ("gemma3", {}),
        ("qwen3_5", {}),
    ],
)
def test_a_follower_has_the_leaders_caches_after_each_turn(
    kind: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = Decoder(KINDS[kind].model(), endless_tokenizer())
    echo = Echo(decoder.loaded)
    leader = led(decoder.loaded, echo)
    next(leader._numbers)
    monkeypatch.setattr(ranks, "share", echo.share)
    cache = PrefixCache(decoder.model, CacheOptions(**options))
    run(Checked(decoder, echo, cache), decoder, cache, options)
    assert echo.names == REPEATED
    assert 0 < cache.forks < cache.hits
    cache.make_room(1 << 40)
    gc.collect()
    leader._dropped.append(0)
    leader._send(Target.mark, [None], None)
    echo.flush()
    assert not echo.follower.known


def run(scheduler: Scheduler, decoder: Decoder, cache: PrefixCache, options: Any) -> None:
    """Run requests that share forwards and prefixes; cancel some; continue one in the last."""
    pick = random.Random(5)
    system, ended = [pick.randrange(64) for _ in range(70)], list[list[int]]()

    def add(prompt: list[int]) -> None:
        scheduler.add(Lent(decoder, prompt, cache, pick.randint(1, 9), options, ended))

    add([7, 1, 2, 1, 2])
    add([8, 1, 2, 1, 2])
    for _ in range(7):
        for _ in range(pick.randint(0, 4)):
            scheduler.turn()
        add([*system[: pick.choice([40, 70])], pick.randrange(64), 1, 2, 1, 2])
        for request in scheduler._running[: pick.random() < 0.3]:
            scheduler.cancel(request)
    scheduler.run()
    add([*ended[-1], 1, 2])
    scheduler.run()


class Lent(Request):
    """A request with a session of the prefix cache."""

    def __init__(
        self,
        decoder: Decoder,
        prompt: list[int],
        cache: PrefixCache,
        n: int,
        options: Any,
        ended: list[list[int]],
    ) -> None:
        super().__init__(decoder, prompt, n, options, lambda _: PromptLookupDrafter(4, 2, 1))
        self._cache, self._ended = cache, ended

        self.at_end = self._end

    def start(self) -> None:
        self.lease = self._session = self._cache.lend(self.prompt)
        super().start()

    def _end(self) -> None:
        assert not self.error
        self._ended.append(self.context)
        self._cache.give_back(self._session)
