"""The API in front of a scripted engine, called without a network."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec

from headgate.api.accounting.ledger import Ledger
from headgate.api.accounting.metrics import ServerMetrics
from headgate.api.app import ServerApp, build_app
from headgate.api.host import ServerContext
from headgate.api.state import Api, ApiSettings
from headgate.contract.keys import Keys
from headgate.edge.cors import NO_PAGES, Cors
from headgate.engine.client import Chunk
from headgate.engine.moving_stream import Place
from headgate.protocol.message import EngineInfo
from headgate.protocol.output import Cause
from headgate.protocol.request import GenerateRequest
from headgate.text.parsers.reader import AnswerParsers
from headgate.text.template import load_template
from headgate.text.tokenizer import load_tokenizer

Script = Callable[[GenerateRequest], AsyncGenerator[Chunk, None]]


class ScriptedStream:
    def __init__(self, chunks: AsyncGenerator[Chunk, None]) -> None:
        self.cause: Cause = "client_disconnect"
        self.ends: list[Cause] = []
        self.made = 0
        self.settled = True
        self._chunks = chunks

    def __aiter__(self) -> AsyncIterator[Chunk]:
        return self._chunks

    def end(self, cause: Cause) -> None:
        self.cause = cause
        self.ends.append(cause)


class ScriptedEngines:
    info = EngineInfo(512, 260, (256,), 64, 16, 8, "none", "scripted", "none", hidden=64)
    version = 3  # version of the engine's weights

    def __init__(self, script: Script) -> None:
        self._script = script
        self.open = 0
        self.streams: list[ScriptedStream] = []

    @asynccontextmanager
    async def generate(self, request: GenerateRequest) -> AsyncIterator[ScriptedStream]:
        async with aclosing(self._script(request)) as chunks:
            self.streams.append(ScriptedStream(chunks))
            self.open += 1
            try:
                yield self.streams[-1]
            finally:
                self.open -= 1

    async def stop_at(self, places: Collection[Place], cause: Cause, timeout_s: float) -> set[Place]:
        assert not places, "a script cannot be stopped"
        return set()


def scripted_app(
    model: Path,
    engines: ScriptedEngines,
    *,
    parsers: AnswerParsers | None = None,
    keys: Keys | None = None,
    cors: Cors = NO_PAGES,
    **settings: Any,
) -> ServerApp:
    metrics = ServerMetrics()
    ledger = Ledger(metrics, limit=100)
    tokenizer, template = load_tokenizer(model), load_template(model)
    api = Api(
        engines=engines,
        ledger=ledger,
        model_name="scripted",
        created=0,
        tokenizer=tokenizer,
        template=template,
        parsers=parsers or AnswerParsers(),
        settings=ApiSettings(**settings),
    )
    host = ServerContext(version="0", model_name="scripted", replicas=[], ledger=ledger)
    return build_app(api, host, keys or Keys(), 1 << 20, cors)


class Client:
    """One request to an app. `status` and `body` hold the part of the answer that was received so far."""

    def __init__(
        self, app: ServerApp, path: str, body: Any, headers: dict[str, str] | None = None, method: str = "POST"
    ) -> None:
        self._app = app
        self._path = path
        self._method = method
        self._headers = [(name.lower().encode(), value.encode()) for name, value in (headers or {}).items()]
        self._sent = [{"type": "http.request", "body": msgspec.json.encode(body), "more_body": False}]
        self.gone = asyncio.Event()
        self.status = 0
        self.headers: dict[str, str] = {}  # headers of the answer
        self.body = b""

    async def call(self) -> None:
        scope = {
            "type": "http",
            "http_version": "1.1",
            "method": self._method,
            "path": self._path,
            "raw_path": self._path.encode(),
            "query_string": b"",
            "headers": self._headers,
            "root_path": "",
        }
        await self._app(scope, self._receive, self._send)

    async def _receive(self) -> Any:
        if self._sent:
            return self._sent.pop()
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.headers = {name.decode(): value.decode() for name, value in message["headers"]}
        else:
            self.body += message.get("body", b"")
