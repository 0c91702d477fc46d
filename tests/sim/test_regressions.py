"""Bugs that the simulation has found, each with the smallest plan or the seed that shows it.

Docstrings describe the behaviour before the fix.
"""

from __future__ import annotations

import pytest

from headgate.testing.sim import hostile
from headgate.testing.sim.caller import ClientBehaviour
from headgate.testing.sim.engine import EngineProfile
from headgate.testing.sim.hosts import ServerSettings
from headgate.testing.sim.judge import read
from headgate.testing.sim.kv import KvSettings
from headgate.testing.sim.network import NetworkConditions
from headgate.testing.sim.world import simulate
from tests.sim.plans import SHORT_DRAIN, action, make_chat, request


def test_44_a_worker_that_shuts_down_during_a_pause_gets_requests_after_its_restart(run_plan):
    """The worker answered the pause as *draining*. The router took that for a drain of its own, which never ended."""
    pause = action(0.3, "pause", mode="drain", new_requests="reject", timeout=5.0)
    report, world = run_plan([request("a"), request("b")], pause, action(0.4, "shutdown"))
    assert not report.failures
    assert {worker.state for worker in world.router.router.fleet} == {"ready"}


def test_a_second_signal_after_the_deadline_of_a_shutdown_changes_nothing(run_plan):
    """The deadline of the first signal had passed, and moving it raised an error in the signal handler."""
    stuck = action(0.3, "stop_engine", duration_s=4.0, which=0.0)
    report, _ = run_plan(
        [request("a", to="server0")], stuck, action(0.5, "shutdown"), action(1.5, "shutdown"), **SHORT_DRAIN
    )
    assert not report.failures
    assert report.actions["shutdown"] == 2


def test_22_a_control_call_interrupted_by_a_shutdown_is_not_logged_as_a_bug(run_plan):
    """The handler was cancelled, and the HTTP server logged that as an exception of the application."""
    stuck = action(0.3, "stop_engine", duration_s=20.0, which=0.0)
    pause = action(0.4, "pause_one", mode="drain", timeout=60.0)
    report, _ = run_plan([], stuck, pause, action(0.5, "shutdown"), **SHORT_DRAIN)
    assert not report.failures


def test_5_a_stream_that_is_aborted_in_the_routers_queue_ends_with_its_usage(run_plan):
    """The router's own end of the stream had no usage, although the client had requested it."""
    waiting = request("waiting", 0.1, stream_options={"include_usage": True})
    report, _ = run_plan([request("first"), waiting], action(0.5, "abort", req_ids=["waiting"]), max_in_flight=1)
    assert not report.failures
    assert waiting.reply.events()[-2]["usage"] == {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}


def test_20_a_server_shuts_down_even_if_its_engine_dies_while_the_server_is_stopped(run_plan):
    """The engine's end and the supervisor's cancellation came in one iteration; the supervisor missed the latter."""
    held = action(0.6, "stop_server", duration_s=2.0)
    report, _ = run_plan([], action(0.5, "shutdown"), held, action(0.7, "kill_engine", which=0.0), **SHORT_DRAIN)
    assert not report.failures


@pytest.mark.parametrize("more", [{"deadline_ms": 5000}, {}], ids=["with a deadline", "with a ticket"])
def test_49_a_retry_is_recognised_although_the_router_modified_the_first_attempt(run_plan, more):
    """The remaining time and the ticket differ between attempts; the worker took the retry for another request."""
    first = request("first", headers={"idempotency-key": "k"}, **more)
    first.retries = True
    first.behaviour = ClientBehaviour(patience_s=0.5)
    roles = {"roles": ("prefill", "decode"), "kv": KvSettings(disaggregate_tokens=4)}
    report, _ = run_plan([first], **roles)
    assert not report.failures
    assert report.counts["asked again"] == 1 and first.reply.status == 200


@pytest.mark.parametrize("duration_s", [0.05, 0.5])
def test_29_a_worker_that_restarts_quickly_does_not_end_the_pause_of_its_fleet(run_plan, duration_s):
    """It restarted unnoticed and was running; the router took that for a resume of all workers by another caller."""
    report, _ = run_plan(
        [], action(0.3, "pause_and_kill", duration_s=duration_s, mode="abort", whole=True, which=0.0)
    )
    assert not report.failures


