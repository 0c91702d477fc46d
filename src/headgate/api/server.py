"""The server process: starts the engines, serves HTTP, and drains when it is stopped.

Stopping, in order: no new connections and no new requests are accepted; requests in flight may finish until the deadline;
then they are aborted and their clients receive the partial answers, with cause `shutdown`; then the engines are closed. A
second signal ends the drain at once. Every wait has a deadline, and a short one for a client that reads nothing.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import uvicorn
import uvloop
from starlette.types import Scope
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from headgate.api.accounting.ledger import Ledger
from headgate.api.accounting.metrics import ServerMetrics
from headgate.api.accounting.traces import tracing
from headgate.api.app import build_app
from headgate.api.host import ServerContext
from headgate.api.registration import Heartbeats
from headgate.api.state import Api, ApiSettings
from headgate.collector import spare_the_collector
from headgate.config import ServerConfig, TlsFiles
from headgate.contract.errors import error_body
from headgate.contract.keys import Keys, is_loopback
from headgate.contract.requests import UsageRecord
from headgate.contract.trace_context import TraceContext
from headgate.edge.certificates import renew
from headgate.edge.cors import Cors
from headgate.edge.outflow import STALL_S, UNREAD_S, Outflow, limit_tls_buffer
from headgate.edge.sharing import Sharing
from headgate.edge.sse import STALLED, TRANSPORT
from headgate.engine.replicas import Replicas, started
from headgate.errors import HeadgateError, RequestError
from headgate.listening import StopSignals, cannot_listen, url_of
from headgate.protocol.message import EngineInfo
from headgate.text.parsers.reader import AnswerParsers
from headgate.text.template import ChatTemplate, load_template
from headgate.text.tokenizer import load_tokenizer
from headgate.tls import server_context

log = logging.getLogger(__name__)

MAX_HEAD_BYTES = 64 * 2**10  # of a request's URL and headers, or of its trailers
HEAD_S = 60.0  # for a complete head to arrive
BODY_S = 120.0  # for a complete body to arrive
FINAL_SEND_S = 5.0  # for clients to receive the end, after all requests have been aborted
SWEEP_S = 1.0  # how often connections are checked
BACKLOG = 4096
SEND_BUFFER_BYTES = 128 * 2**10  # per connection; the kernel doubles it


@dataclass(frozen=True, slots=True)
class ServerReady:
    """Facts about a server that is ready for requests, for its start-up message."""

    config: ServerConfig
    info: EngineInfo
    url: str
    chat: bool  # the model has a chat template
    warning: str | None


Announce = Callable[[ServerReady], None]


def run_server(config: ServerConfig, listener: socket.socket, version: str, announce: Announce) -> None:
    """Serve until a signal arrives; raises HeadgateError if the server cannot start."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        try:
            runner.run(serve(config, listener, version, announce))
        except* HeadgateError as group:
            raise _first(group) from None


def _first(error: BaseException) -> BaseException:
    return _first(error.exceptions[0]) if isinstance(error, BaseExceptionGroup) else error


async def serve(config: ServerConfig, listener: socket.socket, version: str, announce: Announce) -> None:
    with StopSignals() as signals:
        try:
            await _serve(config, listener, version, announce, signals)
        except asyncio.CancelledError:
            if not signals.seen:
                raise
            log.info("stopped before the engines were ready")


async def _serve(
    config: ServerConfig, listener: socket.socket, version: str, announce: Announce, signals: StopSignals
) -> None:
    # Accepted connections inherit it. The kernel's default is some megabytes per connection; tokens that fill them for a
    # client that does not read are computed for nothing.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
    exposed = not is_loopback(config.host)
    keys = Keys(config.api_keys, config.admin_key, worker=config.worker_key, exposed=exposed)
    tokenizer, template = load_tokenizer(config.model), load_template(config.model)
    url = url_of(listener, tls=config.tls is not None)
    if config.tls is not None:
        server_context(config.tls)  # reports an unusable file before the engines start
    log.info("starting %d engine%s for %s", config.replicas, "s" * (config.replicas > 1), config.model_name)
    with tracing(config.otlp_endpoint, config.model_name, version) as trace:
        async with _engines(config) as engines:
            ledger = Ledger(
                ServerMetrics(),
                limit=config.most_choices,
                sharing=Sharing(keys.tenants),
                listeners=[log_usage, *filter(None, [trace])],
            )
            api = Api(
                engines=engines,
                ledger=ledger,
                model_name=config.model_name,
                created=int(time.time()),
                tokenizer=tokenizer,
                template=template,
                parsers=_parsers(config, template),
                settings=ApiSettings(
                    logprobs_mode=config.logprobs_mode,
                    pooling=config.pooling,
                    sampling=config.sampling,
                ),
            )
            host = ServerContext(version, config.model_name, engines.replicas, ledger)
            app = build_app(api, host, keys, config.max_body_bytes, Cors(config.cors_origins))
            ready = ServerReady(config, engines.info, url, template is not None, keys.warning)
            server = HttpServer(
                app, listener, partial(announce, ready), config.client_stall_timeout_s, app.begin, config.tls
            )
            beats = None if config.register is None else Heartbeats(config.register, config, url)
            spare_the_collector()
            drain = Drain(server, ledger, engines, config.drain_timeout_s)
            await serve_until_stopped(server, drain, signals, beats)


