"""What the speed of a model depends on, to tell measurements of one from those of another."""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import sys
from dataclasses import asdict, is_dataclass
from importlib.metadata import version
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.utils import get_total_parameters


def machine_identity() -> dict[str, str | int | float | None]:
    """Chip, device and libraries; no name of host or user."""
    device = mx.default_device()
    info = mx.device_info(device)
    identity: dict[str, str | int | float | None] = {
        "chip": str(info["device_name"]),
        "device": device.type.name,
        "mlx": version("mlx"),
    }
    if device.type == mx.cpu:
        identity |= {"cores": _usable_cores(), "blas": global_blas()}
    else:
        # Chips of one name differ in the number of cores, and that goes with the memory.
        identity["memory"] = int(info.get("memory_size", 0))
    return identity


def model_identity(model: nn.Module) -> dict[str, str | int | float | None]:
    """Kind and size for the eye, and a digest of configuration, shapes and data types.

    Packed weights and their scales show bits and group size of a quantisation in their shapes.
    A fine-tuned model has the identity of its base, and its speed.
    """
    weights = tree_flatten(model.parameters())
    digest = hashlib.sha256(type(model).__module__.encode())
    digest.update(json.dumps(_configuration(model), sort_keys=True, default=repr).encode())
    for name, weight in sorted(weights):
        digest.update(f"{name} {weight.shape} {weight.dtype}\n".encode())
    parameters = get_total_parameters(model)
    nbytes = sum(weight.nbytes for _, weight in weights)
    return {
        "type": str(getattr(model, "model_type", type(model).__name__)),
        "parameters": parameters,
        "bits_per_weight": round(8 * nbytes / parameters, 2),
        "digest": digest.hexdigest()[:32],
    }


def global_blas() -> str:
    """The library whose BLAS comes before the one in MLX's CPU wheel; "own" without one.

    MLX's symbols resolve to the first library that was loaded globally, and then T(M)/T(1) is
    another curve altogether (see :mod:`mlxspec._blas`).
    """
    if sys.platform != "linux":
        return "own"
    everything = ctypes.CDLL(None)
    try:
        address = ctypes.cast(everything.cblas_sgemm, ctypes.c_void_p)
    except AttributeError:
        return "own"
    found = _SymbolInfo()
    everything.dladdr(address, ctypes.byref(found))
    return os.path.basename(found.file_name or b"unknown").decode(errors="replace")


class _SymbolInfo(ctypes.Structure):
    """``Dl_info`` of dladdr(3)."""

    _fields_ = (
        ("file_name", ctypes.c_char_p),
        ("base", ctypes.c_void_p),
        ("symbol_name", ctypes.c_char_p),
        ("address", ctypes.c_void_p),
    )


def _usable_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _configuration(model: nn.Module) -> Any:
    args = getattr(model, "args", None)
    return asdict(args) if is_dataclass(args) and not isinstance(args, type) else repr(args)
