"""Stores of a few texts."""

from functools import partial

from mlxspec.corpus.store import write_store

build_store = write_store
add_to_store = partial(write_store, adds=True)
