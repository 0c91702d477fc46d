"""Measures how long prompts delay running streams: streams run first alone, then while long prompts arrive.

If one engine does both prefill and decode, a step that computes part of a long prompt delays every stream. With
disaggregated prefill, streams should not slow down. To compare, run this benchmark against a router in front of each
kind of fleet.
"""

from __future__ import annotations

import asyncio
import random
import secrets
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import ClassVar

import msgspec

from headgate.bench.client import TimedRequest, ask
from headgate.bench.dataset import some_words
from headgate.bench.load import ClosedLoop, Load
from headgate.bench.report import Spread, cells, count_errors, error_lines, first_token_times_s, gaps_s
from headgate.bench.trial import Trial
from headgate.errors import HeadgateError, RequestError

STREAM_WORDS = 8  # number of words in a stream's prompt

Send = Callable[[], Coroutine[None, None, TimedRequest]]


@dataclass(frozen=True, slots=True, kw_only=True)
class DisaggTrial(Trial):
    streams: int = 4  # concurrent streams; each is replaced when it ends, until all long prompts are answered
    max_tokens: int = 256  # length of a stream's answer
    prompts: int = 16
    prompt_words: int = 1024
    interval_s: float = 0.5  # time between two long prompts
    answer_tokens: int = 4  # length of the answer to a long prompt

    POSITIVE: ClassVar = ("streams", "max_tokens", "prompts", "prompt_words", "answer_tokens")

    def __post_init__(self) -> None:
        Trial.__post_init__(self)
        if not self.interval_s >= 0:
            raise RequestError("interval must be at least 0")


class DisaggReading(msgspec.Struct, frozen=True):
    requests: int
    first_token_ms: Spread | None
    between_tokens_ms: Spread | None

    @classmethod
    def of(cls, samples: list[TimedRequest]) -> DisaggReading:
        return cls(len(samples), Spread.of(first_token_times_s(samples)), Spread.of(gaps_s(samples)))


class DisaggReport(msgspec.Struct, frozen=True):
    url: str
    model: str
    streams: int
    prompt_words: int
    interval_s: float
    prompt_tokens: float  # mean length of the long prompts
    alone: DisaggReading  # streams without other load
    beside: DisaggReading  # streams while long prompts arrive
    long: DisaggReading
    errors: dict[str, int]


def run(trial: DisaggTrial) -> DisaggReport:
    return asyncio.run(measure(trial))


async def measure(trial: DisaggTrial) -> DisaggReport:
    address, model = trial.address, await trial.find_model()
    load = Load(url=trial.url, pace=ClosedLoop(1), api="completions", ignore_eos=True)
    chance = random.Random(secrets.randbits(64))  # a new seed, so that no prompt is cached

    async def send(words: int, max_tokens: int) -> TimedRequest:
        body = load.body(model, [some_words(chance, words)], max_tokens)
        return (await ask(address, load.path, body, api_key=trial.api_key, timeout_s=trial.timeout_s)).sample

    async def stream() -> TimedRequest:
        return await send(STREAM_WORDS, trial.max_tokens)

    await stream()  # a warm-up, so that one-time costs are not measured
    alone = await asyncio.gather(*(stream() for _ in range(trial.streams)))
    beside, long = await _together(trial, stream, lambda: send(trial.prompt_words, trial.answer_tokens))
    return _report(trial, model, alone, beside, long)


async def _together(trial: DisaggTrial, stream: Send, prompt: Send) -> tuple[list[TimedRequest], list[TimedRequest]]:
    """Run streams from before the first long prompt until after the last one."""
    over = False
    beside: list[TimedRequest] = []

    async def keep_streaming() -> None:
        while not over:
            beside.append(await stream())
            if beside[-1].error is not None:
                await asyncio.sleep(trial.interval_s)  # a server that refuses must not be flooded

    async with asyncio.TaskGroup() as tasks:
        for _ in range(trial.streams):
            tasks.create_task(keep_streaming())
        sent = []
        for _ in range(trial.prompts):
            await asyncio.sleep(trial.interval_s)
            sent.append(tasks.create_task(prompt()))
        long = list(await asyncio.gather(*sent))
        over = True
    return beside, long


def _report(
    trial: DisaggTrial, model: str, alone: list[TimedRequest], beside: list[TimedRequest], long: list[TimedRequest]
) -> DisaggReport:
    errors = count_errors([*alone, *beside, *long])
    answered = [sample for sample in long if sample.error is None]
    if not answered:
        raise HeadgateError(f"{trial.url} answered no prompt of {trial.prompt_words} words: {', '.join(errors)}")
    return DisaggReport(
        url=trial.url,
        model=model,
        streams=trial.streams,
        prompt_words=trial.prompt_words,
        interval_s=trial.interval_s,
        prompt_tokens=sum(sample.prompt_tokens for sample in answered) / len(answered),
        alone=DisaggReading.of(alone),
        beside=DisaggReading.of(beside),
        long=DisaggReading.of(answered),
        errors=errors,
    )


def table(report: DisaggReport) -> str:
    lines = [
        f"{report.model} at {report.url}: {report.streams} streams; {report.long.requests} prompts of "
        f"{report.prompt_tokens:.0f} tokens, one every {report.interval_s:g} s",
        "",
        f"{'ms':<38}{'p50':>10}{'p90':>10}{'p99':>10}{'max':>10}",
        _line("between tokens, streams alone", report.alone.between_tokens_ms),
        _line("between tokens, beside long prompts", report.beside.between_tokens_ms),
        _line("first token, streams beside them", report.beside.first_token_ms),
        _line("first token, long prompts", report.long.first_token_ms),
    ]
    return "\n".join(lines + error_lines(report.errors))


def _line(name: str, spread: Spread | None) -> str:
    return f"{name:<38}{cells(spread, 'p50', 'p90', 'p99', 'max')}"
