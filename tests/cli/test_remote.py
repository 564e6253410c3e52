"""A chat with a server: its commands and its answers' statistics."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import pytest
from click.testing import CliRunner

from mlxspec.cli.chat import answer_line, chat_command
from mlxspec.generation.response import GenerationResponse, SpeculationStats
from tests.cli.test_serve import PLAIN, serving
from tests.support.scripted_model import write_scripted_model

LINE = "one two three four\n"


def test_the_speed_against_plain_is_shown_where_it_is_known() -> None:
    stats = SpeculationStats(3, 3, 0, 0, 3)
    last = GenerationResponse("", 0, mx.array([]), False, 10, 1.0, 3, 1.0, 1.0, "stop", stats)
    assert "plain" not in answer_line(last, 9)
    last.stats = replace(stats, cost=2.0)
    assert "1.5× plain" in answer_line(last, 9)


@pytest.mark.slow
def test_every_command_does_its_work_with_a_server(endless: Path, tmp_path: Path) -> None:
    other = write_scripted_model(tmp_path / "other", ("ah", " oh"), ends=True)
    saved = tmp_path / "chat.json"
    lines = [
        *("a", "/model", f"/model {other}", "/model", "b", "/retry 0.5", "/stats"),
        *("/system Be brief.", "/retry", "c", "/undo", f"/save {saved}", "/reset"),
        *(f"/load {saved}", f"/model {endless}", "d", "/model nope"),
    ]
    with serving("--model", endless, "--model", other, *PLAIN) as server:
        options = ["--server", server.address.removeprefix("http://"), "--max-tokens", "5"]
        result = CliRunner().invoke(chat_command, options, input="\n".join(lines))
        forbidding = [*options, "--logit-bias", "0=-inf"]
        forbidden = CliRunner().invoke(chat_command, forbidding, input="a")
        assert forbidden.stdout == LINE, forbidden.stderr
    assert result.stdout == LINE + "ah oh\n" * 4 + LINE, result.stderr
    assert f"Chatting with {endless.name}.\n" in result.stderr
    assert f"/model NAME switches to {endless.name}, other.\n" in result.stderr
    assert "Chatting with other.\n" in result.stderr
    assert "generated tokens" in result.stderr
    assert "against plain" not in result.stderr  # which a server does not report
    assert "Removed: c\nSaved 2 turns" in result.stderr
    assert "Loaded 2 turns.\n" in result.stderr
    assert result.stderr.endswith(
        f"Error: --model is nope: choose one of the server's: {endless.name}, other\n"
    )
    assert result.exit_code == 1
    record = json.loads(saved.read_text())
    assert record["model"] == "other"
    assert [message["content"] for message in record["messages"]] == [
        *("Be brief.", "a", LINE, "b", "ah oh")
    ]
