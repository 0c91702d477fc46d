"""A request whose prompt another server computes is one request in lists, answers and metrics (guarantee 72)."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import pytest

from tests.api.serving import wait_until
from tests.router.pd import CALL_S, Call, PdFleet, pd_fleet
from tests.router.test_disagg import BLOCKS, completion


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PdFleet]:
    with pd_fleet(tmp_path_factory.mktemp("counts"), *BLOCKS, decoders=[BLOCKS]) as fleet:
        yield fleet


def listed(url: str) -> list[tuple[str, str]]:
    """Return the ids and kinds of the requests in flight."""
    answer = httpx.get(f"{url}/v1/requests", timeout=60, trust_env=False).json()
    return [(each["request_id"], each["kind"]) for each in answer["data"]]


@contextmanager
def in_transfer(fleet: PdFleet, name: str) -> Iterator[list[str]]:
    """Start four requests whose KV transfers are held inside the context; yields their ids."""
    arrived, ids = threading.Event(), [f"{name}-{letter}" for letter in "abcd"]
    fleet.kv.to_client = lambda data, _: (arrived.wait(CALL_S), data)[1]
    try:
        calls = [Call(fleet.router.url, completion(2000, max_tokens=4000), id, id) for id in ids]
        wait_until(lambda: len(listed(fleet.p.url)) == len(listed(fleet.d.url)) == 4)
        yield ids
    finally:
        arrived.set()
        fleet.kv.heal()
    for call in calls:
        call.wait()
        assert call.status == 200
    fleet.assert_home()


@pytest.mark.timeout(300)
def test_72_a_request_on_two_servers_is_one_entry_and_one_count(fleet: PdFleet):
    ended = [server.metric("requests") for server in fleet.servers]
    with in_transfer(fleet, "held") as ids:
        assert sorted(id for id, _ in listed(fleet.router.url)) == ids
        told = fleet.router.post("/v1/pause", {"mode": "abort"}).json()["result"]
        assert (told["aborted"], told["finished"], told["forced"]) == (4, 0, [])
    fleet.router.post("/v1/resume", {})
    fleet.router.wait_for(ready=2)
    with in_transfer(fleet, "ended") as ids:
        told = fleet.router.post("/v1/abort_requests", {"abort_all": True}).json()["result"]
        assert sorted(each["request_id"] for each in told["aborted"]) == ids
        assert not (told["errors"] or told["already_finished"] or told["not_found"])
    now = [server.metric("requests") for server in fleet.servers]
    assert [after - before for after, before in zip(now, ended, strict=True)] == [0, 8]