@pytest.mark.parametrize("stream", [False, True])
def test_5_an_answer_that_waits_for_another_worker_is_aborted_like_any_other(run_plan, stream):
    """Its worker had ended it in a shutdown, and the client received that cause instead of the abort."""
    away = action(0.1, "kill_server", target="server1", duration_s=6.0)
    abort = action(3.0, "abort", req_ids=["a"], wait=True)
    cut = request("a", 1.5, stream=stream)
    report, _ = run_plan([cut], away, action(2.0, "shutdown", duration_s=4.0), abort, **SHORT_DRAIN)
    assert not report.failures
    assert report.ends == {"api_abort": 1}


def test_49_a_retry_goes_to_the_worker_that_generates_the_answer(run_plan):
    """The worker of a key was only recorded when it had answered, so the retry of a disconnected client ran twice."""
    first = request("first", headers={"idempotency-key": "k"})
    first.retries = True
    first.behaviour = ClientBehaviour(patience_s=0.3)
    report, _ = run_plan([first], action(0.8, "abort_all"))
    assert not report.failures
    assert report.counts["asked again"] == 1


@pytest.mark.parametrize("late_s", [0.85, 1.0])
def test_19_a_server_that_shuts_down_is_not_reported_as_a_paused_fleet(run_plan, late_s):
    """It reported the shutdown in a control answer; the router took that state for a pause and refused clients."""
    stop, flush = action(0.3, "stop_server", duration_s=0.5), action(0.4, "flush")
    report, _ = run_plan([request("late", late_s)], stop, flush, action(0.5, "shutdown"), servers=1)
    assert not report.failures
    assert report.ends == {"max_tokens": 1}


def test_29_a_worker_that_dies_while_others_are_still_being_paused_does_not_end_the_pause(run_plan):
    """It had paused and was restarted; its earlier answer was recorded late, so it then appeared to be resumed."""
    slow = action(0.2, "slow_engine", times=200.0, duration_s=6.0)
    pause = action(0.5, "pause_and_kill", mode="abort", whole=True, duration_s=0.05)
    killed = action(1.0, "kill_server", target="server1", duration_s=0.05)
    report, _ = run_plan([request("a", to="server0")], slow, pause, killed)
    assert not report.failures


def test_5_an_abort_reports_the_tokens_that_the_client_received_not_those_of_a_lost_worker():
    """A worker that was cut off for a while later reported the tokens that it had generated alone."""
    assert not simulate(631, actors=False).failures


def test_36_an_answer_may_return_to_a_worker_that_was_paused_when_it_left():
    """Its last two workers were updated one after the other; the first was ready again, but was not tried."""
    assert not simulate(1371, actors=False).failures


@pytest.mark.parametrize("seed", [1972, 3659])
def test_34_an_answer_ended_by_its_stop_string_while_it_was_rescheduled_is_sent_as_finished(seed):
    """The worker had no room, and sent all ids again, including those after the stop string, or no text at all."""
    assert not simulate(seed, actors=False).failures


def test_5_an_abort_of_an_answer_whose_worker_shuts_down_is_reported_as_an_abort():
    """An answer that was to move to another worker kept the cause of the move."""
    assert not simulate(2710, actors=False).failures


def test_5_a_request_ended_by_its_deadline_is_not_reported_as_aborted():
    """The engine was stopped for eight seconds; when it resumed, it handled the deadline before the abort."""
    assert not simulate(3288, actors=False).failures


def test_44_a_probe_sent_before_an_update_does_not_mark_its_worker_as_outdated():
    """Its answer arrived after the update's, and the only worker was paused and updated again during its requests."""
    assert not simulate(7457, actors=False).failures


@pytest.mark.parametrize("seed", [6687, 6906])
def test_19_a_request_during_the_shutdown_of_the_only_server_is_not_refused_as_paused(seed):
    """Nothing was paused; the router had no state for a worker that shuts down."""
    assert not simulate(seed, actors=False).failures


@pytest.mark.parametrize("seed", [7039, 7491])
def test_46_a_request_that_finds_one_worker_full_and_one_updating_is_refused_as_full(seed):
    """The client received the last refusal: the pause of a single worker."""
    assert not simulate(seed, actors=False).failures


def test_29_a_worker_restarted_during_a_pause_of_the_fleet_does_not_end_the_pause():
    """The old process's answer to the pause was recorded for the new one, which was running and so looked resumed."""
    assert not simulate(7289, actors=False).failures


