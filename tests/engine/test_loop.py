from __future__ import annotations

import tempfile
import threading
from concurrent.futures import Future
from itertools import count
from pathlib import Path

import pytest

from headgate.contract.sampling import SamplingParams
from headgate.core.blocks import BlockPool
from headgate.core.limits import SchedulerLimits
from headgate.core.scheduler import Scheduler
from headgate.engine.evidence import StepRecorder
from headgate.engine.loop import EngineLoop
from headgate.errors import EngineDead
from headgate.protocol.command import Command, Pause, Result, Sleep
from headgate.protocol.message import CLIENT_SHIFT, Abort, CommandAnswer, CommandCall, StepOutputs, Submit
from headgate.protocol.output import Ended, Outputs, Refused
from headgate.protocol.plan import Fetch, StepPlan, StepResult
from headgate.protocol.request import GenerateRequest, Ticket
from headgate.testing.device import FakeDevice, expected_token, expected_vector
from headgate.testing.executor import FakeExecutor, ManualClock
from headgate.transfer.transport import Fetched, NoTransport, Released, Renewed, Transport

VOCAB_SIZE = 1000


class Harness:
    """A loop with the fake device, and all messages that its clients received."""

    def __init__(
        self,
        *,
        by_hand: bool = False,
        run_ahead: int = 1,
        blocks: int = 32,
        max_context: int = 100,
        transport: Transport | None = None,
    ) -> None:
        self.clock = ManualClock()
        limits = SchedulerLimits(max_context=max_context, max_running=4, max_batch_tokens=64, vocab_size=VOCAB_SIZE)
        self.executor = FakeExecutor(FakeDevice(blocks, 4, 4, VOCAB_SIZE), by_hand=by_hand)
        self.scheduler = Scheduler(BlockPool(blocks, 4), limits)
        self.loop = EngineLoop(
            self.scheduler,
            self.executor,
            self.receive,
            resources=self.executor,
            transport=transport,
            recorder=StepRecorder(Path(tempfile.mkdtemp(prefix="headgate-test-"))),
            run_ahead=run_ahead,
            clock=self.clock,
        )
        self.received: dict[int, list[Outputs]] = {}
        self.answers: dict[int, Result] = {}
        self.numbers = count(1)

    def receive(self, client: int, message: StepOutputs | CommandAnswer) -> None:
        if isinstance(message, CommandAnswer):
            self.answers[message.number] = message.result
        else:
            self.received.setdefault(client, []).append(message.outputs)

    def call(self, command: Command) -> int:
        """Post a command; returns the number under which its result appears in `answers`."""
        number = next(self.numbers)
        self.loop.post(CommandCall(0, number, command))
        return number

    def submit(self, *ids: int, max_tokens: int = 4, **fields: object) -> None:
        self.loop.post(Submit([request(id, max_tokens, **fields) for id in ids]))

    def run(self) -> None:
        self.loop.turn()
        while not self.loop.idle:
            self.loop.turn()

    def tokens(self, id: int) -> list[int]:
        outputs = self.received[id >> CLIENT_SHIFT]
        return [token for each in outputs for i, token in zip(each.ids, each.tokens, strict=True) if i == id]

    def ends(self, client: int = 0) -> list[Ended]:
        return [ended for each in self.received.get(client, []) for ended in each.ended]

    def refusals(self) -> list[Refused]:
        return [refused for outputs in self.received.values() for each in outputs for refused in each.refused]


def request(id: int, max_tokens: int = 4, **fields: object) -> GenerateRequest:
    return GenerateRequest(id, prompt_of(id), SamplingParams(max_tokens=max_tokens), **fields)  # type: ignore[arg-type]


def prompt_of(id: int) -> tuple[int, ...]:
    return tuple((id * 31 + i) % VOCAB_SIZE for i in range(5))


def answer(id: int, count: int) -> list[int]:
    tokens = list(prompt_of(id))
    for _ in range(count):
        tokens.append(expected_token(tokens, 0, VOCAB_SIZE))
    return tokens[5:]


@pytest.mark.parametrize("run_ahead", [1, 2, 3])
def test_a_request_is_answered_token_by_token(run_ahead):
    harness = Harness(run_ahead=run_ahead)
    harness.submit(1, 2)
    harness.run()
    assert harness.tokens(1) == answer(1, 4) and harness.tokens(2) == answer(2, 4)
    assert [ended.cause for ended in harness.ends()] == ["max_tokens", "max_tokens"]


def test_a_request_without_a_seed_is_given_one():
    harness = Harness()
    harness.submit(1)
    harness.run()
    (join,) = (join for plan in harness.executor.plans for join in plan.joins)
    assert join.sampling.seed is not None


def test_a_closed_loop_runs_no_more_turns():
    harness = Harness()
    harness.loop.close()
    with pytest.raises(EngineDead, match="the engine is closed"):
        harness.loop.turn()


