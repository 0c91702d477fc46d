from __future__ import annotations

from collections import Counter
from math import inf

import msgspec
import pytest

from headgate.contract.sampling import SamplingParams
from headgate.core.blocks import BlockPool
from headgate.core.leases import Filled, Granted, Withdrawn
from headgate.core.limits import SchedulerLimits
from headgate.core.scheduler import Flow, Scheduler
from headgate.core.sequence import Phase, Sequence
from headgate.errors import ContextTooLong, DuplicateId, RequestError
from headgate.protocol.plan import Logprobs, StepResult
from headgate.protocol.request import GenerateRequest, Pooling, Ticket
from headgate.testing.device import expected_entries, expected_vector, score
from tests.core.engine import BLOCK_SIZE, VOCAB_SIZE, Engine, prompt_of


def test_a_request_runs_to_its_limit_and_releases_everything():
    engine = Engine()
    engine.add(1, prompt=6, max_tokens=5)
    engine.run()
    assert engine.tokens[1] == engine.answer(prompt_of(1, 6), 5)
    assert (engine.ended[1].finish_reason, engine.ended[1].cause) == ("length", "max_tokens")
    assert engine.pool.available == 32 and repr(engine.scheduler) == (
        "<Scheduler 0 running, 0 waiting, <BlockPool 0 held, 2 cached, 30 free>>"
    )


def test_a_long_prompt_is_computed_in_chunks_of_the_budget():
    engine = Engine(budget=5)
    engine.add(1, prompt=12, max_tokens=1)
    assert [engine.step().counts for _ in range(3)] == [[5], [5], [2]]
    assert engine.tokens[1] == engine.answer(prompt_of(1, 12), 1)


def test_decoding_sequences_and_a_prefill_share_a_step():
    engine = Engine(budget=8)
    engine.add(1, prompt=3)
    engine.step()
    engine.add(2, prompt=20)
    assert engine.step().counts == [1, 7]


def test_without_max_tokens_the_context_is_the_limit():
    engine = Engine(max_context=10)
    engine.add(1, prompt=4, max_tokens=None)
    engine.run()
    assert engine.ended[1].output_tokens == 6


def test_requests_with_one_prefix_share_it_even_within_a_step():
    engine = Engine()
    shared = list(range(100, 116))
    engine.add(1, prompt=[*shared, 1])
    engine.add(2, prompt=[*shared, 2])
    assert engine.step().counts == [17, 1]
    engine.run()
    assert engine.ended[2].cached_tokens == 16
    assert engine.tokens[2] == engine.answer([*shared, 2], 4)


def test_a_prefix_hit_leaves_one_token_to_compute():
    engine = Engine()
    engine.add(1, prompt=8, max_tokens=1)
    engine.run()
    engine.add(2, prompt=prompt_of(1, 8), max_tokens=1)
    assert engine.step().counts == [4]
    assert engine.tokens[2] == engine.tokens[1]


def test_the_next_turn_of_a_conversation_hits_prompt_and_answer():
    engine = Engine()
    engine.add(1, prompt=8, max_tokens=9)
    while engine.launch():
        if len(engine.device) == 2:
            engine.land()
    while len(engine.device):
        engine.land()
    engine.add(2, prompt=[*prompt_of(1, 8), *engine.tokens[1], 5], max_tokens=1)
    engine.run()
    # All but the last token of the answer, whose KV was never computed.
    assert engine.ended[2].cached_tokens == 16


@pytest.mark.parametrize("field", ["salt", "adapter"])
def test_tenants_and_adapters_do_not_share_blocks(field):
    engine = Engine(adapters=frozenset("ab"))
    engine.add(1, prompt=[*range(9)], max_tokens=1, **{field: "a"})
    engine.run()
    engine.add(2, prompt=[*range(9)], max_tokens=1, **{field: "b"})
    engine.run()
    engine.add(3, prompt=[*range(9)], max_tokens=1, **{field: "a"})
    engine.run()
    assert [engine.ended[id].cached_tokens for id in (1, 2, 3)] == [0, 0, 8]


def test_the_device_receives_the_adapter_of_a_sequence():
    engine = Engine(adapters=frozenset("a"))
    engine.add(1, prompt=4, adapter="a")
    engine.add(2, prompt=4)
    assert [join.adapter for join in engine.launch().joins] == ["a", ""]


def test_an_adapter_that_is_not_loaded_is_refused_by_name():
    engine = Engine(adapters=frozenset("a"))
    with pytest.raises(RequestError, match="the adapter 'b' is not loaded"):
        engine.add(1, prompt=4, adapter="b")


def test_run_ahead_plans_a_step_whose_token_is_not_known_yet():
    engine = Engine()
    engine.add(1, prompt=4, max_tokens=3)
    assert engine.launch().starts == [0]
    assert engine.launch().starts == [4]
    assert len(engine.scheduler._launched) == 2
    assert engine.launch().starts == [5]
    assert engine.launch() is None, "the last token of an answer is never computed"
    for _ in range(3):
        engine.land()
    assert engine.tokens[1] == engine.answer(prompt_of(1), 3)


def test_steps_land_in_launch_order():
    engine = Engine()
    engine.add(1)
    first, second = engine.launch(), engine.launch()
    assert first.step < second.step
    with pytest.raises(AssertionError, match="landed before"):
        engine.scheduler.commit(StepResult(second.step, [1]))


# -- stopping ---------------------------------------------------------------------


def test_a_stop_token_ends_the_answer_and_is_part_of_it():
    engine = Engine(eos_token_ids=())
    third = engine.answer(prompt_of(1), 3)[2]
    engine.add(1, sampling=SamplingParams(max_tokens=8, stop_token_ids=(third,)))
    engine.run()
    assert engine.tokens[1][-1] == third and len(engine.tokens[1]) == 3
    assert (engine.ended[1].finish_reason, engine.ended[1].cause) == ("stop", "stop_token")


@pytest.mark.parametrize(
    ("fields", "count"), [({}, 2), ({"ignore_eos": True}, 6), ({"min_tokens": 1}, 2), ({"min_tokens": 2}, 6)]
)
def test_eos_ends_the_answer_unless_ignore_eos_is_set(fields, count):
    eos = Engine().answer(prompt_of(1), 2)[1]
    engine = Engine(eos_token_ids=(eos,))
    engine.add(1, sampling=SamplingParams(max_tokens=6, **fields))
    engine.run()
    assert len(engine.tokens[1]) == count
    assert engine.ended[1].cause == ("eos" if count == 2 else "max_tokens")


def test_an_answer_begun_on_another_engine_continues_from_its_tokens():
    engine = Engine()
    answer = engine.answer(prompt_of(1), 6)
    engine.add(1, max_tokens=6, generated=tuple(answer[:4]))
    engine.run()
    assert engine.tokens[1] == answer[4:]
    assert engine.ended[1].output_tokens == 6 and engine.ended[1].prompt_tokens == 4


def test_an_answer_that_was_complete_on_another_engine_ends_at_once():
    engine = Engine(eos_token_ids=(7,))
    engine.add(1, max_tokens=2, generated=(5, 6))
    engine.add(2, max_tokens=9, generated=(5, 7))
    assert engine.ended[1].cause == "max_tokens" and engine.ended[2].cause == "eos"
    assert not engine.tokens and engine.scheduler.schedule() is None


# -- refusals ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "message"),
    [
        (100, 1, "prompt has 100 tokens; this engine accepts 99, to leave room for an answer"),
        (90, 11, "prompt has 90 tokens and max_tokens is 11; their sum may be at most 100"),
        ([1, VOCAB_SIZE], 1, "token id 1000 is outside the vocabulary of 1000"),
    ],
)
def test_a_request_that_can_never_run_is_refused_with_a_reason(prompt, max_tokens, message):
    engine = Engine()
    with pytest.raises(RequestError, match=message):
        engine.add(1, prompt=prompt, max_tokens=max_tokens)
    assert not engine.scheduler.sequences and not engine.scheduler.waiting


