"""Fake servers of other systems: answers in the formats of vLLM, SGLang and a generic OpenAI server.

Each has a bounded prefix cache and reports its hits as the real system does. It records the requests that it
receives.
"""

from __future__ import annotations

import asyncio
import json
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

MODEL = "foreign"
CHAT = "/v1/chat/completions"
OWNERS = {"vllm": "vllm", "sglang": "sglang", "openai": "somebody"}
BLOCK = 64  # prompt bytes per cache block; four bytes to a token


@dataclass(eq=False)
class Foreign:
    """A foreign server on its own port."""

    kind: str
    cache_blocks: int = 10_000
    reports_cached: bool = True  # reports cached tokens, which is an option of vLLM and SGLang
    pace_s: float = 0.0  # delay between pieces of a stream
    sick: bool = False
    asked: list[tuple[str, str, dict[str, Any]]] = field(default_factory=list)  # method, path, body
    left: int = 0  # clients that disconnected before the end
    url: str = ""
    _cache: OrderedDict[int, None] = field(default_factory=OrderedDict)
    _server: asyncio.Server | None = None

    async def __aenter__(self) -> Foreign:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *exc: object) -> None:
        assert self._server is not None
        self._server.close()

    def paths(self) -> list[str]:
        return [path for _, path, _ in self.asked]

    # -- HTTP ---------------------------------------------------------------------------------------------------

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
                method, target, _ = head.split("\r\n")[0].split(" ")
                headers = dict(line.lower().split(": ", 1) for line in head.split("\r\n")[1:] if line)
                body = await reader.readexactly(int(headers.get("content-length", 0)))
                await self._answer(writer, method, target.partition("?")[0], json.loads(body or b"{}"), headers)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # the router has closed the connection
        finally:
            writer.close()

    async def _answer(
        self, writer: asyncio.StreamWriter, method: str, path: str, body: dict[str, Any], headers: dict[str, str]
    ) -> None:
        if path in (CHAT, "/v1/completions"):
            assert not any(name.startswith("x-headgate") for name in headers), (
                "a foreign worker gets no headgate headers"
            )
            self.asked.append((method, path, body))
            return await self._generate(writer, path, body)
        if method == "POST":
            self.asked.append((method, path, body))
        status, told = self._control(path)
        raw = told if isinstance(told, bytes) else json.dumps(told).encode()
        writer.write(b"HTTP/1.1 %d X\r\ncontent-length: %d\r\n\r\n%b" % (status, len(raw), raw))
        return await writer.drain()

    def _control(self, path: str) -> tuple[int, Any]:
        if path == "/v1/models":
            return 200, {"object": "list", "data": [{"id": MODEL, "object": "model", "owned_by": OWNERS[self.kind]}]}
        if path == "/health" and self.kind != "openai":
            return (503 if self.sick else 200), b""
        theirs = {
            "vllm": {"/pause": {"status": "paused"}, "/resume": {"status": "resumed"}, "/reset_prefix_cache": b""},
            "sglang": {
                "/pause_generation": {"status": "ok", "message": "Generation paused successfully."},
                "/continue_generation": {"status": "ok", "message": "Generation continued successfully."},
                "/flush_cache": b"Cache flushed.\n",
            },
        }.get(self.kind, {})
        return (200, theirs[path]) if path in theirs else (404, {"detail": "Not Found"})

    # -- answers ------------------------------------------------------------------------------------------------

    async def _generate(self, writer: asyncio.StreamWriter, path: str, body: dict[str, Any]) -> None:
        prompt = json.dumps(body.get("messages") or body.get("prompt")).encode()
        usage = self._usage(prompt, self._look_up(prompt), body.get("max_tokens", 4))
        frame = {"id": "theirs-1", "created": 1, "model": MODEL}
        if not body.get("stream"):
            inner = {"message": {"role": "assistant", "content": "x"}} if path == CHAT else {"text": "x"}
            kind = "chat.completion" if path == CHAT else "text_completion"
            whole = {**frame, "object": kind, "choices": [{"index": 0, **inner, "finish_reason": "length"}]}
            raw = json.dumps(whole | {"usage": usage}).encode()
            head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(raw)
            writer.write(head + raw)
            return await writer.drain()
        try:
            await self._stream(writer, path, body, frame, usage)
        except ConnectionError:
            self.left += 1
            raise

    async def _stream(
        self,
        writer: asyncio.StreamWriter,
        path: str,
        body: dict[str, Any],
        frame: dict[str, Any],
        usage: dict[str, Any],
    ) -> None:
        writer.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
        )
        frame["object"] = "chat.completion.chunk" if path == CHAT else "text_completion"
        last = body.get("max_tokens", 4) - 1
        for i in range(last + 1):
            said = {"delta": {"content": f"{i} "}} if path == CHAT else {"text": f"{i} "}
            choice = {"index": 0, **said, "finish_reason": "length" if i == last else None}
            await self._event(writer, json.dumps(frame | {"choices": [choice]}))
            await asyncio.sleep(self.pace_s)
        if (body.get("stream_options") or {}).get("include_usage"):
            await self._event(writer, json.dumps(frame | {"choices": [], "usage": usage}))
        await self._event(writer, "[DONE]")  # in its own write, as the real servers do
        writer.write(b"0\r\n\r\n")
        await writer.drain()

    async def _event(self, writer: asyncio.StreamWriter, data: str) -> None:
        raw = b"data: %b\n\n" % data.encode()
        writer.write(b"%x\r\n%b\r\n" % (len(raw), raw))
        await writer.drain()
        await asyncio.sleep(0)
        if writer.is_closing():
            raise ConnectionError

    def _look_up(self, prompt: bytes) -> int:
        """Return how many bytes of a prompt are cached, then cache it, evicting the least recently used blocks."""
        keys = [hash(prompt[: end + BLOCK]) for end in range(0, len(prompt) - BLOCK, BLOCK)]
        known = next((i for i, key in enumerate(keys) if key not in self._cache), len(keys))
        for key in reversed(keys):
            self._cache[key] = None
            self._cache.move_to_end(key)
        while len(self._cache) > self.cache_blocks:
            self._cache.popitem(last=False)
        return known * BLOCK

    def _usage(self, prompt: bytes, cached: int, tokens: int) -> dict[str, Any]:
        size = len(prompt) // 4
        usage: dict[str, Any] = {
            "prompt_tokens": size,
            "total_tokens": size + tokens,
            "completion_tokens": tokens,
            "prompt_tokens_details": None,
        }
        if self.kind == "openai":
            del usage["prompt_tokens_details"]
        elif self.reports_cached:
            usage["prompt_tokens_details"] = {"cached_tokens": cached // 4}
        return usage