def test_2_a_request_that_had_finished_when_its_worker_died_is_not_reported_as_aborted():
    """The slow client lacked only the end of the stream, which the router sent itself."""
    assert not simulate(6551, actors=False).failures


def test_5_an_abort_counts_the_tokens_that_its_worker_sent_with_the_end():
    """They were only in the withheld event of a pause, which the journal did not contain."""
    assert not simulate(9645, actors=False).failures


@pytest.mark.parametrize("seed", [5481, 6401, 6452, 6931, 7622, 9504, 9711, 9733])
def test_seeds_that_the_judge_misjudged(seed):
    """The judge waited for servers that had ended themselves, for the fleet of one router when that of another was
    resumed or dead, and for answers kept for a key; it took the replayed answer of a retry for one of old weights, and it
    expected the text of a rescheduled choice whose request was aborted or overdue."""
    assert not simulate(seed, actors=False).failures


def test_a_seed_determines_the_whole_run():
    """The order in which workers were probed during a pause depended on their memory addresses."""
    assert len({simulate(3168, actors=False).hash for _ in range(5)}) == 1


def test_58_a_refusal_after_the_deadline_is_reported_as_the_deadline():
    """A worker paused for its update refused an overdue request, and its client was told to retry later."""
    assert not simulate(8670, actors=False).failures


def test_a_router_does_not_hold_requests_for_a_pause_that_no_worker_carried_out():
    """The engine died during the pause call; the fleet was resumed through the other router, but this one kept holding."""
    assert not simulate(3543, actors=False).failures


def test_29_an_answer_cut_by_a_rolling_update_continues_on_the_updated_worker(run_plan):
    """There was no other worker, and the client was refused as paused. Found by seed 1008076."""
    report, _ = run_plan([request("a")], action(0.2, "roll"), servers=1, profile=EngineProfile(step_s=0.05))
    assert not report.failures
    assert report.ends == {"max_tokens": 1} and report.counts["resumes"] == 1


def test_18_an_answer_whose_connection_breaks_waits_for_workers_paused_by_other_callers(run_plan):
    """One worker drained for an update, the other was paused; the client received worker_lost (seed 1004056)."""
    requests = [request(name, to="router1") for name in "ab"]
    pause = action(0.7, "pause_one", "server1", mode="abort", new_requests="reject", timeout=1.0)
    broken = action(1.5, "reset", between=["router1", "server0"])
    report, _ = run_plan(requests, action(0.2, "roll"), pause, broken, profile=EngineProfile(step_s=0.05), routers=2)
    assert not report.failures
    assert report.ends == {"max_tokens": 1, "pause": 1}


def test_36_an_answer_returns_to_the_worker_that_lost_it_if_the_other_has_old_weights(run_plan):
    """The refusal of the other worker came last, and was sent to the client. Found by seed 1004957."""
    requests = [request("a", 1.0), request("b", 1.0)]
    broken = action(1.8, "reset", between=["router", "server1"])
    report, _ = run_plan(requests, action(0.1, "roll"), action(1.0, "return_old", which=0.0), broken)
    assert not report.failures
    assert report.ends == {"max_tokens": 2}


def test_55_a_request_waits_for_another_worker_when_its_own_restarts_with_old_weights(run_plan):
    """It was refused, although a request sent a moment later waited. Found by seed 1008916."""
    lost = [action(0.8, "return_old", "server1", which=0.0), action(1.8, "return_old", "server0", which=0.0)]
    report, _ = run_plan([request("a", 1.8, max_tokens=12)], action(0.8, "roll"), *lost)
    assert not report.failures
    assert report.ends == {"max_tokens": 1}


@pytest.mark.parametrize("timeout_s", [0.2, 10.0], ids=["before it has followed", "when it has followed"])
def test_24_a_router_notices_that_another_one_resumed_a_worker_re_added_during_a_pause(run_plan, timeout_s):
    """The re-added worker counted as new, and was paused again and again. Found by seed 1000112."""
    away = action(1.0, "stop_server", duration_s=8.0)
    pause = action(1.0, "pause", undo_via="router1", mode="freeze", new_requests="queue", timeout=timeout_s)
    report, _ = run_plan([], away, pause, action(4.0, "remove"), servers=1, routers=2)
    assert not report.failures


