"""Safetensors files as they are written: other readers find in them what was given."""

from pathlib import Path

import mlx.core as mx
import numpy as np

from mlxspec.convert.model_writer import write_safetensors

DTYPES = [mx.float16, mx.bfloat16, mx.float32, mx.uint32, mx.uint8, mx.int64, mx.bool_]


def test_mlx_and_the_reference_library_read_what_is_written(tmp_path: Path):
    from safetensors import safe_open

    arrays = {str(dtype): mx.arange(6).reshape(2, 3).astype(dtype) for dtype in DTYPES}
    arrays["transposed"] = mx.arange(6).reshape(2, 3).T
    arrays["scalar"] = mx.array(2.5)
    path = tmp_path / "x.safetensors"
    write_safetensors(path, arrays, iter(arrays.items()))
    loaded = mx.load(str(path))
    assert loaded.keys() == arrays.keys()
    for name, array in arrays.items():
        assert loaded[name].dtype == array.dtype
        assert mx.array_equal(loaded[name], array)
    with safe_open(path, "numpy") as reference:
        assert reference.metadata() == {"format": "mlx"}
        assert set(reference.keys()) == set(arrays)
        np.testing.assert_array_equal(reference.get_tensor("transposed"), arrays["transposed"])
