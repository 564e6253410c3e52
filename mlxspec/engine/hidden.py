"""Reads the hidden states of a model's forwards, for trained heads."""

from __future__ import annotations

import copy
import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn

_FINAL = -1  # instead of a layer's index


class HiddenStates:
    """Records the hidden states of a model's forwards, since mlx-lm's models return only logits.

    Run :attr:`model` in place of the given model, which is not changed. It is a copy that shares
    all weights, in which copies of a few modules record their results. Each thread sees the states
    of its own last forward.

    Args:
        model: an mlx-lm model whose layers and final norm are in one submodule.
        layers: the indices of layers whose states are also recorded. The state of a layer is the
            input of the next one.

    Attributes:
        model: a copy that returns the same as the given model, and shares its weights.

    Raises:
        ValueError: the model has no such submodule.
    """

    def __init__(self, model: nn.Module, layers: Sequence[int] = ()) -> None:
        self._noted = threading.local()
        self._layers = tuple(layers)
        self._original = model
        self._body, name = _list_of_layers(model)
        if not self._body:
            raise ValueError("the model's hidden states cannot be read")
        self.model = _copied_along(model, self._body)
        body = _at(self.model, self._body)
        copies = body[name].copy()
        for index in layers:
            copies[index] = copy.copy(copies[index])
            _override(copies[index], functools.partial(self._note, index))
        body[name] = copies
        _override(body, functools.partial(self._note, _FINAL))

    def _note(self, index: int, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        output = original(*args, **kwargs)
        states = output[0] if isinstance(output, tuple) else output
        self._of_thread[index] = states.flatten(0, 1)
        return output

    @property
    def _of_thread(self) -> dict[Any, mx.array]:
        """The recorded states of this thread's last forward, by layer index or ``_FINAL``."""
        return vars(self._noted)

    @property
    def final(self) -> mx.array:
        """The last forward's hidden states after the final norm, (rows, width), lazy.

        They include all rows of the forward; in a joint forward, also those of other sequences.
        """
        return self._of_thread[_FINAL]

    @property
    def of_layers(self) -> list[mx.array]:
        """The states after each of the ``layers``, (rows, …), as the layer returned them."""
        return [self._of_thread[index] for index in self._layers]

    def logits(self, states: mx.array) -> mx.array:
        """The logits that the model's head computes from hidden states.

        Args:
            states: states after the final norm, (batch, rows, width).

        Returns:
            lazy logits, (batch, rows, vocabulary).
        """
        head = _copied_along(self._original, self._body)
        _override(_at(head, self._body), lambda original, *args, **kwargs: states)
        return head(mx.zeros(states.shape[:2], mx.int32))


def _list_of_layers(model: nn.Module) -> tuple[str, str]:
    """The path of the module that has the model's layers, and the name of its list of layers."""
    first = model.layers[0]
    return next(
        (path, name)
        for path, module in model.named_modules()
        for name, children in module.items()
        if isinstance(children, list) and any(child is first for child in children)
    )


def _at(model: nn.Module, path: str) -> nn.Module:
    for name in path.split(".") if path else ():
        model = model[name]
    return model


def _copied_along(model: nn.Module, path: str) -> nn.Module:
    """A copy of a model and of the modules on a path; all other modules are shared."""
    copied = copy.copy(model)
    if path:
        name, _, rest = path.partition(".")
        copied[name] = _copied_along(model[name], rest)
    return copied


def _override(module: nn.Module, instead: Callable[..., Any]) -> None:
    """Redirect a module's calls to a function.

    Args:
        module: a module of this copy of the model alone. It stays an instance of its class.
        instead: called with the module's original function, and the arguments of the call.
    """
    kind: Any = type(module)
    module.__class__ = _overridden(kind)
    module._instead = instead


@functools.cache
def _overridden(kind: Any) -> Any:
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self._instead(functools.partial(kind.__call__, self), *args, **kwargs)

    # For joint steps, mlx-lm's functions are replaced in the file that ``__module__`` names.
    return type("Overridden", (kind,), {"__call__": call, "__module__": kind.__module__})
