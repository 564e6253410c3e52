"""What was measured, and on what: figures that a report needs to be understood elsewhere."""

from __future__ import annotations

import platform
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

import mlxspec

from ..models.identity import machine_identity, model_identity


def machine_figures() -> dict[str, Any]:
    """The machine and the versions of what ran on it; no name of host or user."""
    return {
        **machine_identity(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
        "mlxspec": mlxspec.__version__,
        "mlx_lm": version("mlx-lm"),
    }


def model_figures(model: nn.Module, name: str) -> dict[str, Any]:
    """What the model is.

    Args:
        model: the loaded model.
        name: what the user called it; of a directory only the last part is given.
    """
    return {
        "name": Path(name).resolve().name if Path(name).is_dir() else name,
        **model_identity(model),
        "dtype": str(_computing_dtype(model)).removeprefix("mlx.core."),
    }


def _computing_dtype(model: nn.Module) -> mx.Dtype:
    """The data type of most floating-point weights: packed ones are computed in their scales'."""
    nbytes: dict[mx.Dtype, int] = {}
    for _, weight in tree_flatten(model.parameters()):
        if mx.issubdtype(weight.dtype, mx.floating):
            nbytes[weight.dtype] = nbytes.get(weight.dtype, 0) + weight.nbytes
    return max(nbytes, key=lambda dtype: nbytes[dtype])
