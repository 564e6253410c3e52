"""The figures of a server's answers, as a chat adds them up."""

from __future__ import annotations

from mlxspec.cli.chat_figures import ChatFigures
from mlxspec.cli.remote import _response


def test_an_answer_that_was_stopped_has_figures() -> None:
    figures = ChatFigures()
    figures.add(_response("text", True, count=3, prompt_tokens=10, speed=5.0), 0.0)
    figures.panel(1024)
