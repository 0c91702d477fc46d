"""TLS of servers, routers, workers and clients, on real sockets. `tests/tls/make.py` made the certificates."""

from __future__ import annotations

import asyncio
import logging
import shutil
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import uvloop

from headgate.api.registration import Heartbeats, reachable_from
from headgate.api.server import HttpServer
from headgate.client import AsyncFleet, Fleet, FleetLost
from headgate.config import SYSTEM_CAS, Registration, ServerConfig, TlsFiles
from headgate.edge.certificates import reload
from headgate.edge.outflow import TLS_BUFFER_BYTES, Outflow
from headgate.errors import RequestError
from headgate.httpclient import HttpAddress
from headgate.listening import take_port
from headgate.router.data_path.downstream import LINGER_S
from headgate.router.router import Router
from headgate.tls import client_context, server_context
from tests.router.client import Wire, ask, check, routing, until
from tests.router.mock import CHAT, Fault, Mock
from tests.router.run import run
from tests.router.test_relay import first
from tests.stalled import SEND_BYTES, Mute

FOLDER = Path(__file__).parent / "tls"


def files(certificate: str | None, key: str | None = None, ca: str | None = None) -> TlsFiles:
    named = {"certificate": certificate, "key": key, "ca": ca}
    return TlsFiles(**{name: FOLDER / file for name, file in named.items() if file is not None})


SERVER = files("server.pem", "server.key")
STRICT = files("server.pem", "server.key", "ca.pem")  # requires a client certificate
TRUSTING = files(None, ca="ca.pem")
KNOWN = files("client.pem", "client.key", "ca.pem")
BODY = {"model": "mock", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 8}
LONG = BODY | {"stream": True, "max_tokens": 200_000}  # far more bytes than all buffers hold


# ------------------------------------------------------------------------------------------------------------- files


@pytest.mark.parametrize(
    ("unusable", "message"),
    [
        (files("server.pem", "client.key"), "client.key does not belong to the certificate in .*server.pem"),
        (files("server.pem", "encrypted.key"), "encrypted.key is encrypted; decrypt it"),
        (files("none.pem", "server.key"), "none.pem cannot be read: No such file"),
        (files("server.key", "server.pem"), "server.key has no certificate in PEM format"),
        (files("server.pem", "ca.pem"), "ca.pem has no private key in PEM format"),
        (files("server.pem", "server.key", "none.pem"), "none.pem cannot be read: No such file"),
    ],
)
def test_an_unusable_file_is_refused_by_its_name(unusable: TlsFiles, message: str):
    with pytest.raises(RequestError, match=message):
        server_context(unusable)


def test_a_certificate_without_its_key_is_refused():
    with pytest.raises(RequestError, match="must be given together"):
        files("server.pem")


def test_a_damaged_certificate_is_refused_by_its_name(tmp_path: Path):
    damaged = tmp_path / "damaged.pem"
    damaged.write_bytes((FOLDER / "server.pem").read_bytes().replace(b"M", b"!", 3))
    for unusable in (TlsFiles(certificate=damaged, key=FOLDER / "server.key"), TlsFiles(ca=damaged)):
        with pytest.raises(RequestError, match=r"damaged\.pem.* damaged"):
            client_context(unusable)


def test_versions_before_tls_1_2_are_refused():
    for context in (server_context(SERVER), client_context(TRUSTING), client_context(SYSTEM_CAS)):
        assert context.minimum_version == ssl.TLSVersion.TLSv1_2
    assert client_context(SYSTEM_CAS).verify_mode == ssl.CERT_REQUIRED and client_context(TRUSTING).check_hostname


def test_a_renewed_certificate_is_loaded_and_a_half_replaced_one_is_not(tmp_path: Path, caplog):
    names = TlsFiles(certificate=tmp_path / "c.pem", key=tmp_path / "c.key")

    def place(certificate: str, key: str) -> None:
        shutil.copy(FOLDER / certificate, tmp_path / "c.pem")
        shutil.copy(FOLDER / key, tmp_path / "c.key")

    place("server.pem", "server.key")
    context = server_context(names)
    assert subject_shown(context) == "server"
    place("client.pem", "server.key")
    reload(context, names)
    assert subject_shown(context) == "server" and "does not belong" in caplog.text
    place("client.pem", "client.key")
    reload(context, names)
    assert subject_shown(context) == "client"


def subject_shown(context: ssl.SSLContext) -> str:
    """Return the subject of the certificate that a server with this context presents, without a network."""
    to_client, to_server = ssl.MemoryBIO(), ssl.MemoryBIO()
    ours = context.wrap_bio(to_server, to_client, server_side=True)
    theirs = client_context(TRUSTING).wrap_bio(to_client, to_server, server_hostname="localhost")
    for _ in range(4):
        for side in (theirs, ours):
            with suppress(ssl.SSLWantReadError):
                side.do_handshake()
    return dict(item[0] for item in theirs.getpeercert()["subject"])["commonName"]  # type: ignore[index,misc]


