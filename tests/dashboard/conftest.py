from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from headgate.testing.tiny import tiny_model
from tests.api.live import LiveServer, live_server
from tests.router.fleets import LiveRouter, live_router

ENGINE = {"device": "cpu", "kv_blocks": 4096, "max_running": 8}


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("watched") / "tiny", max_position_embeddings=32768)


@pytest.fixture(scope="session")
def server(model: Path) -> Iterator[LiveServer]:
    """A server for all tests of the dashboard; they leave it running and idle."""
    with live_server(model, **ENGINE) as server:
        yield server


@pytest.fixture(scope="session")
def router(model: Path, server: LiveServer) -> Iterator[LiveRouter]:
    with live_server(model, **ENGINE) as second, live_router(server.url, second.url) as router:
        yield router
