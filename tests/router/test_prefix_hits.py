"""Cache hits that workers report, compared with those that the router expected."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from headgate.router.exchange.attempt import JSON, Answered, Lost, Streamed
from headgate.router.exchange.journal import Journal
from headgate.router.fleet import prefix_hits
from headgate.router.fleet.prefix_index import WorkerPrefix
from headgate.router.fleet.worker import Worker
from headgate.router.router import Router
from tests.api.live import LiveServer
from tests.api.serving import metric_values
from tests.router.client import ask, routing, until
from tests.router.fleets import live_router
from tests.router.foreign import CHAT, Foreign
from tests.router.run import run

MESSAGES = [{"role": "system", "content": "You keep the gates of a long canal. " * 60}]


def question(text: str, **more: Any) -> dict[str, Any]:
    return {"messages": [*MESSAGES, {"role": "user", "content": text}], "max_tokens": 4, **more}


def about(word: str, **more: Any) -> dict[str, Any]:
    system = {"role": "system", "content": f"{word} words for others. " * 90}
    return question("x", **more) | {"messages": [system, {"role": "user", "content": "x"}]}


# ------------------------------------------------------------------------------------------------------ from journals


@pytest.mark.parametrize("size", [0, 100, 2 * Journal.KEPT_BYTES], ids=["short", "middling", "read and thrown away"])
def test_the_end_of_a_journal_reports_cached_tokens(size: int):
    journal = Journal()
    for i in range(size // 20):
        journal.feed(b':j 0 1 %d 7\ndata: {"x":1}\n\n' % i)
    assert journal.cached(1) is None
    journal.feed(b':j 0 1 9 8\n:f 0 length max_tokens 100 64 9\n:+\ndata: {"y":1}\n\n')
    journal.feed(b"data: {}\n\n")
    journal.feed(b"data: [DONE]\n\n")
    assert journal.cached(1) == (100, 64)


def test_the_choice_with_the_fewest_cached_tokens_counts():
    journal = Journal()
    for index, cached in ((2, 96), (0, 32), (1, 96)):
        journal.feed(b":f %d stop eos 100 %d 9\ndata: {}\n\n" % (index, cached))
    assert journal.cached(3) == (100, 32)


def test_numbers_out_of_range_are_ignored():
    journal = Journal()
    journal.feed(b":f 0 length max_tokens %b 64 9\n\n" % (b"1" * 5000))
    assert journal.cached(1) is None and journal.cached(2) is None


# --------------------------------------------------------------------------------------------------------- from usage


@pytest.mark.parametrize(
    ("usage", "told"),
    [
        ({"prompt_tokens": 9, "total_tokens": 12, "prompt_tokens_details": {"cached_tokens": 8}}, (9, 8)),
        ({"input_tokens": 9, "input_tokens_details": {"cached_tokens": 0}, "output_tokens": 3}, (9, 0)),
        ({"prompt_tokens": 9, "prompt_tokens_details": None}, None),
        ({"prompt_tokens": 9}, None),
        ({"prompt_tokens_details": {"cached_tokens": 8}}, None),
    ],
)
@pytest.mark.parametrize("spaced", [True, False])
def test_usage_is_read_from_the_end_of_an_answer(usage: dict[str, Any], told: tuple[int, int] | None, spaced: bool):
    said = 'say "prompt_tokens": 1, "cached_tokens": 1'  # escaped inside a string
    separators = (", ", ": ") if spaced else (",", ":")
    body = json.dumps({"choices": [{"text": said}], "usage": usage}, separators=separators).encode()
    assert prefix_hits.usage_in(body) == told


# ----------------------------------------------------------------------------------------------------------- counting


def note(
    worker: Worker, found: WorkerPrefix | None, outcome: Any, *, reason: str = "cache", prefill: Any = None
) -> None:
    exchange = SimpleNamespace(journal=Journal(), info=SimpleNamespace(n=1, prompt=b"x" * 4000))
    placement = SimpleNamespace(worker=worker, found=found, reason=reason, prefill=prefill)
    prefix_hits.record_hits(exchange.info, exchange.journal, placement, outcome)  # type: ignore[arg-type]


def usage(cached: int, prompt: int = 1000) -> bytes:
    details = {"prompt_tokens": prompt, "prompt_tokens_details": {"cached_tokens": cached}}
    return json.dumps({"usage": details}).encode()


def test_expected_and_reported_hits_are_counted_in_the_workers_own_tokens():
    worker = Worker("http://a")
    note(worker, WorkerPrefix(3000, 7.0), Streamed(usage(700)))
    note(worker, None, Answered(200, [], usage(0, 500)))
    assert (worker.prompt_tokens, worker.expected_tokens, worker.cached_tokens) == (1500, 750, 700)


def test_answers_that_report_no_cached_tokens_are_not_counted():
    worker, found = Worker("http://a"), WorkerPrefix(3000, 7.0)
    note(worker, found, Streamed(usage(700)), reason="resume")
    note(worker, found, Streamed(usage(700)), prefill=Worker("http://b"))
    note(worker, found, Answered(404, JSON, usage(700)))
    note(worker, found, Lost("it broke"))
    note(worker, found, Streamed(b"data: [DONE]\n\n"))
    assert (worker.prompt_tokens, worker.expected_tokens, worker.cached_tokens) == (0, 0, 0)


def test_42_the_horizon_of_a_foreign_worker_is_inferred_from_missing_hits():
    worker = Worker("http://a")
    worker.kind = "vllm"
    before = worker.horizon_s
    note(worker, WorkerPrefix(3000, 7.0), Streamed(usage(400)))
    assert worker.horizon_s == before, "it had more than half of what was expected"
    note(worker, WorkerPrefix(400, 7.0), Streamed(usage(0)))
    assert worker.horizon_s == before, "such a small difference may come from block granularity"
    note(worker, WorkerPrefix(3000, float("inf")), Streamed(usage(0)))
    assert worker.horizon_s == before, "it may not have been computed yet"
    note(worker, WorkerPrefix(3000, 7.0), Streamed(usage(0)))
    assert worker.horizon_s == 7.0
    note(worker, WorkerPrefix(3000, 6.0), Streamed(usage(0)))
    assert worker.horizon_s == 7.0, "a horizon never moves back"
    ours = Worker("http://b")
    ours.kind = "headgate"
    note(ours, WorkerPrefix(3000, 7.0), Streamed(usage(0)))
    assert ours.horizon_s == before, "a worker that reports its horizon knows it better"


# --------------------------------------------------------------------------------------------------------- end to end


def tallies(router: Router) -> list[tuple[int, int, int]]:
    return [(w.prompt_tokens, w.expected_tokens, w.cached_tokens) for w in router.fleet]


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
@pytest.mark.parametrize("stream", [True, False])
def test_42_evictions_of_a_foreign_worker_are_learned_from_its_usage(kind: str, stream: bool):
    """The worker's cache holds only one prompt, so in the next round, prefixes of earlier prompts are evicted."""
    more = {"stream": stream, "stream_options": {"include_usage": True}}

    async def main() -> None:
        async with Foreign(kind, cache_blocks=45) as foreign, routing(foreign) as (router, url):  # type: ignore[arg-type]
            (worker,) = router.fleet
            await until(lambda: worker.state == "ready")
            old, one, two = (about(word, **more) for word in ("Old", "One", "Two"))
            for body in (old, one, one):
                assert (await ask(url, CHAT, body)).status == 200
            (told,) = tallies(router)
            assert told[1] > told[0] * 0.25 and told[2] > told[0] * 0.25, "one prompt was cached the second time"
            for body in (two, one):
                assert (await ask(url, CHAT, body)).status == 200
            (after,) = tallies(router)
            assert after[1] > told[1] and after[2] - told[2] < (after[1] - told[1]) / 2, (
                "expected, but mostly evicted"
            )
            assert worker.horizon_s > float("-inf")
            await ask(url, CHAT, old)
            assert tallies(router)[0][1] == after[1], "older prefixes are no longer expected"

    run(main())


