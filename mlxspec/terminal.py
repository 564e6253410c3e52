"""Generated text on standard output: in two colours, and without what a terminal obeys."""

from __future__ import annotations

import os
import sys
from typing import TextIO

# Bold and a blue of the 256-colour palette that reads on dark and on light backgrounds. The
# target's own tokens keep the terminal's text colour: blue next to it is distinct with every
# kind of colour blindness, and the weight distinguishes them without any hue.
_ACCEPTED = "\x1b[1;38;5;32m"
_PLAIN = "\x1b[0m"

# Control characters are shown by their pictures (U+2400 and on); C1 controls and the characters
# that reorder text or take no space have none. A carriage return would overwrite its line;
# dropping it leaves the line break of CR LF. The two joiners stay: Persian, the scripts of India
# and many emoji are spelled with them.
_VISIBLE: dict[int, int | None] = {
    **{code: 0x2400 + code for code in range(0x20) if chr(code) not in "\t\n"},
    ord("\r"): None,
    0x7F: 0x2421,
    **dict.fromkeys((*range(0x80, 0xA0), *range(0x202A, 0x202F), *range(0x2066, 0x206A)), 0xFFFD),
    **dict.fromkeys((0x061C, 0x200B, 0x200E, 0x200F, 0x2060, 0xFEFF), 0xFFFD),
}
_JOINERS = dict.fromkeys((0x200C, 0x200D), 0xFFFD)


def visible(text: str) -> str:
    """Make control, escape and bidirectional override characters visible instead of effective.

    Works character by character, so a sequence that is split across calls is caught as well.
    Newlines and tabs stay.
    """
    return text.translate(_VISIBLE)


def one_line(text: object) -> str:
    """A name or a message, which may hold what users or files say: harmless, on one line.

    As :func:`visible`, without any character that cannot be seen, by which two names that differ
    would look the same.
    """
    return visible(" ".join(str(text).split())).translate(_JOINERS)


def colored(text: str, from_draft: bool) -> str:
    """``text`` in the colour of accepted draft tokens, or in the target's own."""
    return f"{_ACCEPTED}{text}{_PLAIN}" if from_draft else text


def wants_color(stream: TextIO, color: bool | None = None) -> bool:
    """Whether to colour what goes to ``stream``.

    Args:
        stream: standard output or standard error.
        color: what the user said; None leaves it to the stream, which is coloured where it is
            a terminal that knows colours and ``NO_COLOR`` is unset (https://no-color.org).
    """
    if color is not None:
        return color
    plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    return stream.isatty() and not plain


class TokenPrinter:
    """Writes one token's text after the other to standard output, at once.

    On a terminal, and wherever colours are on, the text is made :func:`visible`; a file or pipe
    without colours gets it unchanged.

    Args:
        color: True or False, or None to colour at a terminal; see :func:`wants_color`.
    """

    def __init__(self, color: bool | None = None) -> None:
        self._stream = sys.stdout
        self.color = wants_color(self._stream, color)
        self._verbatim = not (self.color or self._stream.isatty())
        self._last = "\n"

    def write(self, text: str, from_draft: bool) -> None:
        """Write a token's text; ``from_draft`` says whether it was an accepted draft token."""
        shown = text if self._verbatim else visible(text)
        if not shown:
            return
        self._last = shown[-1]
        # Every token takes its colour back, so an interrupt at any point leaves none behind.
        self._stream.write(colored(shown, from_draft) if self.color else shown)
        self._stream.flush()

    def finish(self) -> None:
        """End the last line, if it has not ended."""
        if self._last != "\n":
            self._stream.write("\n")
            self._stream.flush()
