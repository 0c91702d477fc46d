from __future__ import annotations

from collections.abc import Iterator

import pytest

from headgate.api.accounting import dashboard
from headgate.api.compat import sglang
from headgate.api.control import health, metrics
from headgate.api.control import lifecycle as control
from headgate.testing.tiny import tiny_model
from tests.api.live import LiveServer, live_server

QUERY_TIMEOUTS = (
    (control, "QUERY_TIMEOUT_S"),
    (dashboard, "QUERY_TIMEOUT_S"),
    (health, "PING_TIMEOUT_S"),
    (metrics, "SCRAPE_TIMEOUT_S"),
    (sglang, "PING_TIMEOUT_S"),
)


@pytest.fixture(scope="module", autouse=True)
def patience() -> Iterator[None]:
    """Raise the timeouts of engine queries: a busy test machine may not schedule an engine for seconds."""
    with pytest.MonkeyPatch.context() as patch:
        for module, name in QUERY_TIMEOUTS:
            patch.setattr(module, name, 30.0)
        yield


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """A server with a tiny model, shared by all tests of a session."""
    model = tiny_model(tmp_path_factory.mktemp("served") / "tiny")
    with live_server(model, device="cpu", max_context=512, kv_blocks=256, block_size=16) as server:
        yield server