def test_a_foreign_worker_that_reports_no_usage_is_not_counted():
    async def main() -> None:
        async with Foreign("vllm", reports_cached=False) as foreign, routing(foreign) as (router, url):  # type: ignore[arg-type]
            for stream in (True, False):
                body = question("x", stream=stream, stream_options={"include_usage": True})
                assert (await ask(url, CHAT, body)).status == 200
            assert tallies(router) == [(0, 0, 0)]

    run(main())


def test_real_servers_report_the_cache_hits_that_were_expected(servers: list[LiveServer]):
    """Streamed and whole answers, with and without usage, are all counted."""
    with live_router(servers[0].url) as router:
        for stream in (True, False, True, False):
            body = question("How wide is the gate?", stream=stream, temperature=0)
            assert router.post(CHAT, body).status_code == 200
        values = metric_values(router.get("/metrics").text)
    label = f'{{worker="{servers[0].url}"}}'
    prompt, expected, cached = (
        values[f"headgate:router_worker_{name}_total{label}"]
        for name in ("prompt_tokens", "expected_cached_tokens", "cached_tokens")
    )
    assert prompt > 4 * 500
    assert cached >= prompt * 0.7 and abs(cached - expected) < prompt * 0.1


def test_usage_is_read_when_the_end_of_the_stream_arrives_in_another_piece():
    async def main() -> None:
        async with Foreign("sglang", pace_s=0.01) as foreign, routing(foreign) as (router, url):  # type: ignore[arg-type]
            body = question("x", stream=True, stream_options={"include_usage": True})
            await ask(url, CHAT, body)
            assert tallies(router)[0][0] > 500

    run(main())
