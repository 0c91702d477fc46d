"""Pause, resume, weight updates and stop-and-wait, on the fake device. Numbers are rules of docs/lifecycle.md."""

from __future__ import annotations

from concurrent.futures import Future

import pytest

from headgate.errors import BrokenCheckpoint, HalfWritten
from headgate.protocol.command import (
    ChecksumWeights,
    Denied,
    EngineState,
    FileSource,
    Flush,
    Flushed,
    ListSequences,
    Pause,
    Resume,
    SequenceList,
    Sleep,
    Stop,
    UpdateWeights,
    Wake,
    WeightChecksums,
)
from headgate.protocol.message import Abort
from headgate.protocol.request import Ticket
from headgate.transfer.transport import Fetched
from tests.engine.test_loop import Harness, RecordingTransport, answer, request


def busy(**options: object) -> Harness:
    """Six requests for four rows: four run, two wait, and a step is in flight."""
    harness = Harness(by_hand=True, **options)  # type: ignore[arg-type]
    harness.submit(1, 2, 3, 4, 5, 6, max_tokens=6)
    harness.loop.turn()
    return harness


def land(harness: Harness, steps: int = 1) -> None:
    for _ in range(steps):
        harness.executor.land()
        harness.loop.turn()


def finish(harness: Harness) -> None:
    while len(harness.executor.device):
        land(harness)


# -- stop and wait ------------------------------------------------------------------


def test_3_a_stop_is_answered_when_blocks_are_free_and_clients_were_notified():
    harness = busy()
    held = harness.scheduler.pool.held
    number = harness.call(Stop([1, 5, 99], "api_abort"))
    harness.loop.turn()
    assert {ended.id for ended in harness.ends()} == {1, 5}
    state = harness.answers[number]
    assert isinstance(state, EngineState) and state.ended == {1: 0, 5: 0} and not state.held
    assert harness.scheduler.pool.held < held, "in the middle of a step"
    finish(harness)
    assert harness.tokens(2) == answer(2, 6)


def fetching() -> Harness:
    """One request whose blocks are filled by a transfer that does not end by itself."""
    harness = Harness(transport=RecordingTransport(), by_hand=True)
    (key,) = harness.scheduler.admission.new_sequence(request(1), 1, 0.0).keys(1, version=0, block_size=4)
    harness.submit(1, ticket=Ticket("elsewhere", 1, 1, 4, 0, key))
    harness.loop.turn()
    assert harness.scheduler.fetches == 1
    return harness


def test_3_7_a_second_stop_waits_for_the_blocks_like_the_first():
    harness = fetching()
    first, second = harness.call(Stop([1], "api_abort")), harness.call(Stop([1], "api_abort"))
    harness.loop.turn()
    assert harness.ends() and not harness.answers
    harness.loop.post(Fetched(1, ok=False))
    harness.loop.turn()
    assert harness.answers[first].held == harness.answers[second].held == []
    assert (harness.answers[first].ended, harness.answers[second].ended) == ({1: 0}, {})
    assert harness.loop.idle


def test_3_a_stop_that_times_out_reports_what_is_still_held():
    harness = fetching()
    number = harness.call(Stop([1], "api_abort", timeout_s=2.0))
    harness.loop.turn()
    harness.clock.now_s = 2.0
    harness.loop.turn()
    assert harness.answers[number].held == [1]
    harness.loop.post(Fetched(1, ok=True))
    harness.run()


def test_stopping_all_means_all_requests_live_at_that_moment():
    harness = busy()
    number = harness.call(Stop(None, "api_abort"))
    harness.submit(7)
    harness.loop.turn()
    land(harness)
    assert set(harness.answers[number].ended) == {1, 2, 3, 4, 5, 6}
    finish(harness)
    assert harness.tokens(7) == answer(7, 4)


