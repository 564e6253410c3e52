import io
import random
import re

import pytest
from rich.cells import cell_len

from mlxspec.terminal import TokenPrinter, colored, one_line, visible, wants_color


class Terminal(io.StringIO):
    """A stream that reports to be a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def _color_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)


def written(monkeypatch: pytest.MonkeyPatch, stream: io.StringIO, color: bool | None) -> str:
    """Return the output for two tokens, of which the second is accepted and has an escape."""
    monkeypatch.setattr("sys.stdout", stream)
    printer = TokenPrinter(color)
    printer.write("own", False)
    printer.write("\x1bdraft", True)
    printer.finish()
    return stream.getvalue()


@pytest.mark.parametrize(
    "character",
    [
        *(chr(code) for code in range(0x20) if chr(code) not in "\t\n"),
        *(chr(code) for code in range(0x7F, 0xA0)),
        *"\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069",
        *"\u061c\u200b\u200e\u200f\u2060\ufeff",
    ],
)
def test_no_control_or_reordering_character_is_left(character: str):
    assert character not in visible(f"a{character}b")


def test_ordinary_text_is_left_as_it_is():
    text = "a\tb\nc é ß 日本 שלום مرحبا 👩‍💻 \u00a0 ~"
    assert visible(text) == text


def test_a_name_is_one_line_on_which_nothing_is_hidden():
    assert one_line("a\nb\u2028c  d") == "a b c d"
    hidden = "\x1b\x9b\u200b\u200c\u200d\u200e\u200f\u061c\u202e"
    assert not set(one_line(f"a{hidden}b")) & set(hidden)


def test_a_crlf_shows_as_a_line_break():
    assert visible("a\r\nb") == "a\nb"


def test_a_sequence_that_is_split_across_tokens_is_harmless():
    parts = ("\x1b", "]0;title", "\x07")
    assert visible("".join(parts)) == "".join(map(visible, parts)) == "␛]0;title␇"


def test_the_two_origins_look_different():
    assert colored("x", True) != colored("x", False)


def test_a_terminal_gets_colours_and_visible_escapes(monkeypatch: pytest.MonkeyPatch):
    text = written(monkeypatch, Terminal(), None)
    assert text == colored("own", False) + colored("␛draft", True) + "\n"


def test_a_terminal_without_colours_still_gets_visible_escapes(monkeypatch: pytest.MonkeyPatch):
    assert written(monkeypatch, Terminal(), False) == "own␛draft\n"


def test_a_file_gets_the_text_unchanged(monkeypatch: pytest.MonkeyPatch):
    assert written(monkeypatch, io.StringIO(), None) == "own\x1bdraft\n"


def test_a_pipe_in_colour_gets_visible_escapes(monkeypatch: pytest.MonkeyPatch):
    assert "␛draft" in written(monkeypatch, io.StringIO(), True)


def test_finish_adds_no_second_line_break(monkeypatch: pytest.MonkeyPatch):
    stream = io.StringIO()
    monkeypatch.setattr("sys.stdout", stream)
    printer = TokenPrinter()
    printer.finish()
    printer.write("line\n", False)
    printer.write("", False)
    printer.finish()
    assert stream.getvalue() == "line\n"


def test_every_token_is_flushed(monkeypatch: pytest.MonkeyPatch):
    raw = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(raw))
    TokenPrinter().write("token", False)
    assert raw.getvalue() == b"token"


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("NO_COLOR", "1", False),
        ("NO_COLOR", "", True),  # no-color.org: only if not empty
        ("TERM", "dumb", False),
        ("TERM", "xterm", True),
    ],
)
def test_the_environment_decides_where_the_user_does_not(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, expected: bool
):
    monkeypatch.setenv(name, value)
    assert wants_color(Terminal()) is expected
    assert wants_color(Terminal(), True) is True
    assert wants_color(io.StringIO()) is False


def screen(output: str) -> list[str]:
    """Emulate a terminal; return its lines after this output and its escape sequences."""
    lines, column = [""], 0
    for sequence, character in re.findall(r"\x1b\[([\d;]*[A-Za-z])|(.)", output, re.DOTALL):
        if character == "\n":
            lines.append("")
            column = 0
        elif character:
            lines[-1] = lines[-1][:column] + character
            column += 1
        elif sequence[-1] == "D":
            column -= int(sequence[:-1])
        elif sequence == "K":
            lines[-1] = lines[-1][:column]
    return lines


@pytest.mark.parametrize("color", [True, False])
def test_lines_break_between_words_wherever_tokens_end(
    monkeypatch: pytest.MonkeyPatch, color: bool
):
    monkeypatch.setattr("mlxspec.terminal.columns_of", lambda stream: 21)
    source = random.Random(1)
    for _ in range(40):
        text = "".join(
            "".join(source.choices("abcdefg.-", k=source.choice((1, 3, 7, 12, 30))))
            + source.choice((" ", " ", " ", "  ", "\n", "\n    "))
            for _ in range(12)
        )
        shown = []
        for longest in (1, 4, 40):  # tokens
            stream, left = Terminal(), text
            monkeypatch.setattr("sys.stdout", stream)
            printer = TokenPrinter(color, wraps=True)
            while left:
                cut = source.randint(1, longest)
                printer.write(left[:cut], source.random() < 0.5)
                left = left[cut:]
            shown.append(screen(stream.getvalue()))
        lines = shown[0]
        assert shown[1:] == [lines, lines]
        assert max(map(len, lines)) <= 20
        assert "".join("".join(lines).split()) == "".join(text.split())
        words = [word for line in lines for word in line.split()]
        assert all(word in words for word in text.split() if len(word) <= 20)
        paragraphs = [line.rstrip() for line in text.split("\n") if len(line) <= 20]
        assert all(line in [one.rstrip() for one in lines] for line in paragraphs)


def test_wide_characters_fill_the_line(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("mlxspec.terminal.columns_of", lambda stream: 11)
    stream = Terminal()
    monkeypatch.setattr("sys.stdout", stream)
    TokenPrinter(False, wraps=True).write("日本語日本語日本語", False)
    assert stream.getvalue() == "日本語日本\n語日本語"


@pytest.mark.parametrize("emoji", ["\u2764\ufe0f", "\U0001f937\u200d\u2642\ufe0f"])
def test_emoji_of_several_characters_are_as_wide_as_they_look(
    monkeypatch: pytest.MonkeyPatch, emoji: str
):
    monkeypatch.setattr("mlxspec.terminal.columns_of", lambda stream: 11)
    stream = Terminal()
    monkeypatch.setattr("sys.stdout", stream)
    printer = TokenPrinter(False, wraps=True)
    for character in f"{emoji} " * 4 + "words":
        printer.write(character, False)
    lines = [""]
    for cells, character in re.findall(r"\x1b\[(\d+)D\x1b\[K|(.)", stream.getvalue(), re.DOTALL):
        if character == "\n":
            lines.append("")
        lines[-1] += character.strip("\n")
        kept = cell_len(lines[-1]) - int(cells or 0)
        while cell_len(lines[-1]) > kept:
            lines[-1] = lines[-1][:-1]
    assert all(cell_len(line) <= 10 for line in lines)
    assert " ".join(lines).split() == [emoji] * 4 + ["words"]


def test_without_a_terminal_nothing_is_wrapped(monkeypatch: pytest.MonkeyPatch):
    stream = io.StringIO()
    monkeypatch.setattr("sys.stdout", stream)
    TokenPrinter(True, wraps=True).write("word " * 40, False)
    assert stream.getvalue() == colored("word " * 40, False)
