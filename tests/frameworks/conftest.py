from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from headgate.testing.tiny import tiny_model
from tests.api.conftest import patience
from tests.api.live import LiveServer, live_server
from tests.api.test_abort import idle
from tests.router.fleets import LiveRouter, live_router, wait_until

__all__ = ["patience"]

CONTEXT = 4096


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("frameworks")


@pytest.fixture(scope="module")
def old(folder: Path) -> Path:
    """The weights that the server starts with."""
    return tiny_model(folder / "old", max_position_embeddings=CONTEXT)


@pytest.fixture(scope="module")
def new(folder: Path) -> Path:
    """Other weights of the same shape."""
    return tiny_model(folder / "new", seed=1, max_position_embeddings=CONTEXT)


@pytest.fixture(scope="module")
def server(old: Path) -> Iterator[LiveServer]:
    """A server for the tests of one file, so that a framework may pause it and change its weights."""
    with live_server(old, device="cpu", kv_blocks=512, max_running=8) as server:
        yield server


@pytest.fixture(scope="module")
def router(server: LiveServer) -> Iterator[LiveRouter]:
    with live_router(server.url) as router:
        yield router


@dataclass(frozen=True)
class Target:
    """A base URL that a framework is configured with."""

    url: str

    def get(self, path: str, **options: Any) -> httpx.Response:
        with httpx.Client(base_url=self.url, timeout=100, trust_env=False) as http:
            return http.get(path, **options)

    def post(self, path: str, body: Any = None, **options: Any) -> httpx.Response:
        with httpx.Client(base_url=self.url, timeout=100, trust_env=False) as http:
            return http.post(path, json=body, **options)

    def events(self, path: str, body: dict[str, Any], **options: Any) -> list[str]:
        """The `data` of every event of a stream."""
        with (
            httpx.Client(base_url=self.url, timeout=100, trust_env=False) as http,
            http.stream("POST", path, json=body | {"stream": True}, **options) as response,
        ):
            assert response.status_code == 200, response.read()
            lines = [line for line in response.iter_lines() if line.startswith("data: ")]
        return [line.removeprefix("data: ") for line in lines]


@pytest.fixture(params=["server", "router"])
def target(request: pytest.FixtureRequest) -> Target:
    """The server itself, and a router in front of it: a framework must not see a difference."""
    live = request.getfixturevalue(request.param)
    if isinstance(live, LiveRouter):
        # A test may have updated the server itself; a router that does not know it gives the next update a used number.
        server: LiveServer = request.getfixturevalue("server")
        wait_until(lambda: all(worker.version == server.status().version for worker in live.router.fleet))
    return Target(live.url)


@pytest.fixture(autouse=True)
def clean(server: LiveServer) -> Iterator[None]:
    """After each test, wake and resume the server, and wait until it is idle."""
    yield
    server.post("/v1/wakeup", None)
    server.post("/v1/resume", None)
    asyncio.run(idle(server))


@contextmanager
def held_request(
    server: LiveServer, target: Target, path: str, body: dict[str, Any]
) -> Iterator[Future[httpx.Response]]:
    """Start a long request that cannot end by itself, because its engine is frozen; yields its answer."""
    with ThreadPoolExecutor(1) as threads:
        for _ in range(20):
            answer = threads.submit(target.post, path, body)
            wait_until(lambda answer=answer: server.status().running == 1 or answer.done())
            server.post("/v1/pause", {"mode": "freeze", "new_requests": "queue"})
            if server.status().running == 1:
                break
            server.post("/v1/resume", None)  # it has ended before the pause
        yield answer
        server.post("/v1/resume", None)
        target.post("/v1/abort_requests", {"abort_all": True})
