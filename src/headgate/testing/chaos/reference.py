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
from headgate.testing.chaos.catalogue import COMPLETIONS, TOLD, Item
from headgate.testing.chaos.client import ObservedAnswer, ObservedChoice, ask, clock

AT_ONCE = 16
TIMEOUT_S = 120.0

Weights = str  # "a" or "b"


@dataclass(frozen=True, slots=True)
class Spliced:
    """An answer that several sets of weights have made, to be looked at when there is time."""

    item: Item
    index: int
    choice: ObservedChoice
    weights: tuple[Weights, ...]  # one per token

    def parts(self) -> list[tuple[int, int, Weights]]:
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


class Reference:
    def __init__(self, url: str, folders: dict[Weights, Path]) -> None:
        self._address, self._fleet, self._folders = HttpAddress.of(url), AsyncFleet(url), folders
        self._weights, self._version = "a", 0
        self._places = asyncio.Semaphore(AT_ONCE)
        self.answers: dict[tuple[int, Weights], ObservedAnswer] = {}

    async def learn(self, items: Sequence[Item]) -> None:
        for weights in self._folders:
            await self._take(weights)
            for item, told in zip(items, await asyncio.gather(*map(self._answer, items)), strict=True):
                self.answers[item.number, weights] = told

    async def _take(self, weights: Weights) -> None:
        if weights == self._weights:
            return
        self._version += 1
        await self._fleet.pause()
        await self._fleet.update_weights(str(self._folders[weights]), self._version)
        await self._fleet.resume()
        self._weights = weights

    async def _answer(self, item: Item) -> ObservedAnswer:
        told = ObservedAnswer(clock())
        async with self._places:
            await ask(self._address, item, {}, told, TIMEOUT_S)
        if told.problem is not None:
            raise HeadgateError(f"a server in peace did not answer request {item.number}: {told.problem}")
        return told

    async def differing(self, spliced: Iterable[Spliced]) -> list[tuple[Spliced, str]]:
        """Those whose later parts are not what their weights go on with, each with a sentence."""
        found: list[tuple[Spliced, str]] = []
        waiting = [(each, part) for each in spliced for part in each.parts()]
        for weights in self._folders:
            mine = [(each, part) for each, part in waiting if part[2] == weights]
            if not mine:
                continue
            await self._take(weights)
            answers = await asyncio.gather(*(self._answer(_going_on(each, *part[:2])) for each, part in mine))
            for (each, (begin, end, _)), told in zip(mine, answers, strict=True):
                if (sentence := _unlike(each, begin, end, told.choices[0])) is not None:
                    found.append((each, f"tokens {begin} to {end} under weights {weights}: {sentence}"))
        return found


def first_difference(got: Sequence[int], expected: Sequence[int]) -> str:
    for position, (one, other) in enumerate(zip(got, expected, strict=False)):
        if one != other:
            return f"token {position} is {one} and not {other}"
    return f"{len(got)} tokens and not {len(expected)}"


def _unlike(spliced: Spliced, begin: int, end: int, expected: ObservedChoice) -> str | None:
    """How a part differs from what a server in peace says in its place."""
    got = spliced.choice.tokens[begin:end]
    if got != expected.tokens:
        return first_difference(got, expected.tokens)
    if spliced.ends_with(end):
        told = spliced.choice.text, spliced.choice.ends
        if told != (expected.text, expected.ends):
            return f"{told} and not {(expected.text, expected.ends)}"
    return None


def _going_on(spliced: Spliced, begin: int, end: int) -> Item:
    """The same answer, asked for from its token `begin` to `end`, or to its own end."""
    asked, choice = spliced.item.body, spliced.choice
    body = {
        "prompt": choice.prompt,
        "generated_token_ids": choice.tokens[:begin],
        "stream": False,
        "seed": asked["seed"] + spliced.index,
        "max_tokens": asked["max_tokens"] if spliced.ends_with(end) else end,
        **{name: asked[name] for name in ("ignore_eos", "temperature")},
        **TOLD,
    }
    return Item(spliced.item.number, COMPLETIONS, body)
