"""KV transfer between simulated engines, and two routers in front of them."""

from __future__ import annotations

from typing import Any

import pytest

from headgate.testing.sim.kv import STAGES, KvSettings, SimBlocks
from headgate.testing.sim.script import ROUTERS
from tests.sim.plans import action, request

SPLIT: dict[str, Any] = {"roles": ("prefill", "decode"), "kv": KvSettings(disaggregate_tokens=8)}
LONG = "a prompt of more than one block"


def long_request(name: str, at_s: float = 0.0):
    return request(f"{name}: {LONG}", at_s)


def test_a_prompt_is_computed_by_one_engine_and_answered_by_another(run_plan):
    report, _ = run_plan([long_request("a"), long_request("b", 0.5)], **SPLIT)
    assert not report.failures
    assert (report.counts["transfers"], report.counts["transfers lost"]) == (2, 0)


@pytest.mark.parametrize("kind", ["corrupt_kv", "cut_kv_short"])
def test_39_a_damaged_transfer_becomes_a_local_prefill(run_plan, kind):
    report, _ = run_plan([long_request("a", 0.1)], action(0.0, kind, duration_s=4.0, share=1.0), **SPLIT)
    assert not report.failures
    assert report.counts["transfers"] == 0 and report.faults.total() > 1


@pytest.mark.parametrize("peer", [False, True], ids=["itself", "its peer"])
@pytest.mark.parametrize("stage", STAGES)
def test_37_an_engine_killed_during_a_transfer_leaks_nothing(run_plan, stage, peer):
    killed = action(0.0, "kill_in_transfer", duration_s=4.0, stage=stage, peer=peer, after_s=0.0)
    report, _ = run_plan([long_request("a", 0.1), long_request("b", 0.12)], killed, **SPLIT)
    assert not report.failures
    assert report.faults[f"killed at {stage}"] == 1


def test_37_engines_that_cannot_reach_each_other_compute_prompts_locally(run_plan):
    report, _ = run_plan([long_request("a", 0.1)], action(0.0, "cut_peers", duration_s=3.0), **SPLIT)
    assert not report.failures
    assert report.counts["transfers"] == 0


def test_wrong_kv_shows_as_a_wrong_token(run_plan, monkeypatch):
    def store(self, blocks, rows):
        whole(self, blocks[::-1], rows)

    whole = SimBlocks.store
    monkeypatch.setattr(SimBlocks, "store", store)
    report, _ = run_plan([long_request("a")], **SPLIT)
    assert any(" is not a prefix of " in failure or " instead of " in failure for failure in report.failures), (
        report.failures
    )


def test_24_a_router_can_resume_what_another_has_paused(run_plan):
    pause = action(0.3, "pause", undo_via=ROUTERS[1], mode="freeze", new_requests="queue", timeout=5.0)
    requests = [request("a"), request("b", to=ROUTERS[1]), request("late", 2.0), request("later", 2.5, to=ROUTERS[1])]
    report, world = run_plan(requests, pause, routers=2)
    assert not report.failures
    assert all(each.reply.status == 200 for each in requests)
    assert [router.router.fleet.double_releases for router in world.routers] == [0, 0]


def test_2_a_router_aborts_requests_placed_by_another_router(run_plan):
    requests = [request("a"), request("b", to=ROUTERS[1])]
    report, _ = run_plan(requests, action(0.5, "abort", req_ids=["a", "b"], via=ROUTERS[1]), routers=2)
    assert not report.failures
    assert report.ends == {"api_abort": 2}
