"""The end of the output's text, compared with a search in the whole text."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from mlxspec.generation.request import OutputText

PIECES = ["a", "b", "ab", "ba", "aab", "", "abba", "\n"]
STOP_TOKEN = 99


class Pieces:
    """A detokenizer with tokens PIECES. Like real ones, it may hold back the last."""

    def __init__(self, delay: bool) -> None:
        self._delay, self._ready, self._held = delay, "", ""

    def reset(self) -> None: ...

    def add_token(self, token: int) -> None:
        self._ready += self._held
        self._held = PIECES[token]
        if not self._delay:
            self.finalize()

    def finalize(self) -> None:
        self._ready += self._held
        self._held = ""

    @property
    def last_segment(self) -> str:
        segment, self._ready = self._ready, ""
        return segment


tokens = st.lists(st.integers(0, len(PIECES) - 1), max_size=12)
stops = st.lists(st.text("ab\n", min_size=1, max_size=4), max_size=3)


@given(tokens, stops, st.booleans())
@example([2, 0], ["b", "aba"], True)
def test_text_ends_before_the_first_stop_string(
    output: list[int], stop: list[str], delay: bool
) -> None:
    text = OutputText(Pieces(delay), {STOP_TOKEN}, stop, max_tokens=100)
    shown, whole, known, ended = "", "", "", False
    for token in [*output, STOP_TOKEN]:
        ended = text.add(token)
        (segment,) = text.take()
        shown += segment
        before, whole = whole, whole + (PIECES[token] if token != STOP_TOKEN else "")
        known = before if delay else whole  # the text from the detokenizer so far
        # No text that may belong to a stop string has been shown.
        assert known.startswith(shown)
        assert not any(s in shown for s in stop)
        if ended:
            break
    assert ended
    assert text.finish_reason == "stop"
    cut = min((known.index(s) for s in stop if s in known), default=len(known))
    assert shown == known[:cut]
    if text.stop_string is None:
        assert not any(s in known for s in stop)
    else:
        assert text.stop_string in stop
        assert known.startswith(text.stop_string, cut)


@given(tokens.filter(bool), stops, st.booleans())
def test_at_max_tokens_everything_held_back_is_shown(
    output: list[int], stop: list[str], delay: bool
) -> None:
    text = OutputText(Pieces(delay), {STOP_TOKEN}, stop, max_tokens=len(output))
    whole, known = "", ""
    for index, token in enumerate(output, start=1):
        before, whole = whole, whole + PIECES[token]
        known = before if delay and index < len(output) else whole
        if text.add(token):
            break
    # The stop string that is complete first ends the output, at the tokens so far.
    cut = min((known.index(s) for s in stop if s in known), default=None)
    assert "".join(text.take()) == known[:cut]
    assert text.finish_reason == ("length" if cut is None else "stop")
