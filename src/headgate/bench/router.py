"""Measures the overhead of a router and the quality of its placement.

*Placement*: conversations with shared system prompts, which continue with the answers they get. The worker is read
from `X-Headgate-Worker`, the cached tokens from usage. *Overhead*: short requests one at a time, each through the
router and then directly to the worker that answered it, so that both run under the same conditions; then many
concurrently.
"""

from __future__ import annotations

import asyncio
import random
import secrets
import statistics
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

import msgspec

from headgate.bench.client import TimedReply, TimedRequest, address_of, ask, clock
from headgate.bench.dataset import some_words
from headgate.bench.report import Spread, cached_share, count_errors, error_lines
from headgate.bench.trial import Trial
from headgate.errors import HeadgateError, RequestError

CHAT = "/v1/chat/completions"
SHORT_WORDS = 8  # number of words in a prompt of the overhead test

Message = dict[str, str]
Send = Callable[[str, list[Message]], Awaitable[TimedReply]]  # takes a URL and messages


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterTrial(Trial):
    direct: tuple[str, ...] = ()  # workers to compare with; if empty, those that answered through the router
    conversations: int = 16
    turns: int = 4
    system_prompts: int = 4
    system_words: int = 256
    zipf: bool = False  # the most popular system prompt is used twice as often as the second, and so on
    think_s: float = 1.0  # mean pause before each question
    max_tokens: int = 16
    ignore_eos: bool = False
    rounds: int = 50  # requests of the overhead test, one at a time; then as many for each of `concurrency` clients
    concurrency: int = 8
    seed: int | None = None  # None: a random seed, so that no prompt is cached

    POSITIVE: ClassVar = (
        *("conversations", "turns", "system_prompts", "system_words"),
        *("max_tokens", "rounds", "concurrency"),
    )

    def __post_init__(self) -> None:
        Trial.__post_init__(self)
        if not self.think_s >= 0:
            raise RequestError("think must be at least 0")


class PlacementFigures(msgspec.Struct, frozen=True):
    requests: int
    at_home: float | None  # share of later turns that went to the worker of the previous turn
    busiest_over_mean: float | None
    workers: dict[str, int]  # requests by worker; empty if answers do not name their worker
    cached_share: float  # share of prompt tokens that were cached, as reported by the workers


# The measured times of an answer.
TIMES_S: dict[str, Callable[[TimedRequest], float | None]] = {
    "first_token_ms": lambda sample: sample.first_token_s,
    "between_pieces_ms": lambda sample: statistics.fmean(sample.gaps_s) if sample.gaps_s else None,
    "end_to_end_ms": lambda sample: sample.total_s,
}


def _times_s(samples: Sequence[TimedRequest], name: str) -> list[float]:
    return [time_s for sample in samples if (time_s := TIMES_S[name](sample)) is not None]


class RouterReading(msgspec.Struct, frozen=True):
    first_token_ms: Spread | None
    between_pieces_ms: Spread | None
    end_to_end_ms: Spread | None
    requests_per_s: float  # throughput of the concurrent clients

    @classmethod
    def of(cls, samples: Sequence[TimedRequest], requests_per_s: float) -> RouterReading:
        spreads = {name: Spread.of(_times_s(samples, name)) for name in TIMES_S}
        return cls(**spreads, requests_per_s=requests_per_s)


class RouterReport(msgspec.Struct, frozen=True):
    url: str
    model: str
    conversations: int
    turns: int
    system_prompts: int
    system_words: int
    placement: PlacementFigures
    router: RouterReading
    direct: RouterReading | None  # None: there was no worker to compare with
    added: dict[str, float]  # name of a time -> median of the differences within pairs, in milliseconds
    errors: dict[str, int]


def run(trial: RouterTrial) -> RouterReport:
    return asyncio.run(measure(trial))


async def measure(trial: RouterTrial) -> RouterReport:
    model = await trial.find_model()
    chance = random.Random(secrets.randbits(64) if trial.seed is None else trial.seed)
    samples: list[TimedRequest] = []

    async def send(url: str, messages: list[Message]) -> TimedReply:
        body = _body(trial, model, messages)
        reply = await ask(address_of(url, trial.tls), CHAT, body, api_key=trial.api_key, timeout_s=trial.timeout_s)
        samples.append(reply.sample)
        return reply

    talks = await _converse(trial, chance, send)
    pairs = await _pairs(trial, chance, send)
    routed, direct = [pair[0] for pair in pairs], [pair[1] for pair in pairs if pair[1] is not None]
    workers = trial.direct or tuple({sample.worker for sample in routed if sample.worker})
    routed_per_s = await _requests_per_s(trial, chance, send, (trial.url,))
    direct_per_s = await _requests_per_s(trial, chance, send, workers) if direct else 0.0
    if all(sample.error is not None for sample in samples):
        raise HeadgateError(f"{trial.url} answered no request: {samples[0].error}")
    return RouterReport(
        url=trial.url,
        model=model,
        conversations=trial.conversations,
        turns=trial.turns,
        system_prompts=trial.system_prompts,
        system_words=trial.system_words,
        placement=placement_of(talks),
        router=RouterReading.of(_answered(routed), routed_per_s),
        direct=RouterReading.of(_answered(direct), direct_per_s) if direct else None,
        added=_added(pairs),
        errors=count_errors(samples),
    )


def _body(trial: RouterTrial, model: str, messages: list[Message]) -> bytes:
    body: dict[str, object] = {
        "model": model,
        "messages": messages,
        "max_tokens": trial.max_tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0,
    }
    if trial.ignore_eos:
        body["ignore_eos"] = True
    return msgspec.json.encode(body)


