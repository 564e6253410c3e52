"""Generate text: ``python decoder.py --help``, or ``from decoder import PromptLookupDecoder``."""

from typing import TYPE_CHECKING

import mlxspec
from mlxspec.cli.generate import generate_command

if TYPE_CHECKING:
    from mlxspec import PromptLookupDecoder

__all__ = ["PromptLookupDecoder"]


def __getattr__(name: str) -> object:
    """Import the decoder when it is asked for, so that ``--help`` does not wait for MLX."""
    if name in __all__:
        return getattr(mlxspec, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


if __name__ == "__main__":
    generate_command(prog_name="decoder.py")
