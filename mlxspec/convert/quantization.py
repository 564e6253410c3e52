"""What ``-q`` and its options ask for, checked against what MLX can do."""

from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from ..errors import OptionError

# Group size and bits, the defaults first. The modes but affine have one format each.
_GROUP_SIZES = {"affine": (64, 32, 128), "mxfp4": (32,), "mxfp8": (32,), "nvfp4": (16,)}
_BITS = {"affine": (4, 2, 3, 5, 6, 8), "mxfp4": (4,), "mxfp8": (8,), "nvfp4": (4,)}


@dataclass(frozen=True)
class Quantization:
    """A format of quantised weights, in MLX's terms."""

    mode: str
    bits: int
    group_size: int

    @property
    def config(self) -> dict[str, Any]:
        """The entry of ``config.json``."""
        return {"group_size": self.group_size, "bits": self.bits, "mode": self.mode}

    def encode(self, module: str, weight: mx.array) -> dict[str, mx.array]:
        """The tensors that take the place of ``{module}.weight``, by name.

        Like mlx-lm, a weight whose rows are no whole number of groups stays as it is.
        """
        if weight.shape[-1] % self.group_size:
            return {f"{module}.weight": weight}
        # The modes but affine have no biases.
        names = [f"{module}.{parameter}" for parameter in ("weight", "scales", "biases")]
        return dict(zip(names, mx.quantize(weight, **self.config), strict=False))


def quantization(
    *, mode: str | None = None, bits: int | None = None, group_size: int | None = None
) -> Quantization:
    """The format with what is left open filled in: affine, 4 bits in groups of 64.

    Raises:
        OptionError: MLX does not have the combination.
    """
    mode = mode or "affine"
    if mode not in _BITS:
        raise OptionError(f"--q-mode {mode}: unknown; choose from {', '.join(_BITS)}")
    bits = _BITS[mode][0] if bits is None else bits
    group_size = _GROUP_SIZES[mode][0] if group_size is None else group_size
    if bits not in _BITS[mode]:
        raise OptionError(f"--q-bits {bits}: {mode} has {_choices(_BITS[mode])}")
    if group_size not in _GROUP_SIZES[mode]:
        raise OptionError(f"--q-group-size {group_size}: {mode} has {_choices(_GROUP_SIZES[mode])}")
    return Quantization(mode, bits, group_size)


def _choices(numbers: tuple[int, ...]) -> str:
    *others, last = map(str, sorted(numbers))
    return f"{', '.join(others)} or {last}" if others else f"only {last}"