# ---------------------------------------------------------------------------------------------------------- placement


async def _converse(trial: RouterTrial, chance: random.Random, send: Send) -> list[list[TimedRequest]]:
    """Run all conversations concurrently; returns the requests of each."""
    systems = [some_words(chance, trial.system_words) for _ in range(trial.system_prompts)]
    questions = [
        [some_words(chance, 2 * SHORT_WORDS) for _ in range(trial.turns)] for _ in range(trial.conversations)
    ]

    pauses_s = [[trial.think_s * chance.expovariate(1.0) for _ in talk] for talk in questions]
    weights = [1 / (rank + 1) for rank in range(len(systems))]
    popular = chance.choices(systems, weights, k=trial.conversations)

    async def talk(number: int) -> list[TimedRequest]:
        system = popular[number] if trial.zipf else systems[number % len(systems)]
        messages = [{"role": "system", "content": system}]
        samples = []
        for question, pause_s in zip(questions[number], pauses_s[number], strict=True):
            await asyncio.sleep(pause_s)
            messages.append({"role": "user", "content": question})
            reply = await send(trial.url, messages)
            samples.append(reply.sample)
            messages.append({"role": "assistant", "content": reply.text})
        return samples

    return list(await asyncio.gather(*(talk(number) for number in range(trial.conversations))))


def placement_of(talks: Sequence[Sequence[TimedRequest]]) -> PlacementFigures:
    samples = [sample for talk in talks for sample in talk if sample.error is None]
    workers = Counter(sample.worker for sample in samples if sample.worker)
    moves = [(one.worker, other.worker) for talk in talks for one, other in pairwise(talk) if other.worker]
    return PlacementFigures(
        requests=len(samples),
        at_home=sum(one == other for one, other in moves) / len(moves) if moves else None,
        busiest_over_mean=max(workers.values()) * len(workers) / workers.total() if workers else None,
        workers=dict(workers.most_common()),
        cached_share=cached_share(samples),
    )


# ----------------------------------------------------------------------------------------------------------- overhead


async def _pairs(
    trial: RouterTrial, chance: random.Random, send: Send
) -> list[tuple[TimedRequest, TimedRequest | None]]:
    """After a warm-up pair, send requests one at a time, each through the router and then directly to its worker."""
    pairs = []
    for number in range(trial.rounds + 1):
        routed = (await send(trial.url, _short(chance))).sample
        url = trial.direct[number % len(trial.direct)] if trial.direct else routed.worker
        pairs.append((routed, (await send(url, _short(chance))).sample if url else None))
    return pairs[1:]


async def _requests_per_s(trial: RouterTrial, chance: random.Random, send: Send, urls: Sequence[str]) -> float:
    """Measure the throughput of a closed loop of `concurrency` clients."""
    prompts = iter([_short(chance) for _ in range(trial.rounds * trial.concurrency)])
    answered = 0

    async def client(number: int) -> None:
        nonlocal answered
        for messages in prompts:
            reply = await send(urls[number % len(urls)], messages)
            answered += reply.sample.error is None

    begun_s = clock()
    await asyncio.gather(*(client(number) for number in range(trial.concurrency)))
    return answered / (clock() - begun_s)


def _added(pairs: Sequence[tuple[TimedRequest, TimedRequest | None]]) -> dict[str, float]:
    """Return median differences within pairs. Unlike differences of medians, they exclude drift of the machine."""
    answered = [(one, other) for one, other in pairs if other is not None and not (one.error or other.error)]
    added = {}
    for name in TIMES_S:
        times_s = [_times_s(pair, name) for pair in answered]
        if differences := [1000 * (both[0] - both[1]) for both in times_s if len(both) == 2]:
            added[name] = statistics.median(differences)
    return added


def _short(chance: random.Random) -> list[Message]:
    return [{"role": "user", "content": some_words(chance, SHORT_WORDS)}]


def _answered(samples: Sequence[TimedRequest]) -> list[TimedRequest]:
    return [sample for sample in samples if sample.error is None]


# ------------------------------------------------------------------------------------------------------------ results


def table(report: RouterReport) -> str:
    placement = report.placement
    lines = [
        f"{report.model} at {report.url}: {report.conversations} conversations of {report.turns} turns, "
        f"{report.system_prompts} system prompts of {report.system_words} words",
        "",
        f"{'turns at the worker of the previous turn':<46}{_share(placement.at_home):>10}",
        f"{'requests of the busiest worker over the mean':<46}{_number(placement.busiest_over_mean):>10}",
        f"{'prompt tokens that were cached':<46}{_share(placement.cached_share):>10}",
        "",
        f"{'ms, one at a time':<22}{'router p50':>12}{'p99':>10}{'direct p50':>12}{'p99':>10}{'added':>12}",
        *(_row(name, attribute, report) for name, attribute in ROWS.items()),
        f"{'requests/s at once':<22}{report.router.requests_per_s:>12.1f}"
        + (f"{'':>10}{report.direct.requests_per_s:>12.1f}" if report.direct else ""),
    ]
    return "\n".join(lines + error_lines(report.errors))


ROWS = {
    "first token": "first_token_ms",
    "between pieces": "between_pieces_ms",
    "end to end": "end_to_end_ms",
}


def _row(name: str, attribute: str, report: RouterReport) -> str:
    cells = []
    for reading in (report.router, report.direct):
        spread: Spread | None = getattr(reading, attribute) if reading else None
        cells.append(f"{'-':>12}{'-':>10}" if spread is None else f"{spread.p50:>12.2f}{spread.p99:>10.2f}")
    return f"{name:<22}{''.join(cells)}{_number(report.added.get(attribute)):>12}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
