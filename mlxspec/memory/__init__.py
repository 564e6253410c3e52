"""Earlier answers, kept to draft from: in a process, or on disk over its runs. No MLX here."""

from .excerpts import Source
from .memory import MAX_TOKENS, Memory
from .part import EARNED, SOURCES

__all__ = ["EARNED", "MAX_TOKENS", "SOURCES", "Memory", "Source"]
