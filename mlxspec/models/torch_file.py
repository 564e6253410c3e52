"""Reads the tensors of a PyTorch file, ``.pth`` or ``.bin``, without PyTorch or running its code.

Since version 1.6 ``torch.save`` writes a zip archive: ``<name>/data.pkl`` describes the tensors,
and the files ``<name>/data/<record>`` hold their elements. A pickle can make the reader call any
function that it names. Here only a few names are accepted, and they build plain tuples.
"""

import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from ..errors import LoadError, printable

_BFLOAT16 = "BFloat16Storage"  # numpy has no such type, so the raw bits are read
_TYPES: dict[str, np.dtype[Any]] = {
    "FloatStorage": np.dtype("<f4"),
    "HalfStorage": np.dtype("<f2"),
    _BFLOAT16: np.dtype("<u2"),
    "LongStorage": np.dtype("<i8"),
    "IntStorage": np.dtype("<i4"),
    "BoolStorage": np.dtype("?"),
}


def read_torch_file(path: Path) -> Iterator[tuple[str, mx.array]]:
    """Yield the name and the elements of each tensor, one after another.

    Raises:
        LoadError: the file is damaged, has the format from before PyTorch 1.6, or holds anything
            but tensors of the accepted types.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            (pickled,) = (name for name in archive.namelist() if name.endswith("/data.pkl"))
            folder = pickled.removesuffix(".pkl")
            for name, tensor in _TensorUnpickler(archive.open(pickled)).load().items():
                (_, kind, record, *_), offset, shape, strides, *_ = tensor
                dtype = _TYPES[kind]
                elements = archive.read(f"{folder}/{record}")
                steps = [stride * dtype.itemsize for stride in strides]
                # numpy refuses a view that reaches beyond the elements.
                view = np.ndarray(shape, dtype, elements, offset * dtype.itemsize, steps)
                array = mx.array(view)
                yield str(name), array.view(mx.bfloat16) if kind == _BFLOAT16 else array
                del elements, view, array  # frees their memory before the next are read
    except LoadError as error:
        raise LoadError(f"{path}: {error}") from None
    except OSError as error:
        raise LoadError(f"{path}: cannot be read ({error.strerror or error})") from error
    except Exception as error:  # a damaged archive or pickle makes the libraries raise anything
        raise LoadError(
            f"{path}: damaged, or not a file of PyTorch 1.6 or newer that holds only tensors; "
            "fetch it again, or save only its tensors with a newer torch.save"
        ) from error


class _TensorUnpickler(pickle._Unpickler):
    """Makes each tensor a tuple: its storage, and its offset, shape and strides in elements.

    It derives from the unpickler written in Python, which keeps memoised objects in a dict. For a
    damaged pickle with a huge index, the one written in C would allocate as much memory.
    """

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return lambda *description: description
        if module == "torch" and name in _TYPES:
            return name
        raise LoadError(
            f"asks for {printable(f'{module}.{name}')}, which is neither a tensor nor a container; "
            "nothing was run"
        )

    def persistent_load(self, pid: Any) -> Any:
        return pid  # PyTorch's ("storage", type, record, device, size)
