"""Pauses and resumes that arrive out of order or that a worker has missed, and other callers that interfere."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import httpx
import pytest

from headgate.contract.control import PauseRequest
from headgate.contract.orders import ORDER_HEADER
from headgate.router.control.fan_out import CallerHeaders
from headgate.router.control.lifecycle import FleetControls
from headgate.router.exchange.relay import NoWorker
from tests.api.serving import wait_until
from tests.router.fleets import FakeWorker, LiveRouter, fake_worker, live_router


@pytest.fixture
def fakes() -> Iterator[list[FakeWorker]]:
    with ExitStack() as stack:
        yield [stack.enter_context(fake_worker()) for _ in range(3)]


def cut_off(router: LiveRouter, fake: FakeWorker) -> None:
    """Let probes of the worker fail until `fake.refuses` is cleared."""
    fake.refuses |= {"/v1/loads": 500, "/v1/models": 500}
    router.wait_for(down=1)


def test_24_29_a_worker_that_missed_a_resume_is_resumed_when_it_is_back(fakes: list[FakeWorker]):
    """Regression: the answer was 202, and the worker stayed paused for ever."""
    with live_router(*(fake.url for fake in fakes)) as router:
        assert router.post("/v1/pause").status_code == 200
        cut_off(router, fakes[2])
        assert router.post("/v1/resume").status_code == 202
        assert fakes[2].state == "paused"
        fakes[2].refuses.clear()
        wait_until(lambda: fakes[2].state == "running")
        router.wait_for(ready=3)


def test_24_a_worker_that_missed_a_resume_and_was_paused_by_another_caller_stays_paused(fakes: list[FakeWorker]):
    late = fakes[2]
    with live_router(*(fake.url for fake in fakes)) as router:
        assert router.post("/v1/pause").status_code == 200
        cut_off(router, late)
        assert router.post("/v1/resume").status_code == 202
        httpx.post(f"{late.url}/v1/pause", json={}, trust_env=False).raise_for_status()
        late.refuses.clear()
        wait_until(lambda: late.asked("/v1/resume"))
        router.wait_for(ready=2, paused=1)
        assert late.state == "paused" and not router.router.holding


def test_24_55_an_update_leaves_a_worker_paused_that_another_caller_has_paused(fakes: list[FakeWorker]):
    """Regression: the router resumed it afterwards, which another router took for the end of its own pause."""
    late = fakes[2]
    with live_router(*(fake.url for fake in fakes)) as router:
        router.post("/v1/pause")
        assert router.post("/v1/update_weights", {"path": "/w", "version": 7}).status_code == 200
        assert router.post("/v1/resume").status_code == 200
        cut_off(router, late)
        httpx.post(f"{late.url}/v1/pause", json={}, trust_env=False).raise_for_status()
        late.calls.clear()
        late.version = 0
        late.refuses.clear()
        wait_until(lambda: late.version == 7 and late.asked("/v1/resume"))
        router.wait_for(ready=2, paused=1)
        assert late.state == "paused"


def test_24_29_a_rolling_update_leaves_a_worker_paused_that_another_caller_pauses_meanwhile(fakes: list[FakeWorker]):
    """Regression: the resume of the update ended the pause of another router. Found by seed 94993566574."""
    asked, gate = threading.Event(), threading.Event()
    fakes[0].late["/v1/update_weights"] = lambda: (asked.set(), gate.wait(60))
    with live_router(*(fake.url for fake in fakes)) as router, ThreadPoolExecutor(1) as threads:
        rolling = threads.submit(router.post, "/v1/update_weights", {"path": "/w", "strategy": "rolling"})
        assert asked.wait(60)
        httpx.post(f"{fakes[0].url}/v1/pause", json={}, trust_env=False).raise_for_status()
        gate.set()
        assert rolling.result(60).status_code == 200
        assert [fake.version for fake in fakes] == [1, 1, 1]
        assert [fake.state for fake in fakes] == ["paused", "running", "running"]


def test_24_29_a_rolling_update_stops_at_a_worker_that_another_caller_has_paused(fakes: list[FakeWorker]):
    asked, gate = threading.Event(), threading.Event()
    fakes[0].late["/v1/update_weights"] = lambda: (asked.set(), gate.wait(60))
    with live_router(*(fake.url for fake in fakes)) as router, ThreadPoolExecutor(1) as threads:
        rolling = threads.submit(router.post, "/v1/update_weights", {"path": "/w", "strategy": "rolling"})
        assert asked.wait(60)
        httpx.post(f"{fakes[1].url}/v1/pause", json={}, trust_env=False).raise_for_status()
        gate.set()
        message = rolling.result(60).json()["error"]["message"]
        assert f"stopped at {fakes[1].url}: another caller has paused" in message
        assert [fake.version for fake in fakes] == [1, 0, 0] and fakes[1].state == "paused"


def test_24_an_update_does_not_hide_that_another_caller_has_resumed_a_worker(fakes: list[FakeWorker]):
    """Regression: the worker was paused again for the update, so the router held the fleet for ever."""
    late = fakes[2]
    with live_router(*(fake.url for fake in fakes), probe_interval_s=60.0) as router:
        router.post("/v1/pause")
        assert router.post("/v1/update_weights", {"path": "/w", "version": 7}).status_code == 200
        # A running worker refuses the update.
        late.state, late.version, late.refuses["/v1/update_weights"] = "running", 0, 409
        router.do(lambda: router.router.fleet.set_version(router.router.fleet.find(late.url), 0))
        wait_until(lambda: not router.router.holding)
        assert len(late.asked("/v1/pause")) == 1


def test_24_the_answer_to_a_pause_reveals_that_its_worker_has_restarted(fakes: list[FakeWorker]):
    """Otherwise a later probe would take the restart for one after the pause, and pause the worker again."""
    known = fakes[0]
    known.boot_id = "first"
    with live_router(known.url) as router:
        found = router.router.fleet.find(known.url)
        wait_until(lambda: found.boot_id == "first")
        probed = threading.Event()
        known.late["/v1/loads"] = lambda: probed.wait(60)
        known.restart("second")
        assert router.post("/v1/pause").status_code == 200
        assert found.boot_id == "second"
        probed.set()
        router.wait_for(paused=1)
        assert len(known.asked("/v1/pause")) == 1


@pytest.fixture
def restarted(fakes: list[FakeWorker]) -> Iterator[tuple[FakeWorker, FakeWorker, LiveRouter]]:
    """A worker that has restarted, unnoticed so far, in a fleet that was paused, and one that has paused late."""
    known, late = fakes[:2]
    known.boot_id = "first"
    with live_router(known.url, late.url) as router:
        cut_off(router, late)
        assert router.post("/v1/pause").status_code == 202
        late.refuses.clear()
        router.wait_for(paused=2)
        cut_off(router, known)
        known.calls.clear()
        late.calls.clear()
        known.restart("second")
        yield known, late, router


def resume_by_another_router(fake: FakeWorker) -> None:
    headers = {ORDER_HEADER: "another:1"}
    httpx.post(f"{fake.url}/v1/resume", json={}, headers=headers, trust_env=False).raise_for_status()


def test_29_75_a_worker_that_restarts_in_a_paused_fleet_is_paused(restarted):
    known, _, router = restarted
    known.refuses.clear()
    wait_until(lambda: known.state == "paused")
    assert router.router.holding


def test_24_a_restarted_worker_that_another_router_has_resumed_ends_the_pause_of_its_fleet(restarted):
    """Regression: it was paused again, and the router held the fleet for ever. Found by seed 3387638280."""
    known, _, router = restarted
    resume_by_another_router(known)
    known.refuses.clear()
    router.wait_for(ready=2)
    assert not router.router.holding and known.state == "running"


def test_24_a_worker_that_paused_late_is_resumed_when_another_router_has_resumed_its_fleet(restarted):
    """Regression: it stayed paused, if it had missed the pause and received it again after the resume."""
    known, late, router = restarted
    resume_by_another_router(known)
    known.refuses.clear()
    wait_until(lambda: late.state == "running")
    router.wait_for(ready=2)


def test_24_a_worker_that_paused_late_stays_paused_if_another_caller_has_paused_it_since(restarted):
    known, late, router = restarted
    httpx.post(f"{late.url}/v1/pause", json={}, trust_env=False).raise_for_status()
    resume_by_another_router(known)
    known.refuses.clear()
    wait_until(lambda: late.asked("/v1/resume"))
    router.wait_for(ready=1, paused=1)
    assert late.state == "paused" and not router.router.holding


def test_25_a_quarantined_worker_that_missed_a_resume_gets_its_update(fakes: list[FakeWorker]):
    """Regression: it was asked to resume again and again, and never updated."""
    late = fakes[2]
    with live_router(*(fake.url for fake in fakes)) as router:
        router.post("/v1/pause")
        assert router.post("/v1/update_weights", {"path": "/w", "version": 7}).status_code == 200
        cut_off(router, late)
        assert router.post("/v1/resume").status_code == 202
        late.version, late.code, late.refuses = 0, "quarantined", {"/v1/resume": 409}
        wait_until(lambda: late.version == 7)


def test_24_a_pause_during_an_update_stays_in_effect_after_it(fakes: list[FakeWorker]):
    """Regression: the end of the update released the fleet despite a pause meanwhile."""
    with live_router(*(fake.url for fake in fakes)) as router, ThreadPoolExecutor(1) as threads:
        fakes[0].slow = "/update_weights_from_distributed"
        updating = threads.submit(router.post, fakes[0].slow, {})
        wait_until(lambda: router.router.queueing)
        assert router.post("/v1/pause", {"new_requests": "reject"}).status_code == 200
        fakes[0].over.set()
        assert updating.result(60).status_code == 200
        assert router.router.holding and not router.router.queueing
        assert router.post("/v1/resume").status_code == 200 and not router.router.holding


@pytest.mark.parametrize("path", ["/pause", "/pause_generation", "/sleep"])
def test_24_a_pause_through_a_compatible_api_does_not_hold_a_fleet_without_workers(path: str):
    with live_router() as router:
        assert router.post(path, {}).json()["error"]["code"] == "no_worker" and not router.router.holding


def test_24_a_fleet_that_empties_while_a_pause_waits_is_not_held(fakes: list[FakeWorker]):
    with live_router(fakes[0].url) as router:

        async def main() -> None:
            controls, fleet = FleetControls(router.router), router.router.fleet
            await controls._resuming.acquire()
            pausing = asyncio.create_task(controls.pause(PauseRequest(), CallerHeaders()))
            await asyncio.sleep(0)
            assert not controls.idle and not pausing.done()
            fleet.remove(fleet.find(fakes[0].url))
            controls._resuming.release()
            with pytest.raises(NoWorker):
                await pausing

        asyncio.run_coroutine_threadsafe(main(), router.loop).result(60)
        assert not router.router.holding


def test_24_59_a_replaced_pause_is_not_reported_as_done_while_a_worker_runs(fakes: list[FakeWorker]):
    """Regression: it was answered 200, although a restarted worker had yet to follow."""
    told = threading.Event()
    first_alone = [told]
    fakes[0].late["/v1/pause"] = lambda: first_alone.pop().wait(60) if first_alone else None
    with (
        live_router(*(fake.url for fake in fakes), probe_interval_s=60.0) as router,
        ThreadPoolExecutor(1) as threads,
    ):
        first = threads.submit(router.post, "/v1/pause", {"mode": "freeze"})
        wait_until(lambda: fakes[1].state == fakes[2].state == "paused")
        assert router.post("/v1/pause").status_code == 200
        fakes[1].state = "running"  # after a restart that the router has not noticed
        told.set()
        answer = first.result(60)
        outcomes = answer.json()["result"]["workers"]
        assert answer.status_code == 202 and not answer.json()["result"]["is_paused"]
        assert outcomes[fakes[1].url]["code"] == "accepted" and "error" not in outcomes[fakes[0].url]


def test_24_a_worker_that_receives_a_pause_after_its_resume_runs(fakes: list[FakeWorker]):
    fakes[0].late["/v1/pause"] = lambda: wait_until(lambda: fakes[0].asked("/v1/resume"))
    with live_router(*(fake.url for fake in fakes)) as router, ThreadPoolExecutor(1) as threads:
        pausing = threads.submit(router.post, "/v1/pause")
        wait_until(lambda: fakes[1].state == fakes[2].state == "paused")
        assert router.post("/v1/resume").json()["result"]["state"] == "running"
        assert [fake.state for fake in fakes] == ["running"] * 3
        assert pausing.result(60).json()["result"]["state"] == "running" and not router.router.holding


def test_24_a_returning_worker_that_receives_its_pause_after_the_resume_runs(fakes: list[FakeWorker]):
    late, on_its_way = fakes[2], threading.Event()

    def overtaken() -> None:
        on_its_way.set()
        wait_until(lambda: late.asked("/v1/resume"))

    with live_router(*(fake.url for fake in fakes)) as router:
        cut_off(router, late)
        assert router.post("/v1/pause").status_code == 202
        late.late["/v1/pause"] = overtaken
        late.refuses.clear()
        assert on_its_way.wait(60)
        assert router.post("/v1/resume").status_code == 200
        wait_until(lambda: late.asked("/v1/pause"))
        router.wait_for(ready=3)
        assert late.state == "running"
