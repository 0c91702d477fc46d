from __future__ import annotations

import asyncio
import os
import socket
import sys
from contextlib import suppress

import pytest

from headgate import cli
from headgate.cli.serve import engine_config
from headgate.config import EngineConfig, RouteConfig
from headgate.engine.replicas import started
from headgate.errors import CannotStart, RequestError
from headgate.offline import LLM
from headgate.router import server
from tests.transfer.engines import Side, config, export
from tests.transfer.peers import Peer


@pytest.mark.parametrize(
    "listen", ["0.0.0.0:1", "[::]:1", "example.org:1", "127.0.0.1", "127.0.0.1:x", "1.2.3.4:70000"]
)
def test_an_address_that_peers_cannot_reach_is_refused(listen):
    with pytest.raises(RequestError, match="kv_listen must be IP:PORT"):
        EngineConfig(kv_listen=listen)


def test_settings_are_checked_by_name():
    for wrong in (
        {"kv_peers": ("10.0.0.1/8",)},
        {"kv_wait_s": 0},
        {"lease_s": -1},
        {"on_preempt": "panic"},
        {"kv_transport": "x"},
    ):
        with pytest.raises(RequestError, match=next(iter(wrong))):
            EngineConfig(**wrong)


def test_flags_reach_the_engine(capsys):
    flags = [
        "--kv-listen",
        "[::1]:9",
        "--kv-peers",
        "10.0.0.0/8,::1",
        "--kv-times",
        "5,2.5,7",
        "--on-preempt",
        "reschedule",
        "--kv-transport",
        "nixl",
    ]
    made = engine_config(cli.parser().parse_args(["serve", *flags]))
    assert (made.kv_listen, made.kv_peers) == ("[::1]:9", ("10.0.0.0/8", "::1"))
    assert made.kv_transport == "nixl"
    assert (made.lease_s, made.kv_wait_s, made.export_wait_s, made.on_preempt) == (5, 2.5, 7, "reschedule")
    with pytest.raises(SystemExit):
        cli.parser().parse_args(["serve", "--kv-times", "30"])
    assert "give three numbers of seconds" in capsys.readouterr().err


def test_flags_reach_the_router(monkeypatch):
    made: list[RouteConfig] = []
    monkeypatch.setattr(server, "run_router", lambda config, *_: made.append(config))
    flags = ["--disaggregate-tokens", "64", "--ticket-timeout", "2.5", "--preempt-retry-count", "1"]
    for more in ([], [*flags, "--no-preempt-retry-exclude-decode"]):
        options = cli.parser().parse_args(["route", "--port", "0", *more])
        assert options.run(options, {}) == 0
    settings = [
        (c.disaggregate_tokens, c.ticket_timeout_s, c.preempt_retry_count, c.preempt_retry_exclude_decode)
        for c in made
    ]
    assert settings == [(256, 10.0, 3, True), (64, 2.5, 1, False)]


@pytest.mark.parametrize(
    "wrong", [{"disaggregate_tokens": -1}, {"ticket_timeout_s": 0.0}, {"preempt_retry_count": -1}]
)
def test_settings_of_the_router_are_checked_by_name(wrong):
    with pytest.raises(RequestError, match=next(iter(wrong))):
        RouteConfig(**wrong)


def two_free_ports() -> int:
    """The first of two consecutive free ports below the ephemeral range."""
    for port in range(20_000 + os.getpid() % 10_000, 32_000, 2):
        with (
            suppress(OSError),
            socket.create_server(("127.0.0.1", port)),
            socket.create_server(("127.0.0.1", port + 1)),
        ):
            return port
    raise AssertionError("no ports are free")


def test_engines_of_one_server_listen_on_consecutive_ports(model):
    async def main() -> None:
        port = two_free_ports()
        listen = f"127.0.0.1:{port}"
        async with started(model, config(kv_listen=listen), count=2) as replicas:
            addresses = []
            for replica in replicas.replicas:
                side = Side(replicas, replica.index)
                async with side.exporting(export(tuple(range(40)))) as exported:
                    addresses.append((await exported.ticket()).engine)
            assert addresses == [listen, f"127.0.0.1:{port + 1}"]

    asyncio.run(main())


def test_a_port_in_use_is_reported_in_one_sentence(model, capfd):
    async def main(listen: str) -> None:
        async with started(model, config(kv_listen=listen)):
            pass

    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(CannotStart):
        asyncio.run(main(f"127.0.0.1:{taken.getsockname()[1]}"))
    assert "KV cannot be served at 127.0.0.1" in capfd.readouterr().err


def test_a_missing_transport_package_is_reported_in_one_sentence(monkeypatch):
    monkeypatch.setitem(sys.modules, "nixl._api", None)
    with pytest.raises(RequestError, match=r"pip install 'headgate\[nixl\]'"):
        Peer(kind="nixl")


def test_a_script_has_no_port_open(model):
    with LLM(model, device="cpu", kv_blocks=16) as llm:
        assert llm.engine.transport.address == ""