def test_24_a_router_notices_the_resume_of_a_worker_that_paused_after_a_restart(run_plan):
    """Its restart was noticed after the resume, and it was paused again: the answer did not identify the new process."""
    short = action(1.0, "kill_server", "server1", duration_s=0.05)
    pause = action(
        1.2, "pause", duration_s=0.05, undo_via="router1", mode="freeze", new_requests="queue", timeout=0.2
    )
    gone = action(1.35, "lose_machine", "server0", duration_s=8.0)
    report, _ = run_plan([], short, pause, gone, routers=2)
    assert not report.failures


@pytest.mark.parametrize("tags", [{}, {"tags": {"run": "a"}}], ids=["by name", "by tags"])
def test_2_an_abort_is_reported_by_the_worker_that_has_the_answer_now(run_plan, tags):
    """After a broken connection another worker still generated it for its key, and reported other tokens (1001790)."""
    keyed = request("a", headers={"idempotency-key": "k"})
    abort = action(1.0, "abort_tags", **tags) if tags else action(1.0, "abort", req_ids=["a"])
    broken = action(0.3, "reset", between=["router", "server1"])
    slow = action(0.3, "slow_engine", "server1", times=2.0)
    report, _ = run_plan([keyed], broken, slow, abort, profile=EngineProfile(step_s=0.03))
    assert not report.failures
    assert report.ends == {"api_abort": 1} and report.counts["resumes"] == 1
    assert report.counts["tokens"] < 80  # no worker has generated all sixty


@pytest.mark.parametrize("at_s", [0.58, 0.62], ids=["before the abort has come", "after it"])
def test_5_a_client_gets_its_aborted_answer_even_if_the_connection_to_the_worker_breaks(run_plan, at_s):
    """The client received worker_lost without the partial answer, which the router had (seed 1008649)."""
    cut = request("a", stream=False)
    broken = action(at_s, "reset", between=["router", "server1"])
    report, _ = run_plan([cut], action(0.5, "abort", req_ids=["a"]), broken, network=NetworkConditions(delay_s=0.05))
    assert not report.failures
    assert report.ends == {"api_abort": 1} and cut.reply.json()["choices"][0]["text"]


def test_49_an_abort_of_an_abandoned_attempt_says_nothing_about_the_retry(run_plan):
    """The judge applied the abort of the first attempt to the second, which had begun since. Found by seed 778730."""
    first = request("a", headers={"idempotency-key": "k"})
    first.retries = True
    first.behaviour = ClientBehaviour(leaves_after_s=0.5)
    report, _ = run_plan([first], action(0.55, "abort_all"), network=NetworkConditions(delay_s=0.03), servers=1)
    assert not report.failures
    assert report.counts["asked again"] == 1


def test_49_an_abort_of_an_answer_kept_for_a_key_says_nothing_about_the_answer_already_sent(run_plan):
    """Another worker had answered since; the judge confused it with the aborted one. Found by seed 1003056."""
    keyed = request("a", headers={"idempotency-key": "k"})
    broken, slow = (
        action(0.3, "reset", between=["router", "server1"]),
        action(0.3, "slow_engine", "server1", times=30.0),
    )
    report, _ = run_plan([keyed], broken, slow, action(2.0, "abort_all"), profile=EngineProfile(step_s=0.02))
    assert not report.failures
    assert report.ends == {"max_tokens": 1}


def test_25_a_server_whose_update_failed_halfway_refuses_requests(run_plan):
    """The judge expected an answer from an engine with incomplete weights. Found by seed 1006994."""
    requests = [request(name, 1.0, to=f"server{i}") for i, name in enumerate("abcd")]
    report, _ = run_plan(requests, action(0.3, "update", mode="abort"), update_breaks=1.0, servers=4)
    assert not report.failures
    assert report.ends["503 engine_lost"] == 1


def test_65_a_request_of_another_tenant_with_the_same_id_is_not_a_leak(run_plan):
    """The judge confused the two requests. Found by seed 91700196."""
    leaving, staying = request("a"), request("a@bob", headers={"x-request-id": "a"})
    leaving.behaviour = ClientBehaviour(leaves_after_s=0.1)
    hostile.assign(leaving, hostile.ANN)
    hostile.assign(staying, hostile.BOB)
    report, _ = run_plan([leaving, staying], tenants=hostile.TENANTS)
    assert not report.failures
    assert report.ends == {"left": 1, "max_tokens": 1}