def test_the_outputs_of_a_step_are_sent_in_one_message():
    harness = Harness()
    harness.submit(1, 2, 3)
    harness.run()
    assert [outputs.ids for outputs in harness.received[0]] == [[1, 2, 3]] * 4


def test_each_client_receives_only_outputs_of_its_own_requests():
    harness = Harness()
    theirs = 7 << CLIENT_SHIFT | 1
    harness.submit(1, theirs)
    harness.submit(999, prompt_too_long := 2, max_tokens=400)
    harness.run()
    assert harness.tokens(1) == answer(1, 4) and harness.tokens(theirs) == answer(theirs, 4)
    assert {id for outputs in harness.received[0] for id in outputs.ids} == {1}
    assert {id for outputs in harness.received[7] for id in outputs.ids} == {theirs}
    assert [refused.id for refused in harness.refusals()] == [999, prompt_too_long]


def test_each_client_receives_the_vectors_of_its_own_prompts():
    harness = Harness()
    theirs = 7 << CLIENT_SHIFT | 1
    harness.submit(1, theirs, max_tokens=0, pooling="mean")
    harness.run()
    for client, id in ((0, 1), (7, theirs)):
        (outputs,) = harness.received[client]
        assert outputs.vectors == {id: expected_vector(prompt_of(id), 0, "mean")}
        assert [ended.id for ended in outputs.ended] == [id]


def test_a_refusal_has_a_reason_and_does_not_affect_other_requests():
    harness = Harness()
    harness.submit(1)
    harness.submit(2, max_tokens=1000)
    harness.submit(1)
    harness.run()
    long, twice = harness.refusals()
    assert (long.id, long.status, long.code, long.param) == (2, 400, "context_length_exceeded", "max_tokens")
    assert (twice.id, twice.status, twice.code) == (1, 409, "duplicate_request_id")
    assert harness.tokens(1) == answer(1, 4)


def test_the_next_step_is_launched_before_the_outputs_of_the_last_one_are_sent():
    harness = Harness(by_hand=True)
    launched: list[int] = []
    harness.loop._send = lambda *_: launched.append(len(harness.executor.plans))
    harness.submit(1)
    harness.loop.turn()
    harness.executor.land()
    harness.loop.turn()
    assert launched == [2]


def test_an_abort_ends_a_request_and_frees_its_blocks_in_the_middle_of_a_step():
    harness = Harness(by_hand=True)
    harness.submit(1)
    harness.loop.turn()
    harness.loop.post(Abort([1, 99], "client_disconnect"))
    harness.loop.turn()
    assert [(ended.id, ended.finish_reason, ended.cause) for ended in harness.ends()] == [
        (1, "abort", "client_disconnect")
    ]
    assert not harness.loop.idle and not harness.scheduler.pool.held
    harness.executor.land()
    harness.loop.turn()
    assert harness.loop.idle


def test_an_idle_engine_expires_a_deadline_without_any_message():
    harness = Harness(by_hand=True)
    harness.submit(1, timeout_s=0.01)
    harness.loop.turn()
    harness.clock.now_s = 0.02
    harness.loop.turn()
    assert [ended.cause for ended in harness.ends()] == ["deadline"]


def test_a_deadline_counts_from_arrival_not_from_the_last_turn():
    harness = Harness(by_hand=True)
    harness.clock.now_s = 1000.0
    harness.submit(1, timeout_s=5.0)
    harness.loop.turn()
    assert not harness.ends()
    assert harness.scheduler.next_deadline_s == 1005.0


def test_a_ticket_without_a_transport_is_a_local_prefill():
    harness = Harness()
    (key,) = harness.scheduler.admission.new_sequence(request(1), 1, 0.0).keys(1, version=0, block_size=4)
    harness.submit(1, ticket=Ticket("elsewhere", 1, 1, 4, 0, key))
    harness.run()
    assert harness.tokens(1) == answer(1, 4) and harness.scheduler.counters.transfers_lost == 1


