"""The load generator, against a scripted OpenAI-compatible server on a plain socket."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from headgate import cli
from headgate.bench.client import HttpAddress, TimedRequest
from headgate.bench.load import ClosedLoop, Load, OpenLoop, Result, measure
from headgate.bench.report import save_json, save_plot, saved, summarise, table
from headgate.errors import HeadgateError, RequestError

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class Scripted:
    """Answers each request with the next entry of its script: a number of tokens, a status, or None to disconnect."""

    def __init__(self, *script: int | None) -> None:
        self.script = list(script)
        self.bodies: list[dict] = []
        self.open = self.most_open = 0

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.open += 1
        self.most_open = max(self.open, self.most_open)
        try:
            await self._answer(reader, writer)
        finally:
            self.open -= 1
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        length = int(head.lower().split("content-length: ")[1].split()[0])
        body = await reader.readexactly(length)
        if head.startswith("GET"):
            return writer.write(whole(200, {"data": [{"id": "the-model"}]}))
        self.bodies.append(json.loads(body) | {"path": head.split()[1], "head": head})
        step = self.script.pop(0)
        if step is None:
            return None
        if step >= 400:
            return writer.write(whole(step, {"error": {"message": "no", "code": "queue_full"}}))
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        for event in stream_of(step, chat="messages" in self.bodies[-1]):
            writer.write(chunk(event))
            await asyncio.sleep(0.001)
        return writer.write(chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")


def whole(status: int, body: dict) -> bytes:
    text = json.dumps(body).encode()
    return b"HTTP/1.1 %d X\r\nContent-Length: %d\r\n\r\n%b" % (status, len(text), text)


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def stream_of(tokens: int, *, chat: bool) -> list[bytes]:
    piece = {"delta": {"content": "x"}} if chat else {"text": "x"}
    events = [{"choices": [piece | {"finish_reason": "length" if i == tokens - 1 else None}]} for i in range(tokens)]
    events.append({"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": tokens}})
    return [f"data: {json.dumps(event)}\n\n".encode() for event in events]


@asynccontextmanager
async def listening(script: Scripted) -> AsyncIterator[str]:
    server = await asyncio.start_server(script.answer, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def test_a_closed_loop_keeps_exactly_n_clients_busy():
    script = Scripted(*[5] * 12)
    async with listening(script) as url:
        result = await measure(Load(url=url, pace=ClosedLoop(3), requests=12, max_tokens=5))
    summary = summarise(result)
    assert script.most_open == 3
    assert (summary.model, summary.requests, summary.completed, summary.errors) == ("the-model", 12, 12, {})
    assert all(s.output_tokens == 5 and s.prompt_tokens == 7 and len(s.gaps_s) == 4 for s in result.samples)
    assert all(0 < s.first_token_s < s.total_s for s in result.samples)
    assert script.bodies[0]["path"] == "/v1/chat/completions" and script.bodies[0]["max_tokens"] == 5


async def test_an_open_loop_does_not_wait_for_answers():
    script = Scripted(*[30] * 20)
    async with listening(script) as url:
        result = await measure(Load(url=url, pace=OpenLoop(2000), requests=20, api="completions"))
    assert len(result.completed) == 20 and script.most_open > 10
    assert script.bodies[0]["path"] == "/v1/completions" and "prompt" in script.bodies[0]


async def test_errors_are_counted_by_reason():
    script = Scripted(3, 429, None, 429)
    async with listening(script) as url:
        result = await measure(Load(url=url, pace=ClosedLoop(1), requests=4, api_key="k"))
    assert summarise(result).errors == {"429 queue_full": 2, "IncompleteReadError": 1}
    assert len(result.completed) == 1 and "Bearer k" in script.bodies[0]["head"]
    assert "queue_full" in table(result)


async def test_an_unreachable_server_is_reported_in_one_sentence():
    with pytest.raises(HeadgateError, match="headgate serve"):
        await measure(Load(url="http://127.0.0.1:9", pace=ClosedLoop(1), requests=1))


def test_a_seed_gives_the_same_prompts_and_arrivals():
    load = Load(url="x", pace=OpenLoop(10), requests=200, seed=4)
    assert load.conversations() == load.conversations() and len(set(load.conversations())) == 200
    assert load.arrivals_s(10, 200) == load.arrivals_s(10, 200)
    assert 15 < load.arrivals_s(10, 200)[-1] < 25


@pytest.mark.parametrize(
    "wrong", [{"requests": 0}, {"max_tokens": 0}, {"pace": OpenLoop(0)}, {"pace": ClosedLoop(-1)}]
)
def test_an_invalid_load_is_refused(wrong):
    with pytest.raises(RequestError):
        Load(**{"url": "x", "pace": ClosedLoop(1)} | wrong)


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("http://h:81", HttpAddress("h", 81, "", False)),
        ("h:81/v1", HttpAddress("h", 81, "", False)),
        ("https://h/base/v1/", HttpAddress("h", 443, "/base", True)),
    ],
)
def test_addresses_are_accepted_in_the_forms_that_clients_use(url, address):
    assert HttpAddress.of(url) == address


def test_results_are_saved_as_json_and_as_a_plot(tmp_path):
    samples = [TimedRequest(i, 0.1, 0.5, [0.1] * 4, 7, 5, "length", None) for i in range(4)]
    result = Result(Load(url="u", pace=ClosedLoop(1), requests=4), "m", 2.0, samples)
    save_json(saved(result), tmp_path / "r.json")
    read = json.loads((tmp_path / "r.json").read_text())
    assert read["summary"]["output_tokens_per_s"] == 10 and len(read["samples"]) == 4
    assert read["summary"]["time_per_output_token_ms"]["p50"] == pytest.approx(100)
    save_plot(result, tmp_path / "r.png")
    assert (tmp_path / "r.png").read_bytes().startswith(b"\x89PNG")


def test_the_command_fails_with_one_sentence_when_no_server_listens(capsys):
    assert cli.main(["bench", "serve", "http://127.0.0.1:9", "--requests", "1"], {}) == 1
    assert "no OpenAI server" in capsys.readouterr().err
