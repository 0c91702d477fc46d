"""A scripted worker in this process, which writes the journal like a Headgate server and fails as a test demands.

Its tokens are a pure function of prompt, seed, choice and position, so every worker must continue an answer in the
same way, and each resume request is checked for this. `Mock(plain=True)` is a foreign server without a journal.
"""

from __future__ import annotations

import asyncio
import json
import random
import socket
import ssl
import struct
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Literal

import httptools

from tests.ports import own_port

MODEL = "mock"
WORDS = (
    "a",
    "bc ",
    "",
    "é",
    "漢字",
    "😀",
    "data: ",
    '"}\n\n',
    ":m x",
    "\n:j 0 0 0 7\n",
    "e\u0301",
    " the",
    "",
    "ß",
    "0",
    "\\u00",
)
CHAT, COMPLETIONS, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/messages"

FaultKind = Literal[
    "none",
    "close",  # closes at once, without an answer
    "reset",  # resets the connection
    "mute",  # never answers
    "after_head",
    "cut",  # after `at` blocks, and `part` of the next one
    "cut_reset",
    "early_end",  # ends early as if the answer were complete
    "bad_http",
    "bad_chunk",
    "bad_sse",  # an event without an end
    "long_length",  # announces more bytes than it sends
    "short_length",
    "status",
    "withheld",  # ends the answer with `cause`
    "withheld_late",  # the same, with its last token withheld
    "slow",
    "alive",  # sends keep-alives before its first token
    "late_close",  # a complete answer, after which the connection closes
    "stall",  # silent after `at` blocks until a pause ends it
    "late",  # reaches the worker after the pause
    "unended",  # sends the whole answer, but never its terminating chunk
]


@dataclass(frozen=True)
class Fault:
    kind: FaultKind = "none"
    at: int = 0
    part: float = 0.0
    status: int = 500
    code: str = "scripted"
    cause: str = "pause"


FINE = Fault()


@dataclass
class Asked:
    """A request as the worker received it."""

    path: str
    headers: list[tuple[bytes, bytes]]
    body: dict[str, Any]
    fault: Fault = FINE
    left: bool = False  # the client left before the end of the answer
    done: bool = False

    def header(self, name: str) -> str | None:
        found = [value.decode("latin-1") for key, value in self.headers if key.lower() == name.encode()]
        return found[0] if found else None

    @property
    def id(self) -> str:
        return self.header("x-request-id") or ""


# ------------------------------------------------------------------------------------------------------- what it says


def number(*key: object) -> int:
    return int.from_bytes(blake2b(repr(key).encode(), digest_size=4).digest())


def prompt_of(body: dict[str, Any]) -> str:
    return json.dumps(body.get("messages") or body.get("prompt"))


def tokens_of(body: dict[str, Any], choice: int) -> list[int]:
    """Return the whole answer of one choice."""
    key = prompt_of(body), body.get("seed"), choice
    return [number(*key, position) % 50_000 for position in range(body.get("max_tokens", 8))]


def words(tokens: list[int]) -> str:
    return "".join(WORDS[token % len(WORDS)] for token in tokens)


def text_of(body: dict[str, Any], choice: int = 0) -> str:
    return words(tokens_of(body, choice))


def holds(token: int) -> bool:
    """Whether the text of this token is sent only with the next token, like the text of a partial stop string."""
    return token % 7 == 3


@dataclass
class Saying:
    """The state of one choice while it is sent."""

    index: int
    tokens: list[int]
    at: int = 0  # tokens sent
    chars: int = 0  # characters sent
    held: str = ""  # text that is not sent yet
    finished: bool = False

    @property
    def over(self) -> bool:
        return self.at >= len(self.tokens)

    def step(self, size: int) -> tuple[list[int], str]:
        said = self.tokens[self.at : self.at + size]
        self.at += len(said)
        self.held += words(said)
        if not self.over and holds(self.tokens[self.at - 1]):
            return said, ""
        new, self.held = self.held, ""
        self.chars += len(new)
        return said, new


