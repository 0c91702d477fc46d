"""Thousands of requests under faults: correct answers or one clear error, and nothing leaks (guarantees 41, 10)."""

from __future__ import annotations

import asyncio
import logging
import random
from collections import Counter
from contextlib import AsyncExitStack
from typing import Any

import pytest

from tests.router.client import Wire, check, routing, until
from tests.router.mock import CHAT, COMPLETIONS, Mock, faults
from tests.router.run import run

# Errors that a client may get instead of the correct answer, only where no worker was left that could help.
HELPLESS = {"worker_lost", "no_worker", "scripted"}
CLIENTS = 40


class Storm:
    def __init__(self, seed: int, requests: int, *, plain: bool) -> None:
        self.rng = random.Random(seed)
        self.left = requests
        self.plain = plain
        self.mocks = [Mock(faults(random.Random(seed + i), 0.25, plain=plain), plain=plain, seed=i) for i in range(4)]
        self._mortal = self.mocks[1:]
        if not plain:  # one worker is always healthy, so that no client need see the faults of the others
            self.mocks = [*self.mocks, Mock(seed=4)]
        self.told: Counter[str] = Counter()

    async def run(self) -> None:
        async with AsyncExitStack() as stack:
            for mock in self.mocks:
                await stack.enter_async_context(mock)
            router, url = await stack.enter_async_context(
                routing(*self.mocks, policy="power_of_two", retries=20, index_nodes=1000, max_in_flight=30)
            )
            # This tests that counters return to zero; the limit on retries has its own test.
            router.retry_budget._left = float("inf")
            killing = asyncio.create_task(self._kill())
            try:
                await asyncio.gather(*(self._client(url) for _ in range(CLIENTS)))
            finally:
                killing.cancel()
            await until(lambda: not router.live)
            assert len(router.index) <= 1000
            await until(lambda: not len(router.connections))
            self._judge()
        assert not any(mock.connections for mock in self.mocks)

    def _judge(self) -> None:
        assert [mistake for mock in self.mocks for mistake in mock.mistakes] == []
        wrong = {code: count for code, count in self.told.items() if code not in HELPLESS | {"right", "left"}}
        assert wrong == {}
        if not self.plain:
            assert set(self.told) == {"right", "left"}  # every answer has a journal and another worker to resume at
        assert self.told["right"] > 0.5 * self.told.total()

    async def _kill(self) -> None:
        while True:
            await self._after(self.rng.randint(30, 90))
            mock = self.rng.choice(self._mortal)
            mock.kill()
            await self._after(self.rng.randint(1, 40))
            await mock.restart()

    async def _after(self, requests: int) -> None:
        """The same number of kills per request, however fast the machine is."""
        until_left = self.left - requests
        await until(lambda: self.left <= until_left)

    async def _client(self, url: str) -> None:
        wire: Wire | None = None
        while self.left > 0:
            self.left -= 1
            wire = wire or await Wire.open(url)
            leaves = self.rng.random() < 0.1
            if await self._ask(wire, leaves) or self.rng.random() < 0.2:
                wire.close()
                wire = None
        if wire is not None:
            wire.close()

    async def _ask(self, wire: Wire, leaves: bool) -> bool:
        """Make one request. Returns whether its connection cannot be used again."""
        path, body = self._body()
        wire.post(path, body)
        if leaves:
            await asyncio.sleep(self.rng.choice((0, 0, 0.001, 0.005, 0.02)))
            self.told["left"] += 1
            return True
        response = await wire.response()
        self.told[check(body, response, path) or "right"] += 1
        return False

    def _body(self) -> tuple[str, dict[str, Any]]:
        rng = self.rng
        body: dict[str, Any] = {"seed": rng.randrange(10**9), "max_tokens": rng.randint(1, 24)}
        body["stream"] = rng.random() < 0.6
        if rng.random() < 0.2:
            body["n"] = rng.randint(2, 3)
        text = f"{rng.randrange(50)} " * rng.randint(1, 400)
        if rng.random() < 0.5:
            return COMPLETIONS, body | {"prompt": text}
        return CHAT, body | {"messages": [{"role": "user", "content": text}]}


def storm(seed: int, requests: int, caplog: pytest.LogCaptureFixture, *, plain: bool, timeout_s: float) -> None:
    logging.getLogger("headgate").setLevel(logging.ERROR)
    try:
        run(Storm(seed, requests, plain=plain).run(), timeout_s)
    finally:
        logging.getLogger("headgate").setLevel(logging.NOTSET)
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR] == []


def test_41_after_a_storm_of_failures_every_answer_was_correct_and_nothing_leaks(
    caplog: pytest.LogCaptureFixture,
):
    storm(1, 1500, caplog, plain=False, timeout_s=100)


def test_41_with_foreign_workers_an_answer_is_correct_or_one_clear_error(caplog: pytest.LogCaptureFixture):
    storm(2, 500, caplog, plain=True, timeout_s=60)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("plain", [False, True])
def test_41_ten_thousand_requests_in_a_storm(plain: bool, caplog: pytest.LogCaptureFixture):
    storm(3, 10_000, caplog, plain=plain, timeout_s=580)
