"""Identifies a model and its machine, and tells how much memory the machine has."""

from __future__ import annotations

import hashlib
import os
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, cast

import mlx.core as mx
import mlx.nn as nn
import psutil
from mlx.utils import tree_flatten
from mlx_lm.utils import get_total_parameters

from ..drafting.cost_file import Identity
from ..models.heads.settings import args_of

if TYPE_CHECKING:
    from .loaded_model import LoadedModel


def machine_identity() -> Identity:
    """The chip, the device and the libraries, without the names of host and user."""
    device = mx.default_device()
    info = mx.device_info(device)
    identity: Identity = {
        "chip": str(info["device_name"]),
        "device": device.type.name,
        "mlx": version("mlx"),
    }
    if device.type == mx.cpu:
        identity |= {"cores": os.cpu_count(), "blas": global_blas()}
    else:
        # Chips of the same name differ in the number of cores, which correlates with the memory.
        identity["memory"] = int(info.get("memory_size", 0))
    return identity


def model_identity(model: nn.Module) -> Identity:
    """The model's kind and size in words, and a digest of its configuration, shapes and data types.

    The bits and the group size of a quantisation show in the shapes of packed weights and scales.
    A fine-tuned model has the same identity as its base model, since it has the same speed.
    """
    weights = tree_flatten(model.parameters())
    digest = hashlib.sha256(type(model).__module__.encode())
    digest.update(repr(args_of(model)).encode())
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
    """The library whose BLAS takes precedence over that of MLX's CPU wheel; "own" if none does.

    With such a library, the curve T(M)/T(1) is very different (see
    :func:`mlxspec.process.prefer_openblas`).
    """
    maps = Path("/proc/self/maps")  # Linux lists mapped files here
    loaded = maps.read_text().split() if maps.exists() else []
    names = {name for path in loaded if (name := os.path.basename(path)).startswith("libopenblas")}
    return min(names, default="own")


# --- how much memory there is ---


def whole_memory() -> int:
    """The bytes that models and caches can take when nothing else runs."""
    if mx.default_device().type == mx.cpu:
        return psutil.virtual_memory().total
    info = mx.device_info(mx.default_device())
    return int(info.get("max_recommended_working_set_size") or info.get("memory_size") or 0)


def free_memory() -> int:
    """The bytes that MLX can take, besides those that it uses or keeps for later arrays.

    On a GPU, this is what they leave of the driver's recommended limit. On a CPU, and with unified
    memory as on a Mac, it is no more than the system can give to programs without swapping.
    """
    free = whole_memory() - mx.get_active_memory() - mx.get_cache_memory()
    if mx.default_device().type == mx.cpu or mx.metal.is_available():
        free = min(free, psutil.virtual_memory().available)
    return max(0, free)


def least_free_memory(loaded: LoadedModel) -> int:
    """:func:`free_memory`; of the machine with the least if the model is split over several."""
    if loaded.group is None:
        return free_memory()
    free = mx.array(free_memory(), mx.int64)
    least = mx.distributed.all_min(free, group=loaded.group, stream=mx.cpu)
    return cast(int, least.item())
