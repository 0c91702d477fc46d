"""What the answers are when nothing goes wrong: those of a server that nobody disturbs, under each set of weights."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from headgate.client import AsyncFleet
from headgate.errors import HeadgateError
from headgate.httpclient import HttpAddress
from headgate.testing.chaos.catalogue import COMPLETIONS, RETURN_DETAILS, CatalogueItem
from headgate.testing.chaos.client import ObservedAnswer, ObservedChoice, clock, send_request

CONCURRENCY = 16
TIMEOUT_S = 120.0

WeightsName = str  # "a" or "b"


@dataclass(frozen=True, slots=True)
class MixedWeightsAnswer:
    """An answer that several sets of weights have made, to be looked at when there is time."""

    item: CatalogueItem
    index: int
    choice: ObservedChoice
    weights: tuple[WeightsName, ...]  # one per token

    def parts(self) -> list[tuple[int, int, WeightsName]]:
        """Where each begins and ends, and who made it."""
        parts, begin = [], 0
        for weights, run in groupby(self.weights):
            end = begin + len(list(run))
            parts.append((begin, end, weights))
            begin = end
        return parts

    def ends_with(self, end: int) -> bool:
        """Whether what ends at that token is the end of a whole answer."""
        return end == len(self.choice.tokens) and bool(self.choice.ends) and not self.choice.cut


class ReferenceAnswers:
    def __init__(self, url: str, folders: dict[WeightsName, Path]) -> None:
        self._address, self._fleet, self._folders = HttpAddress.of(url), AsyncFleet(url), folders
        self._weights, self._version = "a", 0
        self._places = asyncio.Semaphore(CONCURRENCY)
        self.answers: dict[tuple[int, WeightsName], ObservedAnswer] = {}

    async def learn(self, items: Sequence[CatalogueItem]) -> None:
        for weights in self._folders:
            await self._take(weights)
            for item, answer in zip(items, await asyncio.gather(*map(self._answer, items)), strict=True):
                self.answers[item.number, weights] = answer

    async def _take(self, weights: WeightsName) -> None:
        if weights == self._weights:
            return
        self._version += 1
        await self._fleet.pause()
        await self._fleet.update_weights(str(self._folders[weights]), self._version)
        await self._fleet.resume()
        self._weights = weights

    async def _answer(self, item: CatalogueItem) -> ObservedAnswer:
        answer = ObservedAnswer(clock())
        async with self._places:
            await send_request(self._address, item, {}, answer, TIMEOUT_S)
        if answer.problem is not None:
            raise HeadgateError(f"a server in peace did not answer request {item.number}: {answer.problem}")
        return answer

    async def differing(self, mixed: Iterable[MixedWeightsAnswer]) -> list[tuple[MixedWeightsAnswer, str]]:
        """Those whose later parts are not what their weights go on with, each with a sentence."""
        found: list[tuple[MixedWeightsAnswer, str]] = []
        waiting = [(each, part) for each in mixed for part in each.parts()]
        for weights in self._folders:
            mine = [(each, part) for each, part in waiting if part[2] == weights]
            if not mine:
                continue
            await self._take(weights)
            answers = await asyncio.gather(*(self._answer(_continuation(each, *part[:2])) for each, part in mine))
            for (each, (begin, end, _)), answer in zip(mine, answers, strict=True):
                if (problem_text := _difference_from(each, begin, end, answer.choices[0])) is not None:
                    found.append((each, f"tokens {begin} to {end} under weights {weights}: {problem_text}"))
        return found


def first_difference(got: Sequence[int], expected: Sequence[int]) -> str:
    for position, (one, other) in enumerate(zip(got, expected, strict=False)):
        if one != other:
            return f"token {position} is {one} and not {other}"
    return f"{len(got)} tokens and not {len(expected)}"


def _difference_from(mixed: MixedWeightsAnswer, begin: int, end: int, expected: ObservedChoice) -> str | None:
    """How a part differs from what a server in peace says in its place."""
    got = mixed.choice.tokens[begin:end]
    if got != expected.tokens:
        return first_difference(got, expected.tokens)
    if mixed.ends_with(end):
        answer = mixed.choice.text, mixed.choice.ends
        if answer != (expected.text, expected.ends):
            return f"{answer} and not {(expected.text, expected.ends)}"
    return None


def _continuation(mixed: MixedWeightsAnswer, begin: int, end: int) -> CatalogueItem:
    """The same answer, asked for from its token `begin` to `end`, or to its own end."""
    body_sent, choice = mixed.item.body, mixed.choice
    body = {
        "prompt": choice.prompt,
        "generated_token_ids": choice.tokens[:begin],
        "stream": False,
        "seed": body_sent["seed"] + mixed.index,
        "max_tokens": body_sent["max_tokens"] if mixed.ends_with(end) else end,
        **{name: body_sent[name] for name in ("ignore_eos", "temperature")},
        **RETURN_DETAILS,
    }
    return CatalogueItem(mixed.item.number, COMPLETIONS, body)
