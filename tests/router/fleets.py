"""Routers for tests: a real router in a thread, in front of real servers or of fake workers."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx

from headgate.config import RouteConfig, WorkerAddress
from headgate.contract.control import BOOT_HEADER
from headgate.contract.operations.operation import AskAll
from headgate.contract.operations.table import ON_ROUTERS
from headgate.contract.orders import Order, Orders, Overtaken
from headgate.listening import take_port
from headgate.router.router import Router
from headgate.router.server import serving
from tests.api.serving import wait_until
from tests.router.compiled import compiled_fast_path

ASK_ALL = {operation.path: operation.fan_out for operation in ON_ROUTERS if isinstance(operation.fan_out, AskAll)}
PAUSES = {"/v1/pause", *(path for path, effects in ASK_ALL.items() if effects.pauses)}
RESUMES = {"/v1/resume", *(path for path, effects in ASK_ALL.items() if effects.resumes)}

VERSION = "0"

# Timeouts long enough for a machine that does not run a thread for seconds. Tests of a timeout set their own.
UNHURRIED = {
    "probe_interval_s": 0.1,
    "connect_timeout_s": 30.0,
    "probe_timeout_s": 30.0,
    "silence_s": 60.0,
    "idle_timeout_s": 100.0,
    "patience_s": 60.0,
    "control_timeout_s": 60.0,
    "ticket_timeout_s": 30.0,
}


@dataclass(eq=False)
class LiveRouter:
    url: str
    router: Router
    loop: asyncio.AbstractEventLoop

    def client(self, key: str | None = None) -> httpx.Client:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        return httpx.Client(base_url=self.url, headers=headers, timeout=100, trust_env=False)

    def get(self, path: str, **options: Any) -> httpx.Response:
        with self.client(options.pop("key", None)) as http:
            return http.get(path, **options)

    def post(self, path: str, body: Any = None, **options: Any) -> httpx.Response:
        with self.client(options.pop("key", None)) as http:
            return http.post(path, json=body, **options)

    def delete(self, path: str, **options: Any) -> httpx.Response:
        with self.client(options.pop("key", None)) as http:
            return http.delete(path, **options)

    def states(self) -> dict[str, str]:
        return {worker.url: worker.state for worker in self.router.fleet}

    def wait_for(self, **states: int) -> None:
        """Wait until these numbers of workers are in these states."""

        def counted() -> bool:
            seen = list(self.states().values())
            return all(seen.count(state) == number for state, number in states.items())

        wait_until(counted)

    def do(self, call: Callable[[], Any]) -> Any:
        """Run a function in the router's thread."""

        async def run() -> Any:
            return call()

        return asyncio.run_coroutine_threadsafe(run(), self.loop).result(60)


@contextmanager
def live_router(*urls: str, ready: int | None = None, **config: Any) -> Iterator[LiveRouter]:
    """Run a router in front of these workers, and yield when `ready` of them (by default all) are ready."""
    known, stop, made = threading.Event(), [], []
    failed: list[BaseException] = []
    workers = tuple(WorkerAddress(**dict(zip(("url", "role"), url.split("="), strict=False))) for url in urls)

    async def route() -> None:
        ended = asyncio.Event()
        router = Router(RouteConfig(workers=workers, **UNHURRIED | config), seed=0, fast_path=compiled_fast_path())
        async with serving(router, take_port("127.0.0.1", 0), VERSION) as url:
            loop = asyncio.get_running_loop()
            made.append(LiveRouter(url, router, loop))
            stop.append(lambda: loop.call_soon_threadsafe(ended.set))
            known.set()
            await ended.wait()

    def main() -> None:
        try:
            asyncio.run(route())
        except BaseException as error:
            failed.append(error)
            known.set()

    thread = threading.Thread(target=main)
    thread.start()
    try:
        assert known.wait(60)
        if not made:
            raise failed[0]
        made[0].wait_for(ready=len(urls) if ready is None else ready)
        yield made[0]
    finally:
        for call in stop:
            call()
        thread.join(60)
    if failed:
        raise failed[0]


