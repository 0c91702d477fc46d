from __future__ import annotations

from collections.abc import Iterator

import pytest

from headgate.testing.tiny import tiny_model
from tests.api.live import LiveServer, live_server


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """One tiny model behind the whole API, for all tests of a session."""
    model = tiny_model(tmp_path_factory.mktemp("served") / "tiny")
    with live_server(model, device="cpu", max_context=512, kv_blocks=256, block_size=16) as server:
        yield server
