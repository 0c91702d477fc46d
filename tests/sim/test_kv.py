"""KV that moves between simulated engines, and two routers in front of them."""

from __future__ import annotations

from typing import Any

import pytest

from headgate.testing.sim.kv import STAGES, KvSettings, SimBlocks
from headgate.testing.sim.script import ROUTERS
from tests.sim.plans import ask, deed

SPLIT: dict[str, Any] = {"roles": ("prefill", "decode"), "kv": KvSettings(disaggregate_tokens=8)}
LONG = "a prompt of more than one block"


def long_ask(name: str, at_s: float = 0.0):
    return ask(f"{name}: {LONG}", at_s)


def test_a_prompt_is_computed_by_one_engine_and_answered_by_another(carry_out):
    report, _ = carry_out([long_ask("a"), long_ask("b", 0.5)], **SPLIT)
    assert not report.failures
    assert (report.counts["transfers"], report.counts["transfers lost"]) == (2, 0)


@pytest.mark.parametrize("what", ["corrupt_kv", "cut_kv_short"])
def test_39_a_transfer_that_is_damaged_becomes_a_local_prefill(carry_out, what):
    report, _ = carry_out([long_ask("a", 0.1)], deed(0.0, what, lasts_s=4.0, share=1.0), **SPLIT)
    assert not report.failures
    assert report.counts["transfers"] == 0 and report.faults.total() > 1


@pytest.mark.parametrize("peer", [False, True], ids=["itself", "its peer"])
@pytest.mark.parametrize("stage", STAGES)
def test_37_whoever_dies_in_a_transfer_leaves_nothing_behind(carry_out, stage, peer):
    killed = deed(0.0, "kill_in_transfer", lasts_s=4.0, stage=stage, peer=peer, after_s=0.0)
    report, _ = carry_out([long_ask("a", 0.1), long_ask("b", 0.12)], killed, **SPLIT)
    assert not report.failures
    assert report.faults[f"killed at {stage}"] == 1


def test_37_engines_that_cannot_reach_each_other_compute_what_they_need(carry_out):
    report, _ = carry_out([long_ask("a", 0.1)], deed(0.0, "cut_peers", lasts_s=3.0), **SPLIT)
    assert not report.failures
    assert report.counts["transfers"] == 0


def test_wrong_kv_shows_as_a_wrong_token(carry_out, monkeypatch):
    def store(self, blocks, rows):
        whole(self, blocks[::-1], rows)

    whole = SimBlocks.store
    monkeypatch.setattr(SimBlocks, "store", store)
    report, _ = carry_out([long_ask("a")], **SPLIT)
    assert any(" is no " in failure or " and not " in failure for failure in report.failures), report.failures


def test_24_what_one_router_has_paused_another_may_resume(carry_out):
    pause = deed(0.3, "pause", back=ROUTERS[1], mode="freeze", new_requests="queue", timeout=5.0)
    asks = [ask("a"), ask("b", to=ROUTERS[1]), ask("late", 2.0), ask("later", 2.5, to=ROUTERS[1])]
    report, world = carry_out(asks, pause, routers=2)
    assert not report.failures
    assert all(each.reply.status == 200 for each in asks)
    assert [router.router.fleet.double_releases for router in world.routers] == [0, 0]


def test_2_a_router_ends_what_another_one_has_placed(carry_out):
    asks = [ask("a"), ask("b", to=ROUTERS[1])]
    report, _ = carry_out(asks, deed(0.5, "abort", req_ids=["a", "b"], via=ROUTERS[1]), routers=2)
    assert not report.failures
    assert report.ends == {"api_abort": 2}
