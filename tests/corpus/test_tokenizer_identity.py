"""The identity of tokenizers."""

import pytest
from tokenizers import Tokenizer, models

from mlxspec.corpus.answers import identify
from tests.support.tokenizers import FIRST, FakeTokenizer


def test_the_vocabulary_decides_and_not_the_name():
    assert identify(FIRST).fingerprint == identify(FakeTokenizer("elsewhere")).fingerprint
    others = (FakeTokenizer(size=101), FakeTokenizer(prefix="T"))
    assert identify(FIRST).fingerprint not in {identify(other).fingerprint for other in others}


def test_swapped_ids_are_another_tokenizer():
    one = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    other = Tokenizer(models.WordLevel({"a": 1, "b": 0}, unk_token="a"))
    assert identify(one).fingerprint != identify(other).fingerprint


def test_added_tokens_belong_to_the_vocabulary():
    one = Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    before = identify(one)
    one.add_tokens(["<new>"])
    assert identify(one).fingerprint != before.fingerprint
    assert identify(one).vocab_size == 2


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/home/me/secret place/mistral-7b", "mistral-7b"),
        ("/cache/hub/models--some--tiny-model/snapshots/0a1b2c", "some/tiny-model"),
        ("some/tiny-model", "some/tiny-model"),
        ("", "unnamed"),
        ("/", "unnamed"),
    ],
)
def test_the_name_does_not_reveal_the_path(path: str, name: str):
    assert identify(FakeTokenizer(path)).name == name
