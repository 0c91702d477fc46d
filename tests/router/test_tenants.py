"""Isolation of a router's tenants: ids, Idempotency-Keys, and rights at the workers."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise, product
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import pytest

from headgate.client import Fleet
from headgate.config import RouteConfig
from headgate.contract.abort import AbortedRequest, AbortRequest, AbortResult
from headgate.contract.keys import Caller, Keys
from headgate.protocol.keys import tenant_salt
from headgate.router.control.abort import MergedAborts, RoutedTarget, RouterAbortResult
from headgate.router.control.abort_calls import WorkerAborts
from headgate.router.control.fan_out import WorkerReply
from headgate.router.exchange.prefill import PREFILL, prefill_name
from headgate.router.fleet.worker import Worker
from headgate.router.router import Router
from tests.api.live import LiveServer, live_server
from tests.api.serving import serving, up, wait_until
from tests.router.client import Wire, ask, check, routing, until
from tests.router.fleets import LiveRouter, fake_worker, live_router
from tests.router.mock import CHAT, Fault, Mock
from tests.router.run import run
from tests.router.test_up import descendants

KEYS = {"api_keys": {"alice": "ka", "bob": "kb"}, "admin_key": "root"}
ALICE, BOB = {"Authorization": "Bearer ka"}, {"Authorization": "Bearer kb"}
BODY = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 8}
LONG = {"max_tokens": 30000, "temperature": 0, "ignore_eos": True}
ODD_IDS = ["with a space", "a/b", "a/b/", "100%", "%2F", "a%20b", "a?b#c", "..", "é".encode().hex() + ";x=1&y"]


@pytest.fixture
def keyed(servers: list[LiveServer]) -> Iterator[LiveRouter]:
    with live_router(*(server.url for server in servers), **KEYS) as router:
        yield router
        router.post("/v1/abort_requests", {"abort_all": True}, key="root")


# ---------------------------------------------------------------------------------------------------------------- ids


def test_65_two_tenants_run_requests_of_the_same_id_and_each_ends_its_own(keyed: LiveRouter):
    alice, bob, root = (Fleet(keyed.url, key) for key in ("ka", "kb", "root"))
    with ThreadPoolExecutor(2) as threads:
        asked = [threads.submit(fleet.generate, "x", request_id="tale", **LONG) for fleet in (alice, bob)]
        wait_until(lambda: sum(each["output_tokens"] > 3 for each in root.requests()) == 2)
        assert sorted((e["tenant"], e["request_id"]) for e in root.requests()) == [("alice", "tale"), ("bob", "tale")]
        assert [each["tenant"] for each in bob.requests()] == ["bob"]
        assert set(bob.abort("tale").aborted) == {"tale"}
        assert asked[1].result(60).cut and not asked[0].done()
        told = keyed.get("/v1/requests/tale", key="ka").json()
        assert (told["status"], told["request"]["tenant"]) == ("in_flight", "alice")
        assert keyed.get("/v1/requests/tale", key="kb").json()["usage"]["tenant"] == "bob"
        assert set(alice.abort("tale-0").aborted) == {"tale-0"}  # a choice belongs to its tenant too
        assert asked[0].result(60).cut


def test_65_72_the_admin_ends_both_requests_of_one_id_and_gets_a_report_of_each(keyed: LiveRouter):
    with ThreadPoolExecutor(2) as threads:
        fleets = [Fleet(keyed.url, key) for key in ("ka", "kb")]
        asked = [threads.submit(fleet.generate, "x", request_id="tale", **LONG) for fleet in fleets]
        wait_until(lambda: sum(e["output_tokens"] > 3 for e in Fleet(keyed.url, "root").requests()) == 2)
        told = keyed.post("/v1/abort_requests", {"req_ids": ["tale"]}, key="root").json()["result"]
        assert [each["request_id"] for each in told["aborted"]] == ["tale", "tale"]
        alices, bobs = (len(each.result(60).token_ids) for each in asked)
        counts = {each["tenant"]: each["output_token_count"] for each in told["aborted"]}
        assert counts == {"alice": alices, "bob": bobs}


WORKER = Worker("http://w:1")


@dataclass(eq=False)
class EndedExchange:
    """A request that has ended, as far as the report of an abort reads it."""

    tenant: str
    worker: Worker = WORKER
    end_pending: bool = False
    cut: bool = False
    over: bool = True
    choice_ends: tuple[()] = ()


def aborts(targets: list[RoutedTarget], *reported: AbortedRequest) -> RouterAbortResult:
    """Merge the report of one worker that an admin has asked to end `tale`."""
    merged = MergedAborts(targets)
    merged.add(WorkerReply(WORKER, 200, answer=WorkerAborts(AbortResult(aborted=list(reported)))), ["tale"])
    return merged.result(AbortRequest(req_ids=["tale"]), targets, (), Caller("admin", admin=True))


def test_65_72_a_report_on_one_tenants_request_does_not_count_for_anothers_with_the_same_id():
    targets = [RoutedTarget("tale", EndedExchange(tenant)) for tenant in ("alice", "bob")]  # type: ignore[arg-type]
    result = aborts(targets, AbortedRequest("tale", 7, "bob"))
    assert result.aborted == [AbortedRequest("tale", 7, "bob")] and result.already_finished == ["tale"]


def test_65_72_a_request_of_another_router_is_reported_beside_ours_with_the_same_id():
    ours = [RoutedTarget("tale", EndedExchange("alice"))]  # type: ignore[arg-type]
    both = AbortedRequest("tale", 7, "bob"), AbortedRequest("tale", 5, "alice")
    assert aborts(ours, *both).aborted == [both[1], both[0]]
    assert {each.tenant for each in aborts([], *both).aborted} == {"alice", "bob"}
    assert aborts([], both[0], both[0]).aborted == [both[0]]  # once, although two workers had it


def test_65_generated_ids_have_128_random_bits_and_cannot_be_occupied():
    async def main() -> None:
        async with Mock() as mock, routing(mock, **KEYS) as (_, url):
            ids = [(await ask(url, CHAT, BODY, ALICE)).header("x-request-id") or "" for _ in range(40)]
            assert all(re.fullmatch("req-[0-9a-f]{32}", id) for id in ids) and len(set(ids)) == 40
            bits = [int(id[4:], 16) for id in ids]
            # Every bit is random: it differs at least once in 39 consecutive pairs (except with probability 2^-32).
            differing = 0
            for one, other in pairwise(bits):
                differing |= one ^ other
            assert differing == 2**128 - 1

    run(main())


def test_65_ids_of_a_server_have_128_random_bits(servers: list[LiveServer]):
    with servers[0].http as http:
        ids = [http.get("/live").headers["x-request-id"] for _ in range(3)]
    assert all(re.fullmatch("req-[0-9a-f]{32}", id) for id in ids) and len(set(ids)) == 3


def test_65_a_retry_never_takes_the_place_of_another_live_request():
    """Regression: the router kept a retry of `A` as `A#2`, even if another request had that id."""

    async def main() -> None:
        async with Mock(lambda _: Fault("stall", at=1)) as mock, routing(mock, **KEYS) as (router, url):
            body = BODY | {"stream": True}
            wires = [await Wire.open(url) for _ in range(12)]
            first, retry, *others = wires
            for number, wire in enumerate(others):
                wire.post(CHAT, body | {"request_id": f"A#{number // 2}"}, (ALICE, BOB)[number % 2])
            first.post(CHAT, body | {"request_id": "A"}, ALICE | {"Idempotency-Key": "k"})
            await until(lambda: len(router.live) == 11)
            retry.post(CHAT, body | {"request_id": "A"}, ALICE | {"Idempotency-Key": "k"})
            await until(lambda: len(router.live) == 12)
            for tenant, number in product(("alice", "bob"), range(5)):
                named = router.live[tenant, f"A#{number}", 0]
                assert (named.tenant, named.id) == (tenant, f"A#{number}")
            for wire in wires:
                wire.close()

    run(main())


def test_65_an_idempotency_key_of_another_tenant_does_not_affect_placement():
    async def main() -> None:
        async with Mock() as one, Mock() as two, routing(one, two, policy="round_robin", **KEYS) as (router, url):
            chosen = router.counters.chosen
            for who, expected in ((ALICE, 0), (BOB, 0), (ALICE, 1), (BOB, 2)):
                assert check(BODY, await ask(url, CHAT, BODY, who | {"Idempotency-Key": "same"})) is None
                assert chosen["idempotency_key"] == expected

    run(main())


def test_65_a_client_cannot_use_the_id_of_a_prefill_request():
    async def main() -> None:
        async with Mock() as mock, routing(mock) as (_, url):
            for sent in (
                await ask(url, CHAT, BODY | {"request_id": prefill_name("x")}),
                await ask(url, CHAT, BODY, {"X-Request-Id": prefill_name("x")}),
            ):
                assert (sent.status, sent.error["param"]) == (400, "request_id")
            assert check(BODY, await ask(url, CHAT, BODY | {"request_id": "x-prefill"})) is None
        long = [prefill_name("x" * 255 + last) for last in "ab"]
        assert len(set(long)) == 2 and all(len(name) <= 256 and name.endswith(PREFILL) for name in long)

    run(main())


# -------------------------------------------------------------------------------------------------------------- paths


@pytest.mark.parametrize("id", ODD_IDS)
def test_65_ids_in_paths_are_percent_decoded_by_server_and_router(servers: list[LiveServer], id: str):
    body = {"prompt": "x", "max_tokens": 1}
    with live_router(servers[0].url) as router, router.client() as ours, servers[0].http as theirs:
        for http in (ours, theirs):
            assert http.post("/v1/completions", json=body, headers={"X-Request-Id": id}).status_code == 200
            where = f"/v1/requests/{quote(id, safe='')}"
            told = raw_get(http, where)
            assert (told["request_id"], told["status"]) == (id, "finished")


def raw_get(http: Any, path: str) -> Any:
    """Send a GET without a client library, which would normalise the path."""

    async def get() -> Any:
        wire = await Wire.open(str(http.base_url).rstrip("/"))
        try:
            wire.send(f"GET {path} HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n".encode())
            return (await wire.response()).json
        finally:
            wire.close()

    return asyncio.run(get())


def test_65_an_unusual_id_can_be_aborted_by_its_path_through_a_router(servers: list[LiveServer]):
    with live_router(servers[0].url) as router, ThreadPoolExecutor(1) as threads:
        id = "50 % of a/b"
        headers = {"X-Request-Id": id}
        asked = threads.submit(router.post, "/v1/completions", {"prompt": "x", **LONG}, headers=headers)
        wait_until(lambda: any(each["output_tokens"] > 3 for each in Fleet(router.url).requests()))
        told = router.delete(f"/v1/requests/{quote(id, safe='')}").json()["result"]
        assert [each["request_id"] for each in told["aborted"]] == [id]
        assert asked.result(60).json()["choices"][0]["finish_reason"] == "abort"


def test_a_percent_encoded_path_has_the_access_rules_of_the_decoded_one(servers: list[LiveServer]):
    with live_router(servers[0].url, **KEYS) as router:
        assert router.post("/v1/%70ause", {}, key="ka").status_code == 403
        assert router.post("/v1/pause%2F", {}, key="ka").status_code == 403


# ---------------------------------------------------------------------------------------------- rights at the workers

AT_WORKERS = ["/v1/requests/x", "/v1/models", "/v1/loads", "/model_info", "/v1/is_paused", "/get_world_size"]


@pytest.mark.parametrize("admin_key", ["root", None])
def test_67_a_router_asks_its_workers_with_the_rights_of_its_caller(admin_key: str | None):
    """An empty name is that of a caller without a key; no name means the router's own rights."""
    with fake_worker() as fake:
        config = {"admin_key": admin_key, "worker_key": "work", "host": "0.0.0.0"}  # claimed by the caller
        with live_router(fake.url, **config) as router:
            assert set(fake.tenants.values()) == {None}  # probes have the router's own rights
            fake.tenants.clear()
            for path in AT_WORKERS:
                router.get(path)
            router.post("/v1/abort_requests", {"req_ids": ["x"]})
            router.post("/v1/completions", {"prompt": "x"})
            router.post("/tokenize", {"prompt": "x"})
            asked = [*AT_WORKERS, "/v1/abort_requests", "/v1/completions", "/tokenize"]
            own = {"/v1/models", "/v1/loads"}  # probes ask this too
            told = {path: fake.tenants[path] for path in asked if path not in own}
            assert told == dict.fromkeys(told, "")
            if admin_key:
                router.get("/v1/requests/x", key="root")
                assert fake.tenants["/v1/requests/x"] is None


