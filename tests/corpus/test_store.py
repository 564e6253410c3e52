"""A store written, opened and refused."""

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import mlxspec
from mlxspec.corpus.store import Store, build_store
from mlxspec.errors import FileError
from tests.corpus.test_suffix_array import scan
from tests.support.tokenizers import FIRST, SECOND, FakeTokenizer

TEXTS = [[1, 2, 3, 4, 5], [7, 2, 3, 9], [1, 2, 3, 4, 6]]


def texts_in(store: Store) -> list[list[int]]:
    """The texts of a store, read between its separators."""
    texts: list[list[int]] = [[]]
    for token in store.index.tokens.tolist():
        if token < 0:
            texts.append([])
        else:
            texts[-1].append(token)
    return texts[:-1]


def places(store: Store, tail: list[int], limit: int) -> list[tuple[int, int]]:
    """The matches that a store finds: their lengths, and where in its tokens they end."""
    return store.index.matches(tail, limit)


def test_a_store_gives_back_its_texts_and_what_followed(tmp_path: Path):
    built = build_store(tmp_path / "s", TEXTS, FIRST)
    for store in (built, Store(tmp_path / "s", FIRST), Store(tmp_path / "s")):
        assert texts_in(store) == TEXTS
        found = places(store, [0, 1, 2, 3], limit=8)
        assert [length for length, _ in found] == [3, 3, 2]
        assert [store.index.tokens[position] for _, position in found] == [4, 4, 9]
        assert found[0][1] > found[1][1]  # the newer one first


def test_no_match_leads_from_one_text_into_the_next(tmp_path: Path):
    store = build_store(tmp_path / "s", [[1, 2], [3, 4]], FIRST)
    assert places(store, [1, 2], 9) == []
    assert [length for length, _ in places(store, [1, 2, 3], 9)] == [1]


@pytest.mark.slow
@settings(max_examples=40)
@given(
    built=st.lists(st.lists(st.integers(0, 3), min_size=2, max_size=20), min_size=1, max_size=8),
    tail=st.lists(st.integers(0, 3), min_size=1, max_size=8),
)
def test_texts_are_searched_as_one(
    tmp_path_factory: pytest.TempPathFactory, built: list[list[int]], tail: list[int]
):
    path = tmp_path_factory.mktemp("store") / "s"
    build_store(path, built, FIRST)
    store = Store(path, FIRST)
    tokens = store.index.tokens.tolist()
    everything = scan(tokens, tail)
    assert places(store, tail, 1000) == everything
    assert [length for length, _ in places(store, tail, 3)] == [
        length for length, _ in everything[:3]
    ]


def test_repeated_and_tiny_texts_are_left_out(tmp_path: Path):
    store = build_store(tmp_path / "s", [[1, 2], [], [3], [1, 2], [2, 1]], FIRST)
    assert texts_in(store) == [[1, 2], [2, 1]]
    assert (store.n_tokens, store.n_texts) == (4, 2)


def test_ids_that_the_tokenizer_does_not_have_divide_a_text(tmp_path: Path):
    store = build_store(tmp_path / "s", [[1, 2, 100, 3, 4, -7, 5, 6, 2**40]], FIRST)
    assert texts_in(store) == [[1, 2], [3, 4], [5, 6]]


def test_no_more_tokens_are_taken_than_allowed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("mlxspec.corpus.store.MAX_TOKENS", 8)

    def endless():
        for token in range(100):
            yield [token, token, token]
        raise AssertionError("read on")

    store = build_store(tmp_path / "s", endless(), FIRST)
    assert texts_in(store) == [[0, 0, 0], [1, 1, 1], [2, 2]]


def test_a_store_is_readable_by_its_owner_alone(tmp_path: Path):
    path = tmp_path / "s"
    umask = os.umask(0)
    try:
        build_store(path, TEXTS, FIRST)
        assert path.stat().st_mode & 0o777 == 0o600
        path.chmod(0o644)
        build_store(path, [[8, 8, 8]], FIRST, force=True)
        assert path.stat().st_mode & 0o777 == 0o600
    finally:
        os.umask(umask)


def test_another_tokenizer_is_refused_by_name(tmp_path: Path):
    path = tmp_path / "s"
    build_store(path, TEXTS, FIRST)
    before = path.read_bytes()
    both = r"s: holds tokens of first \(100 tokens, .{8}\), but the model's tokenizer is second \("
    with pytest.raises(FileError, match=both) as caught:
        Store(path, SECOND)
    assert "\n" not in str(caught.value)
    assert path.read_bytes() == before
    assert Store(path, FakeTokenizer("renamed")).identity.name == "first"


