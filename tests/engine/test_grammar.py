"""Grammar states along draft trees, with tokenizers of every kind."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.tokenizer_utils import TokenizerWrapper

from mlxspec.drafting.tree import DraftTree
from mlxspec.engine import grammar
from mlxspec.engine.grammar import Grammar, Vocabulary
from mlxspec.engine.json_schema import enforceable
from mlxspec.engine.params import Constraint, Phase, Phases
from mlxspec.errors import OptionError
from mlxspec.generation.chat_prompt import in_answer
from tests.support.chat_tokenizer import chat_tokenizer
from tests.support.demo import demo, endless_tokenizer
from tests.support.examples import LONG
from tests.support.random_schemas import random_object
from tests.support.tokenizer_kinds import (
    SENTENCEPIECE,
    byte_level,
    sentencepiece,
    word_piece,
    wrap,
)

# babyllama's tokenizer lacks characters.
_PATHS = {"demo": SENTENCEPIECE["demo"]}
if LONG:
    _PATHS = {name: path for name, path in SENTENCEPIECE.items() if name != "babyllama"}
TOKENIZERS: dict[str, Any] = {
    **{name: lambda path=path: wrap(sentencepiece(path)) for name, path in _PATHS.items()},
    "byte level": lambda: wrap(byte_level()),
    "bytes": chat_tokenizer,
}


@cache
def vocabulary_of(name: str) -> tuple[TokenizerWrapper, Vocabulary]:
    tokenizer = TOKENIZERS[name]()
    return tokenizer, Vocabulary.of(tokenizer, len(tokenizer) + 5)


def begun(constraint: Constraint | Phases, name: str = "demo") -> Grammar:
    return Grammar(constraint, vocabulary_of(name)[1]).begin()


def allowed(state: Grammar) -> list[int] | None:
    """Return the allowed next tokens; None for all."""
    mask = state.masks(DraftTree.chain(0))
    if mask is None:
        return None
    flags: list[bool] = mask[0].tolist()  # type: ignore[assignment]
    return [token for token, flag in enumerate(flags) if flag]


@pytest.mark.parametrize("name", TOKENIZERS)
def test_forced_tokens_are_all_that_may_come_one_by_one(name: str) -> None:
    tokenizer, vocabulary = vocabulary_of(name)
    value = '{"größe and <s> </s>": [1, "日本語 \\"x\\"", null], "  spaces": ""}'
    constraint = Constraint.json_schema(f'{{"const": {value}}}')
    state = Grammar(constraint, vocabulary).begin()
    tokens: list[int] = []
    while not tokens or tokens[-1] not in tokenizer.eos_token_ids:
        (token,) = allowed(state) or ()
        assert state.forced()[:1] == (token,)
        tokens.append(token)
        if token not in tokenizer.eos_token_ids:
            state.accept([token])
    text = b"".join(vocabulary._texts[token] for token in tokens[:-1]).decode()
    assert text == value
    assert not set(tokens[:-1]) & {*tokenizer.all_special_ids}


@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_text_becomes_tokens_of_exactly_its_bytes(name: str) -> None:
    _, vocabulary = vocabulary_of(name)
    for text in ("", "a", " a", "  ", '": "', "日本 é", "</s><s>", "\n\t{", "name"):
        tokens = vocabulary.encode(text)
        assert b"".join(vocabulary._texts[token] for token in tokens) == text.encode()


def random_tree(source: random.Random, state: Grammar, vocab_size: int) -> DraftTree:
    """Return random branches, valid up to some token."""
    branches = []
    for _ in range(4):
        tokens: list[int] = []
        for _ in range(source.randrange(1, 7)):
            mask = state.masks(DraftTree.chain(0, tokens))
            flags: Any = None if mask is None else mask[len(tokens)].tolist()
            may_come = [t for t in range(vocab_size) if flags is None or flags[t]]
            tokens.append(source.choice(may_come if source.random() < 0.9 else range(vocab_size)))
        branches.append(tokens)
    tree = DraftTree.from_branches(0, branches)
    # In any order with parents before children.
    order = sorted(range(len(tree)), key=lambda node: (tree.depths[node], source.random()))
    number = {node: index for index, node in enumerate(order)} | {-1: -1}
    return DraftTree(
        tuple(tree.tokens[node] for node in order),
        tuple(number[tree.parents[node]] for node in order),
    )


@pytest.mark.slow
def test_each_node_of_a_tree_has_the_mask_of_its_own_context() -> None:
    source = random.Random(5)
    tokenizer, vocabulary = vocabulary_of("bytes")
    ends = tokenizer.eos_token_ids
    for constraint in [Constraint.json_schema(random_object(source)) for _ in range(6)]:
        state = Grammar(constraint, vocabulary).begin()
        tree = random_tree(source, state, vocabulary.vocab_size)
        before = allowed(state)
        masks = state.masks(tree)
        named = replace(tree, origins=tuple(map(str, range(1, len(tree)))))
        kept = {0, *map(int, state.allowed(named).origins)}
        assert masks is not None
        paths: list[list[int]] = [[]]
        for node in range(1, len(tree)):
            paths.append([*paths[tree.parents[node]], tree.tokens[node]])
        for node, path in enumerate(paths):
            alone = Grammar(constraint, vocabulary).begin()
            may_come = True
            for index, token in enumerate(path):
                may_come &= token in (allowed(alone) or ())
                if not may_come or (token in ends and index < len(path) - 1):
                    may_come = False
                    break
                if token not in ends:
                    alone.accept([token])
            assert (node in kept) == may_come
            if may_come and not (path and path[-1] in ends):
                assert mx.array_equal(masks[node], alone.masks(DraftTree.chain(0))[0])  # type: ignore[index]
        assert allowed(state) == before  # looking at the tree leaves no trace


def test_what_takes_too_much_to_follow_ends_with_a_line() -> None:
    items = {"type": "string", "pattern": "^x{6000000}$"}
    state = begun(Constraint.json_schema({"type": "array", "items": items}), "bytes")

    def follow() -> None:
        for token in vocabulary_of("bytes")[0].encode('["xx'):
            state.accept([token])
            allowed(state)

    with pytest.raises(OptionError, match="too costly to follow"):
        follow()


@pytest.mark.parametrize("rule", ["a[max_tokens=3]: /[a-c]*/", 'a[stop="c"]: /[a-c]*/'])
def test_drafts_follow_rules_whose_matcher_cannot_take_tokens_back(rule: str) -> None:
    tokenizer, _ = vocabulary_of("bytes")
    state = begun(Constraint.grammar(f'start: "b" a "b"\n{rule}'), "bytes")
    draft = tokenizer.encode("bab")
    masks = state.masks(DraftTree.chain(0, draft))
    assert masks is not None
    assert len(state.allowed(DraftTree.from_branches(0, [[*draft, 0], [draft[1]]]))) == 4
    for row, token in enumerate(draft):
        own = state.masks(DraftTree.chain(0))
        assert own is not None
        assert mx.array_equal(masks[row], own[0])
        state.accept([token])


def test_phases_lead_from_free_text_to_a_constraint() -> None:
    tokenizer, _ = vocabulary_of("bytes")
    (end,) = tokenizer.eos_token_ids
    opens, closes = (tokenizer.get_vocab()[name] for name in ("<think>", "</think>"))
    answer = Constraint.choice(["yes"])
    phases = (Phase(answer, {opens: 1}), Phase(None, {closes: 2}, False), Phase(answer))
    state = begun(phases, "bytes")
    yes = tokenizer.encode("yes")
    assert allowed(state) == sorted([opens, yes[0]])
    assert state.forced() == ()
    tree = DraftTree.from_branches(
        0, [[opens, yes[2], closes, *yes, end], [*yes, end, yes[0]], [closes], [opens, end]]
    )
    assert sorted(state.allowed(tree).tokens) == sorted(
        [0, opens, yes[2], closes, *yes, *yes, end, end]
    )
    state.accept([opens, yes[1]])
    assert allowed(state) == [t for t in range(len(tokenizer) + 5) if t != end]
    state.accept([closes])
    assert state.forced() == (*yes, end)
    unconstrained = begun((Phase(),), "bytes")
    assert allowed(unconstrained) is None


def test_a_call_may_end_reasoning_and_what_only_looks_like_one_does_not() -> None:
    tokenizer, _ = vocabulary_of("bytes")
    (end,) = tokenizer.eos_token_ids
    closes, yes = tokenizer.get_vocab()["</think>"], tokenizer.encode("yes")
    call = tokenizer.encode("~")[0]
    answer = Constraint.choice(["yes"])
    phases = in_answer(answer, tokenizer, reasons=True, call_start=call)
    everything = [*range(len(tokenizer) + 5)]

    def following(state: Grammar) -> list[int]:
        return everything if (tokens := allowed(state)) is None else tokens

    state = begun(phases, "bytes")
    assert end not in following(state)
    state.accept([yes[0], call])
    assert {end, closes} <= {*following(state)}
    state.accept([closes])
    assert yes[0] in following(state)
    assert end not in following(state)
    from_text = in_answer(answer, tokenizer, reasons=False, call_start=call)
    state = begun(from_text, "bytes")
    state.accept([call, closes])  # in an argument, for example
    assert following(state) == everything
    strict = in_answer(answer, tokenizer, reasons=True, calls=answer, call_start=call)
    state = begun(strict, "bytes")
    state.accept([yes[0], call])
    assert state.forced() == (*yes, end)


def test_unknown_formats_are_notes_and_lenient_schemas_lose_what_cannot_be_enforced() -> None:
    schema = {
        "type": "object",
        "properties": {
            "format": {"type": "string", "format": "password"},
            "mail": {"type": "string", "format": "email", "pattern": r"^(?!\.)\w+$"},
            "any": {"anyOf": [{"type": "any"}, {"type": ["string", "date"]}]},
            "pattern": {"enum": ["(?=x)"], "patternProperties": {"(?<!a)b": {}, "c": {}}},
        },
        "additionalProperties": False,
    }
    begun(Constraint.json_schema(schema["properties"]["format"]))  # type: ignore[index]
    assert enforceable(schema, lenient=True) == {
        "type": "object",
        "properties": {
            "format": {"type": "string"},
            "mail": {"type": "string", "format": "email"},
            "any": {"anyOf": [{}, {}]},
            "pattern": {"enum": ["(?=x)"], "patternProperties": {"c": {}}},
        },
        "additionalProperties": False,
    }
    with pytest.raises(OptionError, match="look-around"):
        begun(Constraint.json_schema(schema["properties"]["mail"]))  # type: ignore[index]


def test_reasoning_before_an_answer_takes_half_of_the_tokens() -> None:
    tokenizer, vocabulary = vocabulary_of("bytes")
    opens, closes = (tokenizer.get_vocab()[name] for name in ("<think>", "</think>"))
    answer = Constraint.choice(["yes"])
    phases = (Phase(answer, {opens: 1}), Phase(None, {closes: 2}, False), Phase(answer))
    state = Grammar(phases, vocabulary).begin(8)
    yes = tokenizer.encode("yes")
    state.accept([opens, *yes])
    assert len(allowed(state) or ()) > 250
    tree = DraftTree.from_branches(0, [[yes[0], yes[0]], [yes[0], closes]])
    assert sorted(state.allowed(tree).tokens) == sorted([0, yes[0], closes])
    state.accept(yes[:1])
    assert allowed(state) == [closes]
    state.accept([closes])
    assert state.forced()[:3] == (*yes,)
    free = Grammar((Phase(None, {closes: 0}),), vocabulary).begin(2)  # may end: all is allowed
    free.accept(3 * yes)
    assert allowed(free) is None


def test_a_step_gets_the_beginning_of_a_long_forced_text() -> None:
    tokenizer, _ = vocabulary_of("bytes")
    text = "abcdefgh" * 2000
    state = begun(Constraint.choice([text]), "bytes")
    for _ in range(2):
        forced = state.forced()
        assert 100 <= len(forced) <= 2000
        written = tokenizer.decode(list(forced))
        assert text.startswith(written)
        text = text[len(written) :]
        state.accept(forced)


def test_ids_that_the_model_lacks_may_not_come_and_break_nothing() -> None:
    tokenizer, vocabulary = vocabulary_of("bytes")
    size, yes = vocabulary.vocab_size, tokenizer.encode("yes")
    lacking = (-1, size, size + 7, 2**31, 2**70)
    answer = Constraint.choice(["yes"])
    phases = (Phase(answer, {size + 1: 1}), Phase(None, {size + 2: 0}, False))
    for constraint in (answer, phases):
        state = begun(constraint, "bytes")
        before = allowed(state)
        branches = [[token, *yes] for token in lacking] + [[yes[0], token] for token in lacking]
        tree = DraftTree.from_branches(0, [*branches, yes])
        assert state.allowed(tree).tokens == (0, *yes)
        masks = state.masks(tree)
        assert masks is not None
        assert masks.shape == (len(tree), size)
        assert allowed(state) == before
        state.accept(yes)


def test_tokenizers_that_cannot_follow_a_constraint_are_refused() -> None:
    with pytest.raises(OptionError, match="no token that ends"):
        Vocabulary.of(endless_tokenizer(), demo().loaded.vocab_size)
    words = wrap(word_piece())
    words.eos_token_ids = {1}
    with pytest.raises(OptionError, match="no token for"):
        Vocabulary.of(words, len(words))


@pytest.mark.slow
def test_a_vocabulary_is_made_once_and_forgets_constraints_it_has_not_seen_for_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tokenizer, vocabulary = vocabulary_of("bytes")
    assert Vocabulary.of(tokenizer, vocabulary.vocab_size) is vocabulary
    monkeypatch.setattr(grammar, "_LEAST_BYTES", 100)
    monkeypatch.setattr(grammar, "_MOST_KEPT", 3 * 2 * grammar._BYTES_PER_CHARACTER)
    forgetful = Vocabulary(tokenizer, vocabulary.vocab_size)
    short = [Constraint.regex(f"a{number}") for number in range(5)]
    for constraint in (*short, short[3]):
        forgetful.matcher(constraint)
    assert [*forgetful._compiled] == [short[2], short[4], short[3]]
    assert forgetful.nbytes == 3 * 2 * grammar._BYTES_PER_CHARACTER
    long = Constraint.regex("a" * 100)  # larger than the whole cache, but in use
    forgetful.matcher(long)
    assert [*forgetful._compiled] == [long]
    assert forgetful.nbytes == 100 * grammar._BYTES_PER_CHARACTER