def test_67_callers_without_a_key_are_no_admins_at_the_workers_of_a_router_with_only_an_admin_key(
    weights: list[Path],
):
    keys = Keys({"alice": "ka"}, admin="work")
    options = {"device": "cpu", "kv_blocks": 4096, "max_running": 8}
    with (
        live_server(weights[0], keys=keys, **options) as server,
        live_router(server.url, admin_key="root", worker_key="work") as router,
        ThreadPoolExecutor(1) as threads,
    ):
        alice = Fleet(server.url, "ka")
        asked = threads.submit(alice.generate, "x", request_id="tale", **LONG)
        wait_until(lambda: any(each["output_tokens"] > 3 for each in alice.requests()))
        assert router.get("/v1/requests/tale").status_code == 404
        assert router.delete("/v1/requests/tale").status_code == 404
        told = router.post("/v1/abort_requests", {"req_ids": ["tale"]}).json()["result"]
        assert (told["aborted"], told["not_found"]) == ([], ["tale"]) and not asked.done()
        assert router.get("/v1/requests/tale", key="root").json()["request"]["tenant"] == "alice"
        assert Fleet(router.url, "root").abort("tale").aborted
        assert asked.result(60).cut


# ----------------------------------------------------- no tenant finds prompts of another one in the prefix cache


