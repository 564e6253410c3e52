"""Clients that disconnect in the middle of a request leave no trace."""

from __future__ import annotations

import logging
import socket
import time
from urllib.parse import urlsplit

import httpx
import pytest

from tests.support.serving import running_server

HEAD = "POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\n"


@pytest.mark.nightly(keep=1)
@pytest.mark.slow
@pytest.mark.parametrize(
    "sent",
    [
        "Content-Length: 1000\r\n\r\n",
        'Content-Length: 1000\r\n\r\n{"messages":',
        'Transfer-Encoding: chunked\r\n\r\n4\r\n{"me\r\n',
    ],
)
def test_a_client_that_leaves_in_its_body_is_no_failure_of_the_server(
    sent: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING), running_server() as server:
        address = urlsplit(server.address)
        with socket.create_connection((address.hostname, address.port)) as connection:
            connection.sendall((HEAD + sent).encode())
            time.sleep(0.05)  # the request has started
        assert httpx.get(f"{server.address}/health").status_code == 200
        time.sleep(0.05)
        assert not server.worker.requests
    assert caplog.messages == []
