"""Workers join and leave a router at run time: by an operator, or by registering themselves."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from headgate.api.registration import Heartbeats, reachable_from
from headgate.cli import WRONG_USE, main
from headgate.client import Fleet
from headgate.config import Registration, ServerConfig
from headgate.httpclient import HttpAddress
from headgate.testing.tiny import tiny_model
from tests.api.live import LiveServer
from tests.api.serving import serving, wait_until
from tests.router.fleets import FakeWorker, LiveRouter, fake_worker, live_router

LONG = {"max_tokens": 2500, "temperature": 0, "ignore_eos": True}


@pytest.fixture
def router() -> Iterator[LiveRouter]:
    with live_router(patience_s=0.2) as router:
        yield router


@pytest.fixture
def fake() -> Iterator[FakeWorker]:
    with fake_worker() as fake:
        yield fake


def listed(router: LiveRouter, key: str | None = None) -> dict[str, dict]:
    return {each["url"]: each for each in router.get("/v1/workers", key=key).json()["workers"]}


def test_a_worker_is_added_changes_its_role_and_is_removed_by_its_address(router: LiveRouter, fake: FakeWorker):
    assert listed(router) == {} and router.get("/ready").status_code == 503
    assert router.post("/v1/workers", {"url": fake.url + "/v1"}).json()["role"] == "mixed"
    router.wait_for(ready=1)
    entry = listed(router)[fake.url]
    assert entry["kind"] == "headgate" and entry["models"] == ["fake"] and not entry["registered"]
    assert (entry["in_flight"], entry["free_blocks"], entry["version"], entry["pid"]) == (0, 8, 0, None)
    assert router.post("/v1/workers", {"url": fake.url, "role": "prefill"}).status_code == 200
    assert listed(router)[fake.url]["role"] == "prefill" and len(listed(router)) == 1
    removed = router.delete(f"/v1/workers/{fake.url}")
    assert removed.status_code == 200 and removed.json()["drained"]
    assert listed(router) == {}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"url": "nonsense"}, "url"),
        ({"url": "http://10.0.0.1:99999"}, "url"),
        ({"url": "http://127.0.0.1:1", "role": "boss"}, "role"),
        ({"url": "http://127.0.0.1:1", "ttl_s": 0}, "ttl_s"),
        ({}, "url"),
    ],
)
def test_an_invalid_worker_is_refused(router: LiveRouter, body: dict, param: str):
    refused = router.post("/v1/workers", body)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nonsense"], "a worker's address is http://HOST:PORT, not 'nonsense'"),
        (["http://a:1=boss"], "the role of worker http://a:1 must be one of mixed, prefill, decode, not boss"),
        (["http://a:1="], "the role of worker http://a:1 must be one of mixed, prefill, decode, not empty"),
        (["--workers", "none"], "the workers in none cannot be read: No such file or directory"),
        (["--workers", "bytes"], "the workers in bytes cannot be read: the file is not UTF-8 text"),
        (["--workers", "three"], "three, line 2: a worker is URL or URL ROLE, not http://a:1 mixed x"),
        (["--workers", "boss"], "boss, line 1: the role of worker http://a:1 must be one of mixed, prefill, decode"),
        (["--worker-key", ""], "--worker-key is empty; give it a key or leave it out"),
    ],
)
def test_invalid_workers_of_a_router_are_reported_in_one_sentence(arguments, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("bytes").write_bytes(b"\xff\xfe")
    Path("three").write_text("# one\nhttp://a:1 mixed x\n")
    Path("boss").write_text("http://a:1 boss\n")
    assert main(["route", "--port", "0", *arguments], {}) == WRONG_USE
    assert capsys.readouterr().err.splitlines()[-1].startswith(f"headgate: {message}")


def test_a_workers_file_with_an_invalid_line_is_applied_once_it_is_corrected(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    file, draft = tmp_path / "workers", tmp_path / "draft"

    def write(text: str) -> None:
        draft.write_text(text)
        draft.replace(file)  # the file is replaced atomically

    write("http://127.0.0.1:1\n")
    with live_router(ready=0, workers_file=file) as router:
        write("http://127.0.0.1:1\nhttp://10.0.0.1:80000\n")
        wait_until(lambda: "http://10.0.0.1:80000" in caplog.text)
        assert [*router.states()] == ["http://127.0.0.1:1"]
        write("http://127.0.0.1:1\nhttp://127.0.0.1:2\n# no more\n")
        wait_until(lambda: [*router.states()] == ["http://127.0.0.1:1", "http://127.0.0.1:2"])


def test_removing_an_unknown_address_is_refused(router: LiveRouter):
    assert router.delete("/v1/workers").json()["error"]["param"] == "url"
    unknown = router.delete("/v1/workers", params={"url": "http://127.0.0.1:1"})
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "unknown_worker")
    assert router.delete("/v1/workers", params={"url": "http://x", "timeout": "soon"}).status_code == 400


def test_a_worker_whose_heartbeats_stop_is_removed_and_others_stay(router: LiveRouter, fake: FakeWorker):
    with fake_worker() as silent:
        router.post("/v1/workers", {"url": silent.url, "ttl_s": 3600})
        router.post("/v1/workers", {"url": fake.url, "ttl_s": 3600})
        assert listed(router)[silent.url]["registered"]
        router.post("/v1/workers", {"url": silent.url, "ttl_s": 0.6})  # its last heartbeat
        wait_until(lambda: silent.url not in listed(router))
        assert list(listed(router)) == [fake.url]


def test_44_removal_by_an_operator_drains(servers: list[LiveServer]):
    # A longer answer, in case the one before ended while this machine did not run the test.
    assert any(drained(servers, tokens) for tokens in (2500, 8000, 24000))


def drained(servers: list[LiveServer], tokens: int) -> bool:
    leaving, staying = (server.url for server in servers)
    with live_router(leaving) as router, ThreadPoolExecutor(4) as threads:
        fleet = Fleet(router.url)
        asked = threads.submit(fleet.generate, "hello", **LONG | {"max_tokens": tokens})
        wait_until(lambda: listed(router)[leaving]["in_flight"] == 1 or asked.done())
        early = router.delete("/v1/workers", params={"url": leaving, "timeout": 0.05})
        entry = listed(router).get(leaving)
        if asked.done() or entry is None:
            return False
        assert early.status_code == 202 and not early.json()["drained"]
        assert entry["state"] == "draining"
        router.post("/v1/workers", {"url": staying})
        router.wait_for(ready=1)
        assert len(fleet.generate("x", **LONG | {"max_tokens": 3}).token_ids) == 3  # it goes to the other
        assert asked.result(60).cause == "max_tokens" and len(asked.result().token_ids) == tokens
        wait_until(lambda: list(listed(router)) == [staying])
        return True


def test_44_a_removal_returns_when_the_last_request_has_ended(servers: list[LiveServer]):
    with live_router(servers[0].url) as router, ThreadPoolExecutor(1) as threads:
        asked = threads.submit(Fleet(router.url).generate, "hello", **LONG)
        wait_until(lambda: listed(router)[servers[0].url]["in_flight"] == 1 or asked.done())
        removed = router.delete("/v1/workers", params={"url": servers[0].url, "timeout": 50})
        assert removed.status_code == 200 and removed.json()["drained"]
        assert asked.result(60).cause == "max_tokens" and removed.elapsed.total_seconds() < 40


def test_a_server_registers_itself_with_its_key_and_leaves_when_it_stops(tmp_path):
    model = tiny_model(tmp_path / "model")
    with live_router(admin_key="root", api_keys={"alice": "ka"}, patience_s=20.0) as router:
        flags = ("--register", router.url, "--role", "decode", "--kv-blocks", 64, "--max-context", 512)
        keys = {"HEADGATE_ROUTER_KEY": "root", "HEADGATE_ADMIN_KEY": "of-the-worker"}
        with serving(model, *flags, **keys) as served:
            router.wait_for(ready=1)
            (entry,) = listed(router, "root").values()
            assert entry["url"] == served.url and entry["role"] == "decode" and entry["registered"]
            body = {"prompt": "hello", "max_tokens": 3, "ignore_eos": True}
            answer = router.post("/v1/completions", body, key="ka")
            assert answer.json()["usage"]["completion_tokens"] == 3
            assert router.get("/v1/workers", key="ka").status_code == 403
            assert served.stop() == 0
            assert any("registered at" in message for message in served.messages())
            assert listed(router, "root") == {}


def test_a_server_that_its_router_refuses_logs_it_once_and_keeps_trying(fake: FakeWorker, caplog):
    config = ServerConfig(model=Path(), model_name="x")

    async def beat(key: str, heard: Callable[[], Any]) -> None:
        beats = Heartbeats(Registration(router=router.url, key=key), config, fake.url)
        beating = asyncio.create_task(beats.run())
        await asyncio.to_thread(wait_until, heard)
        await asyncio.wait([beating], timeout=0.5)
        assert not beating.done()
        beating.cancel()

    def refusals() -> list[str]:
        return [record.message for record in caplog.records if "does not accept the registration" in record.message]

    with live_router(admin_key="root") as router:
        asyncio.run(beat("wrong", refusals))
        (refusal,) = refusals()
        assert "403" in refusal and listed(router, "root") == {}
        asyncio.run(beat("root", lambda: listed(router, "root")))
        assert list(listed(router, "root")) == [fake.url]


def test_a_server_that_listens_on_all_addresses_registers_one_that_its_router_can_reach():
    assert reachable_from(HttpAddress.of("http://127.0.0.1:8080"), "http://0.0.0.0:8000") == "http://127.0.0.1:8000"