def test_66_no_cache_salt_gives_the_root_of_another_tenant():
    names = ["", "A", "A:", "A:s", ":", "'A', '", "('A', '')", "A', 's"]
    pairs = [(tenant, salt) for tenant in names for salt in names]
    assert len({tenant_salt(*pair) for pair in pairs}) == len(pairs)


def test_66_a_caller_without_a_key_finds_no_prompt_of_a_tenant_in_the_cache(weights: list[Path]):
    prompt = "a secret that is long enough to fill several blocks of the cache with its tokens " * 4
    with live_server(weights[0], keys=Keys(admin="root"), device="cpu", kv_blocks=512, max_running=8) as server:

        def cached(headers: dict[str, str], **more: str) -> int:
            body = {"prompt": prompt, "max_tokens": 1} | more
            usage = server.post("/v1/completions", body, headers=headers).json()["usage"]
            return int(usage["prompt_tokens_details"]["cached_tokens"])

        alice = {"Authorization": "Bearer root", "X-Headgate-Tenant": "A"}
        assert cached(alice) == 0 and cached(alice) > 0 and cached(alice, cache_salt="s") == 0
        for salt in ("A:", "A", ":A", "A:s", "('A', '')", "A', '", '["A", ""]', "1:A:"):
            assert cached({}, cache_salt=salt) == 0
        assert cached({}) == 0 and cached({}) > 0


