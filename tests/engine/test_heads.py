"""A head's caches compared with a run over the same context from scratch."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxspec.drafting.heads import HeadExperience
from mlxspec.drafting.tree import DraftTree
from mlxspec.engine import head_cache
from mlxspec.engine import heads as engine_heads
from mlxspec.engine.capability import Capability
from mlxspec.engine.head_cache import HeadCache
from mlxspec.engine.heads import HeadDrafts, TrainedHead, attach_head
from mlxspec.engine.sampling import Perturb
from mlxspec.engine.target import Target
from mlxspec.errors import LoadError
from mlxspec.models.heads.blocks import DFlash
from tests.support import heads
from tests.support.architectures import ARCHITECTURES
from tests.support.examples import examples
from tests.support.random_models import random_model

KINDS: dict[str, tuple[str, Callable[..., Any]]] = {
    "EAGLE-3": ("llama3", heads.eagle3),
    "EAGLE-3.1, with windows": ("llama3", heads.eagle31),
    "MTP": ("qwen3_5", heads.qwen_mtp),
    "Gemma's assistant": ("gemma4", heads.gemma4_assistant),
    "DFlash": ("qwen3", heads.dflash),
}
MOST_UNSEEN = 12
TOKENS = st.integers(0, 63)
SHARE = st.floats(0, 1)
ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("prefill"), st.lists(TOKENS, min_size=1, max_size=20)),
        st.tuples(st.just("step"), st.lists(st.tuples(TOKENS, st.integers(0, 9)), max_size=5)),
        st.tuples(st.just("step"), st.lists(st.tuples(TOKENS, st.integers(0, 9)), max_size=5)),
        st.tuples(st.just("draft"), st.integers(1, 4)),
        st.tuples(st.just("draft"), st.integers(1, 4)),
        st.tuples(st.sampled_from(["truncate", "rewind", "fork"]), SHARE),
        st.tuples(st.sampled_from(["give_up", "interrupt"]), st.just(0)),
    ),
    min_size=4,
    max_size=12,
)


def drafts_of(
    trained: TrainedHead,
    target: Target,
    last: int,
    perturb: Perturb = lambda logprobs, _: logprobs,
) -> HeadDrafts:
    """Return the head drafts after ``last``, which the target has not run yet."""
    drafts = HeadDrafts(trained, HeadExperience(1, 0, trained.head.most))
    drafts.attach(target, perturb)
    drafts.begin([last])
    return drafts


@pytest.fixture(autouse=True)
def soon_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let fewer rows than usual wait for a head."""
    monkeypatch.setattr(head_cache, "_MOST_UNSEEN", MOST_UNSEEN)


@cache
def trained(kind: str) -> TrainedHead:
    name, make = KINDS[kind]
    model = ARCHITECTURES[name].model()
    return TrainedHead(make(model)[1], model)


def target_of(kind: str, **options: Any) -> Target:
    capability = ARCHITECTURES[KINDS[kind][0]].capability
    return Target(trained(kind).new_model(), capability, marks=2, **options)


def test_a_head_that_reads_layers_which_the_model_lacks_is_refused() -> None:
    model = target_of("EAGLE-3").model
    with pytest.raises(LoadError, match="layer 98, but this model has 2 layers"):
        heads.eagle3(model, eagle_aux_hidden_state_layer_ids=[1, 1, 99])


def test_a_head_that_cannot_draft_is_refused() -> None:
    model = target_of("EAGLE-3").model
    _, head = heads.eagle3(model)
    head.reads = (1, 1, 98)
    with pytest.raises(LoadError, match="the head, EAGLE-3, cannot draft for this model"):
        attach_head(head, model)


@pytest.mark.parametrize("bits", [None, 4])
def test_copies_of_the_target_s_layers_are_freed_and_others_are_kept(bits: int | None) -> None:
    model = random_model("qwen3", hidden_size=64, head_dim=16, tie_word_embeddings=False)
    copies = [mx.array(model.model.embed_tokens.weight), mx.array(model.lm_head.weight)]
    if bits:
        nn.quantize(model, 32, bits)
    for changed in (0.0, 0.1):
        _, head = heads.dflash(model)
        head.fit(["embed_tokens.weight", "lm_head.weight"])
        noise = [changed * mx.std(copy) * mx.random.normal(copy.shape) for copy in copies]
        head.embed_tokens.weight, head.lm_head.weight = map(mx.add, copies, noise)
        attach_head(head, model)
        own = {"embed_tokens", "lm_head"} & head.keys()
        assert own == ({"embed_tokens", "lm_head"} if changed else set())


