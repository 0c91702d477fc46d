"""Measures how long aborts and pauses take under load, on one or several servers.

Every round keeps `concurrency` long answers running. An *abort* is timed from the call until the KV blocks of the
answer are free. Headgate's response guarantees that they are; vLLM's does not, so there the abort is timed until the
metrics report one running request fewer. A *disconnect* is timed from closing the socket until the metrics report one
request fewer, on every server; polling the metrics itself takes a few milliseconds. A *pause* is timed from the call
to its response. A *step* is the time between two tokens.
"""

from __future__ import annotations

import asyncio
import re
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, ClassVar, TypeVar

import msgspec

from headgate.bench.client import clock
from headgate.bench.report import Spread, cells
from headgate.bench.trial import Trial
from headgate.errors import HeadgateError
from headgate.httpclient import HttpFailure, HttpResponse, call

SETTLE_S = 1.0  # a server that still counts requests after this time is sent a request, so that it counts again
PIECES = 8  # how many pieces of each answer must arrive before anything is timed
RUNNING = re.compile(rb"^\w+:num_requests_running(?:{[^}]*})? ([0-9.e+]+)$", re.MULTILINE)


class LifecycleReport(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Results of one server in milliseconds; operations that it does not support are omitted."""

    url: str
    model: str
    concurrency: int
    rounds: int
    step_ms: Spread | None = None
    abort_ms: Spread | None = None
    disconnect_ms: Spread | None = None
    pause_abort_ms: Spread | None = None
    pause_freeze_ms: Spread | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LifecycleTrial(Trial):
    concurrency: int = 8
    rounds: int = 20
    max_tokens: int = 1000
    prompt_words: int = 64
    timeout_s: float = 60.0  # longest duration of a round

    POSITIVE: ClassVar = ("concurrency", "rounds", "max_tokens")


@dataclass(slots=True, eq=False)
class _Stream:
    """One answer that is being read, and the times at which its pieces arrived."""

    id: str
    times_s: list[float] = field(default_factory=list)
    arrived: asyncio.Event = field(default_factory=asyncio.Event)

    def add_piece(self) -> None:
        self.times_s.append(clock())
        self.arrived.set()

    async def at_pace(self) -> list[float]:
        """Return the seconds between the next few pieces."""
        first = len(self.times_s)
        while len(self.times_s) < first + PIECES:
            self.arrived.clear()
            await self.arrived.wait()
        return [later - sooner for sooner, later in pairwise(self.times_s[first:])]


T = TypeVar("T")
_TimeOne = Callable[[list[_Stream]], Awaitable[float]]
_Calling = AbstractAsyncContextManager[HttpResponse]


class Bench:
    def __init__(self, trial: LifecycleTrial, model: str) -> None:
        self._trial = trial
        self._model = model
        self._address = trial.address
        self._gaps_s: list[float] = []
        self._reading: dict[_Stream, asyncio.Task[None]] = {}

    async def run(self) -> LifecycleReport:
        trial = self._trial
        report = LifecycleReport(url=trial.url, model=self._model, concurrency=trial.concurrency, rounds=trial.rounds)
        if await self._has("/v1/abort_requests"):
            report.abort_ms = await self._repeat(self._time_abort)
        elif await self._has("/abort_requests"):
            report.abort_ms = await self._repeat(self._time_other_abort)
        report.disconnect_ms = await self._repeat(self._time_disconnect)
        if path := await self._pause_path():
            freeze = "freeze" if path.startswith("/v1/") else "keep"
            report.pause_abort_ms = await self._repeat(lambda _: self._time_pause(path, "abort"))
            report.pause_freeze_ms = await self._repeat(lambda _: self._time_pause(path, freeze))
        report.step_ms = Spread.of(self._gaps_s)
        return report

    async def _repeat(self, time_one: _TimeOne) -> Spread | None:
        times_s = []
        for _ in range(self._trial.rounds):
            async with asyncio.timeout(self._trial.timeout_s), self._load() as streams:
                times_s.append(await time_one(streams))
        return Spread.of(times_s)

    # -- timed operations -------------------------------------------------------

    async def _time_abort(self, streams: list[_Stream]) -> float:
        began_s = clock()
        await self._post("/v1/abort_requests", {"req_ids": [streams[0].id]})
        return clock() - began_s

    async def _time_other_abort(self, streams: list[_Stream]) -> float:
        before = await self._running()
        began_s = clock()
        await self._post("/abort_requests", {"request_ids": [f"cmpl-{streams[0].id}-0"]})
        return await self._until_fewer(before) - began_s

    async def _time_disconnect(self, streams: list[_Stream]) -> float:
        before = await self._running()
        began_s = clock()
        self._reading[streams[0]].cancel()
        return await self._until_fewer(before) - began_s

    async def _until_fewer(self, before: float) -> float:
        while await self._running() >= before:
            pass
        return clock()

    async def _time_pause(self, path: str, mode: str) -> float:
        began_s = clock()
        if path.startswith("/v1/"):
            await self._post(path, {"mode": mode})
        else:
            await self._post(f"{path}?mode={mode}", {})
        elapsed_s = clock() - began_s
        await self._post(path.replace("pause", "resume"), {})
        return elapsed_s

    # -- the load ---------------------------------------------------------------

    @asynccontextmanager
    async def _load(self) -> AsyncIterator[list[_Stream]]:
        """Yield answers that have all started; when the context exits, their clients disconnect."""
        streams = [_Stream(f"bench-{secrets.token_hex(6)}") for _ in range(self._trial.concurrency)]
        self._reading = {stream: asyncio.create_task(self._read(stream)) for stream in streams}
        try:
            await self._wait_for(stream.arrived.wait() for stream in streams)
            # Steps are measured only now, because they also compute prompts until all answers have started.
            gaps_s = await self._wait_for(stream.at_pace() for stream in streams)
            self._gaps_s += [gap_s for each in gaps_s for gap_s in each]
            yield streams
        finally:
            for task in self._reading.values():
                task.cancel()
            await asyncio.wait(self._reading.values())
            await self._settle()

    async def _wait_for(self, waits: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
        """Return the results of `waits`; raises if an answer ends before all of them are done."""
        waiting = asyncio.gather(*waits)
        running: list[asyncio.Future[Any]] = [waiting, *self._reading.values()]
        await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
        if waiting.done():
            return waiting.result()
        waiting.cancel()
        for task in self._reading.values():
            if task.done():
                await task
        raise HeadgateError(f"{self._trial.url}: an answer ended too early; raise --max-tokens")

    async def _settle(self) -> None:
        """Wait until the server counts no request. vLLM's count is stale after a pause has aborted all requests."""
        counting_s = clock()
        while await self._running():
            if clock() - counting_s > SETTLE_S:
                await self._post("/v1/completions", {"model": self._model, "prompt": "x", "max_tokens": 2})
                counting_s = clock()

    async def _read(self, stream: _Stream) -> None:
        body = {
            "model": self._model,
            "prompt": f"{stream.id} " + "word " * self._trial.prompt_words,
            "max_tokens": self._trial.max_tokens,
            "ignore_eos": True,
            "stream": True,
            "request_id": stream.id,
        }
        async with self._call("POST", "/v1/completions", body) as answer:
            if answer.status != 200:
                raise HeadgateError(f"{self._trial.url} answered {answer.status}: {(await answer.body())[:200]!r}")
            async for line in answer.lines():
                if line.startswith(b"data: {"):
                    stream.add_piece()

    # -- HTTP -------------------------------------------------------------------

    def _call(self, method: str, path: str, body: object = None) -> _Calling:
        data = b"" if body is None else msgspec.json.encode(body)
        return call(self._address, method, path, data, self._trial.api_key)

    async def _post(self, path: str, body: object) -> None:
        async with self._call("POST", path, body) as answer:
            raw = await answer.body()
            if answer.status >= 300:
                raise HeadgateError(f"{self._trial.url}{path} answered {answer.status}: {raw[:200]!r}")

    async def _has(self, path: str) -> bool:
        async with self._call("POST", path, {}) as answer:
            await answer.body()
            return answer.status not in (404, 405)

    async def _pause_path(self) -> str | None:
        for path in ("/v1/resume", "/resume"):
            if await self._has(path):
                return path.replace("resume", "pause")
        return None

    async def _running(self) -> float:
        async with self._call("GET", "/metrics") as answer:
            return sum(map(float, RUNNING.findall(await answer.body())))


async def measure(trial: LifecycleTrial) -> LifecycleReport:
    model = await trial.find_model()
    try:
        return await Bench(trial, model).run()
    except TimeoutError:
        raise HeadgateError(f"{trial.url}: a round took more than {trial.timeout_s:g} s") from None
    except (OSError, EOFError, HttpFailure) as error:
        raise HeadgateError(f"{trial.url}: {error or type(error).__name__}") from error


def run(trials: list[LifecycleTrial]) -> list[LifecycleReport]:
    async def measure_all() -> list[LifecycleReport]:
        return [await measure(trial) for trial in trials]

    return asyncio.run(measure_all())


ROWS = {
    "step": "step_ms",
    "abort": "abort_ms",
    "disconnect": "disconnect_ms",
    "pause (abort)": "pause_abort_ms",
    "pause (freeze)": "pause_freeze_ms",
}


def table(reports: list[LifecycleReport]) -> str:
    lines = []
    for report in reports:
        lines += [
            f"{report.model} at {report.url}: {report.concurrency} answers at once, {report.rounds} rounds",
            f"  {'milliseconds':<16}{'p50':>10}{'p99':>10}{'max':>10}",
        ]
        for name, attribute in ROWS.items():
            spread: Spread | None = getattr(report, attribute)
            numbers = f"{'-':>10}" if spread is None else cells(spread, "p50", "p99", "max")
            lines.append(f"  {name:<16}{numbers}")
        lines.append("")
    return "\n".join(lines)