def test_a_store_that_is_there_is_replaced_only_with_force(tmp_path: Path):
    path = tmp_path / "s"
    build_store(path, TEXTS, FIRST)
    with pytest.raises(FileError, match=r"s: exists; .*--force"):
        build_store(path, [[5, 6]], FIRST)
    assert texts_in(Store(path)) == TEXTS
    assert texts_in(build_store(path, [[5, 6]], SECOND, force=True)) == [[5, 6]]
    damaged = path.read_bytes()[:-4]
    path.write_bytes(damaged)
    assert texts_in(build_store(path, TEXTS, FIRST, force=True)) == TEXTS


def test_force_replaces_no_other_file(tmp_path: Path):
    path = tmp_path / "notes.txt"
    path.write_text("mlxspec store build notes.txt\n")
    with pytest.raises(FileError, match=r"notes\.txt: exists and is not an mlxspec store; name"):
        build_store(path, TEXTS, FIRST, force=True)
    assert path.read_text() == "mlxspec store build notes.txt\n"
    path.write_text("")
    assert texts_in(build_store(path, TEXTS, FIRST, force=True)) == TEXTS


def test_force_replaces_no_directory(tmp_path: Path):
    (tmp_path / "directory").mkdir()
    with pytest.raises(FileError, match="is a directory, a link or a device; name a regular file"):
        build_store(tmp_path / "directory", TEXTS, FIRST, force=True)


def test_a_link_to_a_store_is_read_and_not_written(tmp_path: Path):
    (tmp_path / "real").mkdir()
    build_store(tmp_path / "real" / "s", TEXTS, FIRST)
    (tmp_path / "link").symlink_to(tmp_path / "real" / "s")
    with pytest.raises(FileError, match="link: is a directory, a link or a device"):
        build_store(tmp_path / "link", [[4, 4]], FIRST, force=True)
    assert (tmp_path / "link").is_symlink()
    assert texts_in(Store(tmp_path / "link")) == TEXTS


def test_a_failure_while_reading_leaves_nothing(tmp_path: Path):
    def interrupted():
        yield TEXTS[0]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build_store(tmp_path / "s", interrupted(), FIRST)
    with pytest.raises(FileError, match="nothing to write"):
        build_store(tmp_path / "s", [[1]], FIRST)
    assert list(tmp_path.iterdir()) == []


def test_a_large_text_is_searched_right(tmp_path: Path):
    pick = random.Random(1)
    words = [[pick.randrange(90) for _ in range(pick.randrange(1, 12))] for _ in range(400)]
    text = [token for _ in range(4000) for token in pick.choice(words)]
    store = build_store(tmp_path / "s", [text], FIRST)
    for _ in range(30):
        end = pick.randrange(1, len(text))
        tail = [*text[max(0, end - 20) : end], *words[pick.randrange(400)][:2]]
        expected = [length for length, _ in scan(text, tail)[:8]]
        assert [length for length, _ in places(store, tail, 8)] == expected


def test_nothing_of_mlx_is_needed():
    code = (
        "import sys, mlxspec.corpus, mlxspec.corpus.store\n"
        "sys.exit(bool({'mlx.core', 'mlx_lm', 'transformers'} & set(sys.modules)))"
    )
    root = Path(mlxspec.__file__).parents[1]
    assert subprocess.run([sys.executable, "-c", code], cwd=root).returncode == 0


@given(
    built=st.lists(st.lists(st.integers(0, 3), min_size=2, max_size=20), min_size=1, max_size=8),
    tail=st.lists(st.integers(0, 3), min_size=1, max_size=8),
    depth=st.integers(1, 10),
)
def test_a_look_up_copies_what_followed(
    tmp_path_factory: pytest.TempPathFactory,
    built: list[list[int]],
    tail: list[int],
    depth: int,
):
    store = build_store(tmp_path_factory.mktemp("store") / "s", built, FIRST)
    tokens, occurrences = store.look_up(tail, 1000, depth)
    texts = texts_in(store)
    expected = [
        (length, text[place : place + depth])
        for text in texts
        for length, place in scan(text, tail)
    ]
    found = [(length, tokens[start : tokens.index(-1, start)]) for length, start in occurrences]
    assert sorted(found) == sorted(expected)
    assert [length for length, _ in found] == sorted((n for n, _ in found), reverse=True)
