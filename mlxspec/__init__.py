"""Lossless speculative decoding for LLMs on Apple MLX, without a second model."""

from .process import prefer_openblas

prefer_openblas()  # before anything imports mlx.core

import logging  # noqa: E402
import re  # noqa: E402
from importlib import import_module  # noqa: E402
from pathlib import Path  # noqa: E402

# Type checkers and editors read __init__.pyi, too.
_STUB = Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8")
_HOMES = {name: home for home, name in re.findall(r"^from (\S+) import (\w+)", _STUB, re.MULTILINE)}

logging.getLogger(__name__).addHandler(logging.NullHandler())

__version__ = "0.1.0"
__all__ = list(_HOMES)


def __getattr__(name: str) -> object:
    """Import public names on first use, since ``--help`` should not wait seconds for MLX."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name], __name__), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