# ------------------------------------------------------------------------------------------------------------ servers


async def endless(scope: Any, receive: Any, send: Any) -> None:
    """Send bytes until the client leaves; the path /whole is answered at once."""
    await receive()
    await send({"type": "http.response.start", "status": 200, "headers": []})
    if scope["path"] == "/whole":
        return await send({"type": "http.response.body", "body": scope["scheme"].encode()})
    leaving = asyncio.ensure_future(receive())
    while not leaving.done():
        await send({"type": "http.response.body", "body": b"x" * 1000, "more_body": True})
        await asyncio.sleep(0)
    scope["app"](scope["state"])
    return None


@asynccontextmanager
async def serving(ended: Callable[[Any], None] = lambda _: None, **options: Any) -> AsyncIterator[str]:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await endless(scope | {"app": ended}, receive, send)

    listener, ready = take_port("127.0.0.1", 0), asyncio.Event()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BYTES)
    server = HttpServer(app, listener, ready.set, tls=SERVER, **options)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(server.serve())
        await ready.wait()
        try:
            yield f"https://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.stop_accepting()
            await server.close(1.0)


def test_a_server_answers_over_tls_and_not_without():
    async def main() -> None:
        async with serving() as url:
            answer = await ask(url, "/whole", {}, ssl=client_context(TRUSTING))
            assert (answer.status, answer.body) == (200, b"https")
            plain = await Wire.open(url)
            plain.post("/whole", {})
            assert await plain.closed() and plain._responses == []

    run(main())


@pytest.mark.parametrize("leaves", [True, False], ids=["leaves", "does not read"])
def test_62_a_client_over_tls_that_leaves_or_does_not_read_ends_its_request(leaves: bool):
    async def main() -> None:
        ended: list[Any] = []
        async with serving(ended.append, stall_s=2.0) as url:
            client = await asyncio.to_thread(Mute, url, client_context(TRUSTING))
            await asyncio.to_thread(client.post, "/", {})
            if leaves:
                assert await asyncio.to_thread(client.read)
                client.close()
            await until(lambda: ended)
            client.close()

    run(main())


@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def test_62_bytes_in_buffers_below_tls_count_as_unread(loop: Callable[[], asyncio.AbstractEventLoop]):
    """The TLS transport reports an empty buffer while the transport below it cannot send."""

    async def main() -> None:
        transports: list[asyncio.Transport] = []
        listener = socket.create_server(("127.0.0.1", 0))
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BYTES)

        class Server(asyncio.Protocol):
            def connection_made(self, transport: Any) -> None:
                transports.append(transport)

        served = await asyncio.get_running_loop().create_server(Server, sock=listener, ssl=server_context(SERVER))
        url = f"https://127.0.0.1:{listener.getsockname()[1]}"
        client = await asyncio.to_thread(Mute, url, client_context(TRUSTING))
        await until(lambda: transports)
        outflow = Outflow(transports[0])
        assert outflow.stalled_s(0.0) == 0.0
        transports[0].write(b"x" * TLS_BUFFER_BYTES)
        for now_s in range(1, 1000):  # until the kernel's buffers are full
            if outflow.stalled_s(float(now_s)) >= 20.0:
                break
            await asyncio.sleep(0.02)
        assert transports[0].get_write_buffer_size() == 0
        assert outflow.stalled_s(2000.0) >= 20.0
        heard = await asyncio.to_thread(client.read, TLS_BUFFER_BYTES)
        while len(heard) < TLS_BUFFER_BYTES:
            heard += await asyncio.to_thread(client.read, TLS_BUFFER_BYTES)
        await until(lambda: outflow.stalled_s(3000.0) == 0.0)
        client.close()
        transports[0].abort()
        served.close()

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(main())


# ------------------------------------------------------------------------------------------------ routers and workers


@asynccontextmanager
async def routed(*mocks: Mock, **settings: Any) -> AsyncIterator[tuple[Router, str, dict[str, Any]]]:
    """Run a router with TLS on both sides; the last value are a trusting client's options."""
    options = {"tls": SERVER, "worker_tls": TRUSTING} | settings
    async with routing(*mocks, **options) as (router, url):
        assert url.startswith("https://")
        yield router, url, {"ssl": client_context(TRUSTING)}


@pytest.mark.parametrize("stream", [True, False])
def test_34_an_answer_cut_by_a_worker_with_tls_goes_on_at_another(stream: bool):
    async def main() -> None:
        script, tls = first(Fault("cut", at=3, part=0.5)), server_context(SERVER)
        body = BODY | {"stream": stream, "max_tokens": 40}
        async with (
            Mock(script, tls=tls) as one,
            Mock(script, tls=tls) as two,
            routed(one, two) as (_, url, options),
        ):
            assert check(body, await ask(url, CHAT, body, **options)) is None
            assert check(BODY, await ask(url, CHAT, BODY, **options)) is None
            asked = [*one.asked, *two.asked]
            assert sum("resume" in each.body for each in asked) == 1 and not (one.mistakes or two.mistakes)

    run(main())


