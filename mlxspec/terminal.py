"""Writes generated text to standard output, in two colours and with visible control characters."""

from __future__ import annotations

import os
import sys
from typing import TextIO

# Bold, in a blue of the 256-colour palette that is readable on dark and on light backgrounds. The
# target's own tokens keep the terminal's text colour, which differs from blue with every kind of
# colour blindness. Bold type distinguishes them without any colour.
_ACCEPTED = "\x1b[1;38;5;32m"
_PLAIN = "\x1b[0m"

# Control characters become their Unicode pictures, from U+2400. C1 controls, and characters that
# reorder text or take no space, have no pictures and become U+FFFD. A carriage return would let the
# next characters overwrite the line, so it is dropped; of CR LF, the line feed is left. The two
# joiners stay, since Persian, the scripts of India and many emoji need them.
_VISIBLE: dict[int, int | None] = {
    **{code: 0x2400 + code for code in range(0x20) if chr(code) not in "\t\n"},
    ord("\r"): None,
    0x7F: 0x2421,
    **dict.fromkeys((*range(0x80, 0xA0), *range(0x202A, 0x202F), *range(0x2066, 0x206A)), 0xFFFD),
    **dict.fromkeys((0x061C, 0x200B, 0x200E, 0x200F, 0x2060, 0xFEFF), 0xFFFD),
}
_JOINERS = dict.fromkeys((0x200C, 0x200D), 0xFFFD)


def visible(text: str) -> str:
    """Replace control, escape and bidirectional override characters with visible signs.

    Newlines and tabs stay. Each character is treated separately, so an escape sequence is also made
    harmless if it is split across calls.
    """
    return text.translate(_VISIBLE)


def one_line(text: object) -> str:
    """Make text from users or files safe to print, on one line.

    Unlike :func:`visible`, it also replaces joiners, since invisible characters could make two
    different names look the same.
    """
    return visible(" ".join(str(text).split())).translate(_JOINERS)


def colored(text: str, from_draft: bool) -> str:
    """Colour ``text`` if it comes from accepted draft tokens."""
    return f"{_ACCEPTED}{text}{_PLAIN}" if from_draft else text


def wants_color(stream: TextIO, color: bool | None = None) -> bool:
    """Whether to colour the output to ``stream``.

    Args:
        stream: standard output or standard error.
        color: the user's choice. If it is None, the answer is yes for a terminal that supports
            colours, unless ``NO_COLOR`` is set (https://no-color.org).
    """
    if color is not None:
        return color
    plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    return stream.isatty() and not plain


def columns_of(stream: TextIO) -> int:
    """The width of the terminal that a stream writes to; 80 if that is unknown."""
    try:
        return os.get_terminal_size(stream.fileno()).columns or 80
    except OSError:
        return 80


class TokenPrinter:
    """Writes the text of each token to standard output at once.

    On a terminal, or with colours, the text passes through :func:`visible`. A file or pipe without
    colours gets it unchanged.

    Args:
        color: as for :func:`wants_color`.
        wraps: whether lines on a terminal break between words. The terminal then also copies these
            line breaks.
    """

    def __init__(self, color: bool | None = None, wraps: bool = False) -> None:
        self._stream = sys.stdout
        self.color = wants_color(self._stream, color)
        self._verbatim = not (self.color or self._stream.isatty())
        self._wraps = wraps and self._stream.isatty()
        self._last = "\n"
        self._column = 0  # how many cells of the line are taken
        self._before = ""  # the last character and what joined it, which the next one may widen
        self._word: list[tuple[str, bool]] = []  # the characters of the line's last word

    def write(self, text: str, from_draft: bool) -> None:
        """Write a token's text; ``from_draft`` says whether it was an accepted draft token."""
        shown = text if self._verbatim else visible(text)
        if not shown:
            return
        self._last = shown[-1]
        self._stream.write(
            self._wrapped(shown, from_draft) if self._wraps else self._painted(shown, from_draft)
        )
        self._stream.flush()

    def _painted(self, text: str, from_draft: bool) -> str:
        # Each token resets its colour, so an interrupt never leaves the terminal coloured.
        return colored(text, from_draft) if self.color else text

    def _wrapped(self, text: str, from_draft: bool) -> str:
        """What to write so that the text's last word, if it is too long, moves to the next line.

        The word's beginning is on the screen already, so it is erased there. The last column stays
        free, since a terminal's cursor is ambiguous after it.
        """
        from rich.cells import cell_len

        width = columns_of(self._stream) - 1
        written, run = "", ""
        for character in text:
            more = cell_len(self._before + character) - cell_len(self._before)
            cells = 8 - self._column % 8 if character == "\t" else max(0, more)
            joins = more == 0 and character not in "\n\t"  # such as a variation selector
            self._before = self._before + character if joins else character
            if character == "\n":
                self._column, self._word = 0, []
            elif self._column + cells > width > 1:
                written, run = written + self._painted(run, from_draft), ""
                taken = cell_len("".join(part for part, _ in self._word))
                moves = 0 < taken < self._column and not character.isspace()
                moved = self._word if moves else []
                if moved:
                    written += f"\x1b[{taken}D\x1b[K"
                written += "\n" + "".join(self._painted(*part) for part in moved)
                self._column, self._word = taken if moved else 0, moved
                if character.isspace():
                    continue
            run += character
            if character != "\n":
                self._column += cells
                # Between wide characters, as in Chinese, a line may break.
                breaks = character.isspace() or cells > 1 or (not cells and not self._word)
                self._word = [] if breaks else [*self._word, (character, from_draft)]
        return written + self._painted(run, from_draft) if run else written

    def finish(self) -> None:
        """End the last line with a newline, unless it already ends with one."""
        if self._last != "\n":
            self._stream.write("\n")
            self._stream.flush()
