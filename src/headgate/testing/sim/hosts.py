"""Servers and routers as simulated hosts: the real objects, assembled as `headgate serve` and `headgate route` do it."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar, cast

from headgate import scratch
from headgate.api.accounting.ledger import Ledger
from headgate.api.accounting.metrics import ServerMetrics, Stopwatch
from headgate.api.app import ServerApp, build_app
from headgate.api.generate.idempotency import Replays
from headgate.api.host import ServerContext
from headgate.api.server import Drain, HttpServer, serve_until_stopped
from headgate.api.state import Api, ApiSettings
from headgate.config import EngineConfig, RouteConfig, WorkerAddress
from headgate.contract.keys import Keys
from headgate.device.weights.file_stamps import Stamps
from headgate.engine import client as engine_client
from headgate.engine import replicas
from headgate.engine.replicas import Replicas, started
from headgate.errors import HeadgateError
from headgate.listening import StopSignals
from headgate.router.data_path.fast_path import FastPath
from headgate.router.exchange.placement import Placement
from headgate.router.exchange.relay import Exchange
from headgate.router.exchange.retry_state import RetryState
from headgate.router.router import Router
from headgate.router.server import serving
from headgate.testing.sim import kv, vocabulary
from headgate.testing.sim.engine import SimClientChannel
from headgate.testing.sim.loop import SimLoop, SimProcess
from headgate.testing.sim.network import SimSocket
from headgate.text.tokenizer import Tokenizer

EPOCH_S = 1_800_000_000.0
MODEL = "simulated"
PORT = 8000
KEY = "operator"  # the admin key

log = logging.getLogger(__name__)

T = TypeVar("T")


class SimSignals:
    """Replaces `StopSignals`; the simulation sends the signals."""

    def __init__(self) -> None:
        self.on_stop: Any = None
        self._first = asyncio.Event()

    @property
    def received(self) -> bool:
        return self._first.is_set()

    async def first(self) -> None:
        await self._first.wait()

    def send(self) -> None:
        self._first.set()
        if self.on_stop is not None:
            self.on_stop()


class OrderedSet(dict[T, None], Generic[T]):
    """A set that is iterated in insertion order."""

    def add(self, item: T) -> None:
        self[item] = None

    def discard(self, item: T) -> None:
        self.pop(item, None)


class SimHost:
    """A server or router with an address of its own. It can be killed and started again."""

    def __init__(self, loop: SimLoop, name: str) -> None:
        self.loop = loop
        self.name = name
        self.address = name, PORT
        self.url = f"http://{name}:{PORT}"
        self.host = SimProcess(loop, name)
        self.host.alive = False
        self.signals = SimSignals()
        self.task: asyncio.Task[None] | None = None
        self.failed = False  # the process ended by itself and was not restarted yet

    def start(self) -> None:
        self.failed = False
        self.host = SimProcess(self.loop, self.name)
        host = self.host
        host.on_end.append(lambda: self.loop.network.host_ended(host))
        self.signals = SimSignals()
        self.task = host.spawn(self._run(host))

    async def _run(self, host: SimProcess) -> None:
        """Run the process until its end. An error from which it cannot recover is logged and ends it."""
        try:
            await self._serve()
        except HeadgateError as error:
            log.warning("%s ends: %s", self.name, error)
            self.failed = True
        host.kill()

    @property
    def alive(self) -> bool:
        return self.host.alive and self.task is not None and not self.task.done()

    @property
    def stopping(self) -> bool:
        """Whether the process has received a signal to shut down."""
        return self.signals.received

    async def _serve(self) -> None:
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class ServerSettings:
    engines: int = 1
    most_choices: int = 64
    drain_s: float = 2.0
    keep_alive_s: float = 3.0


class SimServer(SimHost):
    """A host that runs `headgate serve`."""

    def __init__(
        self,
        loop: SimLoop,
        name: str,
        settings: ServerSettings,
        config: EngineConfig,
        tenants: Mapping[str, str],
        on_text: Callable[[str], None],
        stall_s: float,
    ) -> None:
        super().__init__(loop, name)
        self._settings = settings
        self._config = config
        self._tenants = tenants
        self._on_text = on_text
        self._stall_s = stall_s  # client stall timeout
        self.false_answer: Callable[[str, bytes], bytes] | None = None  # replaces the body of control answers
        self.app: ServerApp | None = None  # None before the server has started
        self.ledger: Ledger | None = None
        self.engines: Replicas | None = None
        self.http: HttpServer | None = None

    async def _serve(self) -> None:
        settings = self._settings
        async with started(Path("/simulated"), self._config, count=settings.engines) as engines:
            ledger = self._ledger()
            api = Api(
                engines=engines,
                ledger=ledger,
                model_name=MODEL,
                created=int(EPOCH_S),
                tokenizer=WatchedTokenizer(vocabulary.tokenizer(), self._on_text),
                template=vocabulary.template(),
                settings=ApiSettings(keep_alive_s=settings.keep_alive_s),
            )
            self.app = build_app(
                api, ServerContext("0", MODEL, engines.replicas, ledger), Keys(self._tenants, admin=KEY), 1 << 20
            )
            self.app.state.replays = Replays(self.loop.time)
            self.http = HttpServer(
                cast(Any, FalseAnswers(self, self.app)),
                cast(Any, SimSocket(*self.address)),
                lambda: None,
                self._stall_s,
                self.app.begin,
            )
            self.http.server_state.connections = cast(Any, OrderedSet())
            self.ledger, self.engines = ledger, engines
            drain = Drain(self.http, ledger, engines, settings.drain_s)
            await serve_until_stopped(self.http, drain, cast(StopSignals, self.signals))

    def _ledger(self) -> Ledger:
        metrics = ServerMetrics()
        metrics.paused = Stopwatch(self.loop.time)
        return Ledger(metrics, limit=self._settings.most_choices, clock=self.loop.time)


class WatchedTokenizer(Tokenizer):
    """A tokenizer that reports every text that it encodes."""

    def __init__(self, tokenizer: Tokenizer, on_text: Callable[[str], None]) -> None:
        vars(self).update(vars(tokenizer))
        self._on_text = on_text

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        self._on_text(text)
        return super().encode(text, add_special=add_special)


class FalseAnswers:
    """ASGI middleware that replaces control answers with those of the server's `false_answer`, if that is set."""

    PATHS = (
        "/v1/abort_requests",
        "/v1/pause",
        "/v1/resume",
        "/v1/is_paused",
        "/v1/flush_cache",
        "/v1/update_weights",
        "/v1/requests",
        "/get_world_size",
    )

    def __init__(self, server: SimServer, app: Any) -> None:
        self._server = server
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if self._server.false_answer is None or scope["type"] != "http" or scope["path"] not in self.PATHS:
            await self._app(scope, receive, send)
            return
        start: dict[str, Any] = {}
        body = bytearray()

        async def keep(message: dict[str, Any]) -> None:
            if message["type"] == "http.response.start":
                start.update(message)
            else:
                body.extend(message.get("body", b""))

        await self._app(scope, receive, keep)
        if not start:
            return  # the caller disconnected, and the application sent nothing
        replace = self._server.false_answer
        content = bytes(body) if replace is None or start["status"] >= 300 else replace(scope["path"], bytes(body))
        headers = [(name, value) for name, value in start["headers"] if name != b"content-length"]
        await send({**start, "headers": [*headers, (b"content-length", b"%d" % len(content))]})
        await send({"type": "http.response.body", "body": content})