def test_6_a_stop_on_a_paused_engine_is_immediate():
    harness = busy()
    harness.call(Pause("freeze"))
    harness.loop.turn()
    land(harness)
    number = harness.call(Stop([1, 5], "api_abort"))
    harness.loop.turn()
    assert set(harness.answers[number].ended) == {1, 5} and not harness.answers[number].held


# -- pause and resume ---------------------------------------------------------------


def test_18_23_a_pause_with_abort_returns_partial_answers_and_releases_everything():
    harness = busy()
    land(harness)
    number = harness.call(Pause("abort"))
    harness.loop.turn()
    assert harness.loop.control.state == "pausing"
    land(harness)
    state = harness.answers[number]
    assert (state.state, state.mode) == ("paused", "abort")
    assert state.ended == {1: 1, 2: 1, 3: 1, 4: 1, 5: 0, 6: 0}
    assert {ended.cause for ended in harness.ends()} == {"pause"}
    assert harness.loop.idle and harness.scheduler.pool.held == 0


def test_19_new_requests_are_refused_as_soon_as_a_pause_begins():
    harness = busy()
    harness.call(Pause("drain"))
    harness.submit(7)
    harness.loop.turn()
    (refused,) = harness.refusals()
    assert (refused.id, refused.status, refused.code) == (7, 503, "paused")
    finish(harness)


def test_19_new_requests_are_queued_if_the_pause_says_so_and_run_after_the_resume():
    harness = busy()
    harness.call(Pause("abort", queue=True))
    harness.submit(7)
    harness.loop.turn()
    land(harness)
    assert not harness.refusals() and len(harness.scheduler.waiting) == 1
    harness.call(Resume())
    harness.loop.turn()
    finish(harness)
    assert harness.tokens(7) == answer(7, 4)


def test_18_a_draining_pause_finishes_started_requests_and_keeps_the_rest():
    harness = busy()
    number = harness.call(Pause("drain"))
    harness.loop.turn()
    finish(harness)
    assert harness.answers[number].state == "paused"
    assert {ended.id for ended in harness.ends()} == {1, 2, 3, 4}
    harness.call(Resume())
    harness.loop.turn()
    finish(harness)
    assert harness.tokens(5) == answer(5, 6)


def test_20_a_drain_that_times_out_aborts_the_rest_and_names_them():
    harness = busy()
    number = harness.call(Pause("drain", timeout_s=1.0))
    harness.loop.turn()
    harness.clock.now_s = 1.0
    harness.loop.turn()
    land(harness)
    state = harness.answers[number]
    assert state.state == "paused" and state.forced == [1, 2, 3, 4]
    assert {ended.id: ended.cause for ended in harness.ends()} == dict.fromkeys([1, 2, 3, 4], "pause")


def test_18_a_freeze_keeps_everything_and_continues_unchanged():
    harness = busy()
    number = harness.call(Pause("freeze"))
    harness.loop.turn()
    land(harness)
    assert harness.answers[number].state == "paused" and not harness.ends()
    for _ in range(3):
        harness.loop.wake()
        harness.loop.turn()
    assert len(harness.executor.device) == 0
    harness.call(Resume())
    harness.loop.turn()
    finish(harness)
    assert [harness.tokens(id) for id in range(1, 7)] == [answer(id, 6) for id in range(1, 7)]


@pytest.mark.parametrize("mode", ["abort", "drain", "freeze"])
def test_24_pause_and_resume_are_idempotent(mode):
    harness = Harness()
    for _ in range(2):
        first, second = harness.call(Pause(mode)), harness.call(Pause(mode))
        harness.loop.turn()
        harness.loop.wake()
        harness.loop.turn()
        assert harness.answers[first].state == harness.answers[second].state == "paused"
        first, second = harness.call(Resume()), harness.call(Resume())
        harness.loop.turn()
        assert harness.answers[first].state == harness.answers[second].state == "running"


