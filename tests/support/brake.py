"""A brake on a Llama's forwards, which are counted: they can be made slow, held, made to fail."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import mlx.nn as nn
import pytest
from mlx_lm.models.llama import TransformerBlock

PATIENCE = 10.0  # seconds, after which nothing is held any more and nothing waited for


class Brake:
    """What happens at each forward of a model.

    Attributes:
        seconds: how long each one takes longer.
        fault: what the next one raises in its last layer, when the others have run.
        rows: of each forward so far.
        on_forward: called before each.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self.fault: Exception | None = None
        self.rows: list[int] = []
        self.on_forward: Callable[[], object] = lambda: None
        self._released = threading.Event()
        self._released.set()

    @contextmanager
    def holding(self) -> Iterator[None]:
        """No forward begins before the end of the block."""
        self._released.clear()
        try:
            yield
        finally:
            self._released.set()

    def before(self, rows: int) -> None:
        """A forward begins."""
        self.on_forward()
        self.rows.append(rows)
        self._released.wait(PATIENCE)
        time.sleep(self.seconds)

    def in_last_layer(self) -> None:
        fault, self.fault = self.fault, None
        if fault:
            raise fault


@contextmanager
def braked(model: nn.Module) -> Iterator[Brake]:
    """Put a brake on a model until the end of the block."""
    brake, layers, plain = Brake(), model.layers, TransformerBlock.__call__

    def call(layer: TransformerBlock, x: Any, *args: Any, **kwargs: Any) -> Any:
        if layer is layers[0]:
            brake.before(x.shape[1])
        if layer is layers[-1]:
            brake.in_last_layer()
        return plain(layer, x, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TransformerBlock, "__call__", call)
        yield brake


def until(happened: Callable[[], object]) -> None:
    """Wait until something is so."""
    end = time.monotonic() + PATIENCE
    while not happened():
        assert time.monotonic() < end, "it has not happened"
        time.sleep(0.002)
