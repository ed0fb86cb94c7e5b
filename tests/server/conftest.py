from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.server.live import Live, byte_llm


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    """A server of the byte model; after a module's tests all its pages must be free."""
    server = Live(byte_llm()).ready()
    yield server
    server.check_settled()
    server.close()