def test_63_a_tenant_whose_own_requests_fill_the_queue_is_refused(run_plan):
    """The judge assumed that the tenant had only one request at a time. Found by seed 123400131."""
    requests = [request("a"), request("b", 0.1)]
    for each in requests:
        hostile.assign(each, hostile.ANN)
    polite = action(0.3, "ask_politely", times=1)
    report, _ = run_plan(requests, polite, tenants=hostile.TENANTS, max_in_flight=1, max_queue=1)
    assert not report.failures


@pytest.mark.parametrize("stopped", [("server1",), ("server0", "server1")], ids=["its server", "all servers"])
def test_69_an_aborted_answer_is_sent_by_its_deadline_with_the_tokens_received_so_far(run_plan, stopped):
    """Another server was asked for its text without the tokens received, and past the deadline. Found by seed 2700067."""
    cut = request("a", stream=False, deadline_ms=1500)
    stops = [action(0.4, "stop_server", server, duration_s=9.0) for server in stopped]
    report, _ = run_plan([cut], *stops, action(0.5, "abort", req_ids=["a"], timeout=1.0))
    assert not report.failures
    assert report.ends == {"api_abort": 1} and len(cut.reply.json()["choices"][0]["completion_token_ids"]) > 10


@pytest.mark.parametrize(("mode", "end"), [("abort", "pause"), ("freeze", "max_tokens")])
def test_71_a_pause_applies_to_a_request_that_waits_for_weights(run_plan, mode, end):
    """It was refused with the last worker's error, that its engine had old weights. Found by seed 41300220."""
    lost = [action(1.0, "return_old", f"server{i}", which=0.0) for i in (0, 1)]
    pause = action(1.8, "pause", mode=mode, new_requests="reject", timeout=1.0, duration_s=0.5)
    report, _ = run_plan([request("a", 1.2, max_tokens=12)], action(0.1, "roll"), *lost, pause)
    assert not report.failures
    assert report.ends == {end: 1}


def test_55_a_worker_that_restarts_with_older_weights_during_a_rolling_update_gets_no_requests(run_plan):
    """During a rolling update, workers with any weights were accepted. Found by seed 6550026."""
    returned = [action(2.0, "cut", duration_s=2.0), action(2.3, "kill_server", duration_s=0.2)]
    report, _ = run_plan([request("a", 2.1)], action(0.1, "roll"), *returned, action(2.2, "roll"), servers=1)
    assert not report.failures
    assert report.ends == {"max_tokens": 1}


def test_72_a_moved_request_is_listed_once_although_another_worker_still_generates_it_for_its_key(run_plan):
    keyed = request("a", headers={"idempotency-key": "k"})
    broken = action(0.3, "reset", between=["router", "server1"])
    report, _ = run_plan([keyed], broken, action(0.6, "look"))
    assert not report.failures
    assert report.counts["resumes"] == 1


def test_71_a_request_accepted_before_a_pause_waits_for_a_server_that_returns_paused(run_plan):
    """The fleet had been resumed, but the server had missed the resume. Found by seed 300000874."""
    requests = [request("a"), request("b", 0.1)]
    requests[0].behaviour = ClientBehaviour(leaves_after_s=15.0)
    engine, server = (
        action(0.3, "stop_engine", duration_s=20.0, which=0.0),
        action(1.0, "stop_server", duration_s=20.0),
    )
    pause = action(0.4, "pause", mode="freeze", new_requests="queue", timeout=1.0, duration_s=0.5)
    report, _ = run_plan(requests, engine, pause, server, servers=1, max_in_flight=1)
    assert not report.failures
    assert report.ends == {"left": 1, "max_tokens": 1}


def test_24_a_router_that_was_cut_off_notices_that_its_fleet_was_resumed(run_plan):
    """An unreachable worker counted as one that had not paused, and was paused again."""
    pause = action(0.5, "pause", undo_via="router1", duration_s=4.0, mode="freeze", new_requests="queue", timeout=1.0)
    report, world = run_plan([], pause, action(1.0, "cut", duration_s=12.0), servers=1, routers=2)
    assert not report.failures
    assert not world.holds("router")


