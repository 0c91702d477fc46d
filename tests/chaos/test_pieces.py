"""The parts of `headgate chaos`: faults take effect, and the checks notice violations."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import uvloop

from headgate.errors import RequestError
from headgate.testing.chaos.catalogue import COMPLETIONS, CatalogueItem, catalogue
from headgate.testing.chaos.client import ObservedAnswer, ObservedChoice, _add_event
from headgate.testing.chaos.fleet import process_stats
from headgate.testing.chaos.hostile import HostileClients
from headgate.testing.chaos.judge import AnswerJudge, PauseInterval
from headgate.testing.chaos.leaks import IdleUsage, ProcessSample, leaked, memory_growth, memory_leaks
from headgate.testing.chaos.load import FinishedRequest
from headgate.testing.chaos.plan import KINDS, chosen, draw
from headgate.testing.chaos.proxy import FaultProxy
from headgate.testing.chaos.reference import ReferenceAnswers
from headgate.testing.chaos.report import ChaosReport
from headgate.testing.chaos.run import ChaosModels, TracebackCollector
from headgate.testing.chaos.settings import ChaosSettings

PATIENCE_S = 60.0

# ------------------------------------------------------------------------------------------------------------ the plan


def test_the_plan_is_a_function_of_its_seed():
    assert draw(7, 100, 2) == draw(7, 100, 2) != draw(8, 100, 2)
    assert [fault.at_s for fault in draw(7, 10, 2)] == [2, 4, 6, 8, 10]


def test_a_long_plan_has_every_kind_within_its_bounds():
    faults = draw(0, 10_000, 1)
    assert {fault.kind for fault in faults} == set(KINDS)
    for fault in faults:
        shortest_s, longest_s = KINDS[fault.kind].lasts_s
        assert shortest_s <= fault.lasts_s <= longest_s and 0 <= fault.which < 1


def test_faults_are_chosen_by_name_or_group_and_others_are_refused():
    assert chosen([]) == tuple(KINDS)
    assert chosen(["clients", "reset"]) == ("reset", "vanish", "abort")
    with pytest.raises(RequestError, match="there is no fault 'earthquake'; there are servers"):
        chosen(["earthquake"])


@pytest.mark.parametrize(
    ("wrong", "problem_text"),
    [({"clients": 0}, "--clients must be at least 1"), ({"servers": 1}, "--servers"), ({"every_s": 0.0}, "--every")],
)
def test_settings_that_make_no_sense_are_refused(wrong, problem_text):
    with pytest.raises(RequestError, match=problem_text):
        ChaosSettings(**wrong)


# ----------------------------------------------------------------------------------------------------------- the proxy


def run(work: Coroutine[Any, Any, None]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(PATIENCE_S):
            await work

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(bounded())


Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@asynccontextmanager
async def echo_behind_proxy() -> AsyncIterator[tuple[FaultProxy, Callable[[], Coroutine[Any, Any, Connection]]]]:
    """Yield a proxy in front of an echo server, and a function that connects to it."""

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while piece := await reader.read(65536):
                writer.write(piece)
        except OSError:
            pass
        finally:
            writer.close()

    opened: list[Connection] = []

    async def connect() -> Connection:
        opened.append(await asyncio.open_connection("127.0.0.1", int(proxy.url.rpartition(":")[2])))
        return opened[-1]

    async with await asyncio.start_server(echo, "127.0.0.1", 0) as server, FaultProxy() as proxy:
        proxy.target = server.sockets[0].getsockname()[:2]
        try:
            yield proxy, connect
        finally:
            for _, writer in opened:
                writer.close()


async def echoes(connection: Connection, text: bytes) -> bool:
    reader, writer = connection
    writer.write(text)
    return await reader.readexactly(len(text)) == text


def test_the_proxy_delays_and_stalls_bytes_until_it_is_restored():
    async def main() -> None:
        async with echo_behind_proxy() as (proxy, connect):
            connection = await connect()
            assert await echoes(connection, b"in time")
            proxy.delay_s = 0.05
            begun_s = asyncio.get_running_loop().time()
            assert await echoes(connection, b"late")
            assert asyncio.get_running_loop().time() - begun_s > 0.09  # there and back, by a clock of milliseconds
            proxy.delay_s = 0.0
            proxy.stall()
            echoed = asyncio.ensure_future(echoes(connection, b"stalled"))
            done, _ = await asyncio.wait({echoed}, timeout=0.2)
            assert not done
            proxy.restore()
            assert await echoed

    run(main())


def test_a_reset_reaches_both_sides_and_the_next_connection_works():
    async def main() -> None:
        async with echo_behind_proxy() as (proxy, connect):
            connection = await connect()
            assert await echoes(connection, b"well")
            assert proxy.reset() == 1
            with pytest.raises(ConnectionResetError):
                await connection[0].readexactly(1)
            assert await echoes(await connect(), b"well again")
            assert len(proxy.links) == 1

    run(main())


def test_a_cut_answer_passes_half_of_the_next_bytes_and_closes_the_connection():
    async def main() -> None:
        async with echo_behind_proxy() as (proxy, connect):
            reader, writer = connection = await connect()
            assert await echoes(connection, b"whole")
            assert proxy.cut_next_answers() == 1
            writer.write(b"half of it")
            assert await reader.read() == b"half "
            assert await echoes(await connect(), b"whole again")

    run(main())


def test_a_partition_refuses_connections_and_resets_the_held_ones_when_it_ends():
    async def main() -> None:
        async with echo_behind_proxy() as (proxy, connect):
            held = await connect()
            assert await echoes(held, b"before")
            proxy.partition()
            with pytest.raises((ConnectionResetError, asyncio.IncompleteReadError, BrokenPipeError)):
                await echoes(await connect(), b"during")
            held[1].write(b"lost")
            proxy.restore()
            with pytest.raises(ConnectionResetError):
                await held[0].readexactly(1)
            assert await echoes(await connect(), b"after")

    run(main())


# ----------------------------------------------------------------------------------------------------------- the judge

ITEM = catalogue(0)[0]


def answer(**more: Any) -> ObservedAnswer:
    fields: dict[str, Any] = {"begun_s": 10.0, "ended_s": 11.0, "status": 200, "done": 1, "output_tokens": 3}
    choice = ObservedChoice([1, 2, 3], [0, 0, 0], "abc", [("length", "max_tokens")])
    return ObservedAnswer(**fields | {"choices": {0: choice}} | more)


def cut(cause: str, tokens: int = 2) -> ObservedAnswer:
    choice = ObservedChoice([1, 2, 3][:tokens], [0] * tokens, "abc"[:tokens], [("abort", cause)])
    return answer(choices={0: choice}, output_tokens=tokens)


@pytest.fixture
def judge() -> AnswerJudge:
    reference = ReferenceAnswers("http://127.0.0.1:1", {})
    reference.answers = {(ITEM.number, "a"): answer(), (ITEM.number, "b"): answer()}
    return AnswerJudge(reference)


def test_a_whole_answer_with_the_right_tokens_passes(judge):
    assert judge.ended("x", ITEM, answer()) == "whole"
    assert not judge.failures and judge.checked == 1 and judge.tokens == 3


@pytest.mark.parametrize(
    "wrong",
    [
        ObservedChoice([1, 2, 4], [0, 0, 0], "abc", [("length", "max_tokens")]),
        ObservedChoice([1, 2], [0, 0], "ab", [("length", "max_tokens")]),  # one is lost
        ObservedChoice([1, 2, 2, 3], [0] * 4, "abbc", [("length", "max_tokens")]),  # one is sent twice
        ObservedChoice([1, 2, 3], [0, 0, 0], "abd", [("length", "max_tokens")]),
        ObservedChoice([1, 2, 3], [0, 0, 0], "abc", [("stop", "eos")]),
        ObservedChoice([1, 2, 3], [0, 0], "abc", [("length", "max_tokens")]),
        ObservedChoice([1, 2, 3], [9, 9, 9], "abc", [("length", "max_tokens")]),  # weights that were never sent
    ],
)
def test_any_other_answer_is_wrong(judge, wrong):
    judge.ended("x", ITEM, answer(choices={0: wrong}, output_tokens=len(wrong.tokens)))
    assert judge.wrong == 1 and "wrong tokens" in judge.failures[0]


@pytest.mark.parametrize(
    "broken",
    [
        answer(done=2),
        answer(done=0),
        answer(choices={}),
        answer(output_tokens=2),
        answer(choices={0: ObservedChoice([1, 2, 3], [0] * 3, "abc", [("length", "max_tokens")] * 2)}),
        answer(choices={0: ObservedChoice([1, 2, 3], [0] * 3, "abc", [])}),
    ],
)
def test_an_answer_without_one_end_all_choices_and_the_right_usage_is_malformed(judge, broken):
    assert judge.ended("x", ITEM, broken) == "failed"
    assert judge.unexplained == {"malformed": 1}


def test_a_cut_answer_is_explained_only_by_the_abort_of_its_own_id(judge):
    judge.aborted.add("x")
    assert judge.ended("x", ITEM, cut("api_abort")) == "cut"
    assert judge.ended("y", ITEM, cut("api_abort")) == "failed"
    assert judge.unexplained == {"cut by api_abort": 1}


@pytest.mark.parametrize(
    ("pause", "outcome"),
    [
        (PauseInterval("abort", True, 10.5, 12.0), "cut"),
        (PauseInterval("drain", True, 9.0, 10.1), "cut"),
        (PauseInterval("freeze", True, 10.5, 12.0), "failed"),
        (PauseInterval("abort", True, 11.5, 12.0), "failed"),  # later
        (PauseInterval("abort", True, 1.0, 9.0), "failed"),  # long over
    ],
)
def test_a_cut_answer_is_explained_by_a_pause_that_overlaps_it(judge, pause, outcome):
    judge.pauses.append(pause)
    assert judge.ended("x", ITEM, cut("pause")) == outcome


def test_a_partial_answer_must_be_right_too(judge):
    judge.aborted.add("x")
    judge.ended(
        "x",
        ITEM,
        answer(choices={0: ObservedChoice([1, 3], [0, 0], "ac", [("abort", "api_abort")])}, output_tokens=2),
    )
    assert judge.wrong == 1


def test_only_a_pause_that_refuses_requests_explains_a_refusal_and_nothing_explains_other_errors(judge):
    refused = {"status": 503, "problem": "503 paused", "choices": {}}
    assert judge.ended("x", ITEM, answer(**refused)) == "failed"
    judge.pauses.append(PauseInterval("freeze", False, 10.5))
    assert judge.ended("x", ITEM, answer(**refused)) == "failed"
    judge.pauses.append(PauseInterval("freeze", True, 10.5))
    assert judge.ended("x", ITEM, answer(**refused)) == "refused"
    assert judge.ended("x", ITEM, answer(**refused | {"status": 200, "problem": "error paused"})) == "refused"
    assert judge.ended("x", ITEM, answer(problem="error paused")) == "failed"  # it had received tokens
    for problem in ("hung", "stream cut", "502 worker_lost", "ConnectionResetError", "503 no_worker"):
        judge.pauses[:] = [PauseInterval("freeze", True, 10.5)]
        assert judge.ended("x", ITEM, answer(problem=problem)) == "failed"


def test_an_answer_of_several_weights_is_kept_and_checked_part_by_part(judge):
    judge.weights[1] = "b"
    mixed = ObservedChoice([1, 2, 3], [0, 1, 1], "abc", [("length", "max_tokens")])
    assert judge.ended("x", ITEM, answer(choices={0: mixed})) == "whole"
    (mixed,) = judge.mixed
    assert mixed.parts() == [(0, 1, "a"), (1, 3, "b")]


# ------------------------------------------------------------------------------------------------ processes and reports


def sample(at_s: float, rss_mb: float, pid: int = 1) -> ProcessSample:
    return ProcessSample(at_s, "router", pid, rss_mb, 10, 2)


class FixedReference(ReferenceAnswers):
    """A reference in which every answer is 100, 101, ..., with the numbers as text, under any weights."""

    def __init__(self) -> None:
        self._folders = {"a": Path(), "b": Path()}
        self.answers = {}

    async def _take(self, weights: str) -> None:
        pass

    async def _answer(self, item: CatalogueItem) -> ObservedAnswer:
        begin, end = len(item.body["generated_token_ids"]), item.body["max_tokens"]
        return ObservedAnswer(0.0, choices={0: fixed_choice(end, begin)})


def fixed_choice(end: int, begin: int = 0) -> ObservedChoice:
    text = "".join(f" {100 + i}" for i in range(end))
    return ObservedChoice(
        tokens=[100 + i for i in range(begin, end)], text=text, ends=[("length", "max_tokens")], prompt=[1]
    )


@pytest.mark.parametrize(
    ("change", "wrong"),
    [
        ({}, 0),
        ({"text": "something else"}, 1),
        ({"ends": [("stop", "eos")]}, 1),
        ({"tokens": [*range(100, 109), 5]}, 1),
        ({"tokens": [*range(100, 108)], "versions": [0] * 5 + [1] * 3}, 1),  # too short to be whole
        ({"tokens": [*range(100, 108)], "versions": [0] * 5 + [1] * 3, "ends": [("abort", "pause")]}, 0),
    ],
)
def test_an_answer_of_several_weights_is_checked_to_its_end(change: dict[str, Any], wrong: int):
    body = {"max_tokens": 10, "ignore_eos": True, "seed": 1, "temperature": 0.0}
    choice = replace(fixed_choice(10), **({"versions": [0] * 5 + [1] * 5} | change))
    judge = AnswerJudge(FixedReference(), weights={0: "a", 1: "b"})
    judge.vanished(CatalogueItem(0, COMPLETIONS, body), ObservedAnswer(0.0, choices={0: choice}))
    asyncio.run(judge.check_mixed())
    assert judge.wrong == wrong, judge.failures


def test_growing_memory_is_noticed_and_restarted_processes_are_not_compared():
    flat = [sample(t, 100) for t in range(100)]
    assert list(memory_growth(flat)) == [("router", 100, 100)] and not memory_leaks(flat)
    assert memory_leaks([sample(t, 100 + t) for t in range(100)])
    assert not list(memory_growth([sample(t, 100 + t, pid=t // 50) for t in range(100)]))


def test_leaked_descriptors_threads_and_tasks_are_noticed():
    before = {"router": IdleUsage(20, 4, 10)}
    assert leaked(before, before) == []
    found = leaked(before, {"router": IdleUsage(40, 10, 30)})
    assert [problem_text.partition(":")[0] for problem_text in found] == ["fds", "threads", "tasks"]


def test_process_stats_are_read_from_proc_and_none_for_an_ended_process():
    mine = process_stats(os.getpid())
    assert mine is not None and mine.rss_mb > 1 and mine.fds >= 3 and mine.threads >= 1
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait(PATIENCE_S)
    assert process_stats(ended.pid) is None


def test_a_traceback_in_a_log_is_a_bug():
    tracebacks = TracebackCollector()
    for message in ("all is well", "worker 0, api: oops\nTraceback (most recent call last):\n  ..."):
        tracebacks.emit(logging.LogRecord("x", logging.ERROR, "", 0, message, None, None))
    assert len(tracebacks.found) == 1


def test_the_truncated_model_has_half_of_its_weights_file(tmp_path):
    models = ChaosModels.write(tmp_path)
    whole, half = ((folder / "model.safetensors").stat().st_size for folder in (models.folders["b"], models.cut))
    assert half == whole // 2
    assert (models.folders["a"] / "model.safetensors").read_bytes() != (
        models.folders["b"] / "model.safetensors"
    ).read_bytes()


def report() -> ChaosReport:
    events = [{"at_s": 2.0, "kind": "reset", "lasts_s": 0.0, "server": 1}]
    return ChaosReport(
        ChaosSettings(),
        seconds=10.0,
        faults=Counter(reset=1),
        events=events,
        sent=2,
        ended=[FinishedRequest(1.0, 0.5, 0.1, "whole", 3), FinishedRequest(2.0, 0.5, None, "cut", 1)],
        samples=[sample(0, 100), sample(10, 101)],
        at_rest={"router": (IdleUsage(1, 2, 3), IdleUsage(1, 2, 3))},
        judged={"ends": {"whole": 1, "cut": 1}, "wrong_answers": 0, "unexplained": {}},
    )


def test_a_report_is_a_table_json_and_a_plot(tmp_path):
    pytest.importorskip("matplotlib")
    made = report()
    assert made.table().endswith("all is well") and "1 reset" in made.table()
    made.save(tmp_path)
    saved = json.loads((tmp_path / "chaos.json").read_text())
    assert saved["ok"] and saved["faults"] == {"reset": 1} and saved["latency_s"]["p50"] == 0.5
    assert (tmp_path / "timeline.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "where", ["failures", "action_failures", "still_held", "leaks", "leftover_processes", "tracebacks"]
)
def test_every_kind_of_problem_makes_a_report_fail(where):
    made = report()
    getattr(made, where).append("something is wrong")
    assert made.problems and "FAILED: 1 problems" in made.table() and "something is wrong" in made.table()


# ----------------------------------------------------------------------------------------------------- hostile clients


def test_every_hostile_fault_kind_is_a_method_of_hostile_clients():
    assert all(hasattr(HostileClients, name) for name, kind in KINDS.items() if kind.group == "hostile")


def test_57_only_the_error_that_explains_a_cut_to_a_strict_client_is_no_problem():
    def received(code: str, *, strict: bool) -> ObservedAnswer:
        answer = ObservedAnswer(0.0, strict=strict)
        cut = {"finish_reason": "length", "text": ""}
        causes = enumerate(["api_abort", "pause"])
        choices = [cut | {"index": i, "cause": cause, "error": {"code": cause}} for i, cause in causes]
        _add_event({"choices": choices, "error": {"code": code, "message": "cut short"}}, answer)
        return answer

    cut = received("pause", strict=True)
    assert cut.problem is None
    assert [choice.ends for choice in cut.choices.values()] == [[("abort", "api_abort")], [("abort", "pause")]]
    assert received("engine_lost", strict=True).problem == "error engine_lost"
    assert received("pause", strict=False).problem == "error pause"