@dataclass(eq=False)
class FakeWorker:
    """A fake Headgate worker that answers every control call, or hangs, or refuses."""

    state: str = "running"
    version: int = 0
    hangs: bool = False
    owner: str = "headgate"
    slow: str = ""  # paths of calls that are never answered
    late: dict[str, Callable[[], Any]] = field(default_factory=dict)  # path -> delays the call until it returns
    refuses: dict[str, int] = field(default_factory=dict)  # path -> status
    code: str = "stubborn"  # of refusals
    boot_id: str | None = None
    calls: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    tenants: dict[str, str | None] = field(default_factory=dict)  # path -> tenant header of the last call
    url: str = ""
    over: threading.Event = field(default_factory=threading.Event)
    orders: Orders = field(default_factory=Orders)

    def answer(self, method: str, path: str, body: dict[str, Any], order: Order) -> tuple[int, Any]:
        if method == "POST":
            self.calls.append((path, body))
        if path in self.refuses:
            return self.refuses[path], {"error": {"message": "not I", "code": self.code}}
        if path == "/v1/models":
            return 200, {"object": "list", "data": [{"id": "fake", "owned_by": self.owner}]}
        if path == "/v1/loads":
            load = LOAD | {"state": self.state, "weight_version": self.version}
            return 200, {"loads": [load], "life": self.boot_id}
        if path == "/get_world_size":
            return 200, {"world_size": 2}
        if path == "/v1/requests":
            return 200, {"object": "list", "data": []}
        if path in ("/v1/pause", "/v1/resume"):
            try:
                self.orders.take(order, paused=self.state == "paused", resumes=path in RESUMES)
            except Overtaken as error:
                return 409, {"error": {"message": str(error), "code": error.code}}
        if path in PAUSES:
            self.state = "paused"
        elif path in RESUMES:
            self.state = "running"
        self.version = body.get("version", self.version)
        if path == "/v1/abort_requests":
            return 200, {"result": {"aborted": [], "not_found": [], "already_finished": [], "errors": []}}
        result = {"is_paused": self.state == "paused", "state": self.state, "weight_version": self.version}
        return 200, {"request_id": "x", "status": "success", "result": result | {"engines": []}}

    def restart(self, boot_id: str) -> None:
        self.state, self.orders, self.boot_id = "running", Orders(), boot_id

    def asked(self, path: str) -> list[dict[str, Any]]:
        return [body for called, body in self.calls if called == path]


LOAD = {
    "num_running_reqs": 0,
    "num_waiting_reqs": 0,
    "num_free_blocks": 8,
    "num_total_blocks": 8,
    "max_running_requests": 4,
}


@contextmanager
def fake_worker(**options: Any) -> Iterator[FakeWorker]:
    fake = FakeWorker(**options)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length", 0)))
            if fake.hangs or self.path == fake.slow:
                fake.over.wait(60)
            fake.late.get(self.path, bool)()
            fake.tenants[self.path] = self.headers["x-headgate-tenant"]
            order = Order.of(self.headers)
            status, told = fake.answer(self.command, self.path.partition("?")[0], json.loads(body or b"{}"), order)
            raw = json.dumps(told).encode()
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(raw)))
            if fake.boot_id is not None:
                self.send_header(BOOT_HEADER, fake.boot_id)
            self.end_headers()
            self.wfile.write(raw)

        do_POST = do_DELETE = do_GET  # noqa: N815

        def log_message(self, format: str, *args: Any) -> None:
            pass

    class Server(ThreadingHTTPServer):
        daemon_threads = True
        request_queue_size = 64

        def handle_error(self, request: Any, client_address: Any) -> None:
            pass  # the router has closed the connection

    server = Server(("127.0.0.1", 0), Handler)
    fake.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield fake
    finally:
        fake.over.set()
        server.shutdown()
        server.server_close()
        thread.join(60)
