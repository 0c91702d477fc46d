"""What long prompts do to those who are being answered: some streams run, first alone, then while long prompts arrive.

Where prompts and answers share an engine, a step that computes a part of a long prompt makes every stream wait for it.
Where they do not, streams should not notice. Ask the same of a router in front of either kind of fleet.
"""

from __future__ import annotations

import asyncio
import random
import secrets
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path

import msgspec

from headgate.bench.client import TimedRequest, address_of, ask
from headgate.bench.dataset import some_words
from headgate.bench.load import ClosedLoop, Load, first_model
from headgate.bench.report import Spread
from headgate.errors import HeadgateError, RequestError

STREAM_WORDS = 8  # of a stream's prompt

Send = Callable[[], Coroutine[None, None, TimedRequest]]


@dataclass(frozen=True, slots=True, kw_only=True)
class DisaggTrial:
    url: str
    streams: int = 4  # at once, each followed by another as long as there are prompts to come
    max_tokens: int = 256  # of a stream
    prompts: int = 16
    prompt_words: int = 1024
    interval_s: float = 0.5  # from one long prompt to the next
    answer_tokens: int = 4  # to a long prompt
    model: str | None = None
    api_key: str | None = None
    timeout_s: float = 120.0

    def __post_init__(self) -> None:
        for name in ("streams", "max_tokens", "prompts", "prompt_words", "answer_tokens"):
            if getattr(self, name) < 1:
                raise RequestError(f"{name} must be at least 1")
        if not self.interval_s >= 0:
            raise RequestError("interval must be at least 0")


class DisaggReading(msgspec.Struct, frozen=True):
    requests: int
    first_token_ms: Spread | None
    between_tokens_ms: Spread | None

    @classmethod
    def of(cls, samples: list[TimedRequest]) -> DisaggReading:
        first_s = [sample.first_token_s for sample in samples if sample.first_token_s is not None]
        gaps_s = [gap_s for sample in samples for gap_s in sample.gaps_s]
        return cls(len(samples), Spread.of(first_s), Spread.of(gaps_s))


class DisaggReport(msgspec.Struct, frozen=True):
    url: str
    model: str
    streams: int
    prompt_words: int
    interval_s: float
    prompt_tokens: float  # of a long prompt, on average
    alone: DisaggReading  # streams that have the servers to themselves
    beside: DisaggReading  # streams beside long prompts
    long: DisaggReading
    errors: dict[str, int]


def run(trial: DisaggTrial) -> DisaggReport:
    return asyncio.run(measure(trial))


async def measure(trial: DisaggTrial) -> DisaggReport:
    address = address_of(trial.url)
    model = trial.model or await first_model(address, trial.api_key)
    load = Load(url=trial.url, pace=ClosedLoop(1), api="completions", ignore_eos=True)
    chance = random.Random(secrets.randbits(64))  # no prompt is found in a cache

    async def send(words: int, max_tokens: int) -> TimedRequest:
        body = load.body(model, [some_words(chance, words)], max_tokens)
        return (await ask(address, load.path, body, api_key=trial.api_key, timeout_s=trial.timeout_s)).sample

    async def stream() -> TimedRequest:
        return await send(STREAM_WORDS, trial.max_tokens)

    await stream()  # whatever happens at the first request only
    alone = await asyncio.gather(*(stream() for _ in range(trial.streams)))
    beside, long = await _together(trial, stream, lambda: send(trial.prompt_words, trial.answer_tokens))
    return _report(trial, model, alone, beside, long)


async def _together(trial: DisaggTrial, stream: Send, prompt: Send) -> tuple[list[TimedRequest], list[TimedRequest]]:
    """Streams, one after another on each line, from before the first long prompt until after the last."""
    over = False
    beside: list[TimedRequest] = []

    async def line() -> None:
        while not over:
            beside.append(await stream())
            if beside[-1].error is not None:
                await asyncio.sleep(trial.interval_s)  # a server that refuses is not asked without end

    async with asyncio.TaskGroup() as tasks:
        for _ in range(trial.streams):
            tasks.create_task(line())
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
    errors = Counter(sample.error for sample in (*alone, *beside, *long) if sample.error)
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
        errors=dict(errors.most_common()),
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
    if report.errors:
        lines += ["", "errors: " + ", ".join(f"{error} ({count})" for error, count in report.errors.items())]
    return "\n".join(lines)


def _line(name: str, spread: Spread | None) -> str:
    if spread is None:
        return f"{name:<38}{'-':>40}"
    return f"{name:<38}{spread.p50:>10.2f}{spread.p90:>10.2f}{spread.p99:>10.2f}{spread.max:>10.2f}"


def save_json(report: DisaggReport, path: Path) -> None:
    path.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n")
