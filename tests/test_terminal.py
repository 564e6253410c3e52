import io

import pytest

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