class RecordingTransport(NoTransport):
    """A transport that only records its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[object, ...]] = []

    def attach(self, id: int, ticket: Ticket) -> None:
        self.calls.append(("attach", id))

    def fetch(self, fetch: Fetch) -> None:
        self.calls.append(("fetch", fetch.id, fetch.blocks))

    def leave(self, id: int) -> None:
        self.calls.append(("leave", id))

    def offer(self, lease: int, generation: int, version: int, blocks: tuple[int, ...]) -> None:
        self.calls.append(("offer", lease, blocks))

    def fill(self, lease: int, blocks: int) -> None:
        self.calls.append(("fill", lease, blocks))

    def withdraw(self, lease: int) -> None:
        self.calls.append(("withdraw", lease))


def test_an_engine_goes_to_sleep_only_when_transfers_have_settled():
    class Unsettled(RecordingTransport):
        settled: Future[None] = Future()

        def settle(self) -> Future[None]:
            self.calls.append(("settle",))
            return self.settled

    transport = Unsettled()
    harness = Harness(transport=transport)
    harness.submit(1, export_kv=True)
    harness.loop.turn()
    paused = harness.call(Pause("abort"))
    while paused not in harness.answers:
        harness.loop.turn()
    number = harness.call(Sleep(("kv_cache",)))
    for _ in range(5):
        harness.loop.wake()
        harness.loop.turn()
    assert not harness.executor.asleep and number not in harness.answers
    assert transport.calls[-2:] == [("withdraw", 1), ("settle",)]
    transport.settled.set_result(None)
    while number not in harness.answers:
        harness.loop.turn()
    assert harness.executor.asleep == ("kv_cache",)


def test_28_a_lease_renewed_in_time_is_kept_however_late_the_loop_runs():
    transport = RecordingTransport()
    harness = Harness(transport=transport)
    harness.submit(1, export_kv=True)
    harness.loop.turn()
    (outputs,) = harness.received[0]
    ticket = outputs.tickets[1]
    harness.loop.post(Renewed(ticket.lease, ticket.generation, 50.0))  # at 20 s
    harness.clock.now_s = 40.0
    harness.loop.turn()
    assert not harness.ends() and transport.calls == [("offer", 1, (0,)), ("fill", 1, 1)]
    harness.loop.post(Released(ticket.lease, ticket.generation, fetched=True))
    harness.loop.turn()
    assert [ended.cause for ended in harness.ends()] == ["exported"] and transport.calls[-1] == ("withdraw", 1)


def test_blocks_are_withdrawn_before_anything_is_launched_that_writes_to_them():
    transport = RecordingTransport()
    harness = Harness(transport=transport, blocks=6)
    launch, seen = harness.executor.launch, []

    def watch(plan: StepPlan) -> Future[StepResult]:
        blocks = {block for join in plan.joins for block in join.blocks} | {b for _, bs in plan.grown for b in bs}
        seen.append((blocks, ("withdraw", 1) in transport.calls))
        return launch(plan)

    harness.executor.launch = watch  # type: ignore[method-assign]
    harness.submit(1, export_kv=True, priority=1)
    harness.loop.turn()
    (_, _, lent) = transport.calls[0]
    harness.submit(2, max_tokens=18)
    harness.run()
    reused = [withdrawn for blocks, withdrawn in seen[1:] if blocks & set(lent)]
    assert reused and all(reused) and [ended.cause for ended in harness.ends()] == ["preempted", "max_tokens"]


def test_a_ticket_is_attached_at_submission_and_released_when_it_is_unwanted():
    transport = RecordingTransport()
    harness = Harness(transport=transport, by_hand=True)
    (key,) = harness.scheduler.admission.new_sequence(request(1), 1, 0.0).keys(1, version=0, block_size=4)
    good, bad = Ticket("elsewhere", 1, 1, 4, 0, key), Ticket("elsewhere", 2, 1, 4, 0, b"?" * 16)
    harness.submit(1, ticket=good)
    harness.submit(2, ticket=bad)
    harness.loop.turn()
    assert transport.calls[:2] == [("attach", 1), ("attach", 2)]
    assert set(transport.calls[2:]) == {("leave", 2), ("fetch", 1, (0,))}
    harness.loop.post(Abort([1], "client_disconnect"))
    harness.loop.turn()
    assert transport.calls[-1] == ("leave", 1) and harness.scheduler.pool.held
    harness.loop.post(Fetched(1, ok=False))
    harness.executor.land()
    harness.loop.post(Abort([2], "client_disconnect"))
    harness.run()
    assert not harness.scheduler.pool.held


def test_a_step_that_fails_ends_the_loop_with_its_error():
    harness = Harness(by_hand=True)
    harness.submit(1)
    harness.loop.turn()
    harness.executor.fail(RuntimeError("the device is on fire"))
    with pytest.raises(RuntimeError, match="on fire"):
        harness.loop.turn()


def test_closing_wakes_a_sleeping_loop():
    harness = Harness()
    thread = threading.Thread(target=harness.loop.run)
    thread.start()
    harness.loop.close()
    thread.join(60)
    assert not thread.is_alive()


def test_the_status_reports_what_the_engine_is_doing():
    harness = Harness(by_hand=True)
    harness.submit(1, 2, 3, 4, 5)
    harness.loop.turn()
    harness.clock.now_s = 3.0
    quiet_s, status = harness.loop.quiet()
    assert (quiet_s, status.busy, status.running, status.waiting) == (3.0, True, 4, 1)
    assert status.held_blocks == harness.scheduler.pool.held > 0
