"""Delay, hold, fail and count a Llama's forwards."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import mlx.nn as nn
import pytest
from mlx_lm.models.llama import TransformerBlock

PATIENCE = 10.0  # the most seconds to hold a forward or to wait for a condition


class Brake:
    """Controls and records the forwards of a model.

    Attributes:
        seconds: extra time for each forward.
        fault: raised once by the next forward, in its last layer.
        rows: the number of rows of each forward so far.
        on_forward: called before each forward.
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
        """Hold all forwards until the end of the block."""
        self._released.clear()
        try:
            yield
        finally:
            self._released.set()

    def before(self, rows: int) -> None:
        """Called before each forward."""
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
    """Control a model's forwards until the end of the block."""
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


def wait_until(condition: Callable[[], object]) -> None:
    """Wait until a condition holds."""
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, f"still false after {PATIENCE:.0f} seconds"
        time.sleep(0.002)
