"""The hidden states of a model's forwards, for drafters that are trained on them.

mlx-lm's models return logits alone. :class:`HiddenStates` makes a copy of a model that shares all
weights, in which the copies of a few modules note what they return; the model itself stays as it
is. Where the copies have to be is found out by running it, as its capabilities are.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, NamedTuple, cast

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache

from .capability import finite

_TOKENS = 3, 1  # of a trial forward
_FINAL = -1  # in place of a layer's index
_ROUNDING = 1e-3  # as a share of the logits' spread; a norm would change far more


class Body(NamedTuple):
    """Where in a model its hidden states come from.

    Attributes:
        path: of the module that returns them after the final norm: ``model``, or its norm.
        owner: of the module that has the layers.
        layers: the name of their list in that module.
    """

    path: str
    owner: str
    layers: str


def find_body(model: nn.Module) -> Body | None:
    """Find the module whose output a model's head turns into logits, with small forwards.

    Returns:
        None if there is none: what lies between the layers and the head is in no module.
    """
    tokens = mx.array([_TOKENS])
    expected = finite(model(tokens, cache=make_prompt_cache(model)))
    first = model.layers[0]
    owner, layers = next(
        (path, name)
        for path, module in model.named_modules()
        for name, children in module.items()
        if isinstance(children, list) and any(child is first for child in children)
    )
    paths = [path for path, _ in model.named_modules() if path and not _in_list(path)]
    for path in sorted(paths, key=lambda path: path.count(".")):
        body = Body(path, owner, layers)
        states = HiddenStates(model, body)
        states.model(tokens, cache=make_prompt_cache(model))
        if states.was_noted and _heads(model, body, states.final, expected[0]):
            return body
    return None


def _in_list(path: str) -> bool:
    return any(name.isdigit() for name in path.split("."))


def _heads(model: nn.Module, body: Body, states: Any, expected: mx.array) -> bool:
    """Whether each row's logits follow from its hidden state alone, without a norm.

    Args:
        model: an mlx-lm model.
        body: where the states may come from.
        states: what that has returned, (rows, width) if they are states.
        expected: the logits, (rows, vocabulary).
    """
    if not isinstance(states, mx.array) or states.ndim != 2 or len(states) != len(expected):
        return False
    if states.shape == expected.shape:
        return False  # it has the head inside
    trials = mx.stack([states, states[::-1], 2 * states])
    found, swapped, doubled = (finite(logits_of(model, body, trial[None])[0]) for trial in trials)
    bound = _ROUNDING * (mx.max(expected) - mx.min(expected))
    follow = mx.maximum(mx.abs(found - expected), mx.abs(swapped - expected[::-1])).max() <= bound
    normed = mx.abs(doubled - expected).max() > bound
    return cast(bool, (follow & normed).item())


def logits_of(model: nn.Module, body: Body, states: mx.array) -> mx.array:
    """What the model's head makes of hidden states.

    Args:
        model: an mlx-lm model.
        body: from :func:`find_body`.
        states: after the final norm, (batch, rows, width).

    Returns:
        lazy logits, (batch, rows, vocabulary).
    """
    head = _copied_along(model, body.path)
    given = _at(head, body.path)
    given.__class__ = _Given
    given.states = states
    return head(mx.zeros(states.shape[:2], mx.int32))


class _Given(nn.Module):
    """Stands in for a body and returns what it is given."""

    def __call__(self, *args: Any, **kwargs: Any) -> mx.array:
        return self.states


class HiddenStates:
    """Notes the hidden states of a model's forwards, one forward at a time.

    Run :attr:`model` in place of the model: in a :class:`mlxspec.engine.target.Target`, or in a
    :class:`mlxspec.engine.joint.Joint` for several sequences.

    Args:
        model: an mlx-lm model.
        body: from :func:`find_body`.
        layers: indices in the body's list of those layers whose output is to be noted, too; that
            of layer i is what enters layer i + 1.

    Attributes:
        model: returns the same as the given one, whose weights it shares.
        final: of the last forward, after the final norm, (rows, width); lazy. The rows are all of
            the forward: pending ones, and those of other sequences in a joint one.
        of_layers: per noted layer, in the order of ``layers``, (rows, …) as the layer returns them.
    """

    def __init__(self, model: nn.Module, body: Body, layers: Sequence[int] = ()) -> None:
        self.model = _copied_along(_copied_along(model, body.owner), body.path)
        self._noted: dict[int, Any] = {}
        self._layers = tuple(layers)
        owner = _at(self.model, body.owner)
        of_layers = owner[body.layers].copy()
        for index in layers:
            of_layers[index] = copy.copy(of_layers[index])
            _watch(of_layers[index], partial(self._note, index))
        owner[body.layers] = of_layers
        _watch(_at(self.model, body.path), partial(self._note, _FINAL))

    def _note(self, index: int, output: Any) -> None:
        states = output[0] if isinstance(output, tuple) else output
        self._noted[index] = states.flatten(0, 1) if isinstance(states, mx.array) else states

    @property
    def was_noted(self) -> bool:
        """Whether a forward has come by the body."""
        return _FINAL in self._noted

    @property
    def final(self) -> mx.array:
        return self._noted[_FINAL]

    @property
    def of_layers(self) -> list[mx.array]:
        return [self._noted[index] for index in self._layers]


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


def _watch(module: nn.Module, note: Callable[[Any], None]) -> None:
    """Let a module, which is nobody else's, pass on what it returns."""
    kind: Any = type(module)
    module.__class__ = _watched_kind(kind)
    object.__setattr__(module, "_note", note)


@cache
def _watched_kind(kind: Any) -> Any:
    class Watched(kind):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            output = super().__call__(*args, **kwargs)
            self._note(output)
            return output

    Watched.__module__ = kind.__module__  # where mlx-lm's functions are replaced for joint steps
    return Watched