def test_62_a_client_of_a_router_over_tls_that_does_not_read_is_disconnected():
    async def main() -> None:
        async with (
            Mock(tls=server_context(SERVER)) as mock,
            routed(mock, client_stall_timeout_s=2.0, send_bytes=SEND_BYTES) as (router, url, options),
        ):
            client = await asyncio.to_thread(Mute, url, options["ssl"])
            client.post(CHAT, LONG)
            await until(lambda: router.counters.clients_left == {"client_stalled": 1})
            await until(lambda: mock.asked[0].left)
            client.close()

    run(main())


def test_a_refused_request_over_tls_gets_its_error_and_the_connection_is_closed():
    async def main() -> None:
        async with Mock(tls=server_context(SERVER)) as mock, routed(mock) as (_, url, options):
            wire = await Wire.open(url, **options)
            wire.send(b"not http\r\n\r\n")
            assert (await wire.response()).error["code"] == "bad_http"
            async with asyncio.timeout(LINGER_S + 60):
                assert await wire.closed()

    run(main())


class Plain(asyncio.Protocol):
    """A worker without TLS, as it meets a client with TLS."""

    def __init__(self, mock: Mock) -> None:
        pass

    def connection_made(self, transport: Any) -> None:
        transport.write(b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\n\r\n")


@pytest.mark.parametrize(
    ("server", "ours", "reason"),
    [
        (files("expired.pem", "server.key"), TRUSTING, "its certificate is not accepted: certificate has expired"),
        (files("untrusted.pem", "server.key"), TRUSTING, "its certificate is not accepted: unable to get local"),
        (SERVER, SYSTEM_CAS, "its certificate is not accepted: unable to get local issuer certificate"),
        (STRICT, TRUSTING, "it may require another client certificate"),
        (None, TRUSTING, "is its address http://?"),
    ],
    ids=["expired", "untrusted", "unknown CA", "client certificate", "no TLS"],
)
def test_a_worker_whose_tls_fails_is_named_with_the_reason_once(server, ours, reason, caplog):
    caplog.set_level(logging.DEBUG, "headgate.router.fleet.monitor")

    async def main() -> None:
        tls, connection = (server_context(server), None) if server else (None, Plain)
        async with Mock(tls=tls, connection=connection) as mock, routing(worker_tls=ours) as (router, _):
            worker = router.fleet.add(mock.url.replace("http:", "https:"))
            await until(lambda: len([record for record in caplog.records if worker.url in record.message]) >= 3)
            assert worker.state == "starting"
            (warning,) = [record.message for record in caplog.records if record.levelname == "WARNING"]
            assert worker.url in warning and reason in warning

    run(main())


def test_a_worker_that_requires_a_client_certificate_accepts_the_routers():
    async def main() -> None:
        async with Mock(tls=server_context(STRICT)) as mock, routed(mock, worker_tls=KNOWN) as (_, url, options):
            assert check(BODY, await ask(url, CHAT, BODY, **options)) is None

    run(main())


# ------------------------------------------------------------------------------------------- clients and registration


def test_clients_verify_a_fleet_and_say_why_they_do_not_reach_it():
    async def main() -> None:
        async with Mock(tls=server_context(SERVER)) as mock, routed(mock, tls=STRICT) as (_, url, _options):
            trusting = Fleet(url, tls=KNOWN)
            assert (await asyncio.to_thread(trusting.state)).state == (await AsyncFleet(url, tls=KNOWN).state()).state
            for fleet in (AsyncFleet(url), AsyncFleet(url, tls=files("client.pem", "client.key", "stranger.pem"))):
                with pytest.raises(FleetLost, match="its certificate is not accepted"):
                    await fleet.state()
            with pytest.raises(FleetLost, match="its certificate is not accepted"):
                await asyncio.to_thread(Fleet(url).state)
            with pytest.raises(FleetLost):
                await AsyncFleet(url, tls=TRUSTING).state()  # without a client certificate

    run(main())


def test_a_server_with_tls_registers_with_its_certificate_and_its_https_address():
    async def main() -> None:
        async with Mock(tls=server_context(SERVER)) as mock, routed(tls=STRICT) as (router, url, _):
            registration = Registration(router=url, tls=KNOWN, url=mock.url)
            config = ServerConfig(model=Path(), model_name="x", host="0.0.0.0", tls=SERVER)
            beating = asyncio.ensure_future(Heartbeats(registration, config, "https://0.0.0.0:1").run())
            await until(lambda: [worker.url for worker in router.fleet if worker.available] == [mock.url])
            beating.cancel()
            await asyncio.wait([beating])

    run(main())
    own = reachable_from(HttpAddress.of("https://127.0.0.1:1"), "https://0.0.0.0:8000")
    assert own == "https://127.0.0.1:8000"