def test_24_a_resume_cancels_a_pause_in_progress():
    harness = busy()
    number = harness.call(Pause("drain"))
    harness.loop.turn()
    harness.call(Resume())
    harness.loop.turn()
    harness.loop.wake()
    harness.loop.turn()
    assert harness.answers[number].state == "running"
    finish(harness)
    assert harness.tokens(6) == answer(6, 6)


def test_24_a_cancelled_pause_aborts_no_request_even_if_another_pause_follows_at_once():
    harness = busy()
    first = harness.call(Pause("drain", timeout_s=5.0))
    harness.loop.turn()
    harness.clock.now_s = 4.9
    harness.call(Resume())
    second = harness.call(Pause("drain", timeout_s=60.0))
    harness.loop.turn()
    assert first in harness.answers and second not in harness.answers
    harness.clock.now_s = 5.0
    harness.loop.wake()
    harness.loop.turn()
    assert not harness.ends()
    finish(harness)
    assert harness.answers[second].state == "paused" and not harness.answers[second].forced


def test_24_an_abort_pause_overtakes_a_drain():
    harness = busy()
    drain = harness.call(Pause("drain"))
    harness.loop.turn()
    abort = harness.call(Pause("abort"))
    harness.loop.turn()
    land(harness)
    assert harness.answers[drain].state == harness.answers[abort].state == "paused"
    assert harness.loop.idle


def test_17_aborts_and_pauses_in_any_order_never_wait_for_each_other():
    harness = busy()
    numbers = [
        harness.call(c) for c in (Stop([1], "api_abort"), Pause("abort"), Stop(None, "api_abort"), Pause("freeze"))
    ]
    harness.loop.post(Abort([2], "client_disconnect"))
    harness.loop.turn()
    land(harness)
    assert all(number in harness.answers for number in numbers)
    assert len(harness.ends()) == 6 and harness.loop.idle


# -- weights ------------------------------------------------------------------------


def paused(mode: str = "freeze") -> Harness:
    harness = busy()
    land(harness)
    harness.call(Pause(mode))
    harness.loop.turn()
    finish(harness)
    assert harness.loop.control.state == "paused"
    return harness


def test_25_weights_are_refused_unless_paused():
    harness = Harness()
    number = harness.call(UpdateWeights(FileSource("path")))
    harness.loop.turn()
    denied = harness.answers[number]
    assert isinstance(denied, Denied) and (denied.status, denied.code) == (409, "not_paused")


def test_27_new_weights_increment_the_version_and_tokens_carry_it():
    harness = paused()
    number = harness.call(UpdateWeights(FileSource("path")))
    harness.loop.turn()
    harness.loop.turn()
    assert (harness.answers[number].state, harness.answers[number].version) == ("paused", 1)
    harness.call(Resume())
    harness.loop.turn()
    finish(harness)
    versions = [outputs.version for outputs in harness.received[0] for _ in outputs.tokens]
    assert versions == sorted(versions) and set(versions) == {0, 1}
    assert len(harness.ends()) == 6


@pytest.mark.parametrize(
    ("failure", "state", "code"),
    [
        (BrokenCheckpoint("tensor x is missing"), "paused", "bad_weights"),
        (HalfWritten("cut off"), "quarantined", "quarantined"),
    ],
)
def test_25_a_failed_update_leaves_the_old_weights_or_a_quarantined_engine(failure, state, code):
    harness = paused()
    failed: Future[None] = Future()
    failed.set_exception(failure)
    harness.executor.load_weights = lambda _, **_declared: failed
    number = harness.call(UpdateWeights(FileSource("path")))
    harness.loop.turn()
    denied = harness.answers[number]
    assert denied.code == code and str(failure) in denied.message and harness.loop.control.state == state
    number = harness.call(Resume())
    harness.loop.turn()
    assert isinstance(harness.answers[number], Denied) == (state == "quarantined")


