"""The tree finds what comparing with every sequence finds."""

from __future__ import annotations

from array import array
from itertools import takewhile

from hypothesis import given, settings
from hypothesis import strategies as st

from mlxspec.server.radix_tree import RadixTree
from tests.support.examples import examples

sequences = st.lists(st.integers(0, 2), max_size=8)
changes = st.tuples(st.sampled_from(["insert", "insert", "remove"]), sequences, st.integers(0, 99))


def common(first: list[int], second: list[int]) -> int:
    pairs = zip(first, second, strict=False)
    return len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))


@settings(max_examples=examples(100), deadline=None, derandomize=True)
@given(st.lists(changes, max_size=30), st.lists(sequences, min_size=1, max_size=4))
def test_look_ups_find_what_comparing_with_all_finds(changes: list, prompts: list) -> None:
    tree: RadixTree[int] = RadixTree()
    held: list[tuple[int, list[int]]] = []
    for number, (change, tokens, which) in enumerate(changes):
        if change == "insert":
            tree.insert(array("i", tokens), number)
            held.append((number, tokens))
        elif held:
            value, removed = held.pop(which % len(held))
            tree.remove(array("i", removed), value)
        for prompt in [tokens, *prompts]:
            found = list(tree.matches(array("i", prompt)))
            assert sorted(found) == sorted((common(own, prompt), value) for value, own in held)
            lengths = [length for length, _ in found]
            assert lengths == sorted(lengths, reverse=True)
            begun = [value for value, own in held if prompt[: len(own)] == own]
            assert sorted(tree.prefixes(array("i", prompt))) == sorted(begun)


def test_what_is_removed_leaves_no_node_behind() -> None:
    tree: RadixTree[str] = RadixTree()
    sequences = [array("i", tokens) for tokens in ([1, 2, 3], [1, 2], [1, 2, 3, 4, 5], [1, 9])]
    for tokens in sequences:
        tree.insert(tokens, "value")
    for tokens in sequences:
        tree.remove(tokens, "value")
    assert tree._root.children == {}
