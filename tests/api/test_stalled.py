"""Clients that do not read, on a real engine and real sockets. Numbers are guarantees of docs/lifecycle.md."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from headgate.edge import departures
from headgate.edge.departures import Departures
from headgate.edge.outflow import Outflow, await_readers
from headgate.testing.tiny import tiny_model
from tests.api.clients import asking
from tests.api.live import LiveServer, eventually, live_server
from tests.api.serving import serving as served_process
from tests.stalled import LAST_CHUNK, RECEIVE_BYTES, SEND_BYTES, Mute, mute

PATH = "/v1/completions"
PLACES = 24
LONG = 4000  # tokens: far more bytes than all buffers hold
STALL_S = 4.0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("stalled") / "tiny", max_position_embeddings=8192)


def serving(model: Path, **options: Any) -> Any:
    return live_server(model, device="cpu", kv_blocks=4096, limit=PLACES, send_bytes=SEND_BYTES, **options)


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[LiveServer]:
    """A server that drops a client that reads nothing for STALL_S."""
    with serving(model, stall_s=STALL_S) as server:
        yield server


@pytest.fixture(scope="module")
def patient(model: Path) -> Iterator[LiveServer]:
    """A server whose stall timeout is longer than any test."""
    with serving(model, stall_s=600.0) as server:
        yield server


@pytest.fixture(autouse=True)
def clean(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    used = [request.getfixturevalue(name) for name in ("server", "patient") if name in request.fixturenames]
    assert all(eventually(partial(is_idle, server)) for server in used)


def is_idle(server: LiveServer) -> bool:
    status = server.status()
    return not server.api.ledger.live and (status.running, status.waiting, status.held_blocks) == (0, 0, 0)


def wordy(request_id: str, **more: Any) -> dict[str, Any]:
    return asking(LONG, request_id=request_id, stream=True, logprobs=5, **more)


def details(server: LiveServer, id: str) -> Any:
    with server.http as http:
        return http.get(f"/v1/requests/{id}").json()


def fill(server: LiveServer, id: str) -> None:
    """Wait until the buffers are full, so that the client delays the answer of this request."""
    assert eventually(lambda: any(is_held_up(record) for record in server.api.ledger.named(id)))


def is_held_up(record: Any) -> bool:
    writer = record.writer
    return writer is not None and writer.transport is not None and writer.transport.get_write_buffer_size() > 65536


# -------------------------------------------------------------------------------------------------- being given up


def test_62_the_request_of_a_client_that_reads_nothing_ends_and_frees_its_places(server: LiveServer):
    with (
        mute(server.url, PATH, wordy("mute-0", n=PLACES // 2)) as first,
        mute(server.url, PATH, wordy("mute-1", n=PLACES // 2)) as second,
    ):
        assert eventually(lambda: server.api.ledger.in_flight == PLACES)
        assert server.post(PATH, asking(4)).status_code == 429
        assert eventually(lambda: server.api.ledger.in_flight == 0)
        assert server.post(PATH, asking(4)).status_code == 200
        for number, client in enumerate((first, second)):
            usage = details(server, f"mute-{number}")["usage"]
            assert (usage["finish_reason"], usage["cause"]) == ("abort", "client_stalled")
            assert {choice["cause"] for choice in usage["choices"]} == {"client_stalled"}
            assert not client.rest().endswith(LAST_CHUNK)
    assert server.api.ledger.metrics.aborts["client_stalled"] >= PLACES
    with server.http as http:
        page = http.get("/metrics").text
    assert 'headgate:requests_total{cause="client_stalled",finish_reason="abort"}' in page


def test_62_an_unread_complete_answer_and_the_pipelined_request_after_it_end_too(server: LiveServer):
    """The first request keeps its place until its answer is finished, the second until the client is dropped."""
    body = asking(2000, logprobs=5)
    with mute(server.url, PATH, body | {"request_id": "first"}) as client:
        client.post(PATH, body | {"request_id": "second", "stream": True})
        assert eventually(lambda: bool(server.api.ledger.past("second", "")))
        assert details(server, "first")["usage"]["finish_reason"] == "length"
        assert details(server, "second")["usage"]["cause"] == "client_stalled"
        assert len(client.rest()) < 100_000  # the connection was closed before the first answer was complete


def test_62_a_slow_client_that_reads_gets_everything(server: LiveServer):
    """The client takes longer than the stall timeout in total, but not between two bytes."""
    heard, began_s = b"", time.monotonic()
    with mute(server.url, PATH, wordy("slow")) as client:
        while time.monotonic() - began_s < 2 * STALL_S:
            heard += client.read(RECEIVE_BYTES)
            time.sleep(0.05)
        assert not heard.endswith(LAST_CHUNK)
        heard += client.rest_of_answer()
    assert b"data: [DONE]" in heard
    assert details(server, "slow")["usage"]["finish_reason"] == "length"


def test_62_sent_bytes_are_progress_and_buffered_bytes_are_not():
    async def main() -> None:
        transports: list[asyncio.Transport] = []
        listener = socket.create_server(("127.0.0.1", 0))
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BYTES)
        loop = asyncio.get_running_loop()

        class Protocol(asyncio.Protocol):
            def connection_made(self, transport: Any) -> None:
                transports.append(transport)

        served = await loop.create_server(Protocol, sock=listener)
        client = Mute(f"http://127.0.0.1:{listener.getsockname()[1]}")
        async with asyncio.timeout(60):
            while not transports:
                await asyncio.sleep(0.01)
            transport = transports[0]
            outflow = Outflow(transport)
            assert outflow.stalled_s(0.0) == 0.0  # nothing is buffered
            transport.write(b"x" * 10**6)
            await settled(outflow, 100.0)
            transport.write(b"x" * 10**6)
            assert outflow.stalled_s(129.0) == 29.0
            client.read(2**16)
            while outflow.stalled_s(140.0):
                client.read(2**16)
                await asyncio.sleep(0.01)
            await settled(outflow, 150.0)
            assert outflow.stalled_s(151.0) == 1.0
        client.close()
        transport.abort()
        served.close()

    asyncio.run(main())


async def settled(outflow: Outflow, now_s: float) -> None:
    """Wait until the kernel buffers are full."""
    quiet = 0
    while quiet < 10:
        await asyncio.sleep(0.02)
        before, outflow._since_s = outflow._since_s, -1.0
        quiet = 0 if outflow.stalled_s(now_s) == 0.0 else quiet + 1
        outflow._since_s = before
    outflow._since_s = now_s


# ------------------------------------------------------------------------------------------- being waited for


def test_62_an_abort_waits_two_seconds_for_a_client_that_reads_nothing(patient: LiveServer):
    with mute(patient.url, PATH, wordy("deaf", n=4)) as client:
        fill(patient, "deaf")
        began_s = time.monotonic()
        answer = patient.post("/v1/abort_requests", {"abort_all": True, "timeout": 60})
        assert time.monotonic() - began_s < 20  # two seconds plus the delay of a busy machine, but not the timeout
        assert (answer.status_code, answer.json()["status"]) == (202, "accepted")
        result = answer.json()["result"]
        assert [(each["request_id"], each["code"]) for each in result["errors"]] == [("deaf", "not_told")]
        assert result["aborted"] == [] and patient.status().held_blocks == 0
        told = details(patient, "deaf")["request"]
        assert {choice["phase"] for choice in told["choices"]} <= {"sending", "finished"}
        assert b'"cause":"api_abort"' in client.rest_of_answer()
    assert details(patient, "deaf")["usage"]["cause"] == "api_abort"


def test_62_a_request_that_only_waits_for_its_client_to_read_is_listed_as_sending(patient: LiveServer):
    with mute(patient.url, PATH, wordy("unread")) as client:

        def phases() -> set[str]:
            told = details(patient, "unread")["request"]
            return {told["phase"], *(choice["phase"] for choice in told["choices"])}

        assert eventually(lambda: phases() == {"sending"})
        assert patient.status().held_blocks == 0
        assert client.rest_of_answer().endswith(b"data: [DONE]\n\n" + b"\r\n" + LAST_CHUNK)


def test_62_a_pause_waits_two_seconds_for_a_client_that_reads_nothing(patient: LiveServer):
    with mute(patient.url, PATH, wordy("held")) as client:
        fill(patient, "held")
        began_s = time.monotonic()
        answer = patient.post("/v1/pause", {"mode": "abort", "timeout": 60})
        assert time.monotonic() - began_s < 20
        assert answer.json()["result"]["is_paused"] and answer.json()["result"]["aborted"] == 1
        assert patient.post("/v1/resume", {}).status_code == 200
        assert b'"cause":"pause"' in client.rest_of_answer()


def test_62_clients_that_read_are_waited_for(monkeypatch: pytest.MonkeyPatch):
    """The wait for a client that reads is as long as the caller allows; for one that does not, it is two seconds."""

    class Buffer:
        def __init__(self, size: int, *, drains: bool) -> None:
            self.size, self.drains = size, drains

        def get_write_buffer_size(self) -> int:
            self.size -= self.drains
            return self.size

        def get_extra_info(self, name: str) -> None:
            return None

    async def main() -> None:
        monkeypatch.setattr("headgate.edge.outflow.UNREAD_S", 0.2)
        monkeypatch.setattr("headgate.edge.outflow.POLL_S", 0.01)
        loop = asyncio.get_running_loop()
        reading: Any = Buffer(10**6, drains=True)
        stuck: Any = Buffer(10**6, drains=False)
        end = loop.create_future()
        waiting = asyncio.ensure_future(await_readers({end: reading}, 600.0))
        await asyncio.wait_for(await_readers({loop.create_future(): stuck}, 600.0), 60)
        await asyncio.sleep(0.5)
        assert not waiting.done()
        end.set_result(None)
        await asyncio.wait_for(waiting, 60)

    asyncio.run(main())


def test_62_a_shutdown_does_not_wait_for_a_client_that_reads_nothing(model: Path):
    body = wordy("mute", n=32) | {"logprobs": 20, "max_tokens": 8000}
    with (
        served_process(model, "--device", "cpu", "--kv-blocks", 4096, "--drain-timeout", 300) as served,
        mute(served.url, PATH, body),
    ):
        assert eventually(lambda: not _grows(served))
        began_s = time.monotonic()
        assert served.stop(timeout_s=100) == 0
        assert time.monotonic() - began_s < 60


def _grows(served: Any) -> bool:
    """Whether the server sends more of the answer within half a second."""
    with served.client() as http:
        before = http.get("/v1/requests").json()["data"]
        time.sleep(0.5)
        after = http.get("/v1/requests").json()["data"]
    return not before or before[0]["output_tokens"] < after[0]["output_tokens"]


# ------------------------------------------------------------------------------------------------------------- keys


def test_49_62_a_client_that_does_not_read_does_not_delay_an_answer_with_a_key(patient: LiveServer):
    body = wordy("keyed")
    with mute(patient.url, PATH, body, idempotency_key="k") as client:
        assert eventually(lambda: bool(patient.api.ledger.past("keyed", "")))
        with patient.http as http:
            again = http.post(PATH, json=body, headers={"Idempotency-Key": "k"}).content
        assert again.endswith(b"data: [DONE]\n\n") and again.count(b'"completion_token_ids"') > 0
        assert client.rest_of_answer().count(b"data: {") == again.count(b"data: {")


# -------------------------------------------------------------------------------------------------------- INFO lines


def test_a_disconnected_stream_is_logged_in_one_line(patient: LiveServer, caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO, "headgate.api")
    with mute(patient.url, PATH, wordy("gone")) as client:
        client.read()
        address = "{}:{}".format(*client.socket.getsockname())
    assert eventually(lambda: bool(patient.api.ledger.past("gone", "")))
    lines = [record.getMessage() for record in caplog.records if record.getMessage().startswith("gone: ")]
    assert len(lines) == 1 and address in lines[0] and "client_disconnect" in lines[0]
    assert int(lines[0].split(" tokens")[0].split()[-1]) > 0


def test_lines_about_disconnected_streams_are_limited_and_the_rest_is_counted(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO, "headgate.tests")

    async def main() -> None:
        noted = Departures(logging.getLogger("headgate.tests"))
        for number in range(departures.MOST_LINES + 25):
            noted.note("10.0.0.1:5", f"r{number}", number, "client_disconnect")
        async with asyncio.timeout(60):
            while len(caplog.records) <= departures.MOST_LINES:
                await asyncio.sleep(0.01)
        noted.note("10.0.0.1:5", "later", 1, "client_disconnect")

    asyncio.run(main())
    lines = [record.getMessage() for record in caplog.records]
    assert lines[-2:] == [
        "25 more clients disconnected from their streams within a second",
        "later: client 10.0.0.1:5 disconnected from the stream after 1 tokens (client_disconnect)",
    ]
    assert len(lines) == departures.MOST_LINES + 2 and json.dumps(lines)
