"""The server that most tests ask, started once for each of their files."""

from collections.abc import Iterator

import pytest

from tests.support.serving import Running, running_server


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    """A server of the small model."""
    with running_server() as running:
        yield running
