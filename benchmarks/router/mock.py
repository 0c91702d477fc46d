"""Mock workers with canned answers, as cheap as Python can send them, so that the router dominates the measurement.

    python benchmarks/router/mock.py --headgate 4 --plain 4

prints the addresses as JSON, and serves until its standard input closes. `--headgate` workers answer like Headgate
servers, with a journal on request; `--plain` workers like any OpenAI-compatible server. Ordinary fields of a request
control the answer: `max_tokens` is the number of chunks, `seed` the milliseconds between them (0: as fast as
possible), or before an unstreamed answer. All streams of a worker get their next chunk at the same time, as with an
engine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import socket
import sys
from functools import partial
from typing import cast

import uvloop

MODEL = "mock"
BURST = 16  # chunks of a flooded stream that are written at once
LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
CHUNKS = re.compile(rb'"max_(?:completion_)?tokens":(\d+)')  # one router uses the newer name
PACE = re.compile(rb'"seed":(\d+)')
STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ncache-control: no-cache\r\n"
    b"%btransfer-encoding: chunked\r\n\r\n"
)
JOURNAL_HEADER = b"x-headgate-journal: 1\r\n"
LOADS = {
    "dp_rank": 0,
    "num_running_reqs": 0,
    "num_waiting_reqs": 0,
    "num_free_blocks": 1000,
    "num_total_blocks": 1000,
    "block_size": 32,
    "cache_horizon_age_s": 1e6,
    "max_running_requests": 1024,
    "weight_version": "0",
    "state": "running",
}


def framed(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def event(delta: str, finish: str | None) -> bytes:
    choice = {"index": 0, "delta": {"content": delta}, "finish_reason": finish}
    event = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": MODEL, "choices": [choice]}
    return b"data: " + json.dumps(event, separators=(",", ":")).encode() + b"\n\n"


TOKEN = b":j 0 0 4096 31415\n"
FINISH = b":f 0 length max_tokens 64 0 64\n"
LAST = b"data: [DONE]\n\n"
CHUNK = {False: framed(event(" water", None)), True: framed(TOKEN + event(" water", None))}
END = {
    False: framed(event("", "length")) + framed(LAST) + b"0\r\n\r\n",
    True: framed(FINISH + event("", "length")) + framed(LAST) + b"0\r\n\r\n",
}


class Worker:
    """One worker: its canned answers and its paced streams."""

    def __init__(self, name: str, owner: str) -> None:
        self.connections: set[Connection] = set()
        self._paced: dict[int, set[Connection]] = {}  # by milliseconds
        self._whole = _whole(name)
        journal = b":p 64\n:j 0 0 0 " + b",".join([b"31415"] * 16) + b"\n" + FINISH + b"\n"
        self._journalled = (
            (STREAM_HEAD % JOURNAL_HEADER) + framed(journal) + framed(b"data: %b\n\n" % self._whole) + b"0\r\n\r\n"
        )
        self._answers = {path: answer(body) for path, body in _probes(owner).items()}
        self._plain = answer(self._whole)

    def probe(self, path: bytes) -> bytes:
        return self._answers.get(path.partition(b"?")[0], NOT_FOUND)

    def whole(self, journalled: bool) -> bytes:
        return self._journalled if journalled else self._plain

    def pace(self, connection: Connection, milliseconds: int) -> None:
        streams = self._paced.setdefault(milliseconds, set())
        if not streams:
            asyncio.get_running_loop().call_later(milliseconds / 1000, self._tick, milliseconds)
        streams.add(connection)

    def _tick(self, milliseconds: int) -> None:
        began_s = asyncio.get_running_loop().time()
        streams = self._paced[milliseconds]
        for connection in tuple(streams):
            if connection.left <= 0 or connection.gone:
                streams.discard(connection)
            else:
                connection.write_chunks(1)
        if streams:
            # After a late tick wait a whole interval: chunks that catch up would be sent together.
            asyncio.get_running_loop().call_at(began_s + milliseconds / 1000, self._tick, milliseconds)


def _whole(name: str) -> bytes:
    message = {"role": "assistant", "content": "Water flows through the headgate. " * 4}
    return json.dumps(
        {
            "id": "chatcmpl-1",
            "object": "chat.completion",
            "created": 1,
            "model": MODEL,
            "system_fingerprint": name,
            "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
            "usage": {"prompt_tokens": 64, "completion_tokens": 16, "total_tokens": 80},
        },
        separators=(",", ":"),
    ).encode()


def _probes(owner: str) -> dict[bytes, object]:
    info = {"model_path": MODEL, "served_model_name": MODEL, "is_generation": True, "tokenizer_path": ""}
    return {
        b"/health": {},
        b"/health_generate": {},
        b"/v1/models": {"object": "list", "data": [{"id": MODEL, "object": "model", "owned_by": owner}]},
        b"/v1/loads": {"timestamp": 1.0, "dp_rank_count": 1, "loads": [LOADS], "cache_horizon_age_s": 1e6},
        b"/get_model_info": info,
        b"/model_info": info,
        b"/get_server_info": info | {"dp_size": 1, "tp_size": 1},
        b"/server_info": info | {"dp_size": 1, "tp_size": 1},
        b"/version": {"version": "0"},
    }


def answer(body: object, status: bytes = b"200 OK") -> bytes:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return b"HTTP/1.1 %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (
        status,
        len(data),
        data,
    )


NOT_FOUND = answer({"error": {"message": "there is nothing here"}}, b"404 Not Found")


class Connection(asyncio.Protocol):
    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._loop = asyncio.get_running_loop()
        self._buffer = b""
        self._need = 0  # bytes needed before parsing again
        self._full = False
        self._flooding = False
        self._journalled = False
        self.left = 0  # chunks of the running stream
        self.gone = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._worker.connections.add(self)

    def connection_lost(self, error: Exception | None) -> None:
        self.gone = True
        self._worker.connections.discard(self)

    def pause_writing(self) -> None:
        self._full = True

    def resume_writing(self) -> None:
        self._full = False
        if self._flooding:
            self._loop.call_soon(self._flood)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while len(self._buffer) >= self._need and (end := self._buffer.find(b"\r\n\r\n")) >= 0:
            head = self._buffer[: end + 2]
            length = LENGTH.search(head)
            self._need = end + 4 + (int(length[1]) if length else 0)
            if len(self._buffer) < self._need:
                return
            body, self._buffer = self._buffer[end + 4 : self._need], self._buffer[self._need :]
            self._need = 0
            self._answer(head, body)
            if self.gone or self._transport.is_closing():
                return

    def _answer(self, head: bytes, body: bytes) -> None:
        method, path, _ = head.split(b" ", 2)
        if method == b"PRI":  # the client tries HTTP/2 first
            return self._transport.close()
        if method == b"GET":
            return self._transport.write(self._worker.probe(path))
        self._journalled = b"x-headgate-journal:" in head
        if b'"stream":true' not in body:
            return self._tell_whole(body)
        chunks, pace = CHUNKS.search(body), PACE.search(body)
        self.left = int(chunks[1]) if chunks else 16
        self._transport.write(STREAM_HEAD % (JOURNAL_HEADER if self._journalled else b""))
        if pace is not None and int(pace[1]):
            self._worker.pace(self, int(pace[1]))
        else:
            self._flooding = True
            self._flood()
        return None

    def _tell_whole(self, body: bytes) -> None:
        whole, pace = self._worker.whole(self._journalled), PACE.search(body[-4096:])
        if pace is None:
            self._transport.write(whole)
        else:
            self._loop.call_later(int(pace[1]) / 1000, self._transport.write, whole)

    def _flood(self) -> None:
        if self._full or self.gone or not self._flooding:
            return
        self.write_chunks(BURST)
        if self.left > 0:
            self._loop.call_soon(self._flood)
        else:
            self._flooding = False

    def write_chunks(self, most: int) -> None:
        count = min(most, self.left)
        self.left -= count
        end = b"" if self.left else END[self._journalled]
        self._transport.write(CHUNK[self._journalled] * count + end)


async def serve(headgate: int, plain: int) -> None:
    loop = asyncio.get_running_loop()
    urls: dict[str, list[str]] = {"headgate": [], "plain": []}
    servers = []
    for owner, count in (("headgate", headgate), ("plain", plain)):
        for number in range(count):
            worker = Worker(f"worker-{number}", owner if owner == "headgate" else "vllm")
            listener = socket.create_server(("127.0.0.1", 0), backlog=4096)
            servers.append(await loop.create_server(partial(Connection, worker), sock=listener, backlog=4096))
            urls[owner].append(f"http://127.0.0.1:{listener.getsockname()[1]}")
    print(json.dumps(urls), flush=True)
    await loop.run_in_executor(None, sys.stdin.buffer.read)
    for server in servers:
        server.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--headgate", type=int, default=4, metavar="N", help="workers that answer as Headgate's do")
    parser.add_argument("--plain", type=int, default=4, metavar="N", help="workers without Headgate's extensions")
    options = parser.parse_args()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(options.headgate, options.plain))


if __name__ == "__main__":
    main()
