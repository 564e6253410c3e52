"""Written weights, read by MLX and by the library that defines their format."""

from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from safetensors import safe_open

from mlxspec.convert.conversion import write_weights

DTYPES = [mx.float16, mx.bfloat16, mx.float32, mx.uint32, mx.uint8, mx.int64, mx.bool_]


def test_mlx_and_the_reference_library_read_what_is_written(tmp_path: Path) -> None:
    arrays = {str(dtype): mx.arange(6).reshape(2, 3).astype(dtype) for dtype in DTYPES}
    arrays = {name.removeprefix("mlx.core."): array for name, array in arrays.items()}
    arrays |= {"transposed": mx.arange(6).reshape(2, 3).T, "scalar": mx.array(2.5)}
    model = nn.Module()
    for name, array in arrays.items():
        model[name] = array
    write_weights(tmp_path, model, lambda done, total: None, 1 << 20)
    path = tmp_path / "model.safetensors"
    loaded = mx.load(str(path))
    assert isinstance(loaded, dict)
    assert loaded.keys() == arrays.keys()
    for name, array in arrays.items():
        assert loaded[name].dtype == array.dtype
        assert mx.array_equal(loaded[name], array)
    with safe_open(path, "numpy") as reference:
        assert reference.metadata() == {"format": "mlx"}
        assert set(reference.keys()) == set(arrays)
        np.testing.assert_array_equal(reference.get_tensor("transposed"), arrays["transposed"])
