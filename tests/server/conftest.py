"""The server that most server tests share, started once per file."""

from collections.abc import Iterator

import pytest

from tests.support.serving import Running, running_server


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    """A server with the small model."""
    with running_server() as running:
        yield running
