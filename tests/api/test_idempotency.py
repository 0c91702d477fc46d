"""Answers kept for their keys: the cost of a lookup, and which answers are dropped. Numbers: docs/lifecycle.md."""

from __future__ import annotations

import asyncio
import random
import sys
from types import FrameType, SimpleNamespace
from typing import Any

import pytest

from headgate.api.generate import idempotency
from headgate.api.generate.idempotency import KEPT_S, AnswerTooLong, Replays
from headgate.edge.sse import ResponseWriter
from headgate.edge.tenant_store import TenantStore


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


async def answer(
    replays: Replays, tenant: str, key: str, body: bytes = b"{}", work: idempotency.Work | None = None
) -> bytes:
    """Return the answer to a request with this key; the first such request is answered with `body`."""
    request: Any = SimpleNamespace(state=SimpleNamespace(tenant=tenant, request_id="r"))
    sent: list[Any] = []

    async def make(reply: ResponseWriter) -> None:
        await reply.send_json(body)

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        await asyncio.Event().wait()

    await replays.exchange(request, key, "asked", work or make)({}, receive, send)
    return b"".join(message.get("body", b"") for message in sent)


def instructions(replays: Replays, key: str) -> int:
    """The number of Python calls that a new request with this key costs."""
    count = 0

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal count
        frame.f_trace_opcodes = True
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        asyncio.run(answer(replays, "a", key))
    finally:
        sys.settrace(before)
    return count


def test_63_the_cost_of_a_request_with_a_key_does_not_depend_on_the_number_of_kept_answers():
    costs = []
    for kept in (10, 20_000):
        replays = Replays(Clock())

        async def fill(replays: Replays = replays, kept: int = kept) -> None:
            for number in range(kept):
                await answer(replays, f"tenant-{number % 5}", f"k{number}")

        asyncio.run(fill())
        assert len(replays._kept) == kept
        costs.append(min(instructions(replays, f"new-{again}") for again in range(3)))
    assert costs[1] < 2 * costs[0]


def test_49_63_keys_of_one_tenant_never_evict_those_of_another(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(idempotency, "MOST_BYTES", 100_000)

    async def main() -> None:
        replays = Replays(Clock())
        await answer(replays, "polite", "k", b"first")
        for number in range(1000):
            await answer(replays, "greedy", f"k{number}", b"x" * 1000)
        assert await answer(replays, "polite", "k", b"second") == b"first"
        assert await answer(replays, "greedy", "k999", b"again") == b"x" * 1000
        assert await answer(replays, "greedy", "k0", b"again") == b"again"
        assert len(replays._kept) < 100

    asyncio.run(main())


@pytest.mark.parametrize("at_once", [True, False])
def test_49_63_unfinished_answers_use_bounded_memory_and_reach_their_clients(
    monkeypatch: pytest.MonkeyPatch, at_once: bool
):
    monkeypatch.setattr(idempotency, "MAKING_BYTES", 10_000)
    chunk, count = b"x" * 100, 40  # with overhead, one answer exceeds the limit

    async def main() -> None:
        replays, go_on = Replays(Clock()), asyncio.Event()

        async def work(reply: ResponseWriter) -> None:
            for _ in range(count):
                await reply.send_event(chunk)
                if not at_once:
                    await asyncio.sleep(0)
            await go_on.wait()
            await reply.end(b"end")

        tasks = [asyncio.create_task(answer(replays, "greedy", f"{i}", work=work)) for i in range(4)]
        await asyncio.sleep(0.01)
        assert replays._making.held["greedy"] <= 8000 and replays._making.taken <= 10_000
        await answer(replays, "polite", "k", b"kept")
        assert await answer(replays, "polite", "k", b"not made again") == b"kept"
        go_on.set()
        assert await asyncio.gather(*tasks) == [chunk * count + b"end"] * 4
        assert replays._making.taken == 0
        with pytest.raises(AnswerTooLong):
            await answer(replays, "greedy", "0")

    asyncio.run(main())


def test_49_answers_expire_even_for_a_tenant_that_sends_no_more_requests():
    async def main() -> None:
        clock = Clock()
        replays = Replays(clock)
        await answer(replays, "gone", "k", b"old")
        clock.now_s = KEPT_S - 1
        assert await answer(replays, "gone", "k", b"new") == b"old"
        await answer(replays, "here", "k", b"old")
        clock.now_s = KEPT_S
        assert await answer(replays, "here", "k", b"new") == b"old"
        assert len(replays._kept) == 1
        clock.now_s = 2 * KEPT_S
        assert await answer(replays, "here", "k", b"new") == b"new"

    asyncio.run(main())


@pytest.mark.parametrize("seed", range(5))
def test_a_shared_store_keeps_the_newest_entries_and_all_of_a_small_tenant(seed: int):
    rng, store, most = random.Random(seed), TenantStore[int](120), 120
    put: dict[str, list[int]] = {"a": [], "b": [], "small": []}  # weights; the index is the key
    for _ in range(500):
        tenant = rng.choice(("a", "b", "b", "b")) if sum(put["small"]) > 30 else rng.choice(("a", "b", "small"))
        weight = rng.randint(1, 9)
        put[tenant].append(weight)
        store.put(tenant, len(put[tenant]), weight, weight)
        kept = {name: [store.get(name, key + 1) for key in range(len(put[name]))] for name in put}
        assert all(None not in entries[entries.count(None) :] for entries in kept.values())
        assert sum(weight or 0 for entries in kept.values() for weight in entries) <= most
        assert None not in kept["small"]


def test_49_74_an_answer_that_was_returned_for_lack_of_room_is_not_kept():
    """A router sends the request again to the same server, with the same key, if there is no other server."""

    async def main() -> None:
        replays = Replays(Clock())

        async def give_back(reply: ResponseWriter) -> None:
            reply.given_back = True
            await reply.send_json(b"no room")

        assert await answer(replays, "a", "k", work=give_back) == b"no room"
        assert await answer(replays, "a", "k", b"whole") == b"whole"
        assert await answer(replays, "a", "k", b"another") == b"whole"

    asyncio.run(main())