def _parsers(config: ServerConfig, template: ChatTemplate | None) -> AnswerParsers:
    source = None if template is None else template.source
    parsers = AnswerParsers.choose(config.reasoning_parser, config.tool_parser, source)
    reasoning = "none" if parsers.reasoning is None else parsers.reasoning.name
    log.info("parsers of answers: reasoning %s, tools %s", reasoning, parsers.tools.name if parsers.tools else "none")
    return parsers


def _engines(config: ServerConfig) -> AbstractAsyncContextManager[Replicas]:
    return started(
        config.model,
        config.engine,
        count=config.replicas,
        log_level=config.log_level,
        log_format=config.log_format,
    )


async def serve_until_stopped(
    server: HttpServer, drain: Drain, signals: StopSignals, beats: Heartbeats | None = None
) -> None:
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(server.serve())
        beating = None if beats is None else tasks.create_task(beats.run())
        signals.on_stop = drain.hurry
        await signals.first()
        if beats is not None and beating is not None:
            beating.cancel()
            await beats.leave()
        await drain.run()


class Drain:
    """Lets requests finish until the deadline, then aborts them."""

    def __init__(self, server: HttpServer, ledger: Ledger, engines: Replicas, timeout_s: float) -> None:
        self._server = server
        self._ledger = ledger
        self._engines = engines
        self._deadline = asyncio.timeout(timeout_s)
        self._timeout_s = timeout_s
        self._running = False

    def hurry(self) -> None:
        """End the drain now. No effect before it has begun and after its deadline."""
        if self._running:
            with suppress(RuntimeError):  # raised if the deadline expires at this moment
                self._deadline.reschedule(asyncio.get_running_loop().time())

    async def run(self) -> None:
        ledger = self._ledger
        ledger.close()
        self._server.stop_accepting()
        log.info("stopping: %d requests may finish within %g s", len(ledger.live), self._timeout_s)
        try:
            async with self._deadline:
                self._running = True
                await ledger.emptied()
        except TimeoutError:
            self._running = False
            log.warning("aborting %d requests that are still running", len(ledger.live))
            await self._abort()
        finally:
            self._running = False
        await self._server.close(FINAL_SEND_S)

    async def _abort(self) -> None:
        self._engines.end_all("shutdown")
        try:
            async with asyncio.timeout(FINAL_SEND_S):
                await self._ledger.emptied()
        except TimeoutError:
            log.warning("%d clients did not read the end of their answers", len(self._ledger.live))


Begin = Callable[[Scope, Callable[[], None]], None]  # starts a request, now or later


def _at_once(scope: Scope, start: Callable[[], None]) -> None:
    start()


class HeadTooLarge(RequestError):
    status = 431
    code = "headers_too_large"


class TooSlow(RequestError):
    status = 408
    code = "request_timeout"


