"""The places of a text in the order of what stands before them."""

from __future__ import annotations

import numpy as np

from ..drafting.suffix_index import MAX_LENGTH

TOKEN_BITS = 21
"""Token ids are below 2**TOKEN_BITS - 1: three of them fit into one integer to sort by."""


def sorted_places(tokens: np.ndarray) -> np.ndarray:
    """Sort the places that have a token before and after them by the tokens before them.

    The tokens are compared backwards from the place: first the one just before it, then the one
    before that, at least MAX_LENGTH of them. So the places at which a context ends as it does
    now stand beside each other, and the longer they agree with it the closer. Equal places
    keep the text's order.

    This is a suffix array of the reversed text (Manber and Myers, 1990), built by doubling the
    number of tokens compared, and each time only among the places that were equal so far
    (Larsson and Sadakane, 1999).

    Args:
        tokens: (n,) of int32, ids below 2**TOKEN_BITS - 1, and SEPARATOR between texts.

    Returns:
        (places,) of int32: positions of the tokens that follow the places.
    """
    n = len(tokens)
    order, starts = _sorted_by_three(tokens)  # slot s holds the place order[s]
    # A place's rank is the first slot of the places that are equal to it.
    rank = np.empty(n + 1, np.int32)
    rank[order] = np.maximum.accumulate(np.where(starts, np.arange(n + 1, dtype=np.int32), 0))
    depth = 3
    while depth < MAX_LENGTH:
        shared = ~starts
        shared[:-1] |= shared[1:]
        slots = np.flatnonzero(shared)
        places = order[slots]
        before = np.maximum(places - depth, 0)
        keys = rank[places].astype(np.int64) << 32 | rank[before]
        sorting = np.argsort(keys, kind="stable")
        places, keys = places[sorting], keys[sorting]
        order[slots] = places
        starts[slots] = _starts(keys)
        rank[places] = np.maximum.accumulate(np.where(starts[slots], slots, 0))
        depth *= 2
    inner = np.zeros(n + 1, bool)
    inner[1:n] = (tokens[:-1] >= 0) & (tokens[1:] >= 0)
    return order[inner[order]]


def _sorted_by_three(tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """All places 0 … n by the three tokens before them, and where a new value starts.

    A separator, and what would stand before the text, comes before every token.
    """
    values = np.zeros(len(tokens) + 3, np.int64)
    values[3:] = tokens.astype(np.int64) + 1
    keys = values[2:] << 2 * TOKEN_BITS
    keys |= values[1:-1] << TOKEN_BITS
    keys |= values[:-2]
    order = np.argsort(keys, kind="stable")
    return order.astype(np.int32), _starts(keys[order])


def _starts(keys: np.ndarray) -> np.ndarray:
    """Where, in sorted keys, one stands for the first time."""
    starts = np.ones(len(keys), bool)
    starts[1:] = keys[1:] != keys[:-1]
    return starts
