"""Crash evidence: the file that a crashing engine writes, and what a replay finds in it."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import msgspec
import pytest

from headgate.cli import main
from headgate.contract.sampling import SamplingParams
from headgate.engine import evidence as evidence_module
from headgate.engine.evidence import Evidence, RecordedStep, StepRecorder, read_evidence, write_private
from headgate.engine.replay import replay
from headgate.errors import EngineDead
from headgate.protocol.command import FileSource, Pause, Resume, UpdateWeights
from headgate.protocol.plan import Fetch, Join, StepPlan
from headgate.protocol.request import Ticket
from tests.core.engine import Engine
from tests.engine.test_loop import Harness


def recorded(folder: Path, **options: object) -> Harness:
    harness = Harness(by_hand=True, **options)  # type: ignore[arg-type]
    harness.loop._recorder.folder = folder
    return harness


def run_and_crash(harness: Harness, folder: Path, steps: int) -> Path:
    """Run some steps, then have the device fail."""
    harness.loop.turn()
    for _ in range(steps):
        harness.executor.land()
        harness.loop.turn()
    harness.executor.fail(RuntimeError("the device is on fire"))
    with pytest.raises(RuntimeError, match="on fire"):
        harness.loop.turn()
    (path,) = folder.glob("crash-*.json")
    return path


def busy(harness: Harness) -> Harness:
    harness.submit(1, 2, 3, 4, 5, 6, max_tokens=12)
    return harness


@pytest.mark.parametrize(("blocks", "run_ahead"), [(32, 1), (32, 3), (14, 2)])
def test_the_evidence_of_a_correct_engine_is_consistent(tmp_path, blocks, run_ahead):
    path = run_and_crash(busy(recorded(tmp_path, blocks=blocks, run_ahead=run_ahead)), tmp_path, steps=20)
    found = replay(path)
    assert found.fault is None and found.steps > 20 and "on fire" in found.error
    assert str(found) == f"replayed {found.steps} plans; every plan is consistent"


def test_steps_with_several_tokens_per_slice_are_run_again(tmp_path):
    engine, recorder = Engine(), StepRecorder(tmp_path)
    for id in (1, 2):
        engine.add(id, max_tokens=12)
    for lengths in ([2, 0], [3, 1], [1, 2], [1, 1]):
        recorder.planned(engine.launch())
        result = engine.device.land(lengths)
        recorder.landed(result)
        engine.scheduler.commit(result)
    path = recorder.write(RuntimeError("a bug"), engine.scheduler, "running", [])
    assert str(replay(path)) == "replayed 4 plans; every plan is consistent"


@pytest.mark.parametrize(
    ("reused", "found"), [(False, "every plan is consistent"), (True, "plan 1: row 0 reads position 4 in block 3")]
)
def test_layers_with_windows_read_what_their_windows_show(tmp_path, reused, found):
    """`reused`: a plan reuses a block of a window before it has passed, as a bug of the scheduler would."""
    engine, recorder = Engine(windows=(None, 5), budget=6, blocks=20), StepRecorder(tmp_path)
    engine.add(1, prompt=9, max_tokens=20)
    for number in range(14):
        plan = engine.launch()
        if reused and number == 1:
            blocks = list(engine.device._queue[0].grown[0][1])
            blocks[1] = 3  # the second block of the window
            plan = msgspec.structs.replace(plan, grown=((0, tuple(blocks)),))
        recorder.planned(plan)
        result = engine.device.land()
        recorder.landed(result)
        engine.scheduler.commit(result)
    path = recorder.write(RuntimeError("a bug"), engine.scheduler, "running", [])
    assert found in str(replay(path))


def test_the_evidence_records_what_the_engine_was_doing(tmp_path, caplog):
    path = run_and_crash(busy(recorded(tmp_path)), tmp_path, steps=3)
    left = read_evidence(path)
    assert "RuntimeError: the device is on fire" in left.error and left.state == "running"
    assert [seen.id for seen in left.sequences] == [1, 2, 3, 4, 5, 6] and "4 running" in left.scheduler
    assert [step.tokens is None for step in left.steps] == [False] * 3 + [True]
    assert str(path) in caplog.text and "Traceback (most recent call last)" in caplog.text
    assert stat.S_IMODE(path.stat().st_mode) == 0o600, "it contains prompts"


def test_only_the_last_plans_are_kept_and_they_are_enough(tmp_path, monkeypatch):
    monkeypatch.setattr(evidence_module, "PLANS", 8)
    harness = busy(recorded(tmp_path))
    harness.loop._recorder = StepRecorder(tmp_path)
    path = run_and_crash(harness, tmp_path, steps=20)
    assert len(read_evidence(path).steps) == 8
    assert replay(path).fault is None


@pytest.mark.parametrize("recompute", [True, False])
def test_a_weight_update_is_not_an_inconsistency(tmp_path, recompute):
    harness = busy(recorded(tmp_path))
    harness.loop.turn()
    harness.call(Pause("freeze"))
    harness.loop.turn()
    harness.executor.land()
    harness.loop.turn()
    harness.call(UpdateWeights(FileSource("path"), recompute=recompute))
    harness.loop.turn()
    harness.call(Resume())
    path = run_and_crash(harness, tmp_path, steps=10)
    assert {step.plan.version for step in read_evidence(path).steps} == {0, 1}
    assert replay(path).fault is None


def test_an_engine_that_is_stopped_writes_no_evidence(tmp_path):
    harness = busy(recorded(tmp_path))
    harness.loop.turn()
    harness.loop.close()
    harness.executor.fail(RuntimeError("closed"))
    with pytest.raises(EngineDead):
        harness.loop.turn()
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_written_does_not_hide_the_error(tmp_path, caplog):
    harness = busy(recorded(tmp_path / "file" / "below"))
    (tmp_path / "file").write_text("in the way")
    harness.loop.turn()
    harness.executor.fail(RuntimeError("the device is on fire"))
    with pytest.raises(RuntimeError, match="on fire"):
        harness.loop.turn()
    assert "the crash file could not be written" in caplog.text


def test_an_engine_that_crashes_repeatedly_does_not_fill_the_disk(tmp_path):
    for _ in range(40):
        last = write_private(tmp_path, b"{}")
    assert len(list(tmp_path.iterdir())) == evidence_module.FILES and last.exists()


def test_80_the_last_crash_is_kept_even_if_the_wall_clock_was_set_back(tmp_path):
    for number in range(evidence_module.FILES + 1):
        last = write_private(tmp_path, b"{}")
        os.utime(last, (2e9 - number, 2e9 - number))  # each appears to be older than the previous one
    assert last.exists() and write_private(tmp_path, b"{}").exists() and last.exists()


# -- inconsistent plans -------------------------------------------------------------------


def join(row: int, tokens: str, blocks: tuple[int, ...]) -> Join:
    """A sequence whose tokens are the letters of `tokens`."""
    return Join(row, tuple(map(ord, tokens)), len(tokens), SamplingParams(), blocks)


def plan(step: int, *slices: tuple[int, int, int, bool], **more: object) -> StepPlan:
    """A plan of (row, start, count, samples) slices."""
    return StepPlan(step, 0, *(list(column) for column in zip(*slices, strict=True)), **more)  # type: ignore[arg-type]


def fault(folder: Path, *plans: StepPlan) -> tuple[int | None, str | None]:
    """The result of a replay for an engine with 4 rows and 8 blocks of 4 tokens that has sampled only `x`."""
    steps = [RecordedStep(each, [ord("x")] * sum(each.samples)) for each in plans]
    left = Evidence("error", "now", "running", "<Scheduler>", [], [], 8, 4, 4, 200, steps)
    found = replay(write_private(folder, msgspec.json.encode(left)))
    return found.step, found.fault


SOUND = plan(0, (0, 0, 5, True), joins=(join(0, "abcde", (0, 1)),))


@pytest.mark.parametrize(
    ("later", "expected"),
    [
        (plan(1, (0, 5, 1, True)), None),
        (plan(1, (1, 4, 1, True), joins=(join(1, "abcdf", (0, 2)),)), None),
        (plan(1, (1, 0, 1, True)), "row 1 computes, and no sequence has joined it"),
        (plan(1, (9, 0, 1, True)), "row 9 does not exist; there are 4"),
        (plan(1, (1, 0, 1, True), joins=(join(1, "a", (8,)),)), "block 8 does not exist; there are 8"),
        (plan(1, (0, 5, 0, False)), "row 0 has nothing to compute"),
        (plan(1, (0, 5, 1, True), (0, 5, 1, True)), "row 0 has two slices"),
        (plan(1, (0, 6, 1, True)), "row 0 computes to position 7 and has 6 tokens"),
        (plan(1, (0, 4, 1, True)), "row 0 samples after position 5 of 6"),
        (
            plan(1, (1, 0, 5, True), joins=(join(1, "abcde", (2,)),)),
            "row 1 computes to position 5 and has 1 blocks",
        ),
        (
            plan(1, (1, 4, 1, True), joins=(join(1, "abcde", (2, 3)),)),
            "row 1 reads position 0 in block 2, which was never written",
        ),
        (
            plan(1, (1, 4, 1, True), joins=(join(1, "ABCDE", (0, 3)),)),
            "row 1 reads position 0 in block 0, which row 0 wrote last, in plan 0, with other KV",
        ),
        (
            plan(1, (0, 5, 1, True), (1, 0, 4, True), joins=(join(1, "wxyz", (0,)),)),
            "row 0 reads position 0 in block 0, which row 1 wrote last, in plan 1, with other KV",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_replay_finds_the_first_inconsistent_plan(tmp_path, later, expected):
    assert fault(tmp_path, SOUND, later) == (None if expected is None else 1, expected)


def test_kv_from_before_the_first_plan_is_trusted(tmp_path):
    hit = plan(7, (1, 4, 1, True), joins=(join(1, "abcde", (2, 3)),))
    stranger = plan(8, (3, 40, 1, True))
    assert fault(tmp_path, hit, stranger) == (None, None)
    wrong = plan(9, (2, 4, 1, True), joins=(join(2, "ABCDE", (2, 4)),))
    # No recorded plan wrote block 2, but row 1 has read it and found "abcd".
    assert fault(tmp_path, hit, wrong) == (
        9,
        "row 2 reads position 0 in block 2, which holds other KV",
    )


def test_a_block_of_an_unknown_sequence_may_hold_anything(tmp_path):
    ours = plan(7, (1, 0, 4, True), joins=(join(1, "abcd", (2,)),))
    given = plan(8, (3, 40, 1, True), grown=((3, (2,)),))
    hit = plan(9, (2, 4, 1, True), joins=(join(2, "ABCDE", (2, 4)),))
    assert fault(tmp_path, ours, given, hit) == (None, None)


def test_fetched_blocks_hold_the_fetched_kv(tmp_path):
    fetch = Fetch(0, Ticket("other", 1, 0, 4, 0, b""), 0, (5,))
    fetching = plan(1, (0, 5, 1, True), fetches=(fetch,))
    hit = plan(2, (1, 4, 1, True), joins=(join(1, "ABCDE", (5, 6)),))
    assert fault(tmp_path, SOUND, fetching, hit) == (None, None)
    not_fetched = msgspec.structs.replace(fetching, fetches=())
    assert fault(tmp_path, SOUND, not_fetched, hit)[0] == 2


def test_a_file_can_be_replayed_from_the_command_line(tmp_path, capsys):
    path = run_and_crash(busy(recorded(tmp_path)), tmp_path, steps=3)
    assert main(["replay", str(path)]) == 0
    output = capsys.readouterr().out
    assert "plans; every plan is consistent" in output and "the engine crashed with: " in output
    path.write_text("{}")
    assert main(["replay", str(path)]) == 2
    assert "cannot be replayed" in capsys.readouterr().err