class Answer:
    """The answer to one request, block by block."""

    _silent = True  # no journal block was written

    def __init__(self, asked: Asked, mistakes: list[str], rng: random.Random) -> None:
        self.asked, self.body = asked, asked.body
        self.chat = asked.path == CHAT
        self.stream = bool(self.body.get("stream"))
        self.journal = asked.header("x-headgate-journal")
        self.created = int(self.journal or 1)
        self._rng = rng
        self.choices = [Saying(i, tokens_of(self.body, i)) for i in range(self.body.get("n") or 1)]
        if "resume" in self.body:
            self._go_on(mistakes)

    def _go_on(self, mistakes: list[str]) -> None:
        if self.journal is None:
            mistakes.append("asked to go on without a journal")
        for told in self.body["resume"]["choices"]:
            saying, ids = self.choices[told["index"]], told["token_ids"]
            if saying.tokens[: len(ids)] != ids:
                mistakes.append(f"{self.asked.id}: goes on with {ids}, which is not what was said")
            if sum(count for _, count in told["versions"]) != len(ids):
                mistakes.append(f"{self.asked.id}: versions do not fit the tokens: {told}")
            if told["delivered_chars"] > len(words(ids)) or (not self.stream and told["delivered_chars"]):
                mistakes.append(f"{self.asked.id}: delivered more than there is: {told}")
            saying.at, saying.chars = len(ids), told["delivered_chars"]
            saying.held = words(ids)[saying.chars :]
            saying.finished = told["finish"] is not None
            if saying.finished and told["finish"] != ["length", "max_tokens", 5, 0, len(saying.tokens)]:
                mistakes.append(f"{self.asked.id}: finish is {told['finish']}")

    def blocks(self, withheld_at: int = 10**9, cause: str = "", *, late: bool = False) -> Iterator[bytes]:
        """Events without a journal."""
        told, pending = 0, [choice for choice in self.choices if not choice.finished]
        while pending:
            saying = self._rng.choice(pending)
            if told >= withheld_at:
                if late:
                    yield b"".join(b":m %b\n" % line for line in self._block(saying).split(b"\n")[:-1]) + b"\n"
                yield from self._veiled_end(pending, cause)
                return
            told += 1
            yield self._block(saying)
            if saying.finished:
                pending.remove(saying)
        yield self._closing()

    def _block(self, saying: Saying) -> bytes:
        first = saying.chars == 0
        said, text = saying.step(self._rng.randint(1, 3))
        saying.finished = saying.over
        ids = b",".join(b"%d" % id for id in said)
        shown = saying.chars if self.stream else 0
        line = b":j %d 1 %d %b\n" % (saying.index, shown, ids) if ids else b""
        end = b""
        if saying.finished:
            end = b":f %d length max_tokens 5 0 %d\n" % (saying.index, len(saying.tokens))
        if self.journal is None:
            line = end = b""
        elif self._silent:
            self._silent, line = False, b":p 5\n" + line
        if not self.stream:
            return line + end + b"\n"
        event = self._event(saying.index, text, first, "length" if saying.finished else None)
        return line + end + event if event else (line and line + b"\n")

    def _event(self, index: int, text: str, first: bool, finish: str | None) -> bytes:
        if not text and finish is None:
            return b""
        if self.chat:
            delta = ({"role": "assistant"} if first else {}) | ({"content": text} if text else {})
            choice: dict[str, Any] = {"index": index, "delta": delta, "finish_reason": finish}
        else:
            choice = {"index": index, "text": text, "finish_reason": finish}
        return b"data: %b\n\n" % self._json({"choices": [choice]})

    def _json(self, more: dict[str, Any]) -> bytes:
        kind = "chat.completion" if self.chat else "text_completion"
        frame = {"id": self.asked.id, "object": kind, "created": self.created, "model": MODEL}
        return json.dumps(frame | more).encode()

    @property
    def _usage(self) -> dict[str, Any]:
        return {"usage": {"prompt_tokens": 5, "completion_tokens": sum(len(c.tokens) for c in self.choices)}}

    def _closing(self) -> bytes:
        if not self.stream:
            return b"data: %b\n\n" % self.whole()
        bound = b":+\n" if self.journal else b""
        return bound + b"data: %b\n\ndata: [DONE]\n\n" % self._json({"choices": []} | self._usage)

    def whole(self, finish: str = "length") -> bytes:
        choices = []
        for saying in self.choices:
            text = words(saying.tokens)
            inner = {"message": {"role": "assistant", "content": text}} if self.chat else {"text": text}
            choices.append({"index": saying.index, "finish_reason": finish} | inner)
        return self._json({"choices": choices} | self._usage)

    def ended_by_a_pause(self) -> Iterator[bytes]:
        return self._veiled_end(self.choices, "pause")

    def _veiled_end(self, pending: list[Saying], cause: str) -> Iterator[bytes]:
        reason = "pd_reschedule" if cause == "pd_reschedule" else "abort"
        cause = "preempted" if cause == "pd_reschedule" else cause
        ends = [b":m :f %d %b %b 5 0 %d\n" % (s.index, reason.encode(), cause.encode(), s.at) for s in pending]
        shown = "length" if self.asked.header("x-openai-strict") == "true" else reason
        if self.stream:
            for saying, end in zip(pending, ends, strict=True):
                event = self._event(saying.index, "", False, shown).replace(b'": "', b'":"')
                yield end + b":m " + event.removesuffix(b"\n") + b":m \n\n"
            yield b":m data: [DONE]\n:m \n\n"
        else:
            yield b"".join(ends) + b":m data: " + self.whole(shown).replace(b'": "', b'":"') + b"\n:m \n\n"


