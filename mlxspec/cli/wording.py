"""Numbers in sentences."""

from __future__ import annotations


def counted(number: int, thing: str) -> str:
    """A number of things: "1 file", "2,000 files"."""
    return f"{number:,} {thing}" if number == 1 else f"{number:,} {thing}s"


def size_in_words(nbytes: int) -> str:
    """The size of a file, in decimal units: "640 bytes", "3.2 kB", "1,024.0 MB"."""
    if nbytes < 1000:
        return counted(nbytes, "byte")
    return f"{nbytes / 1e3:.1f} kB" if nbytes < 1e6 else f"{nbytes / 1e6:,.1f} MB"