def test_25_a_full_update_ends_the_quarantine():
    harness = paused()
    harness.loop.control.state = "quarantined"
    number = harness.call(Pause("abort"))
    update = harness.call(UpdateWeights(FileSource("path"), version=7))
    harness.loop.turn()
    assert isinstance(harness.answers[number], Denied)
    assert (harness.answers[update].state, harness.answers[update].version) == ("paused", 7)


# -- sleep --------------------------------------------------------------------------


def test_a_frozen_engine_sleeps_wakes_and_continues_unchanged():
    harness = paused()
    asleep = harness.call(Sleep())
    harness.loop.turn()
    state = harness.answers[asleep]
    assert state.state == "paused" and set(state.asleep) == {"weights", "kv_cache"}
    assert set(harness.loop.status.asleep) == {"weights", "kv_cache"}
    refused, awake, resumed = harness.call(Resume()), harness.call(Wake()), harness.call(Resume())
    harness.loop.turn()
    assert harness.answers[refused].code == "asleep" and harness.answers[awake].asleep == ()
    assert harness.answers[resumed].state == "running"
    finish(harness)
    assert [harness.tokens(id) for id in range(1, 7)] == [answer(id, 6) for id in range(1, 7)]


def test_an_engine_with_kv_on_lease_refuses_to_sleep():
    harness = Harness()
    harness.submit(1, max_tokens=1, export_kv=True)
    harness.loop.turn()
    harness.loop.turn()
    harness.call(Pause("freeze"))
    harness.loop.turn()
    kv, weights = harness.call(Sleep(("kv_cache",))), harness.call(Sleep(("weights",)))
    harness.loop.turn()
    assert harness.answers[kv].status == 409 and "is leased" in harness.answers[kv].message
    assert harness.answers[weights].asleep == ("weights",)


# -- inspection ---------------------------------------------------------------------


def test_requests_in_flight_are_listed():
    harness = busy()
    land(harness)
    number = harness.call(ListSequences())
    harness.clock.now_s = 3.0
    harness.loop.turn()
    seen = harness.answers[number]
    assert isinstance(seen, SequenceList)
    assert [(each.id, each.phase, each.output_tokens) for each in seen.sequences] == [
        *((id, "running", 1) for id in (1, 2, 3, 4)),
        *((id, "waiting", 0) for id in (5, 6)),
    ]
    assert seen.sequences[0].age_s == 3.0 and seen.sequences[0].blocks > 0
    finish(harness)


def test_flushing_reports_how_many_blocks_were_dropped():
    harness = Harness()
    harness.submit(1)
    harness.run()
    number = harness.call(Flush())
    harness.loop.turn()
    assert harness.answers[number] == Flushed(2)


def test_checksums_are_computed_while_requests_run_but_not_asleep():
    harness = paused()
    asleep, number = harness.call(Sleep(("weights",))), harness.call(ChecksumWeights())
    harness.loop.turn()
    assert harness.answers[asleep].asleep == ("weights",) and harness.answers[number].code == "asleep"
    harness.call(Wake()), harness.call(Resume())
    harness.loop.turn()
    number = harness.call(ChecksumWeights())
    harness.loop.turn()
    assert harness.answers[number] == WeightChecksums(0, {"weights": "0"})
    finish(harness)


def test_25_a_repeated_update_succeeds_without_loading_again(tmp_path):
    weights = tmp_path / "new.safetensors"
    weights.write_bytes(b"new")
    harness = Harness()
    harness.call(Pause())
    harness.loop.turn()
    update = UpdateWeights(FileSource(str(weights)), version=1)
    for _ in range(2):  # the first answer may have been lost
        number = harness.call(update)
        harness.loop.turn()
        assert isinstance(harness.answers[number], EngineState) and harness.answers[number].version == 1
    assert harness.executor.device.version == 1, "read once"
    weights.write_bytes(b"something else")
    number = harness.call(update)
    harness.loop.turn()
    denied = harness.answers[number]
    assert isinstance(denied, Denied) and denied.code == "stale_version"
