"""The timeline of one request through the fleet, from its workers' reports and the router's records."""

from __future__ import annotations

import time
from typing import Any

from headgate.router.exchange.timeline import Departure, stages
from headgate.router.fleet.worker import Worker

P, D, E = Worker("http://p", role="prefill"), Worker("http://d", role="decode"), Worker("http://e", role="decode")


def ended(arrived: float, elapsed_s: float, **events: float) -> dict[str, Any]:
    """Return a worker's report of a request that has ended at that worker."""
    told = [{"event": name, "at_s": at_s, "choice": None} for name, at_s in events.items()]
    return {"status": "finished", "events": told, "usage": {"arrived": arrived, "elapsed_s": elapsed_s}}


def running(age_s: float, **events: float) -> dict[str, Any]:
    told = [{"event": name, "at_s": at_s, "choice": None} for name, at_s in events.items()]
    return {"status": "in_flight", "events": told, "request": {"age_s": age_s}}


def test_the_prefill_stage_comes_before_the_answer():
    words = [
        (D, "answer", ended(1000.1, 2.0, accepted=0.0, first_token=0.5)),
        (P, "prompt", ended(1000.1, 0.25, accepted=0.0)),
    ]
    prompt, answer = stages(words, began=1000.0)
    assert (prompt.worker, prompt.role, prompt.part, prompt.ended_s) == ("http://p", "prefill", "prompt", 0.35)
    assert (answer.worker, answer.began_s, answer.first_token_s, answer.ended_s) == ("http://d", 0.1, 0.6, 2.1)
    assert prompt.left is None and answer.left is None


def test_without_an_arrival_time_the_timeline_starts_at_the_first_worker():
    (stage,) = stages([(D, "answer", ended(1000.0, 2.0))])
    assert (stage.began_s, stage.ended_s, stage.first_token_s) == (0.0, 2.0, None)
    assert stages([]) == []


def test_a_worker_that_failed_has_a_stage_without_a_report():
    words = [(E, "answer", running(1.0, accepted=0.0, first_token=0.2))]
    lost, now = stages(words, [Departure("http://d", "decode", 3.0, "connection reset")], time.time() - 4.0)
    assert (lost.worker, lost.began_s, lost.ended_s, lost.left) == ("http://d", 0.0, 3.0, "connection reset")
    assert now.worker == "http://e" and now.ended_s is None and now.left is None
    assert 2.9 < now.began_s < 60 and now.first_token_s is not None
    assert abs(now.first_token_s - now.began_s - 0.2) < 0.01


def test_a_worker_that_ended_the_request_itself_reports_its_own_stage():
    words = [(D, "answer", ended(1000.5, 1.0, first_token=0.1)), (E, "answer", ended(1001.6, 1.0, first_token=0.1))]
    first, second = stages(words, [Departure("http://d", "decode", 1.55, "it had no room for it")], 1000.0)
    assert (first.worker, first.began_s, first.first_token_s, first.ended_s) == ("http://d", 0.5, 0.6, 1.55)
    assert first.left == "it had no room for it" and second.left is None


def test_a_worker_that_gets_the_request_again_has_two_stages():
    words = [(D, "answer", ended(1005.0, 1.0, first_token=0.1)), (E, "answer", ended(1002.0, 2.0, first_token=0.1))]
    leaving = [Departure("http://d", "decode", 1.9, "lost"), Departure("http://e", "decode", 4.5, "lost")]
    assert [(stage.worker, stage.began_s, stage.ended_s) for stage in stages(words, leaving, 1000.0)] == [
        ("http://d", 0.0, 1.9),
        ("http://e", 2.0, 4.5),
        ("http://d", 5.0, 6.0),
    ]


def test_clock_skew_gives_no_negative_times():
    (stage,) = stages([(D, "answer", ended(990.0, 2.0, first_token=0.5))], began=1000.0)
    assert (stage.began_s, stage.first_token_s, stage.ended_s) == (0.0, 0.0, 0.0)
