"""Compare saved weights bit for bit."""

from pathlib import Path

import mlx.core as mx


def tensors(path: Path) -> dict[str, mx.array]:
    """Load the weights of a model's safetensors files."""
    found: dict[str, mx.array] = {}
    for file in sorted(path.glob("model*.safetensors")):
        found |= mx.load(str(file))
    return found


def assert_same_bits(left: dict[str, mx.array], right: dict[str, mx.array]) -> None:
    """Assert that names, types and bits are the same."""
    assert left.keys() == right.keys()
    for name, array in left.items():
        assert array.dtype == right[name].dtype, name
        same = array.view(mx.uint8) == right[name].view(mx.uint8)
        assert mx.all(same).item(), name
