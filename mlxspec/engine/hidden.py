"""The hidden states of a model's forwards, for drafters that are trained on them.

mlx-lm's models return logits alone. :class:`HiddenStates` makes a copy of a model that shares all
weights, in which the copies of a few modules note what they return; the model itself stays as it
is. Where the copies have to be is found out by running it, as its capabilities are.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache

from .capability import finite

_TOKENS = 3, 1  # of a trial forward
_FINAL = -1  # in place of a layer's index
_ROUNDING = 1e-3  # as a share of the logits' spread; a norm would change far more


def find_body(model: nn.Module) -> str | None:
    """Find the module whose output a model's head turns into logits, with small forwards.

    Returns:
        its path, such as ``model``, or that of its last norm; None if there is none, since what
        lies between the layers and the head is in no module.
    """
    tokens = mx.array([_TOKENS])
    expected = finite(model(tokens, cache=make_prompt_cache(model)))[0]
    paths = [path for path, _ in model.named_modules() if path]
    outside_lists = [path for path in paths if not any(map(str.isdigit, path.split(".")))]
    for path in sorted(outside_lists, key=lambda path: path.count(".")):
        states = HiddenStates(model, path)
        states.model(tokens, cache=make_prompt_cache(model))
        if states.noted and _leads_to(expected, states.final, model, path):
            return path
    return None


def _leads_to(expected: mx.array, states: Any, model: nn.Module, body: str) -> bool:
    """Whether each row's logits follow from its hidden state alone, without a norm.

    Args:
        expected: the logits, (rows, vocabulary).
        states: what ``body`` has returned, (rows, width) if it can be the body.
        model: an mlx-lm model.
        body: the path of a module.
    """
    if not isinstance(states, mx.array) or states.ndim != 2 or len(states) != len(expected):
        return False
    if states.shape == expected.shape:
        return False  # it has the head inside
    trials = (states, states[::-1], 2 * states)
    found, swapped, doubled = (finite(logits_of(model, body, each[None]))[0] for each in trials)
    bound = _ROUNDING * (mx.max(expected) - mx.min(expected))
    follow = mx.maximum(mx.abs(found - expected), mx.abs(swapped - expected[::-1])).max() <= bound
    normed = mx.abs(doubled - expected).max() > bound
    return cast(bool, (follow & normed).item())


def logits_of(model: nn.Module, body: str, states: mx.array) -> mx.array:
    """What a model's head makes of hidden states.

    Args:
        model: an mlx-lm model.
        body: from :func:`find_body`.
        states: after the final norm, (batch, rows, width).

    Returns:
        lazy logits, (batch, rows, vocabulary).
    """
    head = _copied_along(model, body)
    _override(_at(head, body), lambda original, *args, **kwargs: states)
    return head(mx.zeros(states.shape[:2], mx.int32))


class HiddenStates:
    """Notes the hidden states of a model's forwards, one forward at a time.

    Run :attr:`model` in place of the model: in a :class:`mlxspec.engine.target.Target`, or in a
    :class:`mlxspec.engine.joint.Joint` for several sequences.

    Args:
        model: an mlx-lm model.
        body: from :func:`find_body`.
        layers: indices of layers whose output is to be noted, too; that of layer i is what enters
            layer i + 1.

    Attributes:
        model: returns the same as the given one, whose weights it shares.
        noted: by the index of a layer, or -1 for the body, what it returned in the last forward.
    """

    def __init__(self, model: nn.Module, body: str, layers: Sequence[int] = ()) -> None:
        self.noted: dict[int, Any] = {}
        self._layers = tuple(layers)
        owner, name = _list_of_layers(model)
        self.model = _copied_along(_copied_along(model, owner), body)
        copies = _at(self.model, owner)[name].copy()
        for index in layers:
            copies[index] = copy.copy(copies[index])
            _override(copies[index], partial(self._note, index))
        _at(self.model, owner)[name] = copies
        _override(_at(self.model, body), partial(self._note, _FINAL))

    def _note(self, index: int, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        output = original(*args, **kwargs)
        states = output[0] if isinstance(output, tuple) else output
        self.noted[index] = states.flatten(0, 1) if isinstance(states, mx.array) else states
        return output

    @property
    def final(self) -> mx.array:
        """The hidden states of the last forward after the final norm, lazy, (rows, width).

        The rows are all of the forward: pending ones, and those of other sequences in a joint one.
        """
        return self.noted[_FINAL]

    @property
    def of_layers(self) -> list[mx.array]:
        """Those behind each of the ``layers``, (rows, …) as the layer returns them."""
        return [self.noted[index] for index in self._layers]


def _list_of_layers(model: nn.Module) -> tuple[str, str]:
    """The path of the module that has a model's layers, and the name of their list there."""
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
    """A model with copies of itself and of the modules on a path; all other modules are shared."""
    copied = copy.copy(model)
    if path:
        name, _, rest = path.partition(".")
        copied[name] = _copied_along(model[name], rest)
    return copied


def _override(module: nn.Module, instead: Callable[..., Any]) -> None:
    """Let calls of a module, which is nobody else's, go to a function.

    Args:
        module: stays an instance of its class.
        instead: called with what the module would have called, and its arguments.
    """
    kind: Any = type(module)
    module.__class__ = _overridden(kind)
    module._instead = instead


@cache
def _overridden(kind: Any) -> Any:
    class Overridden(kind):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return self._instead(super().__call__, *args, **kwargs)

    Overridden.__module__ = kind.__module__  # where mlx-lm's functions are replaced for joint steps
    return Overridden
