"""The control plane of a router: control calls act on a fleet as on one server, and name the workers that fail."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from headgate.client import Fleet, FleetError
from headgate.contract.operations.table import ON_ROUTERS
from headgate.router.control.abort import RoutedTarget, _end_here
from headgate.router.exchange.attempt import Streamed
from headgate.router.fleet import catch_up
from tests.api.live import LiveServer, eventually
from tests.api.serving import metric_values, wait_until
from tests.router.fleets import FakeWorker, LiveRouter, fake_worker, live_router

LONG = {"max_tokens": 30000, "temperature": 0, "ignore_eos": True}
SHORT = LONG | {"max_tokens": 8}


@pytest.fixture
def router(servers: list[LiveServer]) -> Iterator[LiveRouter]:
    with live_router(*(server.url for server in servers), policy="round_robin") as router:
        yield router
        router.post("/v1/wakeup")  # after a test that failed half-way
        router.post("/v1/resume")
        Fleet(router.url).abort(everything=True)
        assert router.router.live == {} and router.router.fleet.double_releases == 0
        assert all(worker.in_flight == worker.pending_tokens == 0 for worker in router.router.fleet)


@pytest.fixture
def fakes() -> Iterator[list[FakeWorker]]:
    with ExitStack() as stack:
        yield [stack.enter_context(fake_worker()) for _ in range(3)]


def ask_long(fleet: Fleet, threads: ThreadPoolExecutor, *ids: str, **more: object) -> list:
    asked = [threads.submit(fleet.generate, "hello", request_id=id, **LONG | more) for id in ids]
    wait_until(lambda: sum(each["output_tokens"] > 5 for each in fleet.requests()) == len(ids))
    return asked


# ------------------------------------------------------------------------------------------------------------ fan-out


def test_43_two_failed_workers_of_eight_are_named_within_the_timeout():
    with ExitStack() as stack:
        fakes = [stack.enter_context(fake_worker()) for _ in range(8)]
        urls = [fake.url for fake in fakes]
        router = stack.enter_context(
            live_router(*urls, probe_interval_s=60.0, control_timeout_s=0.5, probe_timeout_s=0.5)
        )
        for fake in fakes[:2]:
            fake.hangs = True  # it accepts connections and answers nothing, like a stopped process

        def two_named() -> dict[str, Any] | None:
            """Return the answer if it names two workers, else None: on a busy machine, other workers may be late."""
            began_s = time.monotonic()
            told = router.get("/v1/is_paused").json()["result"]["workers"]
            assert time.monotonic() - began_s < 30
            return told if sum("error" in outcome for outcome in told.values()) == 2 else None

        told = wait_until(two_named)
        assert {url for url, outcome in told.items() if "error" in outcome} == set(urls[:2])
        assert "0.5 s" in told[urls[0]]["error"] and told[urls[2]]["state"] == "running"
        refused = wait_until(lambda: "6 of 8" in (r := router.post("/v1/flush_cache", {"timeout": 2})).text and r)
        assert refused.status_code == 502 and refused.json()["error"]["code"] == "partial"
        assert urls[0] in refused.json()["error"]["message"]


def test_43_a_call_does_not_wait_for_a_worker_that_has_gone_down_meanwhile():
    with ExitStack() as stack:
        well, dead = (stack.enter_context(fake_worker()) for _ in range(2))
        router = stack.enter_context(live_router(well.url, dead.url, silence_s=1.5, probe_timeout_s=0.5))
        dead.hangs = True
        began_s = time.monotonic()
        told = router.post("/v1/pause", {"timeout": 60})
        assert time.monotonic() - began_s < 40, "less than the timeout of 60 s"
        assert told.status_code == 202 and "down" in told.json()["result"]["workers"][dead.url]["error"]
        assert well.state == "paused"


def test_29_a_worker_that_refuses_makes_the_call_an_error_that_names_it(fakes: list[FakeWorker]):
    with live_router(*(fake.url for fake in fakes)) as router:
        fakes[1].refuses["/v1/pause"] = 409
        answer = router.post("/v1/pause", {})
        assert answer.status_code == 502 and answer.json()["error"]["code"] == "partial"
        outcomes = answer.json()["result"]["workers"]
        assert outcomes[fakes[1].url]["error"] == "not I" and outcomes[fakes[1].url]["code"] == "stubborn"
        assert outcomes[fakes[0].url]["state"] == outcomes[fakes[2].url]["state"] == "paused"
        for fake in fakes:
            fake.refuses["/v1/pause"] = 409
        # All refuse alike, so the refusal is passed on.
        assert router.post("/v1/pause", {}).json()["error"]["code"] == "stubborn"
        assert router.router.holding  # by the first pause, which some workers have followed
        assert router.post("/v1/resume").status_code == 200


@pytest.mark.parametrize(("path", "body"), [("/v1/pause", {}), ("/pause_generation", {"mode": "bogus"})])
def test_18_29_a_pause_that_every_worker_refuses_changes_nothing(fakes: list[FakeWorker], path: str, body: Any):
    with live_router(*(fake.url for fake in fakes)) as router:
        for fake in fakes:
            fake.refuses[path] = 400
        assert router.post(path, body).status_code == 400
        assert not router.router.holding
        for fake in fakes:
            fake.refuses.clear()
        router.post("/v1/pause", {"mode": "freeze", "new_requests": "queue"})
        for fake in fakes:
            fake.refuses[path] = 400
        assert router.post(path, body).status_code == 400
        assert router.router.queueing  # as before
        with fake_worker() as newcomer:
            router.post("/v1/workers", {"url": newcomer.url})
            wait_until(lambda: newcomer.state == "paused")
            assert [each["mode"] for each in newcomer.asked("/v1/pause")] == ["freeze"]
            router.wait_for(paused=4)


@pytest.mark.parametrize("first", [0, 1], ids=["in order", "the other way round"])
def test_18_29_two_pauses_at_once_that_every_worker_refuses_change_nothing(fakes: list[FakeWorker], first: int):
    with live_router(fakes[0].url) as router, ThreadPoolExecutor(2) as threads:
        asked, gates = [threading.Event(), threading.Event()], [threading.Event(), threading.Event()]
        turn = iter(range(2))

        def late() -> None:
            mine = next(turn)
            asked[mine].set()
            assert gates[mine].wait(60)

        fakes[0].refuses["/v1/pause"] = 409
        fakes[0].late["/v1/pause"] = late
        pausing = []
        for i, mode in enumerate(("drain", "abort")):
            pausing.append(threads.submit(router.post, "/v1/pause", {"mode": mode}))
            assert asked[i].wait(60)
        assert router.router.holding
        for i in (first, 1 - first):
            gates[i].set()
            pausing[i].result(60)
        assert not router.router.holding


def test_bodies_with_unknown_fields_are_refused_before_any_worker_is_asked(fakes: list[FakeWorker]):
    with live_router(*(fake.url for fake in fakes)) as router:
        for path in ("/v1/pause", "/v1/resume", "/v1/update_weights", "/v1/sleep", "/v1/workers"):
            refused = router.post(path, {"nonsense": 1})
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, "nonsense"), path
        refused = router.post("/v1/abort_requests", {"stop_all": True})
        assert refused.json()["error"]["param"] == "stop_all"
        assert router.post("/v1/abort_requests", {"req_ids": []}).status_code == 400
        assert router.get("/v1/nothing").json()["error"]["code"] == "not_found"
        assert router.get("/v1/pause").json()["error"]["code"] == "method_not_allowed"
        assert not any(fake.calls for fake in fakes)


# --------------------------------------------------------------------------------------------- workers that come back


def test_29_a_worker_that_comes_back_while_the_fleet_is_paused_is_paused(fakes: list[FakeWorker]):
    late = fakes[2]
    late.refuses |= {"/v1/loads": 500, "/v1/models": 500}
    with live_router(*(fake.url for fake in fakes), ready=2) as router:
        router.do(lambda: router.router.fleet.give_up(router.router.fleet.find(late.url)))
        paused = router.post("/v1/pause", {"new_requests": "queue"})
        assert paused.status_code == 202 and paused.json()["status"] == "accepted"
        assert late.asked("/v1/pause") == []
        late.refuses.clear()
        wait_until(lambda: late.state == "paused")
        assert late.asked("/v1/pause") == [{"mode": "abort", "new_requests": "queue", "timeout": 30}]
        router.wait_for(paused=3)
        assert router.post("/v1/resume").status_code == 200
        router.wait_for(ready=3)


@pytest.mark.parametrize(
    ("path", "body", "told"),
    [
        ("/v1/pause", {"mode": "freeze"}, {"mode": "freeze", "new_requests": "reject", "timeout": 30}),
        ("/v1/pause", {"mode": "drain", "timeout": 7}, {"mode": "drain", "new_requests": "reject", "timeout": 7}),
        ("/pause_generation", {"mode": "in_place"}, {"mode": "freeze", "new_requests": "queue", "timeout": 3600}),
        ("/pause_generation", {}, {"mode": "abort", "new_requests": "queue", "timeout": 3600}),
        ("/pause?mode=wait", None, {"mode": "drain", "new_requests": "queue", "timeout": 3600}),
        ("/sleep?mode=keep", None, {"mode": "freeze", "new_requests": "queue", "timeout": 3600}),
        ("/release_memory_occupation", {}, {"mode": "drain", "new_requests": "queue", "timeout": 3600}),
        ("/start_weight_update", None, {"mode": "freeze", "new_requests": "queue", "timeout": 3600}),
    ],
)
def test_18_29_a_worker_that_missed_a_pause_is_paused_as_the_others_were(
    fakes: list[FakeWorker], path: str, body: Any, told: Any, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(catch_up, "RETRY_DELAY_S", 0.05)
    late = fakes[2]
    late.refuses[path.partition("?")[0]] = 503
    with live_router(*(fake.url for fake in fakes)) as router:
        assert router.post(path, body).status_code == 502
        late.refuses.clear()
        wait_until(lambda: late.state == "paused")
        assert all(each == told for each in late.asked("/v1/pause"))
        router.wait_for(paused=3)


def test_55_a_worker_that_comes_back_with_older_weights_is_updated_before_it_gets_requests(
    fakes: list[FakeWorker],
):
    late = fakes[2]
    with live_router(*(fake.url for fake in fakes)) as router:
        router.post("/v1/pause")
        assert router.post("/v1/update_weights", {"path": "/w", "version": 7}).json()["result"]["weight_version"] == 7
        router.post("/v1/resume")
        assert [fake.version for fake in fakes] == [7, 7, 7]
        late.refuses |= {"/v1/loads": 500, "/v1/update_weights": 503}
        router.wait_for(down=1)
        late.version, late.state = 0, "running"
        late.calls.clear()
        del late.refuses["/v1/loads"]
        wait_until(lambda: late.asked("/v1/update_weights"))
        assert router.states()[late.url] != "ready"  # its update was refused
        late.refuses.clear()
        wait_until(lambda: late.version == 7)
        router.wait_for(ready=3)
        assert late.asked("/v1/update_weights")[-1]["path"] == "/w" and late.state == "running"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/update_weights_from_disk", {"model_path": "/w"}),
        ("/update_weights", {"weight_dir": "/w"}),
        ("/update_weights", {"update_info": {"path": "/w", "weight_version": "5"}}),
    ],
)
def test_55_78_a_worker_that_missed_an_update_of_another_api_gets_its_files_and_its_latest_label(
    fakes: list[FakeWorker], path: str, body: dict[str, Any]
):
    late = fakes[2]
    for fake in fakes:
        fake.version = 5
    with live_router(*(fake.url for fake in fakes)) as router:
        assert router.post(path, body).status_code == 200
        assert router.post("/update_weight_version", {"new_version": "final"}).status_code == 200
        late.refuses["/v1/loads"] = 500
        router.wait_for(down=1)
        late.version = 4
        del late.refuses["/v1/loads"]
        wait_until(lambda: late.version == 5)
        assert late.asked("/v1/update_weights")[-1] == {"path": "/w", "version": 5, "label": "final"}


def test_24_a_resume_by_another_caller_ends_the_pause_of_the_fleet(fakes: list[FakeWorker]):
    with live_router(*(fake.url for fake in fakes)) as router:
        router.post("/v1/pause")
        assert router.router.holding and router.get("/ready").status_code == 503
        for fake in fakes:
            fake.state = "running"
        wait_until(lambda: not router.router.holding)
        router.wait_for(ready=3)
        assert [len(fake.asked("/v1/pause")) for fake in fakes] == [1, 1, 1]


# ------------------------------------------------------------------------------------------------------------ updates


def test_25_an_update_is_refused_unless_every_worker_is_paused(fakes: list[FakeWorker]):
    with live_router(*(fake.url for fake in fakes)) as router:
        fakes[0].state = fakes[1].state = "paused"
        refused = router.post("/v1/update_weights", {"path": "/w"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (409, "not_paused")
        message = refused.json()["error"]["message"]
        assert fakes[2].url in message and fakes[0].url not in message
        assert not any(fake.asked("/v1/update_weights") for fake in fakes)


def test_29_a_repeated_update_goes_only_to_the_workers_that_missed_it(fakes: list[FakeWorker]):
    with live_router(*(fake.url for fake in fakes)) as router:
        router.post("/v1/pause")
        fakes[1].refuses["/v1/update_weights"] = 400
        failed = router.post("/v1/update_weights", {"path": "/w", "version": 3})
        assert failed.status_code == 502 and fakes[1].url in failed.json()["error"]["message"]
        fakes[1].refuses.clear()
        assert router.post("/v1/update_weights", {"path": "/w", "version": 3}).status_code == 200
        assert [len(fake.asked("/v1/update_weights")) for fake in fakes] == [1, 2, 1]
        assert [fake.version for fake in fakes] == [3, 3, 3]


def test_in_a_trainers_group_every_engine_of_the_fleet_has_its_own_rank(fakes: list[FakeWorker]):
    with live_router(*(fake.url for fake in fakes)) as router:
        router.post("/v1/pause")
        group = {"init_method": "tcp://127.0.0.1:1", "world_size": 6}
        refused = router.post("/v1/update_weights", {"group": group})
        assert refused.status_code == 400 and "world_size must be 7" in refused.json()["error"]["message"]
        assert router.post("/v1/update_weights", {"group": group | {"world_size": 7}}).status_code == 200
        asked = [fake.asked("/v1/update_weights") for fake in fakes]
        assert [[body["group"]["rank"] for body in bodies] for bodies in asked] == [[1], [3], [5]]
        meeting = {"master_address": "127.0.0.1", "master_port": 1, "world_size": 7}
        assert router.post("/init_weight_transfer_engine", {"init_info": meeting}).status_code == 200
        asked = [fake.asked("/init_weight_transfer_engine")[0]["init_info"] for fake in fakes]
        assert asked == [meeting | {"rank_offset": rank} for rank in (1, 3, 5)]
        assert router.post("/init_weights_update_group", meeting | {"world_size": 2}).status_code == 400


def test_new_requests_wait_while_an_update_holds_running_workers(fakes: list[FakeWorker]):
    with live_router(*(fake.url for fake in fakes)) as router, ThreadPoolExecutor(1) as threads:
        fakes[0].slow = "/update_weights_from_distributed"
        updating = threads.submit(router.post, fakes[0].slow, {})
        wait_until(lambda: router.router.queueing)
        fakes[0].over.set()
        assert updating.result(60).status_code == 200 and not router.router.holding
        assert router.post("/start_weight_update").status_code == 200 and router.router.queueing
        assert router.post("/finish_weight_update", {}).status_code == 200 and not router.router.holding


def test_29_a_rolling_update_stops_at_the_first_worker_that_fails_and_names_it(fakes: list[FakeWorker]):
    with live_router(*(fake.url for fake in fakes)) as router:
        fakes[1].refuses["/v1/update_weights"] = 400
        failed = router.post("/v1/update_weights", {"path": "/w", "strategy": "rolling"})
        assert failed.status_code == 502
        assert f"stopped at {fakes[1].url}: not I (1 of 3 workers have it)" in failed.json()["error"]["message"]
        assert [fake.version for fake in fakes] == [1, 0, 0] and not fakes[2].asked("/v1/pause")
        assert [fake.state for fake in fakes] == ["running"] * 3 and not router.router.fleet.rolling
        router.wait_for(ready=3)
        group = {"init_method": "tcp://127.0.0.1:1", "world_size": 4}
        refused = router.post("/v1/update_weights", {"group": group, "strategy": "rolling"})
        assert refused.json()["error"]["param"] == "strategy"


def roll_slowly(
    router: LiveRouter, fakes: list[FakeWorker], threads: ThreadPoolExecutor
) -> tuple[Future[httpx.Response], threading.Event]:
    """Start a rolling update that waits for the event at its first worker."""
    asked, gate = threading.Event(), threading.Event()
    fakes[0].late["/v1/pause"] = lambda: (asked.set(), gate.wait(60))
    rolling = threads.submit(router.post, "/v1/update_weights", {"path": "/w", "strategy": "rolling"})
    assert asked.wait(60)
    return rolling, gate


def test_29_44_a_worker_that_leaves_before_its_turn_does_not_stop_a_rolling_update(fakes: list[FakeWorker]):
    with live_router(*(fake.url for fake in fakes)) as router, ThreadPoolExecutor(1) as threads:
        rolling, gate = roll_slowly(router, fakes, threads)
        assert router.delete("/v1/workers", params={"url": fakes[1].url, "timeout": 60}).status_code == 200
        gate.set()
        rolled = rolling.result(60)
        assert rolled.status_code == 200, rolled.text
        assert [fake.version for fake in fakes] == [1, 0, 1] and not fakes[1].asked("/v1/pause")


def test_44_a_worker_that_is_removed_while_it_is_updated_leaves_with_its_last_request(fakes: list[FakeWorker]):
    with live_router(*(fake.url for fake in fakes)) as router, ThreadPoolExecutor(2) as threads:
        rolling, gate = roll_slowly(router, fakes, threads)
        worker = router.router.fleet.find(fakes[0].url)
        taken = router.do(lambda: router.router.fleet.add_load(worker, 0))
        options = {"params": {"url": fakes[0].url, "timeout": 60}}
        removing = threads.submit(lambda: router.delete("/v1/workers", **options))
        wait_until(lambda: worker not in router.router.fleet)
        gate.set()
        assert rolling.result(60).status_code == 200
        assert worker.state == "draining" and worker in router.router.fleet.with_leaving
        router.do(taken.give_back)
        assert removing.result(60).status_code == 200
        assert worker not in router.router.fleet.with_leaving


def test_29_a_rolling_update_through_real_workers_fails_no_request(router: LiveRouter, weights: list[Path]):
    # Longer answers are tried if the shorter ones ended before their worker's turn.
    assert any(moved_by_a_roll(router, weights[1], tokens) for tokens in (4000, 12000, 24000))


def moved_by_a_roll(router: LiveRouter, weights: Path, tokens: int) -> bool:
    """Return whether requests moved during a rolling update. Each must be answered completely."""
    fleet = Fleet(router.url)
    before = fleet.state().weight_version
    with ThreadPoolExecutor(8) as threads:
        options = LONG | {"max_tokens": tokens}
        asked = [threads.submit(fleet.generate, "hello", request_id=f"roll{i}-{tokens}", **options) for i in range(4)]
        wait_until(lambda: sum(each["output_tokens"] > 5 for each in fleet.requests()) == 4 or asked[0].done())
        body = {"path": str(weights), "strategy": "rolling", "drain_timeout": 0.2}
        rolled = router.post("/v1/update_weights", body)
        assert rolled.status_code == 200, rolled.text
        samples = [each.result(100) for each in asked]
    assert {sample.cause for sample in samples} == {"max_tokens"}
    assert {len(sample.token_ids) for sample in samples} == {tokens}
    assert rolled.json()["result"]["weight_version"] == before + 1
    assert {outcome["state"] for outcome in rolled.json()["result"]["workers"].values()} == {"running"}
    assert set(router.states().values()) == {"ready"}
    moved = any(len(set(sample.weight_versions)) > 1 for sample in samples)
    assert not moved or metric_values(router.get("/metrics").text)["headgate:router_resumes_total"] >= 1
    return moved


# ------------------------------------------------------------------------------------------------------------- aborts


def test_2_an_abort_through_the_router_reports_every_id_correctly(router: LiveRouter, servers: list[LiveServer]):
    fleet = Fleet(router.url)
    done = fleet.generate("hello", request_id="done", **SHORT)
    with ThreadPoolExecutor(8) as threads:
        asked = ask_long(fleet, threads, "a", "b", "c")
        direct = threads.submit(Fleet(servers[1].url).generate, "x", request_id="elsewhere", **LONG)
        wait_until(lambda: len(fleet.requests()) == 4)
        assert {each["worker"] for each in fleet.requests()} == {server.url for server in servers}
        told = fleet.abort("a", "b", "done", "nobody", "elsewhere")
        assert set(told.aborted) == {"a", "b", "elsewhere"} and told.not_found == ["nobody"]
        assert told.already_finished == ["done"] and told.errors == {}
        cut = [each.result(60) for each in asked[:2]] + [direct.result(60)]
        assert [sample.cause for sample in cut] == ["api_abort"] * 3
        assert [told.aborted[sample.request_id] for sample in cut] == [len(sample.token_ids) for sample in cut]
        assert fleet.requests()[0]["request_id"] == "c"
        assert router.get("/v1/requests/c").json()["status"] == "in_flight"
        assert router.delete("/v1/requests/c").json()["result"]["aborted"][0]["request_id"] == "c"
        assert asked[2].result(60).cut
    (stage,) = router.get("/v1/requests/done").json()["stages"]
    assert stage["worker"] in {server.url for server in servers} and stage["left"] is None
    assert 0 == stage["began_s"] < stage["first_token_s"] <= stage["ended_s"]
    (choice,) = router.get("/v1/requests/done").json()["usage"]["choices"]
    assert choice["output_tokens"] == len(done.token_ids)
    assert router.delete("/v1/requests/nobody").json()["error"]["code"] == "request_not_found"


def test_52_aborts_by_tag_and_of_all_requests_reach_every_worker(router: LiveRouter):
    fleet = Fleet(router.url)
    with ThreadPoolExecutor(8) as threads:
        tagged = ask_long(fleet, threads, "t1", "t2", "t3", tags={"run": "7"})
        other = threads.submit(fleet.generate, "x", request_id="other", **LONG)
        wait_until(lambda: len(fleet.requests()) == 4)
        assert set(fleet.abort(tags={"run": "7"}).aborted) == {"t1", "t2", "t3"}
        assert all(each.result(60).cut for each in tagged) and not other.done()
        assert fleet.abort(everything=True, wait=False).accepted == ["other"]
        assert other.result(60).cause == "api_abort"


@pytest.mark.parametrize("stream", [False, True])
def test_6_a_request_that_waits_in_the_router_is_aborted_there(servers: list[LiveServer], stream: bool):
    with live_router(servers[0].url, max_in_flight=1) as router, ThreadPoolExecutor(4) as threads:
        fleet = Fleet(router.url)
        (first,) = ask_long(fleet, threads, "first")
        body = {"messages": [{"role": "user", "content": "x"}], "n": 2, "stream": stream, "request_id": "second"}
        waiting = threads.submit(router.post, "/v1/chat/completions", body)
        wait_until(lambda: any(each["phase"] == "queued" for each in fleet.requests()))
        assert fleet.abort("second").aborted == {"second": 0}
        answer = waiting.result(60)
        assert answer.status_code == 200
        if stream:
            assert answer.text.count('"finish_reason":"abort","cause":"api_abort"') == 2
            assert answer.text.endswith("data: [DONE]\n\n")
        else:
            choices = answer.json()["choices"]
            assert [(c["finish_reason"], c["message"]["content"]) for c in choices] == [("abort", "")] * 2
        fleet.abort("first")
        assert first.result(60).cut


def test_7_an_abort_during_the_last_event_adds_nothing(router: LiveRouter):
    """The worker has sent everything, and the task that writes to the client has not run yet."""
    with router.client() as http, ThreadPoolExecutor(1) as threads:
        body = {"prompt": "x", "stream": True, "request_id": "last", **LONG}
        answer = threads.submit(http.post, "/v1/completions", json=body)
        last = "", "last", 0
        wait_until(lambda: last in router.router.live and router.router.live[last].journal.tokens > 3)
        exchange = router.router.live[last]

        def race() -> bool:
            exchange.attempt.leave()
            exchange.attempt._finish(Streamed())
            _end_here([RoutedTarget("last", exchange)], "api_abort")
            return exchange.cut

        assert not router.do(race)
        assert answer.result(60).status_code == 200 and "api_abort" not in answer.result().text


def test_a_request_at_a_foreign_worker_is_aborted_by_closing_the_connection(fakes: list[FakeWorker]):
    foreign = fakes[0]
    foreign.owner, foreign.slow = "vllm", "/v1/completions"
    with live_router(foreign.url) as router, ThreadPoolExecutor(1) as threads:
        asked = threads.submit(router.post, "/v1/completions", {"prompt": "x", "request_id": "there"})
        wait_until(lambda: router.states() and router.router.fleet.find(foreign.url).in_flight)
        wait_until(lambda: router.router.live["", "there", 0].worker is not None)
        assert Fleet(router.url).requests()[0]["worker"] == foreign.url
        assert Fleet(router.url).abort("there").aborted == {"there": 0}
        assert asked.result(60).json()["choices"][0]["finish_reason"] == "abort"
        assert router.router.fleet.find(foreign.url).in_flight == 0
        foreign.refuses["/v1/pause"] = 404
        assert router.post("/v1/pause").status_code == 404  # it has no such call, and there is no other worker
        router.post("/v1/resume")


def test_11_a_tenant_is_no_admin_at_a_worker_of_unknown_kind():
    with fake_worker() as fake:
        fake.slow = "/v1/models"
        keys = {"api_keys": {"ann": "ann-key"}, "admin_key": "root", "worker_key": "work"}
        with live_router(fake.url, ready=0, **keys) as router:
            assert [worker.kind for worker in router.router.fleet] == ["unknown"]
            router.post("/v1/abort_requests", {"abort_all": True}, key="ann-key")
            router.get("/v1/requests", key="ann-key")
            assert fake.tenants == {"/v1/abort_requests": "ann", "/v1/requests": "ann"}
            fake.over.set()


def test_2_an_id_that_a_silent_worker_may_have_is_not_reported_as_not_found(fakes: list[FakeWorker]):
    with live_router(*(fake.url for fake in fakes)) as router:
        fakes[0].refuses["/v1/abort_requests"] = 500
        told = router.post("/v1/abort_requests", {"req_ids": ["x"]})
        assert told.status_code == 202 and told.json()["result"]["not_found"] == []
        (trouble,) = told.json()["result"]["errors"]
        assert trouble["code"] == "unreachable" and fakes[0].url in trouble["message"]
        fakes[0].refuses.clear()
        assert router.post("/v1/abort_requests", {"req_ids": ["x"]}).json()["result"]["not_found"] == ["x"]


def test_11_a_tenant_sees_and_ends_its_own_requests_only(servers: list[LiveServer]):
    keys = {"api_keys": {"alice": "ka", "bob": "kb"}, "admin_key": "root"}
    urls = [server.url for server in servers]
    with live_router(*urls, **keys) as router, ThreadPoolExecutor(4) as threads:
        alice, bob, root = (Fleet(router.url, key) for key in ("ka", "kb", "root"))
        asked = [
            threads.submit(fleet.generate, "x", request_id=name, **LONG)
            for fleet, name in ((alice, "of-alice"), (bob, "of-bob"))
        ]
        wait_until(lambda: len(root.requests()) == 2)
        assert [each["request_id"] for each in alice.requests()] == ["of-alice"]
        assert alice.abort("of-bob").not_found == ["of-bob"]
        assert router.get("/v1/requests/of-bob", key="ka").status_code == 404
        assert set(alice.abort(everything=True).aborted) == {"of-alice"}
        assert asked[0].result(60).cut and not asked[1].done()
        with pytest.raises(FleetError, match="admin key"):
            bob.pause()
        assert router.get("/v1/workers", key="kb").status_code == 403
        assert router.get("/v1/workers").status_code == 401 and router.get("/health").status_code == 200
        assert set(root.abort("of-bob").aborted) == {"of-bob"}
        assert asked[1].result(60).cut


# -------------------------------------------------------------------------------------------------------------- pause


def test_18_a_fleet_pause_gives_every_client_its_partial_answer_and_refuses_new_requests(router: LiveRouter):
    fleet = Fleet(router.url)
    with ThreadPoolExecutor(8) as threads:
        asked = ask_long(fleet, threads, "p1", "p2", "p3", "p4")
        paused = fleet.pause()
        assert paused.is_paused and paused.state == "paused" and paused.aborted == 4 and len(paused.engines) == 2
        samples = [each.result(60) for each in asked]
        assert {sample.cause for sample in samples} == {"pause"} and all(sample.token_ids for sample in samples)
        began_s = time.monotonic()
        with pytest.raises(FleetError) as refused:
            fleet.generate("x", **SHORT)
        assert (refused.value.status, refused.value.code) == (503, "paused") and time.monotonic() - began_s < 20
        assert router.get("/health").status_code == 200 and router.get("/ready").json()["reason"] == "paused"
        assert fleet.state().mode == "abort"
        assert fleet.resume().state == "running"
        assert fleet.generate(after=samples[0], **LONG | {"max_tokens": len(samples[0].token_ids) + 4}).token_ids


def test_19_new_requests_wait_for_the_end_of_a_pause_that_queues(router: LiveRouter):
    fleet = Fleet(router.url)
    with ThreadPoolExecutor(4) as threads:
        (running,) = ask_long(fleet, threads, "frozen")
        fleet.pause("freeze", new_requests="queue")
        try:
            waiting = threads.submit(fleet.generate, "x", **SHORT)
            assert eventually(lambda: len(router.router.live) == 2) and not waiting.done()
            (frozen,) = (each for each in fleet.requests() if each["request_id"] == "frozen")
        finally:
            fleet.resume()
        assert len(waiting.result(60).token_ids) == 8
        fleet.abort("frozen")
        assert len(running.result(60).token_ids) > frozen["output_tokens"] and running.result().cause == "api_abort"


def test_24_a_resume_cancels_a_pause_that_still_waits(router: LiveRouter):
    fleet = Fleet(router.url)
    with ThreadPoolExecutor(4) as threads:
        (running,) = ask_long(fleet, threads, "long")
        pausing = threads.submit(fleet.pause, "drain", timeout_s=30)
        wait_until(lambda: fleet.state().state == "pausing")
        assert fleet.resume().state == "running" and pausing.result(60).state == "running"
        assert not router.router.holding and not running.done()
        fleet.abort("long")
        assert running.result(60).cause == "api_abort"


def test_24_a_pause_that_comes_after_a_resume_is_kept(fakes: list[FakeWorker]):
    with live_router(*(fake.url for fake in fakes)) as router, ThreadPoolExecutor(2) as threads:
        assert router.post("/v1/pause").json()["result"]["state"] == "paused"
        fakes[0].late = dict.fromkeys(("/v1/pause", "/v1/resume"), lambda: fakes[0].over.wait(0.2))
        resuming = threads.submit(router.post, "/v1/resume")
        wait_until(lambda: fakes[1].state == "running")
        assert router.post("/v1/pause").json()["result"]["state"] == "paused"
        assert resuming.result(60).status_code == 200
        assert [fake.state for fake in fakes] == ["paused"] * 3 and router.router.holding


def test_a_pause_of_a_fleet_without_workers_has_no_effect():
    with live_router() as router:
        assert router.post("/v1/pause").json()["error"]["code"] == "no_worker" and not router.router.holding
        assert router.post("/v1/resume").status_code == 503
        assert router.post("/v1/abort_requests", {"req_ids": ["x"]}).json()["result"]["not_found"] == ["x"]


def test_the_client_for_one_server_works_on_a_fleet(router: LiveRouter, weights: list[Path]):
    fleet = Fleet(router.url)
    before = fleet.generate("hello", **SHORT)
    version = fleet.state().weight_version + 1
    with pytest.raises(FleetError, match="pause the fleet before"):
        fleet.update_weights(str(weights[2]))
    fleet.pause("freeze")
    with pytest.raises(FleetError) as refused:
        fleet.update_weights("/nowhere")
    assert refused.value.status in (400, 404, 502) and "/nowhere" in str(refused.value)
    assert fleet.update_weights(str(weights[2]), version).weight_version == version
    assert set(fleet.sleep("kv_cache").asleep) == {"kv_cache"} and fleet.wakeup().asleep == []
    fleet.resume()
    after = [fleet.generate("hello", **SHORT) for _ in range(2)]
    assert after[0].token_ids == after[1].token_ids != before.token_ids
    assert set(after[0].weight_versions) == {version}
    assert fleet.flush_cache().state == "running"
    fleet.wait_idle(60)


def test_compatible_control_apis_act_on_the_whole_fleet(router: LiveRouter, weights: list[Path]):
    def states() -> set[str]:
        return {e["state"] for e in router.get("/v1/is_paused").json()["result"]["engines"]}

    assert router.post("/pause_generation", {"mode": "abort"}).json()["status"] == "ok" and states() == {"paused"}
    assert router.router.holding and router.router.queueing
    assert router.post("/continue_generation", {}).status_code == 200 and states() == {"running"}
    assert router.post("/pause?mode=keep").json() == {"status": "paused"}
    assert router.get("/is_paused").json() == {"is_paused": True}
    assert router.post("/resume").json() == {"status": "resumed"} and not router.router.holding
    updated = router.post("/update_weights_from_disk", {"model_path": str(weights[0])})
    assert updated.json()["success"] and router.router.fleet.wanted_version == max(
        worker.version for worker in router.router.fleet
    )
    assert router.post("/update_weights_from_disk", {"model_path": "/nowhere"}).status_code == 400
    assert "flushed" in router.get("/flush_cache").text
    assert router.post("/sleep").status_code == 200 and router.get("/is_sleeping").json() == {"is_sleeping": True}
    assert router.post("/wake_up").status_code == 200 and states() == {"running"}
    assert router.get("/get_world_size").json() == {"world_size": 2}
    assert router.get("/model_info").json()["model_path"] == "tiny"
    assert router.post("/abort_request", {"rid": "nobody"}).status_code == 200
    assert (
        router.post("/abort_request", {"rid": ""}).status_code == 200 and router.router.counters.aborts_ignored == 1
    )
    assert len(Fleet(router.url).generate("x", **SHORT).token_ids) == 8


# ------------------------------------------------------------------------------------------------------------- status


def test_status_endpoints_cover_the_whole_fleet(router: LiveRouter, servers: list[LiveServer]):
    Fleet(router.url).generate("x", **SHORT)
    assert [model["id"] for model in router.get("/v1/models").json()["data"]] == ["tiny"]
    assert router.get("/v1/models/tiny").json()["owned_by"] == "headgate"
    assert router.get("/v1/models/other").json()["error"]["code"] == "model_not_found"
    assert {load["worker"] for load in router.get("/v1/loads").json()["loads"]} == {s.url for s in servers}
    assert router.get("/version").json() == {"version": "0"} and router.get("/live").status_code == 200
    paths = router.get("/openapi.json").json()["paths"]
    assert {"/v1/chat/completions", "/v1/pause", "/v1/workers", "/pause_generation"} <= set(paths)
    docs = Path(__file__).parents[2] / "docs"
    documented = (docs / "router.md").read_text()
    own = {operation.path for operation in ON_ROUTERS if not operation.on_server and operation.in_api}
    assert {"/v1/workers", "/v1/scale"} <= own <= set(paths)
    assert [path for path in own if path not in documented + (docs / "ray.md").read_text()] == []
    values = metric_values(router.get("/metrics").text)
    names = {name.partition("{")[0].removeprefix("headgate:router_") for name in values if ":router_" in name}
    assert {name for name in names if f"`{name}" not in documented} == {"build_info"}
    assert values["headgate:router_requests_total"] == 1 and values["headgate:router_requests_in_flight"] == 0
    state = f'headgate:router_worker_state{{role="mixed",state="ready",worker="{servers[0].url}"}}'
    assert values[state] == 1 and values["headgate:router_double_releases_total"] == 0
    assert sum(value for name, value in values.items() if name.startswith("headgate:router_attempts_total")) == 1


def test_50_health_is_ok_while_a_worker_answers_and_names_those_that_do_not(fakes: list[FakeWorker]):
    with live_router(*(fake.url for fake in fakes)) as router:
        fakes[0].refuses["/v1/loads"] = 500
        router.wait_for(down=1)
        told = router.get("/health")
        assert told.status_code == 200 and told.json()["status"] == "degraded"
        assert {w["url"] for w in told.json()["workers"] if w["state"] == "down"} == {fakes[0].url}
        for fake in fakes:
            fake.refuses["/v1/loads"] = 500
        router.wait_for(down=3)
        assert router.get("/health").status_code == router.get("/ready").status_code == 503
        assert router.post("/v1/pause").json()["error"]["code"] == "no_worker"