class WatchedRouter(Router):
    """A router that reports each placement, the live requests at the moment of each pause, and the end of each request."""

    on_place: Callable[[Exchange, str], None]
    on_exchange_end: Callable[[Exchange], None]
    on_hold: Callable[[tuple[Exchange, ...]], None]

    def __init__(self, config: RouteConfig, *, seed: int, fast_path: FastPath) -> None:
        super().__init__(config, seed=seed, fast_path=fast_path)
        self._unwatched_choose = self.choose
        self.choose = self._choose

    def hold(self, *arguments: Any, **named: Any) -> Any:
        self.on_hold(tuple(self.live.values()))
        return super().hold(*arguments, **named)

    def exchange_ended(self, exchange: Exchange) -> None:
        self.on_exchange_end(exchange)
        super().exchange_ended(exchange)

    def _choose(self, exchange: Exchange, retry_state: RetryState | None = None) -> Placement | None:
        placement = self._unwatched_choose(exchange, retry_state)
        if placement is not None:
            self.on_place(exchange, placement.worker.url)
        return placement


class RouterObserver(Protocol):
    """Receives the placements, pauses and ended requests of a router."""

    def placed(self, router: str, exchange: Exchange, url: str) -> None: ...

    def exchange_ended(self, router: str, exchange: Exchange) -> None: ...

    def held(self, router: str, live: tuple[Exchange, ...]) -> None: ...


class SimRouter(SimHost):
    """A host that runs `headgate route`."""

    def __init__(
        self, loop: SimLoop, name: str, config: RouteConfig, seed: int, watch: RouterObserver, fast_path: FastPath
    ) -> None:
        super().__init__(loop, name)
        self._config = config
        self._fast_path = fast_path
        self._seed = seed
        self._watch = watch
        self.router: Router | None = None

    async def _serve(self) -> None:
        self.router = WatchedRouter(self._config, seed=self._seed, fast_path=self._fast_path)
        self.router.on_place = lambda exchange, url: self._watch.placed(self.name, exchange, url)
        self.router.on_hold = lambda live: self._watch.held(self.name, live)
        self.router.on_exchange_end = lambda exchange: self._watch.exchange_ended(self.name, exchange)
        async with serving(self.router, cast(Any, SimSocket(*self.address)), "0"):
            await self.signals.first()
            await self.router.drain()


def workers(servers: list[SimServer], roles: tuple[str, ...]) -> tuple[WorkerAddress, ...]:
    return tuple(WorkerAddress(url=server.url, role=role) for server, role in zip(servers, roles, strict=True))


@contextmanager
def simulated(loop: SimLoop, rng: Any, stamps: Callable[[str | Path], Stamps]) -> Iterator[None]:
    """Replace the parts of the machine that the code uses: clocks, randomness, folders, engine channels."""
    folders = count(1)
    replaced = [
        (time, "time", lambda: EPOCH_S + loop.time() + loop.skew_s),
        (time, "monotonic", loop.time),
        (secrets, "token_hex", lambda size=16: rng.randbytes(size).hex()),
        (secrets, "randbits", rng.getrandbits),
        (scratch, "folder", lambda *_: nullcontext(Path(f"/simulated/{next(folders)}"))),
        (engine_client, "ClientChannel", SimClientChannel),
        (replicas, "stamps", stamps),
        *kv.replaced(),
    ]
    before = [getattr(where, name) for where, name, _ in replaced]
    for where, name, substitute in replaced:
        setattr(where, name, substitute)
    try:
        yield
    finally:
        for (where, name, _), original in zip(replaced, before, strict=True):
            setattr(where, name, original)
