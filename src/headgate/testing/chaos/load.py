"""The load: clients that send a request, read the whole answer and send the next one, until `over` is set."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass

from headgate.httpclient import HttpAddress
from headgate.testing.chaos.catalogue import CatalogueItem
from headgate.testing.chaos.client import ObservedAnswer, clock, send_request
from headgate.testing.chaos.judge import AnswerJudge

PATIENCE_S = 180.0  # client timeout; a request that takes longer has hung
MAX_THINK_S = 0.5  # maximum pause between an answer and the next request
STRICT = 0.15  # share of requests that accept only OpenAI's finish reasons
MAX_RETRY_WAIT_S = 2.0  # limit on Retry-After


@dataclass(frozen=True, slots=True)
class FinishedRequest:
    """One entry of the timeline."""

    at_s: float
    took_s: float
    first_s: float | None
    outcome: str
    tokens: int


@dataclass(eq=False)
class LoadClient:
    number: int
    request_id: str = ""
    task: asyncio.Task[None] | None = None
    leaving: bool = False


class ClientLoad:
    """The clients of a run. Start `run` in a task; set `over` to let every client finish its request and stop."""

    def __init__(
        self,
        url: str,
        items: Sequence[CatalogueItem],
        judge: AnswerJudge,
        clients: int,
        seed: int,
        api_key: str | None = None,
    ) -> None:
        self._api_key = api_key
        self._address, self._items, self._judge, self._seed = HttpAddress.of(url), items, judge, seed
        self._clients = [LoadClient(number) for number in range(clients)]
        self._rng = random.Random(seed)
        self.over = asyncio.Event()
        self.ended: list[FinishedRequest] = []
        self.begun_s = clock()
        self.sent = 0

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            for client in self._clients:
                tasks.create_task(self._run_client(client))

    def vanish(self, count: int) -> int:
        """Disconnect up to `count` clients in the middle of their answers; returns how many."""
        leaving = self._choose_clients(count)
        for client in leaving:
            client.leaving = True
            assert client.task is not None
            client.task.cancel()
        return len(leaving)

    def abort(self, count: int) -> list[str]:
        """Choose up to `count` requests that the caller will abort; returns their ids."""
        ids = [client.request_id for client in self._choose_clients(count)]
        self._judge.aborted |= set(ids)
        return ids

    def ids(self) -> list[str]:
        """Ids of all requests in flight."""
        return [client.request_id for client in self._clients if client.task is not None]

    def _choose_clients(self, count: int) -> list[LoadClient]:
        sending = [client for client in self._clients if client.task is not None and not client.leaving]
        return self._rng.sample(sending, min(count, len(sending)))

    async def _run_client(self, client: LoadClient) -> None:
        rng = random.Random(f"{self._seed} {client.number}")
        while not self.over.is_set():
            await asyncio.sleep(rng.uniform(0, MAX_THINK_S))
            await self._one_request(client, rng)

    async def _one_request(self, client: LoadClient, rng: random.Random) -> None:
        item, answer = rng.choice(self._items), ObservedAnswer(clock())
        self.sent += 1
        client.request_id = f"chaos-{client.number}-{self.sent}"
        more: dict[str, object] = {"request_id": client.request_id}
        if rng.random() < 0.3:
            more["cache_salt"] = client.request_id  # keeps the prompt from being found in a cache
        strict = rng.random() < STRICT
        sending = send_request(self._address, item, more, answer, PATIENCE_S, api_key=self._api_key, strict=strict)
        client.task = asyncio.ensure_future(sending)
        try:
            await asyncio.wait({client.task})
        finally:
            client.task.cancel()
        left, client.leaving, client.task = client.leaving and client.task.cancelled(), False, None
        if left:
            self._judge.vanished(item, answer)
            return
        outcome = self._judge.ended(client.request_id, item, answer)
        self._note(answer, outcome)
        if outcome == "refused":
            await asyncio.sleep(min(answer.retry_after_s, MAX_RETRY_WAIT_S))

    def _note(self, answer: ObservedAnswer, outcome: str) -> None:
        tokens = sum(len(choice.tokens) for choice in answer.choices.values())
        first_s = None if answer.first_s is None else answer.first_s - answer.begun_s
        at_s, took_s = answer.ended_s - self.begun_s, answer.ended_s - answer.begun_s
        self.ended.append(FinishedRequest(round(at_s, 3), round(took_s, 4), first_s, outcome, tokens))