def test_24_a_router_ignores_workers_that_have_left_its_fleet(run_plan):
    """A re-added worker is paused with the fleet, whatever other routers requested. Found by seed 1912348608."""
    elsewhere = action(0.3, "remove", via="router1", duration_s=8.0)
    pause = action(1.4, "pause", undo_via="router1", duration_s=0.5, mode="freeze", new_requests="queue", timeout=0.2)
    gone = action(1.97, "remove", "server1", duration_s=8.0)
    report, _ = run_plan([], elsewhere, pause, gone, routers=2)
    assert not report.failures


@pytest.mark.parametrize("seed", [1912345972, 1912353006])
def test_24_a_pause_is_not_repeated_after_another_routers_resume_nor_complete_while_a_worker_runs(seed):
    """A worker was paused again for an update, after another router had resumed it. A pause that another pause had
    replaced was answered 200 although a restarted worker was running."""
    assert not simulate(seed, choices=False).failures


def test_63_a_request_whose_choices_fill_a_server_leaves_capacity_to_other_tenants(run_plan):
    """It was the only request when it arrived, and got the whole capacity. Found by seed 1912349599."""
    greedy = request("a", n=8)
    hostile.assign(greedy, hostile.BOB)
    polite, few = action(0.3, "ask_politely", times=2), ServerSettings(most_choices=8)
    report, _ = run_plan([greedy], polite, tenants=hostile.TENANTS, settings=few, servers=1)
    assert not report.failures
    assert report.ends == {"max_tokens": 8}


def test_71_a_request_kept_by_a_pause_is_not_refused_by_a_server_paused_again_after_the_resume():
    """A returned server was paused like the fleet after the fleet had been resumed."""
    assert not simulate(1912348010, choices=False).failures


def test_29_another_router_fails_no_request_while_servers_are_updated_one_by_one():
    """It considered the first server paused when the second one refused the request."""
    assert not simulate(1912348655, choices=False).failures


@pytest.mark.parametrize("stream", [True, False])
def test_5_the_usage_of_an_answer_ended_by_a_router_counts_its_prompt(run_plan, stream):
    """The router learned the prompt length from the end of an answer, and the worker was lost before that."""
    usage = {"stream_options": {"include_usage": True}} if stream else {}
    cut = request("a", stream=stream, deadline_ms=1500, **usage)
    stops = [action(0.4, "stop_server", f"server{i}", duration_s=9.0) for i in (0, 1)]
    report, _ = run_plan([cut], *stops, action(0.5, "abort", req_ids=["a"], timeout=1.0))
    assert not report.failures
    answer = cut.reply.events()[-2] if stream else cut.reply.json()
    assert answer["usage"]["prompt_tokens"] == len(cut.prompt) and answer["usage"]["completion_tokens"] > 10


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("joins_again", [True, False])
def test_71_a_pause_with_abort_ends_requests_on_a_worker_that_leaves_the_fleet(run_plan, stream, joins_again):
    """No pause reached such a worker, and its requests continued. Found by seeds 1912348545, 1912348808, 3889145659."""
    cut, slow = request("a", stream=stream), action(0.2, "slow_engine", "server1", duration_s=9.0, times=10.0)
    leave = action(0.4, "remove", "server1", duration_s=0.1 if joins_again else 5.0)
    pause = action(2.6, "pause", mode="abort", new_requests="reject", timeout=1.0, duration_s=0.5)
    report, _ = run_plan([cut], slow, leave, pause)
    assert not report.failures
    assert report.ends == {"pause": 1} and report.counts["tokens"] < 60


def test_2_a_workers_answer_counts_only_for_requests_it_was_asked_to_abort(run_plan):
    """The answer listed what the worker claimed. Found by seeds 1912347863 and 1912352248."""
    slow = [action(0.1, "slow_engine", f"server{i}", duration_s=9.0, times=10.0) for i in (0, 1)]
    lie = action(0.2, "lie", "server0", duration_s=9.0, lie=None, ids=["a"])
    report, _ = run_plan(
        [request("a"), request("b", 0.05)], *slow, lie, action(5.0, "abort", req_ids=["b"], wait=True)
    )
    assert not report.failures
    assert report.ends == {"max_tokens": 1, "api_abort": 1}


