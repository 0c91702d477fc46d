"""Measures how much time a prefix cache saves: the time to first token with a new prefix and with a cached one.

Each round makes a random prefix, sends one request with it (*cold*), then others with the same prefix and different
endings (*warm*). Requests are sent one at a time, so that only the prefill is measured.
"""

from __future__ import annotations

import asyncio
import random
import secrets
from dataclasses import dataclass
from typing import ClassVar

import msgspec

from headgate.bench.client import TimedRequest, ask
from headgate.bench.dataset import some_words
from headgate.bench.load import ClosedLoop, Load
from headgate.bench.report import Spread, cached_share, cells, first_token_times_s
from headgate.bench.trial import Trial
from headgate.errors import HeadgateError

QUESTION_WORDS = 8  # number of words after the prefix; they differ in each request


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixTrial(Trial):
    rounds: int = 5
    warm: int = 4  # requests per round after the cold one
    prefix_words: int = 512
    max_tokens: int = 4

    POSITIVE: ClassVar = ("rounds", "warm", "prefix_words", "max_tokens")


class PrefixReading(msgspec.Struct, frozen=True):
    first_token_ms: Spread | None
    prompt_tokens: int
    cached_share: float  # share of prompt tokens that were cached, as reported by the server

    @classmethod
    def of(cls, samples: list[TimedRequest]) -> PrefixReading:
        prompt_tokens = sum(sample.prompt_tokens for sample in samples)
        return cls(Spread.of(first_token_times_s(samples)), prompt_tokens, cached_share(samples))


class PrefixReport(msgspec.Struct, frozen=True):
    url: str
    model: str
    rounds: int
    prefix_words: int
    cold: PrefixReading
    warm: PrefixReading

    @property
    def speedup(self) -> float | None:
        """The ratio of the median times to first token, cold over warm."""
        cold, warm = self.cold.first_token_ms, self.warm.first_token_ms
        return cold.p50 / warm.p50 if cold and warm else None


def run(trial: PrefixTrial) -> PrefixReport:
    return asyncio.run(measure(trial))


async def measure(trial: PrefixTrial) -> PrefixReport:
    address, model = trial.address, await trial.find_model()
    load = Load(url=trial.url, pace=ClosedLoop(1), api="completions", ignore_eos=True)
    chance = random.Random(secrets.randbits(64))  # with a fixed seed, a second run would find its prefixes cached

    async def send(prefix: str) -> TimedRequest:
        body = load.body(model, [f"{prefix} {some_words(chance, QUESTION_WORDS)}"], trial.max_tokens)
        reply = await ask(address, load.path, body, api_key=trial.api_key, timeout_s=trial.timeout_s)
        if reply.sample.error is not None:
            raise HeadgateError(
                f"{trial.url} did not answer a prompt of {trial.prefix_words} words: {reply.sample.error}"
            )
        return reply.sample

    cold, warm = [], []
    for _ in range(trial.rounds):
        prefix = some_words(chance, trial.prefix_words)
        cold.append(await send(prefix))
        warm += [await send(prefix) for _ in range(trial.warm)]
    return PrefixReport(
        trial.url, model, trial.rounds, trial.prefix_words, PrefixReading.of(cold), PrefixReading.of(warm)
    )


def table(report: PrefixReport) -> str:
    lines = [
        f"{report.model} at {report.url}: {report.rounds} prefixes of {report.prefix_words} words",
        "",
        f"{'first token, ms':<18}{'p50':>10}{'p90':>10}{'p99':>10}{'cached':>10}",
    ]
    for name, reading in (("cold", report.cold), ("warm", report.warm)):
        times = cells(reading.first_token_ms, "p50", "p90", "p99")
        lines.append(f"{name:<18}{times}{reading.cached_share:>10.1%}")
    if report.speedup is not None:
        lines += ["", f"with a cached prefix, the first token arrives {report.speedup:.1f} times as soon"]
    return "\n".join(lines)