def test_an_unknown_token_among_generated_tokens_is_refused_too():
    with pytest.raises(RequestError, match="token id 1000 is outside the vocabulary of 1000"):
        Engine().add(1, generated=(5, VOCAB_SIZE))


def test_a_request_larger_than_the_cache_is_refused_even_if_it_fits_the_model():
    engine = Engine(blocks=4, max_context=100)
    with pytest.raises(ContextTooLong, match="their sum may be at most 16"):
        engine.add(1, prompt=10, max_tokens=7)


def test_a_live_id_is_refused_and_a_finished_one_may_be_reused():
    engine = Engine()
    engine.add(1, max_tokens=1)
    with pytest.raises(DuplicateId, match="request 1 is already running"):
        engine.add(1)
    engine.run()
    engine.ended.clear()
    engine.add(1)


# -- aborts and deadlines --------------------------------------------------------


def test_an_abort_before_running_takes_no_step():
    engine = Engine()
    engine.add(1)
    assert engine.scheduler.abort([1, 1, 2], "api_abort") == [1, 1]
    engine.collect()
    assert engine.ended[1].finish_reason == "abort" and engine.ended[1].cause == "api_abort"
    assert engine.ended[1].timings.started_s is None
    assert engine.launch() is None


def test_an_abort_releases_blocks_at_once_and_the_row_when_the_running_step_lands():
    engine = Engine(blocks=8, running=1)
    engine.add(1, prompt=4)
    engine.add(2, prompt=4)
    engine.launch()
    engine.scheduler.abort([1], "client_disconnect")
    engine.scheduler.check()
    assert engine.pool.available == 8 and not engine.scheduler.returning
    assert engine.scheduler.has_any([1]) and engine.launch() is None
    engine.land()
    assert not engine.scheduler.has_any([1]) and engine.launch()
    assert 1 not in engine.tokens, "a token that lands after the terminal output is dropped"


def test_blocks_of_an_aborted_sequence_are_correct_for_the_next_owner_despite_pending_writes():
    engine = Engine(blocks=2)
    engine.add(1, prompt=6, max_tokens=2)
    engine.launch()
    engine.launch()
    engine.scheduler.abort([1], "client_disconnect")
    engine.add(2, prompt=7, max_tokens=1)
    assert engine.launch().joins[0].blocks == (1, 0)
    while len(engine.device):
        engine.land()
    assert engine.tokens == {2: engine.answer(prompt_of(2, 7), 1)}


def test_aborting_twice_ends_once():
    engine = Engine()
    engine.add(1)
    engine.step()
    assert engine.scheduler.abort([1], "api_abort") == [1]
    assert engine.scheduler.abort([1], "api_abort") == []
    engine.collect()
    assert engine.ended[1].output_tokens == 1


def test_a_deadline_ends_a_sequence_wherever_it_is():
    engine = Engine(running=1)
    engine.add(1, timeout_s=5.0)
    engine.add(2, timeout_s=3.0, priority=1)
    engine.add(3, priority=2)
    engine.step()
    assert engine.scheduler.next_deadline_s == 3.0
    engine.scheduler.tick(2.9)
    assert len(engine.scheduler.sequences) == 3
    engine.scheduler.tick(3.0)
    engine.scheduler.tick(5.0)
    engine.collect()
    assert engine.ended[1].cause == engine.ended[2].cause == "deadline"
    assert engine.ended[1].output_tokens == 1 and engine.ended[2].output_tokens == 0
    engine.run()
    assert engine.ended[3].cause == "max_tokens"


def test_timings_record_when_a_sequence_arrived_started_and_ended():
    engine = Engine()
    engine.scheduler.tick(1.0)
    engine.add(1, max_tokens=2)
    for now in (2.0, 3.0):
        engine.scheduler.tick(now)
        engine.step()
    timings = engine.ended[1].timings
    assert (timings.arrived_s, timings.started_s, timings.first_token_s, timings.ended_s) == (1, 2, 2, 3)


# -- order ------------------------------------------------------------------------


def run_one_by_one(engine: Engine) -> list[int]:
    while engine.scheduler.sequences:
        engine.scheduler.tick(engine.scheduler.now_s + 0.001)
        engine.step()
    return list(engine.ended)


def test_the_queue_is_ordered_by_priority_then_due_time_then_arrival():
    engine = Engine(running=1)
    engine.add(1)
    engine.add(2, timeout_s=40.0)
    engine.add(3, timeout_s=30.0)
    engine.add(4, priority=-1)
    engine.add(5, priority=1, timeout_s=10.0)
    engine.add(6)
    assert run_one_by_one(engine) == [4, 3, 2, 1, 6, 5]


def test_a_request_without_a_deadline_is_not_starved_by_newer_ones_with_deadlines():
    engine = Engine(running=1, patience_s=60.0)
    engine.add(1)
    engine.scheduler.tick(50.0)
    engine.add(2, timeout_s=20.0)
    assert run_one_by_one(engine) == [1, 2]


# -- preemption -------------------------------------------------------------------


def test_the_worst_running_sequence_is_preempted_and_its_answer_is_unchanged():
    engine = Engine(blocks=8)
    engine.add(1, prompt=8, max_tokens=16)
    engine.add(2, prompt=8, max_tokens=16)
    engine.run()
    assert engine.scheduler.counters.preemptions > 0
    assert engine.tokens == {id: engine.answer(prompt_of(id, 8), 16) for id in (1, 2)}
    assert list(engine.ended) == [1, 2], "the older one was never the victim"


def test_a_sequence_of_lower_priority_is_the_victim_even_if_it_is_older():
    engine = Engine(blocks=8)
    engine.add(1, prompt=8, max_tokens=16, priority=1)
    engine.step()
    engine.add(2, prompt=8, max_tokens=16)
    engine.run()
    assert list(engine.ended) == [2, 1]


def test_a_preempted_sequence_is_readmitted_before_new_ones():
    engine = Engine(blocks=8, running=2)
    engine.add(1, prompt=8, max_tokens=16)
    engine.add(2, prompt=8, max_tokens=20)
    while not engine.scheduler.counters.preemptions:
        engine.step()
    engine.add(3, prompt=4, max_tokens=1, priority=-1)
    engine.run()
    assert list(engine.ended) == [1, 2, 3] or list(engine.ended) == [1, 3, 2]
    started = {id: engine.ended[id].timings.started_s for id in engine.ended}
    assert started[2] <= started[3]


def test_a_preempted_sequence_waits_until_its_last_step_has_landed():
    engine = Engine(blocks=6, running=2)
    engine.add(1, prompt=8, max_tokens=12)
    engine.add(2, prompt=8, max_tokens=12)
    while engine.launch() and not engine.scheduler.leaving:
        if len(engine.device) == 3:
            engine.land()
    (victim,) = engine.scheduler.leaving
    assert victim.id == 2 and victim.phase is Phase.WAITING and victim.holds and not victim.blocks
    while len(engine.device):
        engine.launch()
        assert victim.phase is Phase.WAITING or not victim.holds
        engine.land()
    engine.run()
    assert engine.tokens[2] == engine.answer(prompt_of(2, 8), 12)