@pytest.mark.parametrize("stream", [True, False])
def test_49_a_kept_answer_is_replayed_although_the_weights_have_changed(run_plan, stream):
    """The router took its worker for one that had restarted with old weights. Found by seed 126303143."""
    first = request("a", headers={"idempotency-key": "k"}, stream=stream)
    first.retries, first.behaviour = True, ClientBehaviour(leaves_after_s=0.8)
    report, world = run_plan([first], action(0.3, "update", mode="freeze"), servers=1)
    assert not report.failures
    assert report.counts["asked again"] == 1 and report.ends == {"max_tokens": 1}
    assert [worker.errors for worker in world.router.router.fleet] == [0]


def test_2_an_abort_whose_worker_is_lost_reports_the_tokens_that_the_client_received(run_plan):
    """Another worker rendered the text. The abort reported the request as finished, or the lost worker's tokens."""
    cut = request("a", stream=False)
    stuck = action(0.4, "stop_engine", "server1", duration_s=4.0, which=0.0)
    broken = action(0.7, "reset", between=["router", "server1"])
    report, world = run_plan([cut], stuck, action(0.5, "abort", req_ids=["a"], wait=True), broken)
    assert not report.failures
    assert report.ends == {"api_abort": 1}
    assert world._aborted == {"a": len(cut.reply.json()["choices"][0]["completion_token_ids"])}


@pytest.mark.parametrize("server", ["server0", "server1"])
def test_24_a_rolling_update_does_not_resume_a_worker_that_another_router_has_paused(run_plan, server):
    """The update resumed every worker that it had paused, although another router had paused it since (94993566574)."""
    requests = [request(name) for name in "ab"]
    slow = action(0.28, "slow_network", server, duration_s=8.0, most_s=0.2)
    pause = action(0.6, "pause_and_kill", server, 0.05, via="router1", mode="abort", whole=False, which=0.0)
    report, _ = run_plan(requests, action(0.2, "roll"), slow, pause, profile=EngineProfile(step_s=0.05), routers=2)
    assert not report.failures


def test_24_a_router_notices_that_another_one_resumed_a_worker_restarted_during_the_pause(run_plan):
    """It was taken for a worker that had only restarted, and was paused again. Found by seed 3387638280."""
    away = action(0.33, "stop_server", "server0", duration_s=3.5)
    pause = action(
        0.34, "pause", undo_via="router1", duration_s=0.5, mode="freeze", new_requests="queue", timeout=0.2
    )
    short = action(1.05, "kill_server", "server1", duration_s=0.2)
    report, world = run_plan([], away, pause, short, routers=2)
    assert not report.failures
    assert not world.holds("router")


# In the last ten cases, the simulation or its judge was wrong.
def test_44_a_prefill_worker_removed_right_after_a_request_was_placed_fails_no_request(run_plan):
    """It left the fleet before the request took its share of the load, and the client received internal_error."""
    late = request("a", 0.6, prompt=[3, *range(20, 60)])
    late.prompt = tuple(late.body["prompt"])
    held = action(0.5, "stop_server", "router", duration_s=1.0)  # both arrive in one iteration of its event loop
    roles = {"roles": ("prefill", "decode"), "kv": KvSettings(disaggregate_tokens=4)}
    report, _ = run_plan([late], held, action(0.6, "remove", "server0"), **roles)
    assert not report.failures
    assert report.ends == {"max_tokens": 1}


