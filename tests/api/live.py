"""A real server for tests: engine processes with a tiny model, and the API in a thread, on its own port."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx

from headgate.api.accounting.ledger import Ledger
from headgate.api.accounting.metrics import ServerMetrics
from headgate.api.app import build_app
from headgate.api.host import ServerContext
from headgate.api.server import HttpServer
from headgate.api.state import Api, ApiSettings
from headgate.config import EngineConfig
from headgate.contract.keys import Keys
from headgate.edge.outflow import STALL_S
from headgate.edge.sharing import Sharing
from headgate.engine.replicas import Replicas, started
from headgate.listening import take_port
from headgate.protocol.message import EngineStatus
from headgate.text.template import load_template
from headgate.text.tokenizer import load_tokenizer

MODEL = "tiny"


@dataclass(eq=False)
class LiveServer:
    url: str
    api: Api
    host: ServerContext
    loop: asyncio.AbstractEventLoop

    @property
    def http(self) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=100)

    def post(self, path: str, body: Any, **options: Any) -> httpx.Response:
        with self.http as http:
            return http.post(path, json=body, **options)

    def events(self, path: str, body: Any, **options: Any) -> list[str]:
        """Return the `data` of every event of a stream."""
        with self.http as http, http.stream("POST", path, json=body | {"stream": True}, **options) as response:
            assert response.status_code == 200, response.read()
            lines = [line for line in response.iter_lines() if line.startswith("data: ")]
        return [line.removeprefix("data: ") for line in lines]

    def status(self, engine: int = 0) -> EngineStatus:
        client = self.host.replicas[engine].client
        assert client is not None
        return asyncio.run_coroutine_threadsafe(client.ping(60), self.loop).result(60).status

    @contextmanager
    def stopped(self, engine: int = 0) -> Iterator[None]:
        """Stop the process of this engine inside the context."""
        pid = self.host.replicas[engine].pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(pid, signal.SIGCONT)


def eventually(true: Callable[[], bool], timeout_s: float = 60) -> bool:
    until_s = time.monotonic() + timeout_s
    while not true():
        if time.monotonic() > until_s:
            return False
        time.sleep(0.01)
    return True


@contextmanager
def live_server(
    model: Path,
    *,
    settings: ApiSettings | None = None,
    keys: Keys | None = None,
    count: int = 1,
    limit: int = 1000,
    stall_s: float = STALL_S,
    send_bytes: int | None = None,
    **engine: Any,
) -> Iterator[LiveServer]:
    """Serve `model` on `count` engines inside the context."""
    ready: list[LiveServer] = []
    failed: list[BaseException] = []
    known = threading.Event()
    stop: list[Callable[[], None]] = []

    async def serve() -> None:
        async with started(model, EngineConfig(**engine), count=count) as engines:
            await run(engines)

    async def run(engines: Replicas) -> None:
        metrics = ServerMetrics()
        ledger = Ledger(metrics, limit=limit, sharing=Sharing((keys or Keys()).tenants))
        api = Api(
            engines=engines,
            ledger=ledger,
            model_name=MODEL,
            created=1,
            tokenizer=load_tokenizer(model),
            template=load_template(model),
            settings=settings or ApiSettings(),
        )
        host = ServerContext("0", MODEL, engines.replicas, ledger)
        listener = take_port("127.0.0.1", 0)
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        if send_bytes is not None:  # the kernel's send buffer per connection
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_bytes)
        app = build_app(api, host, keys or Keys(), 1 << 20)
        server = HttpServer(app, listener, known.set, stall_s, app.begin)
        ready.append(LiveServer(url, api, host, asyncio.get_running_loop()))
        stop.append(partial(asyncio.get_running_loop().call_soon_threadsafe, server.stop_accepting))
        await server.serve()

    def main() -> None:
        try:
            asyncio.run(serve())
        except BaseException as error:
            failed.append(error)
            known.set()

    thread = threading.Thread(target=main)
    thread.start()
    try:
        assert known.wait(100)
        if failed:
            raise failed[0]
        yield ready[0]
    finally:
        for call in stop:
            call()
        thread.join(100)
