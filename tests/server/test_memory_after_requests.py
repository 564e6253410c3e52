"""Only the prefix cache keeps the caches of a finished request."""

from __future__ import annotations

import gc
import time
import weakref

import pytest

from mlxspec.generation.session import Session
from mlxspec.server.worker import ServedRequest
from tests.support.serving import running_server, served


@pytest.mark.slow
@pytest.mark.parametrize("streamed", [False, True])
def test_caches_go_with_their_request_without_garbage_collection(streamed: bool) -> None:
    sessions: list[weakref.ref[Session]] = []

    def note(request: ServedRequest) -> None:
        assert request.session
        sessions.append(weakref.ref(request.session))

    gc.collect()
    gc.disable()
    try:
        with running_server(served(cache_bytes=0)) as server:
            server.worker.on_end = note
            client = server.client()
            for turn in range(3):
                prompt = f"Request {turn} with a prompt of some length."
                answer = client.completions.create(
                    model="small", prompt=prompt, max_tokens=8, stream=streamed
                )
                if streamed:
                    list(answer)
            deadline = time.monotonic() + 5
            while any(session() for session in sessions) and time.monotonic() < deadline:
                time.sleep(0.01)
            assert len(sessions) == 3
            assert not any(session() for session in sessions)
    finally:
        gc.enable()