def test_a_preempted_sequence_is_not_readmitted_before_its_last_step_has_landed():
    engine = Engine(blocks=6, running=4)
    engine.add(1, prompt=8, max_tokens=12)
    engine.add(2, prompt=8, max_tokens=12)
    while engine.launch() and not engine.scheduler.leaving:
        if len(engine.device) == 3:
            engine.land()
    (victim,) = engine.scheduler.leaving
    engine.scheduler.abort([1], "api_abort")  # its blocks would suffice for the victim
    engine.launch()
    assert victim.holds and victim.phase is Phase.WAITING
    while len(engine.device):
        engine.land()
    engine.run()
    assert engine.tokens[2] == engine.answer(prompt_of(2, 8), 12)


def test_blocks_of_a_sequence_preempted_after_its_slice_was_drafted_are_not_used_in_that_step():
    engine = Engine(blocks=7)
    engine.add(1, prompt=8, max_tokens=16, priority=1)
    engine.step()
    engine.add(2, prompt=8, max_tokens=16)
    while not engine.scheduler.counters.preemptions:
        plan = engine.step()
    assert plan is not None and len(plan.rows) == 1 and not plan.grown, "the other sequence waits for a step"
    engine.run()
    assert engine.tokens == {id: engine.answer(prompt_of(id, 8), 16) for id in (1, 2)}


def test_aborting_a_preempted_sequence_whose_step_is_under_way_publishes_nothing():
    engine = Engine(blocks=3, max_context=12)
    for id in (1, 2):
        engine.add(id, prompt=1, max_tokens=11)
    preempted: list[Sequence] = []
    while not preempted:
        while len(engine.device) < 2 and engine.launch():
            pass
        preempted = [seq for seq in engine.scheduler.leaving if seq.preempted]
        if not preempted:
            engine.land()
    (seq,) = preempted
    assert min(seq.computed, len(seq.tokens)) // 4 > seq.published, "a full block is not published yet"
    engine.scheduler.abort([seq.id], "api_abort")
    engine.scheduler.check()
    while len(engine.device):
        engine.land()
    engine.run()
    assert engine.pool.available == 3


def test_an_export_that_can_never_fit_is_refused():
    engine = Engine(blocks=4, exports=True)
    with pytest.raises(
        ContextTooLong, match="prompt and generated tokens together are 22; this engine holds at most 16"
    ):
        engine.add(1, prompt=12, max_tokens=1, export_kv=True, generated=tuple(range(10)))


def test_admission_never_preempts():
    engine = Engine(blocks=4)
    engine.add(1, prompt=12, max_tokens=2)
    engine.step()
    engine.add(2, prompt=4, max_tokens=2, priority=-5)
    engine.step()
    assert engine.scheduler.counters.preemptions == 0 and engine.ended[1].output_tokens == 2


def test_admission_leaves_a_block_for_each_running_sequence():
    engine = Engine(blocks=4)
    engine.add(1, prompt=2, max_tokens=8)
    engine.step()
    engine.add(2, prompt=12, max_tokens=1)
    assert engine.pool.available == 3
    assert engine.step().rows == [0], "one of the three blocks is the first sequence's to grow into"


# -- pause, resume and weights ----------------------------------------------------


def test_a_frozen_scheduler_runs_nothing_and_loses_nothing():
    engine = Engine()
    engine.add(1)
    engine.step()
    engine.launch()
    engine.scheduler.pause(Flow.FROZEN)
    assert engine.launch() is None and not engine.scheduler.quiesced
    engine.land()
    assert engine.scheduler.quiesced
    engine.scheduler.resume()
    engine.run()
    assert engine.tokens[1] == engine.answer(prompt_of(1), 4)


def test_draining_finishes_started_sequences_and_admits_no_new_ones():
    engine = Engine(running=1)
    engine.add(1)
    engine.add(2)
    engine.step()
    engine.scheduler.pause(Flow.DRAIN)
    assert not engine.scheduler.drained
    engine.run()
    assert list(engine.ended) == [1] and engine.scheduler.drained
    engine.scheduler.resume()
    engine.run()
    assert list(engine.ended) == [1, 2]


def test_draining_readmits_preempted_sequences():
    engine = Engine(blocks=8)
    engine.add(1, prompt=8, max_tokens=16)
    engine.add(2, prompt=8, max_tokens=16)
    while not engine.scheduler.counters.preemptions:
        engine.step()
    engine.scheduler.pause(Flow.DRAIN)
    assert not engine.scheduler.drained
    engine.run()
    assert set(engine.ended) == {1, 2} and engine.scheduler.drained


@pytest.mark.parametrize("recompute", [True, False])
def test_new_weights_change_tokens_and_never_hit_old_kv(recompute):
    engine = Engine()
    engine.add(1, prompt=8, max_tokens=4)
    engine.step()
    engine.scheduler.pause(Flow.FROZEN)
    engine.device.version = 1
    engine.scheduler.weights_changed(1, recompute=recompute)
    engine.scheduler.resume()
    engine.add(2, prompt=prompt_of(1, 8), max_tokens=4)
    engine.run()
    assert engine.ended[2].cached_tokens == (8 - BLOCK_SIZE if recompute else 0)
    assert engine.tokens[2] == engine.answer(prompt_of(1, 8), 4)
    assert [outputs.version for outputs in engine.outputs_taken if outputs.tokens] == [0] + [1] * (
        len(engine.outputs_taken) - 3
    )
    if recompute:
        prompt = [*prompt_of(1, 8), engine.tokens[1][0]]
        assert engine.tokens[1][1:] == engine.answer(prompt, 3)


def test_42_the_horizon_is_when_the_evicted_sequence_ended_and_new_weights_move_it_to_now():
    engine = Engine(blocks=8)
    for now_s, id in enumerate((1, 2), start=1):
        engine.scheduler.tick(now_s)
        engine.add(id, prompt=8)
        engine.run()
    assert engine.pool.horizon_s == -inf
    engine.scheduler.tick(3.0)
    engine.add(3, prompt=20)
    engine.run()
    assert engine.pool.horizon_s == 1.0, "the first request's prefix is gone, the second's is not"
    engine.scheduler.tick(5.0)
    engine.scheduler.pause(Flow.FROZEN)
    engine.scheduler.weights_changed(1, recompute=True)
    assert engine.pool.horizon_s == 5.0


def test_a_block_half_filled_by_old_weights_is_not_published():
    engine = Engine(budget=3)
    engine.add(1, prompt=8, max_tokens=1)
    engine.step()
    engine.scheduler.pause(Flow.FROZEN)
    engine.device.version = 1
    engine.scheduler.weights_changed(1, recompute=False)
    engine.scheduler.resume()
    engine.run()
    engine.add(2, prompt=prompt_of(1, 8), max_tokens=4)
    engine.run()
    assert engine.tokens[2] == engine.answer(prompt_of(1, 8), 4) and engine.ended[2].cached_tokens == 0


def test_weights_change_only_when_quiesced_and_all_outputs_were_taken():
    engine = Engine()
    engine.add(1)
    engine.launch()
    with pytest.raises(AssertionError):
        engine.scheduler.weights_changed(1, recompute=True)


def test_running_sequences_recompute_when_all_kv_is_lost():
    engine = Engine()
    engine.add(1, prompt=8, max_tokens=1)
    engine.run()
    engine.add(2, prompt=9, max_tokens=6)
    engine.step()
    engine.step()
    engine.scheduler.pause(Flow.FROZEN)
    engine.scheduler.kv_lost()
    engine.device.forget()
    assert engine.pool.held == engine.pool.cached == 0
    engine.scheduler.resume()
    engine.add(3, prompt=prompt_of(1, 8), max_tokens=4)
    engine.run()
    assert engine.tokens[2] == engine.answer(prompt_of(2, 9), 6)
    assert engine.tokens[3] == engine.answer(prompt_of(1, 8), 4) and engine.ended[3].cached_tokens == 0


