"""Stand-ins for tokenizers: a vocabulary and a name."""

from __future__ import annotations


class FakeTokenizer:
    """A tokenizer whose tokens 0, 1, … are ``<prefix>0``, ``<prefix>1``, …"""

    def __init__(self, name: str = "first", size: int = 100, prefix: str = "t") -> None:
        self.name_or_path = name
        self._vocabulary = {f"{prefix}{index}": index for index in range(size)}

    def get_vocab(self) -> dict[str, int]:
        return self._vocabulary


FIRST = FakeTokenizer()
SECOND = FakeTokenizer("second", prefix="u")