class BoundedHttp(HttpToolsProtocol):
    """A connection with limits: the time for a request to arrive, the time for the client to read the answer, and the size
    of the head.

    A deadline is a number that `HttpServer` checks once a second: no timer is scheduled per request or per token.
    """

    def __init__(self, *arguments: Any, begin: Begin, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self._begin = begin
        self._due_s: float | None = None  # deadline for the part of a request that is being received
        self._part = "nothing"  # the part that is being received: nothing, head or body
        self._head_bytes = 0  # reported by the parser
        self._unread_bytes = 0  # received since the parser last reported a complete head or part of a body
        self._answering: RequestResponseCycle | None = (
            None  # being answered; `cycle` is the newest, which may be queued
        )
        self._outflow: Outflow

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._outflow = Outflow(transport)
        limit_tls_buffer(transport)
        self._due_s = self.loop.time() + HEAD_S

    def data_received(self, data: bytes) -> None:
        if self.timeout_keep_alive_task is not None:
            # These bytes end the keep-alive timeout, even if no request begins.
            self._due_s = self.loop.time() + HEAD_S
        self._unread_bytes += len(data)
        super().data_received(data)
        if self._unread_bytes > MAX_HEAD_BYTES:
            self._refuse(_head_too_large())

    def connection_lost(self, exc: Exception | None) -> None:
        answering = self._answering
        if answering is not None and answering is not self.cycle and not answering.response_complete:
            answering.disconnected = True  # uvicorn notifies only the newest request
            answering.message_event.set()
        super().connection_lost(exc)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._answering = cycle
        self._begin(cast(Any, cycle.scope), partial(super()._start_asgi_task, cycle, app))

    def check(self, now_s: float, stall_s: float) -> None:
        """Close the connection if a deadline has passed. A pipelined request's time starts after the previous answer."""
        if self._outflow.stalled_s(now_s) >= stall_s:
            return self._break_off()
        if self._due_s is None:
            return None
        answering = self.cycle is not None and not self.cycle.response_complete
        allowed_s = BODY_S if self._part == "body" else HEAD_S
        if self.pipeline or (answering and self._part == "head"):
            self._due_s = now_s + allowed_s
        elif now_s < self._due_s:
            return None
        elif answering or self._part == "head":
            self._refuse(TooSlow(f"the {self._part} of the request did not come within {allowed_s:g} s"))
        else:
            self.transport.close()
        return None

    def _break_off(self) -> None:
        """Drop a client that reads nothing, and mark its request as stalled."""
        if self._answering is not None:
            self._answering.scope["state"][STALLED] = True
        self.transport.abort()

    def _refuse(self, error: RequestError) -> None:
        if self.transport.is_closing():
            return
        body = error_body(error)
        head = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(body)
        if self.cycle is None or self.cycle.response_complete or not self.cycle.response_started:
            self.transport.write(STATUS_LINE[error.status] + head + body)
        self.transport.close()

    # -- callbacks of the parser --------------------------------------------------

    def send_400_response(self, msg: str) -> None:
        self._refuse(RequestError("this is not an HTTP request", code="invalid_http"))

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["state"][TRANSPORT] = self.transport
        self._part, self._head_bytes = "head", 0
        self._due_s = self.loop.time() + HEAD_S

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        self._count(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._part == "head":  # a trailer must not be taken for a header
            super().on_header(name, value)
        self._count(len(name) + len(value) + 4)  # a colon, a space and the end of the line

    def _count(self, size: int) -> None:
        self._head_bytes += size
        if self._head_bytes > MAX_HEAD_BYTES:
            error = _head_too_large()
            self._refuse(error)
            raise error  # stops the parser

    def on_headers_complete(self) -> None:
        self._part, self._unread_bytes = "body", 0
        self._due_s = self.loop.time() + BODY_S
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._unread_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._part, self._unread_bytes, self._due_s = "nothing", 0, None
        super().on_message_complete()


def _head_too_large() -> HeadTooLarge:
    return HeadTooLarge(f"the headers have more than {MAX_HEAD_BYTES} bytes; send less in them")


class HttpServer(uvicorn.Server):
    """Uvicorn on a socket that we opened, without its signal handlers, and with a deadline for its shutdown."""

    def __init__(
        self,
        app: object,
        listener: socket.socket,
        announce: Callable[[], None],
        stall_s: float = STALL_S,
        begin: Begin = _at_once,
        tls: TlsFiles | None = None,
    ) -> None:
        super().__init__(
            uvicorn.Config(
                app,  # type: ignore[arg-type]
                http=partial(BoundedHttp, begin=begin),  # type: ignore[arg-type]
                lifespan="off",
                ws="none",
                access_log=False,
                log_config=None,
                server_header=False,
                backlog=BACKLOG,
                timeout_keep_alive=75,  # longer than that of common proxies
                timeout_graceful_shutdown=None,
            )
        )
        self._listener = listener
        self._announce = announce
        self._stall_s = stall_s  # the longest that a client may read nothing
        self._ended = asyncio.Event()
        self._tls = tls
        self._context = None if tls is None else server_context(tls)

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        async with asyncio.TaskGroup() as tasks:
            beside = [tasks.create_task(self._sweep())]
            if self._context is not None and self._tls is not None:
                beside.append(tasks.create_task(renew(self._context, self._tls)))
            try:
                await super().serve([self._listener])
            finally:
                for task in beside:
                    task.cancel()
                self._ended.set()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        host, port = self._listener.getsockname()[:2]
        self.config.ssl = self._context
        try:
            await super().startup(sockets)
        except OSError as error:
            raise cannot_listen(error, host, port) from None
        self._announce()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def _sweep(self) -> None:
        """Check connections until the last one is closed; uvicorn's own ticks end when it stops accepting requests."""
        clock = asyncio.get_running_loop().time
        while True:
            await asyncio.sleep(SWEEP_S)
            for connection in list(self.server_state.connections):
                if isinstance(connection, BoundedHttp):
                    connection.check(clock(), self._stall_s)

    def stop_accepting(self) -> None:
        self.should_exit = True
        self._stall_s = min(self._stall_s, UNREAD_S)

    async def close(self, timeout_s: float) -> None:
        """Wait for the last bytes to be sent, then abort the connections that are still open."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._ended.wait()
        except TimeoutError:
            self.force_exit = True
            for connection in list(self.server_state.connections):
                connection.transport.abort()
            for task in list(self.server_state.tasks):
                task.cancel()
            await self._ended.wait()


def log_usage(usage: UsageRecord) -> None:
    if log.isEnabledFor(logging.DEBUG):
        log.debug(
            "%s: %s after %.3f s (%s), %d + %d tokens, %d cached",
            *(usage.request_id, usage.finish_reason, usage.elapsed_s, usage.cause),
            *(usage.prompt_tokens, usage.output_tokens, usage.cached_tokens),
            extra={"fields": {"request_id": usage.request_id, "tenant": usage.tenant} | _trace_field(usage)},
        )


def _trace_field(usage: UsageRecord) -> dict[str, str]:
    return {"trace_id": trace_id} if (trace_id := TraceContext(usage.traceparent).trace_id) else {}
