"""The clients: each asks, reads to the end, and asks again, until it is told that it is over."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass

from headgate.httpclient import HttpAddress
from headgate.testing.chaos.catalogue import Item
from headgate.testing.chaos.client import ObservedAnswer, ask, clock
from headgate.testing.chaos.judge import Judge

PATIENCE_S = 180.0  # of a client; beyond it the request has hung
THINKS_S = 0.5  # at most, between an answer and the next question
STRICT = 0.15  # of all clients know only OpenAI's finish reasons
LONGEST_WAIT_S = 2.0  # when told to come back later


@dataclass(frozen=True, slots=True)
class FinishedRequest:
    """For the timeline."""

    at_s: float
    took_s: float
    first_s: float | None
    word: str
    tokens: int


@dataclass(eq=False)
class LoadClient:
    number: int
    request_id: str = ""
    task: asyncio.Task[None] | None = None
    leaving: bool = False


class ClientLoad:
    """Use `run` in a task, and `over` to have every client finish and leave."""

    def __init__(
        self, url: str, items: Sequence[Item], judge: Judge, clients: int, seed: int, api_key: str | None = None
    ) -> None:
        self._api_key = api_key
        self._address, self._items, self._judge, self._seed = HttpAddress.of(url), items, judge, seed
        self._clients = [LoadClient(number) for number in range(clients)]
        self._chance = random.Random(seed)
        self.over = asyncio.Event()
        self.ended: list[FinishedRequest] = []
        self.begun_s = clock()
        self.asked = 0

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            for client in self._clients:
                tasks.create_task(self._live(client))

    def vanish(self, count: int) -> int:
        """So many clients hang up in the middle of what they are told."""
        leaving = self._some(count)
        for client in leaving:
            client.leaving = True
            assert client.task is not None
            client.task.cancel()
        return len(leaving)

    def abort(self, count: int) -> list[str]:
        """Ids of requests that somebody else is going to end."""
        ids = [client.request_id for client in self._some(count)]
        self._judge.aborted |= set(ids)
        return ids

    def ids(self) -> list[str]:
        """Of all requests that are under way."""
        return [client.request_id for client in self._clients if client.task is not None]

    def _some(self, count: int) -> list[LoadClient]:
        asking = [client for client in self._clients if client.task is not None and not client.leaving]
        return self._chance.sample(asking, min(count, len(asking)))

    async def _live(self, client: LoadClient) -> None:
        chance = random.Random(f"{self._seed} {client.number}")
        while not self.over.is_set():
            await asyncio.sleep(chance.uniform(0, THINKS_S))
            await self._one(client, chance)

    async def _one(self, client: LoadClient, chance: random.Random) -> None:
        item, told = chance.choice(self._items), ObservedAnswer(clock())
        self.asked += 1
        client.request_id = f"chaos-{client.number}-{self.asked}"
        more: dict[str, object] = {"request_id": client.request_id}
        if chance.random() < 0.3:
            more["cache_salt"] = client.request_id  # its prompt is in nobody's cache
        strict = chance.random() < STRICT
        asking = ask(self._address, item, more, told, PATIENCE_S, api_key=self._api_key, strict=strict)
        client.task = asyncio.ensure_future(asking)
        try:
            await asyncio.wait({client.task})
        finally:
            client.task.cancel()
        left, client.leaving, client.task = client.leaving and client.task.cancelled(), False, None
        if left:
            self._judge.vanished(item, told)
            return
        word = self._judge.ended(client.request_id, item, told)
        self._note(told, word)
        if word == "refused":
            await asyncio.sleep(min(told.retry_after_s, LONGEST_WAIT_S))

    def _note(self, told: ObservedAnswer, word: str) -> None:
        tokens = sum(len(choice.tokens) for choice in told.choices.values())
        first_s = None if told.first_s is None else told.first_s - told.begun_s
        at_s, took_s = told.ended_s - self.begun_s, told.ended_s - told.begun_s
        self.ended.append(FinishedRequest(round(at_s, 3), round(took_s, 4), first_s, word, tokens))