def test_kv_on_lease_is_not_discarded():
    engine, ticket = prefilled()
    engine.scheduler.pause(Flow.FROZEN)
    assert engine.scheduler.lends_kv
    with pytest.raises(AssertionError):
        engine.scheduler.kv_lost()
    engine.scheduler.end_lease(ticket.lease, ticket.generation, fetched=True)
    assert not engine.scheduler.lends_kv
    engine.scheduler.kv_lost()


def test_flushing_drops_only_cached_blocks():
    engine = Engine()
    engine.add(1, prompt=8, max_tokens=1)
    engine.run()
    engine.add(2, prompt=8, max_tokens=2)
    engine.step()
    assert engine.pool.cached == 2 and engine.pool.flush() == 2 and engine.pool.held == 2
    engine.scheduler.check()


# -- log-probabilities ------------------------------------------------------------


def test_prompt_positions_are_scored_once_even_if_computed_twice():
    engine = Engine(blocks=8, budget=8)
    engine.add(1, prompt=20, max_tokens=2, sampling=SamplingParams(max_tokens=2, prompt_logprobs=0))
    engine.step()
    engine.scheduler.pause(Flow.FROZEN)
    engine.device.version = 1
    engine.scheduler.weights_changed(1, recompute=True)
    engine.scheduler.resume()
    engine.run()
    assert sum(len(outputs.prompt_logprobs.get(1, ())) for outputs in engine.outputs_taken) == 19


