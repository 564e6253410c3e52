"""Whatever stands in a store's file, it is refused, or what is drafted from it is a token."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxspec.corpus.answers import identify
from mlxspec.corpus.store import Store, build_store
from mlxspec.corpus.suffix_index import SuffixArray, write_index
from mlxspec.errors import FileError
from tests.support.examples import examples
from tests.support.hostile import harmless, mutated
from tests.support.tokenizers import FIRST

pytestmark = pytest.mark.slow

TEXTS = [[1, 2, 3, 4, 5], [7, 2, 3, 9], [1, 2, 3, 4, 6]]
IDENTITY = identify(FIRST)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("store") / "s.store"


@pytest.fixture(scope="module")
def whole(path: Path) -> bytes:
    build_store(path, TEXTS, FIRST)
    return path.read_bytes()


def drafts_tokens_or_is_refused(path: Path) -> None:
    def read() -> list[int]:
        store = Store(path, FIRST)
        tokens, occurrences = store.look_up([1, 2, 3])
        assert all(-1 in tokens[position:] for _, position in occurrences)
        return [token for token in tokens if token != -1]

    drafted = harmless(read)
    if not isinstance(drafted, FileError):
        assert isinstance(drafted, list)
        assert all(0 <= token < IDENTITY.vocab_size for token in drafted)


@settings(max_examples=examples(150))
@given(data=st.data())
def test_damaged_bytes_do_no_harm(path: Path, whole: bytes, data: st.DataObject) -> None:
    path.write_bytes(data.draw(mutated(whole)))
    drafts_tokens_or_is_refused(path)


numbers = st.one_of(
    st.integers(-2, 12), st.sampled_from([2**31 - 1, -(2**31), IDENTITY.vocab_size])
)
sections = st.lists(numbers, max_size=20).map(lambda values: np.array(values, dtype=np.int32))
parts = st.builds(SuffixArray, sections, sections)


@settings(max_examples=examples(150))
@given(index=parts)
def test_what_has_the_right_checksums_and_makes_no_sense_is_harmless(
    path: Path, whole: bytes, index: SuffixArray
) -> None:
    header = json.loads(whole[: whole.index(b"\n")])
    with path.open("wb") as file:
        lengths = len(index.tokens), len(index.order)
        write_index(file, header, lengths, [index.tokens, index.order])
    drafts_tokens_or_is_refused(path)