def close(found: mx.array, expected: mx.array) -> bool:
    return found.shape == expected.shape and bool(mx.allclose(found, expected, 1e-3, 1e-3))


class Checked:
    """A target whose head is compared with the tokens that it should have seen.

    Attributes:
        tokens: the tokens in the target's caches.
        last: the token after them.
        lost: the positions that may lack an entry.
        other: the context from which this one was copied, if any. They draft together.
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.trained, self.target = trained(kind), target_of(kind)
        self.random = random.Random(3)
        self.tokens: list[int] = []
        self.last = 5
        self.lost: set[int] = set()
        self.other: Checked | None = None
        self.prefill([1, 2, 3])

    @property
    def head(self) -> HeadCache:
        assert self.target.head
        return self.target.head

    # --- operations ---

    def prefill(self, tokens: list[int]) -> None:
        rows = [self.last, *tokens[:-1]]
        if self.head.behind > MOST_UNSEEN:  # some rows will be forgotten
            self.lost |= {*range(self.head._seen, self.head.length)}
        self.target.prefill(rows)
        self.tokens += rows
        self.last = tokens[-1]

    def step(self, nodes: list[tuple[int, int]]) -> None:
        """Run a tree or a chain; keep a path chosen by the nodes."""
        branches = self.target.capability is Capability.TREE
        parents = [-1, *(p % (n + 1) if branches else n for n, (_, p) in enumerate(nodes))]
        tree = DraftTree((self.last, *(token for token, _ in nodes)), tuple(parents))
        self.target.forward(mx.array(tree.tokens), tree)
        node, path = (nodes[0][1] if nodes else 0) % len(tree), []
        while node >= 0:
            path.insert(0, node)
            node = tree.parents[node]
        seen, length = self.head._seen, self.head.length
        self.target.commit(path)
        self.tokens += [tree.tokens[row] for row in path]
        if self.head._seen > seen:  # some rows were forgotten
            assert length - seen > MOST_UNSEEN > length - self.head._seen - 1 > MOST_UNSEEN - 7
            self.lost |= {*range(seen, self.head._seen)}
        self.last = self.random.randrange(64)

    def draft(self, depth: int) -> None:
        """Draft, together with the other context; compare the logits with a run from scratch."""
        both = [self, *([self.other] if self.other else [])]
        ready = [own for own in both if own.head.is_ready(own.target.length)]
        depth = min(depth, self.trained.head.most)
        if ready:
            members = [drafts_of(self.trained, own.target, own.last) for own in ready]
            expected = [own.logits() for own in ready]
            drafts = self.trained.draft(members, depth)
            for own, logits, (tokens, confidences) in zip(ready, expected, drafts, strict=True):
                assert len(tokens) == len(confidences) == depth
                for token, values in zip(tokens, logits(tokens), strict=True):
                    assert values[token] >= values.max() - 1e-2
                own.check()

    def give_up(self, _: int) -> None:
        """Interrupt a draft after the head has run."""

        def fails(logprobs: mx.array, _: Sequence[int]) -> mx.array:
            raise KeyboardInterrupt

        if self.head.is_ready(self.target.length):
            with pytest.raises(KeyboardInterrupt):
                self.trained.draft([drafts_of(self.trained, self.target, self.last, fails)], 1)
            self.cut(self.target.length)

    def interrupt(self, _: int) -> None:
        """Run a step without committing it."""
        self.target.forward(mx.array([self.last, 7]), DraftTree.chain(self.last, [7]))
        self.cut(self.target.length)

    def cut(self, length: int) -> None:
        self.target.truncate(length)
        self.shortened()

    def truncate(self, share: float) -> None:
        self.return_to(self.target.truncate, share)

    def rewind(self, share: float) -> None:
        self.return_to(self.target.rewind, share)

    def return_to(self, cut: Callable[[int], None], share: float) -> None:
        try:
            cut(round(share * len(self.tokens)))
        except ValueError:  # no snapshot was kept
            self.__init__(self.kind)  # type: ignore[misc]
        else:
            self.shortened()

    def shortened(self) -> None:
        length = self.target.length
        del self.tokens[length:]
        self.lost = {place for place in self.lost if place < length} | {length - 1}
        self.last = self.random.randrange(64)

    def fork(self, share: float) -> None:
        """Continue with a copy of the first tokens."""
        length = self.target.reusable_prefix(round(share * len(self.tokens)))
        if length:
            self.other = copy.copy(self)
            self.other.other, self.other.tokens = None, [*self.tokens]
            self.target = self.target.fork(length, room=0)
            self.shortened()

    # --- the expected state ---

    def check(self) -> None:
        head, length = self.head, len(self.tokens)
        assert head.length == self.target.length == length
        places, seen = head._positions, head._seen
        if head.caches:
            assert {*range(seen)} - self.lost <= {*places} <= {*range(seen)}
        assert [layer.offset for layer in head.caches] == [len(places)] * len(head.caches)
        features = self.features()
        if head._unseen:
            tokens, held = head._tokens_and_features()
            assert tokens.tolist() == self.tokens[seen:]
            assert close(held, features[seen:])
        if places:
            expected, _ = self.seen_from_scratch(places, features)
            for layer, own in zip(head.caches, expected, strict=True):
                for found, right in zip(
                    layer.keys_and_values(), own.keys_and_values(), strict=True
                ):
                    assert close(found, right)

    def features(self) -> mx.array:
        """Return the features of all tokens, from one forward of the model."""
        rows = [*self.tokens, self.last]  # never empty
        self.trained.model(mx.array([rows]))
        hidden, head = self.trained._hidden, self.trained.head
        states = hidden.of_layers if head.reads else [hidden.final]
        return head.features([each[:-1] for each in states])

    def seen_from_scratch(self, places: Sequence[int], features: mx.array) -> tuple[Any, Any]:
        """Return the head's caches after these positions, and a chain head's output."""
        head, caches = self.trained.head, self.trained.head.make_cache()
        rows = features[mx.array(places)][None]
        if isinstance(head, DFlash):
            head.see(rows, caches)
            return caches, None
        following = [*self.tokens, self.last][1:]
        return caches, head(mx.array([[following[place] for place in places]]), rows, caches)

    def logits(self) -> Callable[[list[int]], list[mx.array]]:
        """Return a function from draft tokens to the logits that each comes from."""
        head, features = self.trained.head, self.features()
        places = [*self.head._positions, *range(self.head._seen, len(self.tokens))]
        last = self.last
        if not self.head.caches:
            fresh = target_of(self.kind)
            fresh.prefill(self.tokens)
            caches: Any = engine_heads._keys_of(fresh)
            returned = head(mx.array([[last]]), features[None, -1:], caches)
        elif isinstance(head, DFlash):
            rows = features[mx.array(places)][None]

            def of_block(tokens: list[int]) -> list[mx.array]:
                hidden = head.block(mx.array([last]), len(tokens), [rows], [head.make_cache()])
                before = [last, *tokens]
                return [
                    head.after(head.logits(hidden)[:, n], mx.array(before[n : n + 1]))[0]
                    for n in range(len(tokens))
                ]

            return of_block
        else:
            caches, returned = self.seen_from_scratch(places, features)

        def of_chain(tokens: list[int]) -> list[mx.array]:
            fed, hidden = returned
            found = []
            for token in tokens:
                found.append(head.logits(hidden)[0, -1])
                fed, hidden = head(mx.array([[token]]), fed[:, -1:], caches)
            return found

        return of_chain


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_whatever_happens_the_head_knows_the_context(kind: str) -> None:
    @settings(max_examples=examples(12, long=300))
    @given(ACTIONS)
    def check(actions: list[tuple[str, Any]]) -> None:
        checked = Checked(kind)
        for name, argument in actions:
            getattr(checked, name)(argument)
            checked.check()
            if checked.other:
                checked.other.check()

    check()


# --- copies ---

PROMPT = [token * 7 % 60 + 3 for token in range(40)]


def test_copies_do_not_write_into_each_other() -> None:
    target = target_of("EAGLE-3")
    target.prefill(PROMPT)
    assert target.head
    before = [array.tolist() for array in target.head.arrays]
    for last in (7, 8):
        forked = target.fork(30, room=0)
        assert forked.head
        assert len(forked.head._positions) == 29
        forked.forward(mx.array([last]), DraftTree.chain(last))
        forked.commit([0])
        head = trained("EAGLE-3")
        head.draft([drafts_of(head, forked, 9)], 3)
    assert [array.tolist() for array in target.head.arrays] == before
