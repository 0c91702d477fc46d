"""Tenants take turns on the event loop: a tenant's work does not wait for all earlier work of another (guarantee 63)."""

from __future__ import annotations

import asyncio
from functools import partial

from headgate.turns import Turns


async def turns_until(true) -> int:
    async with asyncio.timeout(60):
        count = 0
        while not true():
            await asyncio.sleep(0)
            count += 1
        return count


def test_63_a_call_waits_for_a_few_calls_of_another_tenant():
    async def main() -> None:
        turns, made = Turns(2), []
        for i in range(1000):
            turns.call("greedy", partial(made.append, ("greedy", i)))
        turns.call("polite", partial(made.append, ("polite", 0)))
        assert len(made) == 2  # in the first iteration
        assert await turns_until(lambda: ("polite", 0) in made) <= 2
        assert len(made) <= 6
        await turns_until(lambda: len(made) == 1001)
        assert [i for name, i in made if name == "greedy"] == [*range(1000)]
        assert repr(turns) == "<Turns 0 waiting>"

    asyncio.run(main())


def test_63_the_number_of_calls_per_iteration_is_limited():
    async def main() -> None:
        turns, made = Turns(3), []
        for i in range(30):
            turns.call(f"tenant {i % 4}", partial(made.append, i))
        for _ in range(30):
            before = len(made)
            await asyncio.sleep(0)
            assert len(made) - before <= 3
        assert sorted(made) == [*range(30)]

    asyncio.run(main())


def test_63_a_call_runs_at_once_while_the_iteration_has_room():
    async def main() -> None:
        turns, made = Turns(2), []
        for i in range(5):
            turns.call("only", partial(made.append, i))
            assert made == [*range(i + 1)]
            await asyncio.sleep(0)

    asyncio.run(main())
