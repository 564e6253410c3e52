"""What equal models verify, found once: a command loads its model anew, and would try it again.

The trials of one load take as long as a hundred tokens. ``tests/engine`` has their own tests.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten

from mlxspec.engine import capability
from mlxspec.generation import loaded

_found: dict[object, Any] = {}


def try_equal_models_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let decoders of models with the same settings and weights share the results of trials."""
    for function in (capability.examine, capability.chain_capability, capability.examine_joint):
        monkeypatch.setattr(loaded, function.__name__, _once(function))


def _once(function: Callable[..., Any]) -> Callable[..., Any]:
    def found(model: nn.Module, *args: Any) -> Any:
        equal = _key(model)
        if equal not in _found:
            _found[equal] = capability.chain_capability(model)
        model.chain_capability = _found[equal]
        key = (function.__name__, equal, *args)
        if key not in _found:
            _found[key] = function(model, *args)
        return _found[key]

    return found


def _key(model: nn.Module) -> tuple[object, ...]:
    """The same for two models if they compute the same."""
    weights = sorted(tree_flatten(model.parameters()))
    sums = mx.stack([mx.abs(weight.astype(mx.float32)).sum() for _, weight in weights])
    names = [(name, weight.shape, str(weight.dtype)) for name, weight in weights]
    return type(model), repr(getattr(model, "args", None)), repr(names), repr(sums.tolist())
