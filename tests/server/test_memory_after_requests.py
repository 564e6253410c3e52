"""A finished request keeps nothing large; only the prefix cache keeps its caches."""

from __future__ import annotations

import gc
import time
import weakref

import pytest

from mlxspec.engine.grammar import Grammar
from mlxspec.generation.session import Session
from mlxspec.server.worker import ServedRequest
from tests.support.serving import running_server, served


@pytest.mark.slow
@pytest.mark.parametrize("streamed", [False, True])
def test_caches_and_grammars_go_without_garbage_collection(
    streamed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    large: list[weakref.ref[Session | Grammar]] = []
    start = ServedRequest.start

    def noted(request: ServedRequest) -> None:
        start(request)
        assert request.session
        assert request.constraint
        large.extend((weakref.ref(request.session), weakref.ref(request.constraint)))

    monkeypatch.setattr(ServedRequest, "start", noted)
    gc.collect()
    gc.disable()
    try:
        with running_server(model := served()) as server:
            client = server.client()
            for turn in range(3):
                prompt = f"Request {turn} with a prompt of some length."
                answer = client.completions.create(
                    model="small",
                    prompt=prompt,
                    max_tokens=8,
                    stream=streamed,
                    extra_body={"response_format": {"type": "json_object"}},
                )
                if streamed:
                    list(answer)
            server.worker.call(lambda: model.cache.make_room(1 << 40))
            deadline = time.monotonic() + 5
            while any(one() for one in large) and time.monotonic() < deadline:
                time.sleep(0.01)
            assert len(large) == 6
            assert not any(one() for one in large)
    finally:
        gc.enable()