class MessageAnswer(Answer):
    """The same answer in the format of the Messages API: one block of text."""

    def __init__(self, asked: Asked, mistakes: list[str], rng: random.Random) -> None:
        super().__init__(asked, mistakes, rng)
        (saying,) = self.choices
        self._begun, self._opened = saying.at > 0, saying.chars > 0

    def _event(self, index: int, text: str, first: bool, finish: str | None) -> bytes:
        events = [] if self._begun else [("message_start", {"message": self._message()})]
        self._begun = True
        if text and not self._opened:
            self._opened = True
            events.append(("content_block_start", {"index": 0, "content_block": {"type": "text", "text": ""}}))
        if text:
            events.append(("content_block_delta", {"index": 0, "delta": {"type": "text_delta", "text": text}}))
        if finish and self._opened:
            events.append(("content_block_stop", {"index": 0}))
        if finish:
            events.append(("message_delta", {"delta": self._stop(finish), "usage": {"output_tokens": 0}}))
        told = [b"event: %b\ndata: %b\n\n" % (k.encode(), json.dumps({"type": k} | f).encode()) for k, f in events]
        bound = b":+\n" if self.journal else b""
        return b"".join(bound + event for event in told[:-1]) + b"".join(told[-1:])

    def _stop(self, finish: str) -> dict[str, Any]:
        reason, cause = ("max_tokens", "max_tokens") if finish == "length" else ("abort", "pause")
        return {"stop_reason": reason, "stop_sequence": None, "cause": cause}

    def _message(self, **more: Any) -> dict[str, Any]:
        return {"id": self.asked.id, "type": "message", "role": "assistant", "model": MODEL} | more

    def _closing(self) -> bytes:
        if not self.stream:
            return b"data: %b\n\n" % self.whole()
        return b'event: message_stop\ndata: {"type":"message_stop"}\n\n'

    def whole(self, finish: str = "length") -> bytes:
        content = [{"type": "text", "text": words(self.choices[0].tokens)}]
        return json.dumps(self._message(**self._stop(finish), content=content), separators=(",", ":")).encode()

    def _veiled_end(self, pending: list[Saying], cause: str) -> Iterator[bytes]:
        (saying,) = pending
        reason, cause = ("pd_reschedule", "preempted") if cause == "pd_reschedule" else ("abort", cause)
        yield b":m :f 0 %b %b 5 0 %d\n" % (reason.encode(), cause.encode(), saying.at)
        events = self._event(0, "", False, reason) + self._closing() if self.stream else self._closing()
        events = events.replace(b'": ', b'":').replace(b', "', b',"').replace(b":+\n", b"")
        yield b"".join(b":m %b\n" % line for line in events.split(b"\n")[:-1]) + b"\n"


