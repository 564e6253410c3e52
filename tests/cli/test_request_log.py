"""Outcomes of requests in the server's log lines."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import httpx
import pytest

from mlxspec.cli.serve import end_record, request_log
from mlxspec.generation.scheduler import Scheduler
from mlxspec.server.body import ApiError
from mlxspec.server.worker import ServedRequest
from tests.support.brake import braked, wait_until
from tests.support.serving import Running, running_server

pytestmark = pytest.mark.slow


def outcomes(capsys: pytest.CaptureFixture[str], *ends: tuple[int, ApiError]) -> list[Any]:
    """Return the logged outcomes and errors of two choices that end like this, by index."""
    logging = ExitStack()
    with running_server() as server, braked(server.decoder.model) as brake:
        log = logging.enter_context(request_log(as_json=True))
        server.worker.on_end = lambda request: log(end_record(request))
        with ThreadPoolExecutor() as pool:
            with brake.holding():
                asked = pool.submit(ask_for_two, server)
                wait_until(lambda: len(server.worker.requests) == 2)
                requests = server.worker.requests.copy()
                for index, error in ends:
                    server.worker.call_scheduler("small", Scheduler.cancel, requests[index], error)
            asked.result()
        wait_until(lambda: not server.worker.requests)
        logging.close()
    records = map(json.loads, capsys.readouterr().out.splitlines())
    return [(record["outcome"], record["error"]) for record in records]


def ask_for_two(server: Running) -> httpx.Response:
    body = {"prompt": "Once", "n": 2, "max_tokens": 200}
    return httpx.post(f"{server.address}/v1/completions", json=body, timeout=60)


def test_the_failure_is_logged_for_which_other_choices_were_cancelled(
    capsys: pytest.CaptureFixture[str],
) -> None:
    failed, cancelled = outcomes(capsys, (1, ApiError("out of order", status=500)))
    assert failed == ("error", "out of order")
    assert cancelled[0] == "cancelled"


def test_who_left_has_cancelled(capsys: pytest.CaptureFixture[str]) -> None:
    gone = ApiError("cancelled", status=499)
    assert outcomes(capsys, (0, gone), (1, gone)) == [("cancelled", "cancelled")] * 2


def test_tokens_are_those_of_the_usage(capsys: pytest.CaptureFixture[str]) -> None:
    body = {"prompt": ["Once upon a time", "The"], "n": 2, "max_tokens": 3}
    logging = ExitStack()
    with running_server() as server:
        log = logging.enter_context(request_log(as_json=True))
        server.worker.on_end = lambda request: log(end_record(request))
        answers = [httpx.post(f"{server.address}/v1/completions", json=body) for _ in range(2)]
        logging.close()
    lines = capsys.readouterr().out.splitlines()
    for at, answer in enumerate(answers):
        usage, records = answer.json()["usage"], [*map(json.loads, lines[4 * at : 4 * at + 4])]
        # A prompt's choices share its prefill.
        assert sum(one["prompt_tokens"] for one in records) == 2 * usage["prompt_tokens"]
        assert sum(one["tokens"] for one in records) == usage["completion_tokens"]


def test_an_error_after_the_last_token_is_logged_beside_the_outcome(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(request: ServedRequest) -> None:
        raise RuntimeError("out of order")

    monkeypatch.setattr(ServedRequest, "close", fail)
    logging = ExitStack()
    with running_server() as server:
        log = logging.enter_context(request_log(as_json=True))
        server.worker.on_end = lambda request: log(end_record(request))
        body = {"prompt": "Once", "max_tokens": 3}
        answer = httpx.post(f"{server.address}/v1/completions", json=body).json()
        wait_until(lambda: not server.worker.requests)
        logging.close()
    record = json.loads(capsys.readouterr().out)
    assert answer["choices"][0]["finish_reason"] == record["outcome"] == "length"
    assert record["error"] == "out of order"
