"""What a prefix cache is worth: the time to the first token of a prompt whose prefix is new, and of one whose is not.

Each round makes up a prefix that no server has seen, sends one request with it (*cold*), and then others that begin with it
and end differently (*warm*), one after another, so that nothing else is timed than computing the prompt.
"""

from __future__ import annotations

import asyncio
import random
import secrets
from dataclasses import dataclass
from pathlib import Path

import msgspec

from headgate.bench.client import TimedRequest, address_of, ask
from headgate.bench.dataset import some_words
from headgate.bench.load import ClosedLoop, Load, first_model
from headgate.bench.report import Spread, cached_share
from headgate.errors import HeadgateError, RequestError

QUESTION_WORDS = 8  # after the prefix, different in each request


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixTrial:
    url: str
    rounds: int = 5
    warm: int = 4  # requests per round after the cold one
    prefix_words: int = 512
    max_tokens: int = 4
    model: str | None = None
    api_key: str | None = None
    timeout_s: float = 120.0

    def __post_init__(self) -> None:
        for name in ("rounds", "warm", "prefix_words", "max_tokens"):
            if getattr(self, name) < 1:
                raise RequestError(f"{name} must be at least 1")


class PrefixReading(msgspec.Struct, frozen=True):
    first_token_ms: Spread | None
    prompt_tokens: int
    cached_share: float  # of prompt tokens, as the server says

    @classmethod
    def of(cls, samples: list[TimedRequest]) -> PrefixReading:
        times_s = [sample.first_token_s for sample in samples if sample.first_token_s is not None]
        prompt_tokens = sum(sample.prompt_tokens for sample in samples)
        return cls(Spread.of(times_s), prompt_tokens, cached_share(samples))


class PrefixReport(msgspec.Struct, frozen=True):
    url: str
    model: str
    rounds: int
    prefix_words: int
    cold: PrefixReading
    warm: PrefixReading

    @property
    def speedup(self) -> float | None:
        """How many times sooner the first token comes, at the median."""
        cold, warm = self.cold.first_token_ms, self.warm.first_token_ms
        return cold.p50 / warm.p50 if cold and warm else None


def run(trial: PrefixTrial) -> PrefixReport:
    return asyncio.run(measure(trial))


async def measure(trial: PrefixTrial) -> PrefixReport:
    address = address_of(trial.url)
    model = trial.model or await first_model(address, trial.api_key)
    load = Load(url=trial.url, pace=ClosedLoop(1), api="completions", ignore_eos=True)
    chance = random.Random(secrets.randbits(64))  # a seed would make the second run warm from the start

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
        spread = reading.first_token_ms
        times = "" if spread is None else f"{spread.p50:>10.2f}{spread.p90:>10.2f}{spread.p99:>10.2f}"
        lines.append(f"{name:<18}{times or '-':>30}{reading.cached_share:>10.1%}")
    if report.speedup is not None:
        lines += ["", f"a known prefix brings the first token {report.speedup:.1f} times as soon"]
    return "\n".join(lines)


def save_json(report: PrefixReport, path: Path) -> None:
    path.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n")