def routed_of(engine: Engine, id: int) -> list[tuple[int, int]]:
    """The first position of each report, and the number of its tokens."""
    reports = [report for outputs in engine.outputs_taken for report in outputs.routed.get(id, ())]
    return [(report.start, len(report.ids) // 8) for report in reports]


def test_experts_of_cached_tokens_are_reported_with_the_first_slice():
    engine = Engine(budget=8, keeps_routed_experts=True)
    engine.add(1, prompt=prompt_of(1, 12), max_tokens=1)
    engine.run()
    asked = SamplingParams(max_tokens=3, return_routed_experts=True, ignore_eos=True)
    engine.add(2, prompt=prompt_of(1, 20), sampling=asked)
    engine.run()
    assert routed_of(engine, 2) == [(0, 20), (20, 1), (21, 1)] and not routed_of(engine, 1)


def test_reports_of_experts_add_up_until_the_outputs_are_taken():
    engine = Engine(budget=8, keeps_routed_experts=True)
    engine.add(1, prompt=20, sampling=SamplingParams(max_tokens=1, return_routed_experts=True))
    for _ in range(3):
        engine.launch()
        engine.scheduler.commit(engine.device.land())
    engine.collect()
    assert routed_of(engine, 1) == [(0, 8), (8, 8), (16, 4)]


def test_an_engine_that_keeps_no_experts_refuses_to_return_them():
    with pytest.raises(RequestError, match="start it with --routed-experts") as refused:
        Engine().add(1, sampling=SamplingParams(return_routed_experts=True))
    assert refused.value.param == "return_routed_experts"


def scores_of(engine: Engine, id: int) -> list[Logprobs]:
    return [score for outputs in engine.outputs_taken for score in outputs.prompt_logprobs.get(id, ())]


def test_a_prompt_without_an_answer_is_scored_and_ends():
    engine = Engine(budget=8)
    engine.add(1, prompt=20, sampling=SamplingParams(max_tokens=0, prompt_logprobs=0))
    engine.run()
    ended = engine.ended[1]
    assert (ended.finish_reason, ended.cause, ended.output_tokens) == ("length", "max_tokens", 0)
    assert len(scores_of(engine, 1)) == 19 and not engine.tokens
    assert engine.pool.held == 0


def test_a_prompt_of_one_token_without_an_answer_ends_at_once():
    engine = Engine()
    engine.add(1, prompt=1, sampling=SamplingParams(max_tokens=0, prompt_logprobs=0))
    assert engine.step() is None
    assert engine.ended[1].finish_reason == "length"


def test_a_prompt_without_an_answer_fills_the_cache_and_may_be_found_there():
    engine = Engine()
    for id in (1, 2):
        engine.add(id, prompt=prompt_of(1, 9), sampling=SamplingParams(max_tokens=0))
        engine.run()
    assert engine.ended[1].cached_tokens == 0 and engine.ended[2].cached_tokens == 4
    assert engine.ended[2].finish_reason == "length"


def test_a_prompt_without_an_answer_may_fill_the_context():
    engine = Engine(blocks=8, budget=64)
    most = engine.scheduler.max_context
    engine.add(1, prompt=most, sampling=SamplingParams(max_tokens=0, prompt_logprobs=0))
    engine.run()
    assert len(scores_of(engine, 1)) == most - 1
    with pytest.raises(ContextTooLong, match="max_tokens is 0"):
        engine.add(2, prompt=most + 1, sampling=SamplingParams(max_tokens=0, prompt_logprobs=0))


def pooled(engine: Engine, id: int, prompt: list[int], pooling: Pooling, **fields: object) -> None:
    engine.add(id, prompt=prompt, max_tokens=0, pooling=pooling, **fields)


def vectors_of(engine: Engine) -> dict[int, bytes]:
    return {id: vector for outputs in engine.outputs_taken for id, vector in outputs.vectors.items()}


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_a_pooled_prompt_ends_with_its_vector_and_samples_nothing(pooling: Pooling):
    engine = Engine(budget=8)
    for id, count in ((1, 1), (2, 20), (3, 9)):
        pooled(engine, id, prompt_of(id, count), pooling)
    engine.add(4, prompt=5)
    engine.run()
    assert vectors_of(engine) == {
        id: expected_vector(prompt_of(id, count), 0, pooling) for id, count in ((1, 1), (2, 20), (3, 9))
    }
    assert engine.tokens == {4: engine.answer(prompt_of(4, 5), 4)}
    assert {(ended.cause, ended.output_tokens) for id, ended in engine.ended.items() if id < 4} == {("max_tokens", 0)}
    assert engine.pool.held == 0


@pytest.mark.parametrize(("pooling", "cached"), [("last", 16), ("mean", 0)])
def test_a_prefix_hit_serves_the_last_token_and_not_a_mean(pooling: Pooling, cached: int):
    engine = Engine()
    for id in (1, 2):
        pooled(engine, id, prompt_of(1, 18), pooling)
        engine.run()
    assert engine.ended[2].cached_tokens == cached
    assert set(vectors_of(engine).values()) == {expected_vector(prompt_of(1, 18), 0, pooling)}


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_the_vector_of_a_preempted_prompt_begins_anew(pooling: Pooling):
    engine = Engine(budget=8)
    pooled(engine, 1, prompt_of(1, 20), pooling)
    engine.step()
    engine.scheduler.pause(Flow.FROZEN)
    engine.scheduler.kv_lost()
    engine.device.forget()
    engine.scheduler.resume()
    engine.run()
    assert engine.scheduler.counters.preemptions == 1
    assert vectors_of(engine) == {1: expected_vector(prompt_of(1, 20), 0, pooling)}


def test_a_pooled_prompt_may_fill_the_context():
    engine = Engine(blocks=8)
    most = engine.scheduler.max_context
    pooled(engine, 1, prompt_of(1, most), "mean")
    engine.run()
    assert vectors_of(engine) == {1: expected_vector(prompt_of(1, most), 0, "mean")}
    with pytest.raises(ContextTooLong, match=f"prompt has {most + 1} tokens"):
        pooled(engine, 2, prompt_of(2, most + 1), "mean")


def test_an_aborted_prompt_has_no_vector():
    engine = Engine(budget=8)
    pooled(engine, 1, prompt_of(1, 12), "mean")
    engine.step()
    engine.launch()
    engine.scheduler.abort([1], "api_abort")
    engine.land()
    engine.run()
    assert engine.ended[1].cause == "api_abort" and not vectors_of(engine)


@pytest.mark.parametrize("other", [{"max_tokens": 1}, {"generated": (1,)}, {"export_kv": True}])
def test_a_pooled_prompt_neither_resumes_nor_samples(other: dict[str, object]):
    with pytest.raises(ValueError, match="a request with pooling must be one with max_tokens 0"):
        Engine().add(1, **{"max_tokens": 0, "pooling": "last", **other})  # type: ignore[arg-type]


def test_a_fetched_prompt_with_max_tokens_0_ends_with_length():
    p, ticket = prefilled(9)
    assert ticket.tokens == 8
    d = Engine()
    d.add(1, prompt=9, ticket=ticket, sampling=SamplingParams(max_tokens=0))
    d.step()
    d.scheduler.transfer_done(1, ok=True)
    d.device.kv = p.device.kv
    d.run()
    assert d.ended[1].finish_reason == "length"


def test_tokens_before_the_first_scored_one_may_be_cached():
    engine = Engine()
    engine.add(1, prompt=16, max_tokens=1)
    engine.run()
    engine.add(
        2, prompt=prompt_of(1, 16), sampling=SamplingParams(max_tokens=1, prompt_logprobs=0, prompt_logprobs_start=10)
    )
    plan = engine.step()
    assert (plan.starts, plan.counts) == ([8], [8])
    engine.run()
    assert scores_of(engine, 2) == [
        score(expected_entries(prompt_of(1, 16), 0)[p - 1], prompt_of(1, 16)[p]) for p in range(10, 16)
    ]


def test_a_preempted_sequence_finds_the_scored_part_of_its_prompt_in_the_cache():
    engine = Engine(blocks=8, budget=8)
    engine.add(1, prompt=20, sampling=SamplingParams(max_tokens=2, prompt_logprobs=0))
    engine.step()
    engine.scheduler._preempt(engine.scheduler.sequences[1])
    assert engine.step().starts == [8]
    engine.run()
    assert len(scores_of(engine, 1)) == 19


def test_a_scored_prompt_does_not_use_the_cache():
    engine = Engine()
    engine.add(1, prompt=8, max_tokens=1)
    engine.run()
    engine.add(2, prompt=prompt_of(1, 8), sampling=SamplingParams(max_tokens=1, prompt_logprobs=0))
    assert engine.step().counts == [8]


def test_a_scored_prompt_is_not_fetched_either():
    _, ticket = prefilled()
    d = Engine()
    d.add(1, prompt=10, ticket=ticket, sampling=SamplingParams(max_tokens=1, prompt_logprobs=0))
    plan = d.step()
    assert not plan.fetches and plan.counts == [10]
    assert sum(len(outputs.prompt_logprobs.get(1, ())) for outputs in d.outputs_taken) == 9


def test_the_first_tokens_carry_the_version_of_the_first_weights():
    scheduler = Scheduler(BlockPool(8, 4), SchedulerLimits(20, 1, 20, VOCAB_SIZE), version=7)
    scheduler.add(GenerateRequest(1, (1, 2), SamplingParams(max_tokens=1)))
    plan = scheduler.schedule()
    scheduler.commit(StepResult(plan.step, [5]))
    assert scheduler.take_outputs().version == 7


def test_a_sampled_token_is_reported_with_its_log_probability():
    engine = Engine()
    engine.add(1, max_tokens=1)
    plan = engine.scheduler.schedule()
    engine.scheduler.commit(StepResult(plan.step, [5], {0: Logprobs(-1.5)}))
    assert engine.scheduler.take_outputs().logprobs == {0: Logprobs(-1.5)}


# -- prefill/decode disaggregation ------------------------------------------------


def prefilled(prompt: int = 10, **limits: object) -> tuple[Engine, Ticket]:
    """Return an engine that has computed a prompt and leases its KV, and the ticket for it."""
    engine = Engine(engine="P", generation=3, **limits)
    engine.add(1, prompt=prompt, max_tokens=1, export_kv=True)
    engine.run()
    return engine, ticket_of(engine)


def ticket_of(engine: Engine, id: int = 1) -> Ticket:
    (ticket,) = (outputs.tickets[id] for outputs in engine.outputs_taken if id in outputs.tickets)
    return ticket


def end_of(engine: Engine, id: int = 1) -> tuple[str, str]:
    engine.collect()
    return engine.ended[id].finish_reason, engine.ended[id].cause


def test_an_export_computes_whole_blocks_and_samples_nothing():
    engine, ticket = prefilled(blocks=8)
    assert (ticket.engine, ticket.generation, ticket.tokens) == ("P", 3, 8)
    assert not engine.tokens and not engine.ended and engine.pool.held == 2
    assert engine.device.kv[0] + engine.device.kv[1] == expected_entries(prompt_of(1, 8), 0)


def test_an_export_ends_when_its_kv_has_been_fetched():
    engine, ticket = prefilled(blocks=8)
    engine.scheduler.end_lease(ticket.lease, ticket.generation + 1, fetched=True)
    assert engine.pool.held == 2
    engine.scheduler.end_lease(ticket.lease, ticket.generation, fetched=True)
    engine.scheduler.end_lease(ticket.lease, ticket.generation, fetched=False)
    assert engine.pool.held == 0 and not engine.scheduler.leases
    assert end_of(engine) == ("stop", "exported")


def test_an_export_that_the_peer_releases_unfetched_ends_at_once():
    engine, ticket = prefilled()
    engine.scheduler.end_lease(ticket.lease, ticket.generation, fetched=False)
    assert end_of(engine) == ("abort", "transfer_failed") and engine.pool.held == 0


def test_the_ticket_is_issued_before_the_prompt_is_computed_and_blocks_are_lent_as_they_fill():
    engine = Engine(budget=4)
    engine.add(1, prompt=14, export_kv=True)
    plan = engine.launch()
    engine.collect()
    ticket = ticket_of(engine)
    assert plan.counts == [4] and ticket.tokens == 12
    (lease,) = engine.scheduler.leases
    assert engine.scheduler.leases.take_news() == [Granted(lease)]
    engine.land()
    engine.step()
    assert engine.scheduler.leases.take_news() == [Filled(lease.id, 1), Filled(lease.id, 2)]
    engine.scheduler.abort([1], "client_disconnect")
    assert engine.scheduler.leases.take_news() == [Withdrawn(lease.id)]


def test_an_export_computes_its_last_block_even_if_all_are_cached():
    engine = Engine()
    engine.add(1, prompt=12, max_tokens=1)
    engine.run()
    engine.add(2, prompt=prompt_of(1, 12), export_kv=True)
    assert engine.step().counts == [4]
    assert Filled(1, 2) in engine.scheduler.leases.take_news()


def test_a_prompt_without_a_whole_block_has_nothing_to_export():
    engine = Engine()
    engine.add(1, prompt=4, export_kv=True)
    assert end_of(engine) == ("stop", "exported") and not engine.scheduler.leases
    assert not any(outputs.tickets for outputs in engine.outputs_taken)


def test_an_engine_that_serves_no_kv_exports_nothing():
    engine = Engine(exports=False)
    with pytest.raises(RequestError, match="does not export KV"):
        engine.add(1, prompt=9, export_kv=True)


def test_an_export_includes_generated_tokens():
    engine = Engine()
    engine.add(1, prompt=4, export_kv=True, generated=(5, 6, 7, 8, 9))
    engine.run()
    assert ticket_of(engine).tokens == 8


def test_an_unfetched_lease_expires():
    engine, _ = prefilled(lease_s=30.0)
    assert engine.scheduler.next_deadline_s == 30.0
    engine.scheduler.tick(29.9)
    assert engine.pool.held == 2
    engine.scheduler.tick(30.0)
    assert engine.pool.held == 0 and engine.scheduler.counters.leases_expired == 1
    assert end_of(engine) == ("abort", "transfer_failed")


def test_an_export_has_a_limited_wait_for_blocks_and_then_its_own_timeout():
    engine = Engine(blocks=8, export_wait_s=5.0, lease_s=100.0)
    engine.add(1, prompt=20, max_tokens=8)
    engine.launch()
    engine.add(2, prompt=20, export_kv=True)
    engine.scheduler.tick(5.0)
    assert end_of(engine, 2) == ("abort", "capacity")
    engine.land()
    engine.run()
    engine.add(3, prompt=20, export_kv=True, timeout_s=50.0)
    engine.step()
    engine.scheduler.tick(54.0)
    assert 3 not in engine.ended
    engine.scheduler.tick(55.0)
    assert end_of(engine, 3) == ("abort", "deadline")


def test_an_aborted_export_leaves_no_lease():
    engine = Engine()
    engine.add(1, prompt=8, max_tokens=1, export_kv=True)
    engine.launch()
    engine.scheduler.abort([1], "api_abort")
    engine.land()
    assert not engine.scheduler.leases and engine.pool.held == 0


def test_32_an_export_chosen_for_preemption_ends_at_once():
    engine = Engine(blocks=8)
    engine.add(1, prompt=9, max_tokens=20)
    engine.add(2, prompt=13, export_kv=True, priority=1)
    while 2 not in engine.ended:
        engine.step()
    assert end_of(engine, 2) == ("abort", "preempted") and not engine.scheduler.leases
    engine.run()
    assert engine.tokens[1] == engine.answer(prompt_of(1, 9), 20)


@pytest.mark.parametrize("recompute", [True, False])
def test_kv_of_mixed_weights_is_not_exported(recompute):
    engine = Engine(budget=4)
    engine.add(1, prompt=9, max_tokens=1, export_kv=True)
    engine.step()
    engine.scheduler.pause(Flow.FROZEN)
    engine.device.version = 1
    engine.scheduler.weights_changed(1, recompute=recompute)
    assert end_of(engine) == ("abort", "weights") and not engine.scheduler.leases


def test_33_a_sequence_without_room_is_returned_for_rescheduling():
    engine = Engine(blocks=8, reschedules=True)
    engine.add(1, prompt=9, max_tokens=20)
    engine.add(2, prompt=13, max_tokens=12, priority=1)
    engine.run()
    assert end_of(engine, 2) == ("pd_reschedule", "preempted")
    assert engine.tokens[1] == engine.answer(prompt_of(1, 9), 20)
    assert 0 < engine.ended[2].output_tokens == len(engine.tokens[2]) < 12
    assert engine.scheduler.counters.rescheduled == 1 and engine.scheduler.counters.preemptions == 0


def test_74_a_sequence_marked_for_recomputation_is_not_returned_for_rescheduling():
    engine = Engine(blocks=8, reschedules=True)
    engine.add(1, prompt=9, max_tokens=20)
    engine.add(2, prompt=13, max_tokens=12, priority=1, recompute=True)
    engine.run()
    assert engine.tokens[2] == engine.answer(prompt_of(2, 13), 12)
    assert engine.scheduler.counters.rescheduled == 0 and engine.scheduler.counters.preemptions == 1


@pytest.mark.parametrize(("reschedules", "reason"), [(True, "pd_reschedule"), (False, "abort")])
def test_33_sequences_cut_by_a_shutdown_can_be_resumed_on_another_engine(reschedules, reason):
    engine = Engine(reschedules=reschedules)
    engine.add(1, prompt=9, max_tokens=20)
    engine.add(2, prompt=9, export_kv=True)
    engine.step()
    engine.scheduler.abort([1, 2], "shutdown")
    assert end_of(engine, 1) == (reason, "shutdown") and end_of(engine, 2) == ("abort", "shutdown")


def waiting_to_fetch() -> Engine:
    """Return an engine in which a fetch waits, because two launched steps still write its blocks."""
    engine = Engine(blocks=3, max_context=12, running=2)
    engine.add(5, prompt=9, max_tokens=3)
    engine.launch()
    engine.launch()
    engine.scheduler.abort([5], "client_disconnect")
    engine.add(1, prompt=10, max_tokens=2, ticket=prefilled()[1])
    assert engine.launch() is None and engine.pool.available == 0
    return engine


def test_a_transfer_begins_when_the_last_step_that_touches_its_blocks_has_landed():
    engine = waiting_to_fetch()
    engine.land()
    assert engine.launch() is None
    engine.land()
    (fetch,) = engine.launch().fetches
    assert (fetch.id, len(fetch.blocks)) == (1, 2)


def test_a_sequence_that_ends_before_its_transfer_begins_fetches_nothing():
    engine = waiting_to_fetch()
    engine.scheduler.abort([1], "client_disconnect")
    assert engine.pool.available == 3 and engine.scheduler.unwanted == [1]
    engine.land()
    engine.land()
    assert engine.launch() is None and not engine.scheduler.fetches


def fetching(ticket: Ticket, **limits: object) -> Engine:
    engine = Engine(engine="D", **limits)
    engine.add(1, prompt=10, max_tokens=4, ticket=ticket)
    return engine


def test_a_fetched_prompt_leaves_the_rest_to_compute():
    p, ticket = prefilled()
    d = fetching(ticket)
    (fetch,) = d.launch().fetches
    assert d.launch() is None, "nothing runs before the KV has landed"
    lease = p.scheduler.leases.find(ticket.lease, ticket.generation)
    for ours, theirs in zip(fetch.blocks, lease.blocks, strict=True):
        d.device.kv[ours][:] = p.device.kv[theirs]
    d.scheduler.transfer_done(fetch.id, ok=True)
    assert d.step().counts == [2]
    d.run()
    assert d.tokens[1] == d.answer(prompt_of(1, 10), 4)


def test_a_step_takes_no_more_than_its_budget_however_many_transfers_land():
    _, ticket = prefilled()
    d = Engine(budget=2)
    for id in (1, 2, 3):
        d.add(id, prompt=prompt_of(1, 10), max_tokens=4, ticket=ticket)
    for fetch in d.launch().fetches:
        d.scheduler.transfer_done(fetch.id, ok=True)
    assert d.launch().counts == [2]


def test_a_lost_transfer_is_a_local_prefill():
    d = fetching(prefilled()[1])
    (fetch,) = d.launch().fetches
    assert d.scheduler.fetches == 1
    d.scheduler.transfer_done(fetch.id, ok=False)
    assert d.step().counts == [10]
    assert d.scheduler.counters.transfers_lost == 1 and d.scheduler.fetches == 0
    d.run()
    assert d.tokens[1] == d.answer(prompt_of(1, 10), 4)


def test_a_ticket_is_good_for_one_fetch_even_if_the_sequence_is_preempted_later():
    d = Engine(blocks=8)
    d.add(1, prompt=10, max_tokens=4, ticket=prefilled()[1], priority=1)
    (fetch,) = d.launch().fetches
    d.scheduler.transfer_done(fetch.id, ok=False)
    d.add(2, prompt=16, max_tokens=15)
    fetches = []
    while plan := d.step():
        fetches += plan.fetches
    assert d.scheduler.counters.preemptions == 1 and not fetches and not d.scheduler.unwanted
    assert d.tokens[1] == d.answer(prompt_of(1, 10), 4)


def test_locally_cached_blocks_are_not_fetched():
    d = fetching(prefilled()[1])
    d.scheduler.abort([1], "api_abort")
    d.collect()
    d.add(2, prompt=prompt_of(1, 5), max_tokens=1)
    d.run()
    d.add(3, prompt=prompt_of(1, 10), ticket=prefilled()[1])
    (fetch,) = d.launch().fetches
    assert fetch.skip == 1 and len(fetch.blocks) == 1


def test_a_ticket_for_less_than_the_local_cache_is_not_used():
    d = Engine()
    d.add(2, prompt=prompt_of(1, 9), max_tokens=1)
    d.run()
    _, ticket = prefilled(prompt=8)
    d.add(3, prompt=prompt_of(1, 9), ticket=ticket)
    assert not d.launch().fetches and d.scheduler.unwanted == [3]


@pytest.mark.parametrize(
    "change", [{"version": 1}, {"key": b"?" * 16}, {"tokens": 9}, {"tokens": 12}, {"tokens": -4}]
)
def test_a_ticket_that_does_not_match_is_not_used(change):
    d = fetching(msgspec.structs.replace(prefilled()[1], **change))
    plan = d.launch()
    assert not plan.fetches and plan.counts == [10]


def test_a_forged_ticket_for_more_than_the_prompt_is_not_used():
    d = Engine()
    request = GenerateRequest(1, tuple(prompt_of(1, 10)))
    forged = d.scheduler.admission.new_sequence(request, 1, 0.0).keys(3, version=0, block_size=4)
    d.add(1, prompt=10, ticket=Ticket("P", 1, 1, 12, 0, forged[-1]))
    assert not d.launch().fetches


def test_a_ticket_for_every_token_leaves_one_to_compute():
    d = Engine()
    d.add(1, prompt=8, ticket=prefilled(prompt=9)[1])
    (fetch,) = d.launch().fetches
    d.scheduler.transfer_done(fetch.id, ok=True)
    assert d.launch().counts == [1]


def test_an_unused_ticket_is_reported_as_unwanted_once():
    d = fetching(prefilled()[1], blocks=8)
    d.scheduler.abort([1], "api_abort")
    assert d.scheduler.unwanted == [1]
    d = fetching(prefilled()[1], blocks=8)
    (fetch,) = d.launch().fetches
    d.scheduler.abort([1], "api_abort")
    assert d.scheduler.unwanted == [1]
    d.scheduler.transfer_done(fetch.id, ok=False)
    assert d.scheduler.unwanted == [1] and d.pool.held == 0


def test_an_abort_while_loading_keeps_blocks_until_the_transfer_lands():
    d = fetching(prefilled()[1], blocks=8)
    (fetch,) = d.launch().fetches
    d.scheduler.abort([1], "api_abort")
    assert d.pool.available == 5
    d.scheduler.transfer_done(fetch.id, ok=True)
    assert d.pool.available == 8


@pytest.mark.parametrize("recompute", [True, False])
def test_kv_that_lands_after_a_weight_change_is_not_used(recompute):
    d = fetching(prefilled()[1])
    (fetch,) = d.launch().fetches
    d.scheduler.pause(Flow.FROZEN)
    d.device.version = 1
    d.scheduler.weights_changed(1, recompute=recompute)
    d.scheduler.resume()
    d.scheduler.transfer_done(fetch.id, ok=True)
    plan = d.step()
    assert plan.counts == [10] and not plan.fetches, "the ticket was good for one fetch"
    d.run()
    assert d.tokens[1] == d.answer(prompt_of(1, 10), 4)


GRAMMAR = SamplingParams(max_tokens=4, grammar="start: /.*/")


def test_a_sequence_with_a_grammar_waits_until_its_token_is_known():
    engine = Engine()
    engine.add(1, sampling=GRAMMAR)
    engine.add(2)
    assert engine.launch().rows == [0, 1]
    assert engine.launch().rows == [1], "only the free one runs ahead"
    engine.land()
    assert engine.launch().rows == [0, 1]
    while len(engine.device):
        engine.land()
    engine.run()
    assert engine.tokens[1] == engine.answer(prompt_of(1), 4)
    assert engine.tokens[2] == engine.answer(prompt_of(2), 4)


def test_a_prompt_under_a_grammar_is_computed_ahead_like_any_other():
    engine = Engine(budget=5)
    engine.add(1, prompt=12, sampling=GRAMMAR)
    assert [engine.launch().counts for _ in range(3)] == [[5], [5], [2]]
    assert engine.launch() is None


def test_a_token_that_broke_its_grammar_ends_the_request_and_is_not_sent():
    engine = Engine()
    engine.add(1, sampling=GRAMMAR)
    engine.add(2)
    engine.step()
    engine.launch()
    engine.scheduler.commit(msgspec.structs.replace(engine.device.land(), lost=(0,)))
    engine.collect()
    assert (engine.ended[1].finish_reason, engine.ended[1].cause) == ("abort", "grammar")
    assert engine.tokens[1] == engine.answer(prompt_of(1), 1)
    engine.run()
    assert engine.tokens[2] == engine.answer(prompt_of(2), 4)
    assert engine.pool.available == 32


# -- several tokens per slice -----------------------------------------------------


@pytest.mark.parametrize("length", [1, 2, 3])
def test_a_slice_may_have_several_tokens_and_the_next_one_computes_them_all(length):
    engine = Engine()
    engine.add(1, max_tokens=9)
    engine.step(length)
    assert engine.tokens[1] == engine.answer(prompt_of(1), length)
    plan = engine.step()
    assert (plan.starts, plan.counts) == ([4], [length])
    engine.run()
    assert engine.tokens[1] == engine.answer(prompt_of(1), 9)
    assert engine.scheduler.counters.output_tokens == engine.ended[1].output_tokens == 9
    assert engine.pool.available == 32


@pytest.mark.parametrize("prompt", [1, 4, 6])
def test_a_slice_without_a_token_computes_its_last_position_again(prompt):
    engine = Engine()
    engine.add(1, prompt=prompt, max_tokens=3)
    engine.step(0)
    assert 1 not in engine.tokens and 1 not in engine.ended
    plan = engine.step(2)
    assert (plan.starts, plan.counts, plan.samples) == ([prompt - 1], [1], [True])
    engine.run()
    assert engine.tokens[1] == engine.answer(prompt_of(1, prompt), 3)


def test_slices_of_one_step_may_have_different_numbers_of_tokens():
    engine = Engine()
    for id in (1, 2, 3, 4):
        engine.add(id, max_tokens=6)
    engine.step(2, 0, 3, 1)
    assert {id: len(tokens) for id, tokens in engine.tokens.items()} == {1: 2, 3: 3, 4: 1}
    engine.run()
    assert engine.tokens == {id: engine.answer(prompt_of(id), 6) for id in (1, 2, 3, 4)}


@pytest.mark.parametrize("length", [2, 3])
def test_tokens_after_the_limit_are_dropped(length):
    engine = Engine()
    engine.add(1, max_tokens=3)
    engine.step(2)
    engine.step(length)
    assert engine.tokens[1] == engine.answer(prompt_of(1), 3)
    assert (engine.ended[1].cause, engine.ended[1].output_tokens) == ("max_tokens", 3)
    assert engine.pool.available == 32


@pytest.mark.parametrize(("min_tokens", "count", "cause"), [(0, 2, "stop_token"), (2, 3, "max_tokens")])
def test_tokens_after_a_stop_token_are_dropped_unless_min_tokens_holds_it_back(min_tokens, count, cause):
    engine = Engine(eos_token_ids=())
    second = engine.answer(prompt_of(1), 2)[1]
    engine.add(1, sampling=SamplingParams(max_tokens=3, min_tokens=min_tokens, stop_token_ids=(second,)))
    engine.step(3)
    assert engine.tokens[1] == engine.answer(prompt_of(1), count)
    assert (engine.ended[1].cause, engine.ended[1].output_tokens) == (cause, count)


def test_several_tokens_have_their_own_log_probabilities():
    engine = Engine()
    engine.add(1, max_tokens=2)
    engine.add(2, max_tokens=9)
    plan = engine.launch()
    scores = {i: Logprobs(-float(i)) for i in range(5)}
    engine.scheduler.commit(StepResult(plan.step, [5, 6, 7, 8, 9], scores, lengths=[3, 2]))
    outputs = engine.scheduler.take_outputs()
    assert (outputs.ids, outputs.tokens) == ([1, 1, 2, 2], [5, 6, 8, 9])
    assert outputs.logprobs == {0: Logprobs(0.0), 1: Logprobs(-1.0), 2: Logprobs(-3.0), 3: Logprobs(-4.0)}


def test_tokens_before_the_one_that_broke_its_grammar_count():
    engine = Engine()
    engine.add(1, sampling=GRAMMAR)
    engine.add(2)
    engine.launch()
    engine.scheduler.commit(msgspec.structs.replace(engine.device.land([3, 1]), lost=(1,)))
    engine.collect()
    assert (engine.ended[1].cause, engine.tokens[1]) == ("grammar", engine.answer(prompt_of(1), 1))
    engine.run()
    assert engine.tokens[2] == engine.answer(prompt_of(2), 4)


def test_tokens_of_a_sequence_aborted_during_the_step_are_not_assigned_to_the_next_one():
    engine = Engine()
    engine.add(1)
    engine.add(2, max_tokens=5)
    engine.launch()
    engine.scheduler.abort([1], "api_abort")
    engine.land(3, 2)
    assert 1 not in engine.tokens and engine.tokens[2] == engine.answer(prompt_of(2), 2)


def test_a_block_that_accepted_tokens_fill_is_published_by_the_slice_that_computes_them():
    engine = Engine()
    engine.add(1, prompt=6, max_tokens=9)
    engine.step(2)
    following = [*prompt_of(1, 6), *engine.tokens[1], 1]
    engine.add(2, prompt=following, max_tokens=1)
    # The slice that fills the second block comes first in this step, so the other sequence finds it.
    assert engine.step().counts == [2, 1]
    engine.run()
    assert (engine.ended[2].cached_tokens, engine.tokens[2]) == (8, engine.answer(following, 1))


@pytest.mark.parametrize("length", [0, 2])
def test_a_step_that_a_later_plan_depends_on_has_one_token(length):
    engine = Engine()
    engine.add(1, max_tokens=9)
    engine.launch()
    engine.launch()
    with pytest.raises(AssertionError, match="a later step was planned for the position after one token"):
        engine.land(length)


def test_an_engine_without_grammar_support_refuses_grammars():
    engine = Engine(takes_grammars=False)
    with pytest.raises(RequestError, match="no tokenizer, so an answer cannot follow a grammar") as refused:
        engine.add(1, sampling=GRAMMAR)
    assert refused.value.param == "response_format"
    engine.add(1)


def test_a_request_is_validated_when_it_is_constructed():
    with pytest.raises(ValueError, match="the prompt is empty"):
        GenerateRequest(1, ())


# -- tenants (guarantee 63) ------------------------------------------------------------


def rows_of(engine: Engine) -> dict[str, int]:
    return dict(Counter(seq.request.tenant for seq in engine.scheduler.running))


def test_63_a_single_tenant_leaves_rows_free_and_a_new_tenant_runs_at_once():
    engine = Engine(running=10, blocks=200)
    for id in range(20):
        engine.add(id, max_tokens=50, tenant="greedy")
    engine.step()
    assert rows_of(engine) == {"greedy": 8}
    engine.add(100, tenant="polite")
    engine.step()
    assert rows_of(engine) == {"greedy": 8, "polite": 1}


def test_62_a_suspended_sequence_computes_nothing_until_it_resumes():
    engine = Engine()
    engine.add(1, max_tokens=10)
    engine.add(2, max_tokens=10)
    engine.step()
    engine.scheduler.suspend([1, 999], suspended=True)
    engine.run()
    assert (len(engine.tokens[1]), len(engine.tokens[2])) == (1, 10)
    engine.scheduler.suspend([1], suspended=False)
    engine.run()
    assert engine.ended[1].cause == "max_tokens"


def test_62_launched_steps_of_a_suspended_sequence_still_land():
    engine = Engine()
    engine.add(1, max_tokens=10)
    engine.launch()
    engine.scheduler.suspend([1], suspended=True)
    engine.land()
    assert len(engine.tokens[1]) == 1 and engine.launch() is None


def test_62_a_drain_does_not_wait_for_clients_that_do_not_read():
    engine = Engine()
    engine.add(1, max_tokens=10)
    engine.step()
    engine.scheduler.suspend([1], suspended=True)
    engine.scheduler.pause(Flow.DRAIN)
    engine.run()
    assert engine.ended[1].cause == "max_tokens" and engine.scheduler.drained


def test_63_requests_without_tenants_may_use_all_rows():
    engine = Engine(running=10, blocks=200)
    for id in range(20):
        engine.add(id, max_tokens=50)
    engine.step()
    assert rows_of(engine) == {"": 10}


def test_63_a_single_row_may_go_to_any_tenant():
    engine = Engine(running=1)
    engine.add(1, tenant="a")
    engine.add(2, tenant="b")
    engine.run()
    assert set(engine.ended) == {1, 2}


def test_63_the_tenant_with_the_fewest_rows_is_next_regardless_of_the_priorities_of_others():
    engine = Engine(running=4, blocks=200)
    for id in range(6):
        engine.add(id, max_tokens=3 + id, tenant="a", priority=-5)
    engine.add(10, max_tokens=50, tenant="b")
    engine.add(11, max_tokens=50, tenant="b", priority=-1)
    engine.step()
    assert [seq.id for seq in engine.scheduler.running] == [0, 11, 1]  # the fourth row is kept for a third tenant


def test_63_a_single_tenant_leaves_blocks_free():
    engine = Engine(running=30, blocks=100, budget=1000)
    for id in range(20):
        engine.add(id, prompt=47, max_tokens=2, tenant="greedy")
    engine.step()
    assert sum(seq.own for seq in engine.scheduler.running) == 72  # 12 more would leave only 16 of 100
    engine.add(100, prompt=47, max_tokens=2, tenant="polite")
    engine.launch()
    assert rows_of(engine) == {"greedy": 6, "polite": 1}
    engine.land()
    engine.run()
    assert len(engine.ended) == 21


def test_63_the_tenant_with_the_most_blocks_is_preempted_and_its_first_sequence_last():
    engine = Engine(running=8, blocks=12)
    engine.add(1, prompt=4, max_tokens=30, tenant="greedy")
    engine.add(2, prompt=4, max_tokens=30, tenant="greedy")
    engine.add(3, prompt=4, max_tokens=20, tenant="polite")
    while not engine.scheduler.counters.preemptions:
        engine.step()
    assert {seq.id for seq in engine.scheduler.running} == {1, 3}  # although 3 arrived last
    engine.run()
    assert {id: end.finish_reason for id, end in engine.ended.items()} == dict.fromkeys((1, 2, 3), "length")


def test_63_a_step_considers_only_tenants_that_may_be_next(monkeypatch: pytest.MonkeyPatch):
    engine, looked = Engine(blocks=24), []
    engine.add(0, prompt=20, max_tokens=60, tenant="busy")
    engine.step()
    for id in range(1, 51):
        engine.add(id, prompt=90, tenant=f"t{id}")  # does not fit beside the running one
    may_start = Scheduler._may_start
    monkeypatch.setattr(Scheduler, "_may_start", lambda self, seq: looked.append(seq) or may_start(self, seq))
    engine.step()
    assert [seq.id for seq in looked] == [1]