def test_48_a_stream_that_lost_its_engine_names_no_sequence_of_the_next_one(run_plan):
    """Sequence ids began anew with the engine: the abort of an answer that was not read ended another request."""
    unread, other = request("unread", to="server0"), request("other", 1.5, to="server0")
    unread.behaviour = ClientBehaviour(stalls=True, leaves_after_s=20.0)
    killed, abort = action(0.6, "kill_engine", which=0.0), action(2.0, "abort", req_ids=["unread"])
    report, _ = run_plan([unread, other], killed, abort, servers=1, network=NetworkConditions(high_water=512))
    assert not report.failures
    assert report.ends == {"left": 1, "max_tokens": 1}


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("fault", ["the worker is lost", "the worker shuts down", "no worker has it yet"])
def test_2_4_a_choice_that_was_asked_to_end_continues_on_no_other_worker(run_plan, stream, fault):
    """The router marked whole requests only: the next worker generated the rest of the choice."""
    asked = request("a", 0.2, n=3, stream=stream)
    abort = action(0.5, "abort", req_ids=["a-1"], wait=True, timeout=0.3)
    faults = {
        "the worker is lost": [
            action(0.4, "stop_server", "server1", duration_s=1.0),
            action(1.0, "kill_server", "server1", duration_s=0.5),
        ],
        "the worker shuts down": [
            action(0.4, "stop_engine", "server1", duration_s=4.0, which=0.0),
            action(0.6, "shutdown", "server1"),
        ],
        "no worker has it yet": [
            action(0.0, "pause", mode="freeze", new_requests="queue", timeout=1.0, duration_s=1.0)
        ],
    }
    report, _ = run_plan([asked], abort, *faults[fault], **SHORT_DRAIN)
    assert not report.failures
    choices = read(asked).choices
    assert [choices[i].cause for i in range(3)] == ["max_tokens", "api_abort", "max_tokens"]
    assert [len(choices[i].ids) == 60 for i in range(3)] == [True, False, True]


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("to", ["router", "server0"])
@pytest.mark.parametrize("chat", [True, False])
def test_57_each_choice_that_was_cut_short_has_its_own_error_for_a_strict_client(run_plan, stream, to, chat):
    """A whole answer explained only the first choice, although the other one had another cause (seed 3171707521)."""
    asked = request("a", to=to, headers={"x-openai-strict": "true"}, n=2, stream=stream)
    if chat:
        make_chat(asked)
    abort, pause = action(0.3, "abort", req_ids=["a-0"]), action(0.5, "pause", mode="abort")
    report, _ = run_plan([asked], abort, pause, servers=1)
    assert not report.failures
    assert report.ends == {"api_abort": 1, "pause": 1}


LATEST = {
    677900124: "an attempt that its router has superseded is not kept under its Idempotency-Key",
    677903472: "a request that moved and ended while workers were listed is not listed by both",
    677895842: "a pause may fail while a worker's answers are forged",
    677893540: "an end that a worker withheld is outdated once another worker has added tokens to a whole answer",
    502657514713: "an abort reports the tokens that the client received, not those of a worker that lost its connection",
    94993566574: "a rolling update does not resume a worker that another router has paused",
    695787787445: "an answer cut by another router's rolling update waits for a worker with old weights",
    720037830364: "an answer cut by a rolling update waits for a place at a full worker",
    33505901910: "a rescheduled answer returns to a worker whose pause was too brief for a probe to show it",
    130935662815: "a pause with a short timeout waits for ends that are slower than its workers' replies",
    2834731027: "an answer whose engine was lost waits for workers that another router has paused",
    3424496411: "a server that restarted with old weights generated an answer and kept it for its key",
    2196412318: "an answer whose workers all lacked the weights continues when a probe finds one ready",
    2044193742: "a worker that was full, and one that failed since, are both retried",
    2044199300: "an answer ended by another router's update continues on a worker that was known as paused",
    184266789: "the answer of a key that was rescheduled for lack of room was replayed to the router's retry",
    946856544: "a client that reads slowly while more is written was taken for one that does not read",
    946855756: "a worker whose answer to a pause cannot be parsed does not count as paused",
    2044205121: "a request whose connection was reset finds its own prompt cached",
    77000196: "no server has weights after an update that failed everywhere",
    3047417735: "a refused update is repeated, although an older one has finished since",
    2809551823: "a request that a pause sent back from the wait for its ticket finds its own prompt cached",
    7038: "a stopped worker ends a request that its router has already ended",
    749408475: "no server has weights: an update failed at one, and the other restarted with old ones",
    2196408953: "an operator's abort ends the requests of all tenants that use the id",
    218994093759: "a worker whose engine was killed is down while another worker's answers are forged",
    127115408759: "one of several tenants is refused although fewer choices run than there are places",
    779757294146: "a server outlives an engine that was killed while it did not answer",
    255086519796: "an abort ends a request that arrived during the call, although its worker was also paused",
    1251488397: "an answer returned by a shutdown continues on a server that was restarted between two probes",
    733630493341: "a worker reports a request as ended and as unknown, and its whole answer is still expected",
    949795884997: "a restarted worker that another router pauses for an update is paused with the fleet, too",
    1007583619286: "a request that moved just before a pause is counted once, although two workers had it",
}


@pytest.mark.parametrize("seed", LATEST, ids=LATEST.get)
def test_seeds_that_failed(seed):
    assert not simulate(seed, choices=False).failures
