"""A model as it will be written: what is known before any weight is read, and how to read it."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from .safetensors_file import TensorSpec


@dataclass(frozen=True)
class TensorGroup:
    """Tensors that come from one source tensor: a weight, or its quantised parts.

    ``produce`` reads and converts them; ``parameters`` counts the model's numbers in them.
    """

    specs: dict[str, TensorSpec]
    parameters: int
    produce: Callable[[], dict[str, mx.array]]

    @property
    def nbytes(self) -> int:
        """Size of the tensors as written."""
        return sum(spec.nbytes for spec in self.specs.values())


@dataclass(frozen=True)
class PlannedModel:
    """What the converter writes. ``write_tokenizer`` fills in a directory's tokenizer files."""

    config: dict[str, Any]
    groups: list[TensorGroup]
    write_tokenizer: Callable[[Path], None]