# ----------------------------------------------------------------------------------------------------- how it says it


class Mock:
    """A worker on its own port. `script` chooses the fault of each request."""

    def __init__(
        self,
        script: Callable[[Asked], Fault] | None = None,
        *,
        plain: bool = False,
        seed: int = 0,
        keep_alive_s: float = 0.1,
        version: int = 1,
        connection: type[Connection] | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self.tls = tls
        self._connection = connection or Connection
        self.script = script or (lambda _: FINE)
        self.plain = plain
        self.version = version
        self.state = "running"
        self.keep_alive_s = keep_alive_s
        self.asked: list[Asked] = []
        self.probes: Counter[str] = Counter()
        self.mistakes: list[str] = []
        self.connections: set[Connection] = set()
        self.opened = 0
        self.deaf = False  # accepts connections and answers nothing, not even probes
        self.paused: dict[str, Any] | None = None  # the body of the pause
        self.refuses = 0  # status with which control calls are refused
        self.running, self.pausing, self.aborting = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.running.set()
        self.pace_s = 0.0  # delay between events
        self.written = 0
        self.rng = random.Random(seed)
        self.port = 0
        self._server: asyncio.Server | None = None

    @property
    def url(self) -> str:
        return f"{'https' if self.tls else 'http'}://127.0.0.1:{self.port}"

    @property
    def live(self) -> list[Asked]:
        return [asked for asked in self.asked if not (asked.done or asked.left)]

    async def start(self) -> Mock:
        self.port = self.port or own_port()
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", self.port))
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(
            lambda: self._connection(self), sock=listener, backlog=1024, ssl=self.tls
        )
        return self

    restart = start

    def pause(self, body: dict[str, Any]) -> dict[str, Any]:
        self.state, self.paused = "paused", body
        self.running.clear()
        self.pausing.set()
        ended = [asked for asked in self.live if asked.fault.kind == "stall"] if body.get("mode") == "abort" else []
        if ended:
            self.aborting.set()
        return self.control(aborted=len(ended), finished=0, forced=[])

    def resume(self) -> dict[str, Any]:
        self.state, self.paused = "running", None
        self.running.set()
        return self.control()

    def control(self, **more: Any) -> dict[str, Any]:
        result = {"is_paused": self.state == "paused", "state": self.state, "weight_version": self.version}
        return {"request_id": "x", "status": "success", "result": result | {"engines": []} | more}

    def kill(self) -> None:
        """Act like a process after kill -9: refuse connections, and reset every open one."""
        if self._server is not None:
            self._server.close()
            self._server = None
        for connection in tuple(self.connections):
            connection.reset()

    async def __aenter__(self) -> Mock:
        return await self.start()

    async def __aexit__(self, *exc: object) -> None:
        self.kill()
        tasks = [c.task for c in self.connections if c.task is not None]
        await asyncio.gather(*tasks, return_exceptions=True)

    def loads(self) -> bytes:
        load = {
            "num_running_reqs": len(self.connections),
            "num_waiting_reqs": 0,
            "num_free_blocks": 100,
            "num_total_blocks": 100,
            "max_running_requests": 64,
            "weight_version": self.version,
            "state": self.state,
        }
        return json.dumps({"loads": [load], "cache_horizon_age_s": None}).encode()

    def models(self) -> bytes:
        model = {"id": MODEL, "object": "model", "owned_by": "somebody" if self.plain else "headgate"}
        return json.dumps({"object": "list", "data": [model]}).encode()


class Broken(Exception):
    """The connection was closed on purpose."""


class Connection(asyncio.Protocol):
    def __init__(self, mock: Mock) -> None:
        self._mock = mock
        self._parser = httptools.HttpRequestParser(self)
        self._transport: asyncio.Transport | None = None
        self._drained = asyncio.Event()
        self._drained.set()
        self.task: asyncio.Task[None] | None = None
        self._asked: Asked | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]
        self._mock.connections.add(self)
        self._mock.opened += 1

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        self._mock.connections.discard(self)
        self._drained.set()
        if self._asked is not None and not self._asked.done:
            self._asked.left = True
        if self.task is not None:
            self.task.cancel()

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def pause_writing(self) -> None:
        self._drained.clear()

    def resume_writing(self) -> None:
        self._drained.set()

    def on_message_begin(self) -> None:
        self._url, self._headers, self._body = b"", [], b""  # type: bytes, list[tuple[bytes, bytes]], bytes

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers.append((name, value))

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        if self._mock.deaf:
            return None
        path = self._url.decode()
        if self._parser.get_method() == b"GET":
            return self._probe(path)
        if path in ("/v1/pause", "/v1/resume"):
            if self._mock.refuses:
                return self._send_json(self._mock.refuses, b'{"error":{"message":"no","code":"stubborn"}}')
            told = self._mock.resume() if path == "/v1/resume" else self._mock.pause(json.loads(self._body))
            return self._send_json(200, json.dumps(told).encode())
        asked = self._asked = Asked(path, self._headers, json.loads(self._body))
        asked.fault = self._mock.script(asked)
        if asked.header("x-headgate-on-preempt") == "recompute" and asked.fault.cause == "pd_reschedule":
            asked.fault = FINE  # the request is recomputed instead
        self._mock.asked.append(asked)
        self.task = asyncio.get_running_loop().create_task(self._answer(asked))
        return None

    def _probe(self, path: str) -> None:
        self._mock.probes[path] += 1
        bodies = {"/v1/models": self._mock.models(), "/health": b"{}"}
        bodies["/v1/is_paused"] = json.dumps(self._mock.control()).encode()
        if not self._mock.plain:
            bodies["/v1/loads"] = self._mock.loads()
        self._send_json(200 if path in bodies else 404, bodies.get(path, b"{}"))

    def reset(self) -> None:
        if self._transport is not None:
            sock = self._transport.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self._transport.abort()

    # -- answers ------------------------------------------------------------------------

    async def _answer(self, asked: Asked) -> None:
        kind = MessageAnswer if asked.path == MESSAGES else Answer
        answer = kind(asked, self._mock.mistakes, self._mock.rng)
        if self._mock.plain:
            answer.journal = None
        try:
            await self._begin(asked.fault)
            if answer.stream or answer.journal:
                await self._tell(answer, asked.fault)
            else:
                await self._tell_whole(answer, asked.fault)
            asked.done = True
            if asked.fault.kind == "late_close" and self._transport is not None:
                self._transport.close()
        except Broken:
            pass

    async def _begin(self, fault: Fault) -> None:
        if fault.kind == "late":
            await self._mock.pausing.wait()
        if self._mock.paused is not None and self._mock.paused.get("new_requests") == "queue":
            await self._mock.running.wait()
        elif self._mock.paused is not None:
            fault = Fault("status", status=503, code="paused")
        match fault.kind:
            case "close":
                self._break()
            case "reset":
                self._break(reset=True)
            case "mute":
                await asyncio.Event().wait()
            case "bad_http":
                self._write(b"SSH-2.0-OpenSSH_9.9\r\n")
                self._break()
            case "status":
                error = {"error": {"message": "scripted", "type": "x", "param": None, "code": fault.code}}
                extra = b"retry-after: 7\r\n" if fault.status in (429, 503) else b""
                self._send_json(fault.status, json.dumps(error, separators=(",", ":")).encode(), extra)
                if self._asked is not None:
                    self._asked.done = True
                raise Broken

    async def _tell(self, answer: Answer, fault: Fault) -> None:
        journal = b"x-headgate-journal: 1\r\n" if answer.journal else b""
        self._write(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\nx-other: kept\r\nkeep-alive: 5\r\n"
            b"transfer-encoding: chunked\r\n%b\r\n" % journal
        )
        if fault.kind == "after_head":
            self._break()
        if fault.kind == "alive":
            await self._chunk(b": keep-alive\n\n", fault)
            await asyncio.sleep(0.02)  # so that it arrives alone
        withheld_at = fault.at if fault.kind in ("withheld", "withheld_late") and answer.journal else 10**9
        told_late = answer.blocks(withheld_at, fault.cause, late=fault.kind == "withheld_late")
        blocks = (block for block in told_late if block)
        at = -1
        if fault.kind not in ("none", "slow", "alive", "late", "late_close", "withheld", "withheld_late"):
            blocks = iter(told := list(blocks))
            at = min(fault.at, len(told) - 1)  # a fault in mid-answer happens at the end of a short answer
        for i, block in enumerate(blocks):
            if i == at:
                await self._strike(fault, block)
            if i == at and fault.kind == "stall":
                for end in answer.ended_by_a_pause():
                    await self._chunk(end, fault)
                break
            await self._pace()
            await self._chunk(block, fault)
        if fault.kind == "unended":
            await asyncio.Event().wait()
        self._write(b"0\r\n\r\n")

    async def _strike(self, fault: Fault, block: bytes) -> None:
        part = block[: int(len(block) * fault.part)]
        match fault.kind:
            case "cut" | "cut_reset":
                if part:
                    self._write(b"%x\r\n%b\r\n" % (len(part), part))
                self._break(reset=fault.kind == "cut_reset")
            case "early_end":
                self._write(b"0\r\n\r\n")
                self._asked.done = True  # type: ignore[union-attr]
                raise Broken
            case "bad_chunk":
                self._write(b"zz\r\nnot a chunk\r\n")
                self._break()
            case "bad_sse":
                self._write(b"%x\r\n%b\r\n" % (4000, b"\xff\x00:" + b"x" * 3997))
                self._break()
            case "stall":
                await self._mock.aborting.wait()

    async def _tell_whole(self, answer: Answer, fault: Fault) -> None:
        await self._pace()
        if fault.kind == "stall":
            await asyncio.Event().wait()
        body, extra = answer.whole(), 0
        if fault.kind in ("cut", "cut_reset", "long_length", "after_head", "bad_chunk", "bad_sse", "early_end"):
            extra = 10
        if fault.kind == "short_length":
            extra = -10
        self._write(
            b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\nx-other: kept\r\ncontent-length: %d\r\n\r\n%b"
            % (len(body) + extra, body)
        )
        if extra:
            self._break(reset=fault.kind == "cut_reset")

    async def _pace(self) -> None:
        await asyncio.sleep(self._mock.pace_s)

    async def _chunk(self, block: bytes, fault: Fault) -> None:
        framed = b"%x\r\n%b\r\n" % (len(block), block)
        if fault.kind == "slow":
            for i in range(0, len(framed), 7):
                self._write(framed[i : i + 7])
                await asyncio.sleep(0.001)
        else:
            self._write(framed)
        await self._drained.wait()

    def _write(self, data: bytes) -> None:
        if self._transport is None:
            raise Broken
        self._mock.written += len(data)
        self._transport.write(data)

    def _send_json(self, status: int, body: bytes, extra: bytes = b"") -> None:
        self._write(
            b"HTTP/1.1 %d X\r\ncontent-type: application/json\r\ncontent-length: %d\r\n%b\r\n%b"
            % (status, len(body), extra, body)
        )

    def _break(self, reset: bool = False) -> None:
        if self._asked is not None:
            self._asked.done = True
        if self._transport is not None:
            if reset:
                self.reset()
            else:
                self._transport.close()
        raise Broken


def faults(rng: random.Random, share: float, *, plain: bool = False) -> Callable[[Asked], Fault]:
    """Return a script in which this share of requests fails, each in a random way."""
    late = ["after_head", "cut", "cut_reset", "bad_chunk", "bad_sse", "early_end"]
    early = ["close", "reset", "bad_http", "status", "long_length", "slow", "late_close"]
    # Nothing in a foreign stream shows that it ended early.
    kinds = [*early, *early, *late[:-1]] if plain else [*early, *late, *late, "withheld", "withheld"]

    def script(asked: Asked) -> Fault:
        if rng.random() >= share:
            return FINE
        kind: Any = rng.choice(kinds)
        return Fault(
            kind,
            at=rng.randint(0, 8),
            part=rng.choice((0.0, rng.random(), 0.999)),
            status=rng.choice((429, 500, 502, 503, 504)),
            cause=rng.choice(("pause", "shutdown", "pd_reschedule")),
        )

    return script