def test_66_workers_started_by_up_accept_no_request_without_a_key(weights: list[Path], tmp_path: Path):
    keys = tmp_path / "keys"
    keys.write_text("alice:ka\n")
    flags = ("--mixed", 1, "--api-keys", keys, "--kv-blocks", 64, "--max-context", 512)
    body = {"prompt": "hello", "max_tokens": 3, "ignore_eos": True}
    with up(weights[0], *flags, HEADGATE_ADMIN_KEY="of-the-operator") as fleet, fleet.client("ka") as http:
        with fleet.client("of-the-operator") as root:
            (worker,) = root.get("/v1/workers").json()["workers"]
        assert http.post("/v1/completions", json=body).json()["usage"]["completion_tokens"] == 3
        with httpx.Client(base_url=worker["url"], timeout=60, trust_env=False) as direct:
            for headers in ({}, {"Authorization": "Bearer ka"}, {"X-Headgate-Tenant": "alice"}):
                assert direct.post("/v1/completions", json=body, headers=headers).status_code == 401
                assert direct.get("/v1/requests", headers=headers).status_code == 401
            assert direct.get("/health").status_code == 200
            operator = {"Authorization": "Bearer of-the-operator"}
            assert direct.post("/v1/completions", json=body, headers=operator).status_code == 200
        commands = [Path(f"/proc/{pid}/cmdline").read_text() for pid in descendants(fleet.process.pid)]
        assert commands and not any("KEY" in command or "of-the-operator" in command for command in commands)


def test_66_a_server_that_registers_with_a_key_accepts_no_request_without_one(weights: list[Path]):
    with live_router(admin_key="root", api_keys={"alice": "ka"}) as router:
        flags = ("--register", router.url, "--kv-blocks", 64, "--max-context", 512)
        with serving(weights[0], *flags, HEADGATE_ROUTER_KEY="root") as served:
            router.wait_for(ready=1)
            body = {"prompt": "hello", "max_tokens": 3, "ignore_eos": True}
            assert router.post("/v1/completions", body, key="ka").json()["usage"]["completion_tokens"] == 3
            with served.client() as direct:
                assert direct.post("/v1/completions", json=body).status_code == 401


# -------------------------------------------------------------------------------------------------- claims of tenants


def test_68_a_tenants_claims_through_a_router_are_refused_and_move_no_counter(servers: list[LiveServer]):
    with live_router(servers[0].url, api_keys={"alice": "ka"}) as router:
        worker = next(iter(router.router.fleet))
        before = dict(servers[0].api.ledger.metrics.tokens)
        for finish in (["stop", "eos", 2147483647, 0, 1], ["stop", "eos", 1, 2147483647, 1]):
            claim = {"index": 0, "token_ids": [5], "versions": [[0, 1]], "finish": finish}
            body = {"prompt": "x", "max_tokens": 9, "resume": {"choices": [claim]}}
            answer = router.post("/v1/completions", body, key="ka")
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "resume.choices[0].finish")
        assert dict(servers[0].api.ledger.metrics.tokens) == before
        assert (worker.prompt_tokens, worker.cached_tokens) == (0, 0)


def test_63_a_tenant_cannot_take_all_places_of_a_router():
    async def main() -> None:
        router = Router(RouteConfig(max_in_flight=10, api_keys={"ann": "key-a", "bob": "key-b"}))
        assert [router.admission.try_enter("ann") for _ in range(10)] == [True] * 8 + [False] * 2
        assert router.admission.try_enter("bob")
        alone = Router(RouteConfig(max_in_flight=10, api_keys={"ann": "key-a"}))
        assert all(alone.admission.try_enter("ann") for _ in range(10))
        await router.close()
        await alone.close()

    asyncio.run(main())
