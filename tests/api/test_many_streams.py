"""A thousand concurrent streams, and five hundred clients that disconnect."""

from __future__ import annotations

import asyncio
import json
import re
import time
from contextlib import suppress
from pathlib import Path

import pytest

from headgate.testing.tiny import tiny_model
from tests.api.serving import Served, serving, wait_until

STREAMS = 1000
KINDS = 20  # different prompts, whose answers are known
TOKENS = 12


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with serving(tiny_model(tmp_path_factory.mktemp("model")), "--max-running", 64, "--max-queue", 2000) as served:
        yield served


def question(kind: int, **fields: object) -> dict[str, object]:
    return {
        "prompt": [1 + kind, 2, 3],
        "seed": kind,
        "max_tokens": TOKENS,
        "ignore_eos": True,
        "return_token_ids": True,
        **fields,
    }


async def opened(url: str, body: dict[str, object]) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    data = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(data)}\r\n\r\n"
    writer.write(head.encode() + data)
    return reader, writer


async def streamed(url: str, kind: int) -> list[int]:
    """Return the token ids of one streamed answer."""
    reader, writer = await opened(url, question(kind, stream=True))
    try:
        events = re.findall(rb"data: (\{.*?\})\n\n", await reader.read())
        choices = [choice for event in events for choice in json.loads(event)["choices"]]
        assert [choice["finish_reason"] for choice in choices if choice["finish_reason"]] == ["length"]
        return [token for choice in choices for token in choice.get("completion_token_ids") or ()]
    finally:
        writer.close()
        await writer.wait_closed()


def resident_mb(pid: int) -> float:
    (line,) = (line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1]) / 1024


def test_a_thousand_streams_lose_no_chunk_and_get_none_twice(server: Served):
    with server.client() as http:
        answers = [http.post("/v1/completions", json=question(kind)).json() for kind in range(KINDS)]
    expected = [answer["choices"][0]["completion_token_ids"] for answer in answers]
    before_mb = resident_mb(server.process.pid)

    async def main() -> list[list[int]]:
        async with asyncio.timeout(100):
            return await asyncio.gather(*(streamed(server.url, i % KINDS) for i in range(STREAMS)))

    assert asyncio.run(main()) == [expected[i % KINDS] for i in range(STREAMS)]
    assert resident_mb(server.process.pid) - before_mb < 150
    wait_until(lambda: gauges(server) == (0, 0, 0))


def gauges(server: Served) -> tuple[float, float, float]:
    """Return the numbers of running sequences, waiting sequences and held blocks."""
    with server.client() as http:
        text = http.get("/metrics").text

    def value(name: str) -> float:
        return sum(
            float(number) for number in re.findall(rf"^headgate:{name}(?:\{{.*?\}})? (\S+)$", text, re.MULTILINE)
        )

    return value("num_requests_running"), value("num_requests_waiting"), value("kv_blocks_held")


def test_five_hundred_clients_that_disconnect_leave_nothing_held(server: Served):
    async def vanish(i: int) -> None:
        reader, writer = await opened(server.url, question(i % KINDS, max_tokens=450, stream=True))
        try:
            if i % 2:  # half of them in the middle of their stream, half while they wait
                await reader.readuntil(b"data: ")
        finally:
            writer.transport.abort()
            with suppress(ConnectionError):
                await writer.wait_closed()

    async def main() -> None:
        async with asyncio.timeout(60):
            await asyncio.gather(*(vanish(i) for i in range(500)))

    asyncio.run(main())
    # Generating their 225,000 tokens would take many times as long.
    deadline_s = time.monotonic() + 60
    while (left := gauges(server)) != (0, 0, 0):
        assert time.monotonic() < deadline_s, f"running, waiting, blocks held: {left}"
