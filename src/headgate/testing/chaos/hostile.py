"""Hostile clients. They are a separate tenant, so nothing that they do may affect the other clients.

Their answers are counted. The run fails if an attack breaks a guarantee to any client: for example, if a request is
refused because another tenant uses its id, or if a prompt of megabytes is not refused at once.
"""

from __future__ import annotations

import asyncio
import random
import socket
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import msgspec

from headgate.errors import HeadgateError
from headgate.httpclient import HttpAddress, call
from headgate.testing.chaos.catalogue import COMPLETIONS, CatalogueItem
from headgate.testing.chaos.client import ObservedAnswer, clock, send_request
from headgate.testing.chaos.fleet import HOSTILE_KEY, NO_ANSWER
from headgate.testing.chaos.judge import AnswerJudge

PATIENCE_S = 180.0
GIANT_BYTES = 8 * 2**20
GIANT_S = 30.0  # longest time until a prompt that cannot fit is refused, on a loaded machine
STALLED = 6  # concurrent stalled clients
RECEIVE_BUFFER_BYTES = 2048  # size of the receive buffers of the stalled clients
BURST = 60  # concurrent requests
TWINS = 4


class HostileClients:
    """Each public method with `lasts_s` is a fault kind of the plan, with the same name."""

    def __init__(
        self,
        url: str,
        items: Sequence[CatalogueItem],
        judge: AnswerJudge,
        in_flight: Callable[[], list[str]],
        seed: int,
    ) -> None:
        self._address, self._items, self._judge = HttpAddress.of(url), items, judge
        self._in_flight = in_flight
        self._rng = random.Random(f"hostile {seed}")
        self.answers: Counter[str] = Counter()  # number of answers by attack and outcome

    async def stalled_readers(self, lasts_s: float) -> None:
        """Request long answers and read nothing."""
        loop = asyncio.get_running_loop()
        body = {"prompt": "gate", "n": 16, "stream": True, "max_tokens": 500, "ignore_eos": True, "logprobs": 5}
        content = msgspec.json.encode(body)
        lines = [f"POST {COMPLETIONS} HTTP/1.1", "Host: fleet", f"Authorization: Bearer {HOSTILE_KEY}"]
        request = "\r\n".join([*lines, f"Content-Length: {len(content)}", "", ""]).encode() + content
        sockets = [socket.socket() for _ in range(STALLED)]
        try:
            for each in sockets:
                each.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER_BYTES)
                each.setblocking(False)
                with suppress(*NO_ANSWER):
                    async with asyncio.timeout(PATIENCE_S):
                        await loop.sock_connect(each, (self._address.host, self._address.port))
                        await loop.sock_sendall(each, request)
                self.answers["stalled_readers"] += 1
            await asyncio.sleep(lasts_s)
        finally:
            for each in sockets:
                each.close()

    async def giant_prompts(self, lasts_s: float) -> None:
        begun_s = clock()
        status = await self._post({"prompt": "gate " * (GIANT_BYTES // 5), "max_tokens": 1})
        self.answers[f"giant_prompts {status}"] += 1
        if status == 200:
            raise HeadgateError("a prompt that does not fit the context was answered")
        if clock() - begun_s > GIANT_S:
            raise HeadgateError(f"a prompt that does not fit was refused only after {clock() - begun_s:.1f} s")

    async def twins(self, lasts_s: float) -> None:
        """Send requests with ids that another tenant uses now or will use next."""
        ids = self._in_flight()
        async with asyncio.TaskGroup() as tasks:
            for id in self._rng.sample(ids, min(len(ids), TWINS)):
                tasks.create_task(self._twin(id))

    async def _twin(self, id: str) -> None:
        item, answer = self._rng.choice(self._items), ObservedAnswer(clock())
        await send_request(self._address, item, {"request_id": id}, answer, PATIENCE_S, api_key=HOSTILE_KEY)
        if answer.problem is not None and answer.problem.startswith("429"):
            self.answers["twins 429"] += 1  # allowed: this tenant sends many requests
            return
        self.answers[f"twins {self._judge.ended(id, item, answer)}"] += 1

    async def burst(self, lasts_s: float) -> None:
        statuses = await asyncio.gather(*(self._post(self._small(i)) for i in range(BURST)))
        self.answers.update(f"burst {status}" for status in statuses)

    def _small(self, number: int) -> dict[str, Any]:
        return {"prompt": f"gate {number}", "max_tokens": 20, "ignore_eos": True}

    async def long_prompts(self) -> None:
        """Send long prompts that are not cached anywhere, so that a prefill server computes them."""
        async with asyncio.TaskGroup() as tasks:
            for item in [item for item in self._items if item.number % 6 == 4][:BURST]:
                tasks.create_task(self._long(item))

    async def _long(self, item: CatalogueItem) -> None:
        answer, id = ObservedAnswer(clock()), f"long-{self._rng.randrange(2**48):x}"
        await send_request(
            self._address, item, {"request_id": id, "cache_salt": id}, answer, PATIENCE_S, api_key=HOSTILE_KEY
        )
        if not (answer.problem or "").startswith("429"):
            self.answers[f"long_prompts {self._judge.ended(id, item, answer)}"] += 1

    async def forgers(self, lasts_s: float) -> None:
        """Resume an answer with forged progress, which no engine has generated."""
        claim = {"index": 0, "token_ids": [3, 4], "finish": ["stop", "eos", 2**31 - 1, 2**31 - 1, 2**31 - 1]}
        status = await self._post({"prompt": "gate", "max_tokens": 4, "resume": {"choices": [claim]}})
        self.answers[f"forgers {status}"] += 1

    async def _post(self, body: dict[str, Any]) -> int:
        """Send a request and read the answer; returns its status, or 0 if there was no answer."""
        with suppress(*NO_ANSWER):
            async with asyncio.timeout(PATIENCE_S):
                async with call(self._address, "POST", COMPLETIONS, msgspec.json.encode(body), HOSTILE_KEY) as answer:
                    await answer.body()
                    return answer.status
        return 0
