"""The device thread: order, run-ahead, failure, closing, new weights."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager

import pytest
import torch

from headgate.contract.sampling import SamplingParams
from headgate.device.executor import LocalExecutor, PipelinedExecutor
from headgate.device.runner import ModelRunner
from headgate.device.weights.loading import TensorInfo
from headgate.errors import BrokenCheckpoint, EngineDead, HalfWritten
from headgate.layers.batch import Batch
from headgate.protocol.plan import StepResult
from tests.device.fakes import HashModel, expected_tokens, hash_runner, step_plan
from tests.device.test_runner import KINDS, decode, prefill, text

SAMPLED = SamplingParams(seed=11)


@pytest.fixture(autouse=True, params=[LocalExecutor, PipelinedExecutor])
def _kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run every test with both kinds of executor, which behave the same."""
    monkeypatch.setattr("tests.device.test_executor.LocalExecutor", request.param)


DEADLINE_S = 60.0


@contextmanager
def running(runner: ModelRunner) -> Iterator[LocalExecutor]:
    executor = LocalExecutor(runner)
    try:
        yield executor
    finally:
        executor.close()


def tokens_of(*futures: Future[StepResult]) -> list[list[int]]:
    return [future.result(DEADLINE_S).tokens for future in futures]


def test_steps_run_on_the_gpu_of_the_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The current GPU is a setting of each thread, and is the first GPU by default."""
    entered: list[tuple[torch.device, str]] = []

    @contextmanager
    def noted(device: torch.device) -> Iterator[None]:
        entered.append((device, threading.current_thread().name))
        yield

    monkeypatch.setattr("headgate.device.executor.current", noted)
    runner = hash_runner()
    with running(runner) as executor:
        executor.launch(step_plan(0, [])).result(DEADLINE_S)
    assert entered == [(runner.rows.tokens.device, "headgate-device")]


class Gate(HashModel):
    """A model whose first step waits until it is released."""

    def __init__(self) -> None:
        super().__init__()
        self.entered, self.opened = threading.Event(), threading.Event()

    def __call__(self, batch: Batch, kv: list) -> torch.Tensor:  # type: ignore[type-arg]
        self.entered.set()
        assert self.opened.wait(DEADLINE_S)
        return super().__call__(batch, kv)


def gated_runner() -> tuple[ModelRunner, Gate]:
    runner, gate = hash_runner(), Gate()
    runner.model = gate
    return runner, gate


def test_plans_launched_before_any_result_is_read_give_the_same_tokens_as_lockstep():
    runner, gate = gated_runner()
    texts = [text(row, SamplingParams(seed=row, **kind)) for row, kind in enumerate(KINDS)]
    with running(runner) as executor:
        # All eight are in flight before the first has computed anything.
        futures = [executor.launch(prefill(0, texts)), *(executor.launch(decode(i, texts)) for i in range(1, 8))]
        assert not any(future.done() for future in futures)
        gate.opened.set()
        ahead = tokens_of(*futures)
    assert [list(column) for column in zip(*ahead, strict=True)] == [
        expected_tokens(one.prompt, one.sampling, 8) for one in texts
    ]


def test_results_complete_in_launch_order():
    landed: list[int] = []
    texts = [text(0, SAMPLED)]
    with running(hash_runner()) as executor:
        futures = [executor.launch(prefill(0, texts)), *(executor.launch(decode(i, texts)) for i in range(1, 9))]
        for future in futures:
            future.add_done_callback(lambda done: landed.append(done.result().step))
        futures[-1].result(DEADLINE_S)
    assert landed == list(range(9))


def test_a_launched_step_cannot_be_cancelled():
    runner, gate = gated_runner()
    with running(runner) as executor:
        future = executor.launch(prefill(0, [text(0, SAMPLED)]))
        assert not future.cancel()
        gate.opened.set()
        assert len(future.result(DEADLINE_S).tokens) == 1


def test_a_failed_step_fails_itself_and_all_later_ones():
    texts = [text(0, SAMPLED)]
    with running(hash_runner(max_tokens=32)) as executor:
        first = executor.launch(prefill(0, texts))
        broken = executor.launch(step_plan(1, [(0, 0, 60, True)]))
        later = [executor.launch(decode(i, texts)) for i in (2, 3)]
        assert len(first.result(DEADLINE_S).tokens) == 1
        with pytest.raises(AssertionError, match="plan 1 has 60 tokens"):
            broken.result(DEADLINE_S)
        for i, future in enumerate(later, 2):
            with pytest.raises(EngineDead, match=f"step {i} cannot run after .*plan 1 has 60 tokens"):
                future.result(DEADLINE_S)


def test_closing_finishes_the_running_step_and_fails_the_waiting_ones():
    runner, gate = gated_runner()
    executor, texts = LocalExecutor(runner), [text(0, SAMPLED)]
    first, second = executor.launch(prefill(0, texts)), executor.launch(decode(1, texts))
    assert gate.entered.wait(DEADLINE_S)
    executor.close(timeout_s=0)
    gate.opened.set()
    assert tokens_of(first) == [expected_tokens(texts[0].prompt, SAMPLED, 1)]
    with pytest.raises(EngineDead, match="closed"):
        second.result(DEADLINE_S)


def test_launching_after_close_fails_at_once():
    executor = LocalExecutor(hash_runner())
    executor.close()
    with pytest.raises(EngineDead, match="closed"):
        executor.launch(step_plan(0, [])).result(DEADLINE_S)


def test_closing_twice_is_allowed():
    executor = LocalExecutor(hash_runner())
    executor.close()
    executor.close()
    with pytest.raises(EngineDead, match="closed"):
        executor.launch(step_plan(0, [])).result(DEADLINE_S)


def test_close_abandons_a_stuck_step_at_its_deadline(caplog: pytest.LogCaptureFixture):
    runner, gate = gated_runner()
    executor = LocalExecutor(runner)
    future = executor.launch(prefill(0, [text(0, SAMPLED)]))
    assert gate.entered.wait(DEADLINE_S)
    executor.close(timeout_s=0.01)
    assert "still in a step after 0.01 s" in caplog.text
    gate.opened.set()
    assert len(future.result(DEADLINE_S).tokens) == 1


class Weights:
    """A weight source with one tensor, which may fail halfway."""

    def __init__(self, value: int, *, shape: int = 1, breaks: bool = False) -> None:
        self.tensor, self.breaks = torch.full((shape,), float(value)), breaks

    def metadata(self) -> Mapping[str, TensorInfo]:
        return {"weight": TensorInfo(self.tensor.dtype, tuple(self.tensor.shape))}

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield "weight", self.tensor
        if self.breaks:
            raise ConnectionError("the sender is gone")


def first_token(executor: LocalExecutor, step: int) -> list[int]:
    return executor.launch(prefill(step, [text(0, SamplingParams(temperature=0))])).result(DEADLINE_S).tokens


def test_new_weights_serve_the_plans_launched_after_them():
    runner, gate = gated_runner()
    with running(runner) as executor:
        plans = [prefill(step, [text(0, SamplingParams(temperature=0))]) for step in range(2)]
        before, loaded, after = (
            executor.launch(plans[0]),
            executor.load_weights(Weights(3)),
            executor.launch(plans[1]),
        )
        gate.opened.set()
        loaded.result(DEADLINE_S)
        assert tokens_of(before) != tokens_of(after)


def test_weights_that_do_not_fit_change_nothing():
    with running(hash_runner()) as executor:
        before = first_token(executor, 0)
        with pytest.raises(BrokenCheckpoint, match="shape"):
            executor.load_weights(Weights(3, shape=2)).result(DEADLINE_S)
        assert first_token(executor, 1) == before


def test_a_partial_load_fails_all_steps_until_another_load_succeeds():
    with running(hash_runner()) as executor:
        before = first_token(executor, 0)
        with pytest.raises(HalfWritten, match="the sender is gone"):
            executor.load_weights(Weights(3, breaks=True)).result(DEADLINE_S)
        with pytest.raises(EngineDead, match="the sender is gone"):
            first_token(executor, 1)
        executor.load_weights(Weights(1)).result(DEADLINE_S)
        assert first_token(executor, 2) == before
