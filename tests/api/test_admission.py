"""Requests in flight, waiting and refused (guarantee 46); places are released however a wait ends."""

from __future__ import annotations

import asyncio
import random
from collections import Counter

import pytest

from headgate.contract.errors import QueueFull
from headgate.edge.admission import Admission
from headgate.edge.sharing import Sharing
from tests.router.run import run


async def waiting(admission: Admission, tenant: str = "") -> asyncio.Task[None]:
    task = asyncio.create_task(admission.enter(tenant))
    await asyncio.sleep(0)
    assert not task.done()
    return task


def test_46_places_are_given_in_order_of_arrival():
    async def main() -> None:
        admission = Admission(1, 10)
        await admission.enter("")
        first, second = await waiting(admission), await waiting(admission)
        admission.leave("")
        await first
        assert not second.done() and admission.in_flight == 1
        admission.leave("")
        await second
        admission.leave("")
        assert (admission.in_flight, admission.waiting) == (0, 0)

    run(main())


def test_63_tenants_that_have_nothing_in_flight_get_places_in_turns():
    async def main() -> None:
        admission, order = Admission(2, 100, Sharing(["greedy", "eager", "polite"])), []

        async def work(tenant: str) -> None:
            async with admission.place(tenant):
                order.append(tenant)
                await asyncio.sleep(0)

        async with asyncio.TaskGroup() as tasks:
            for tenant in [*("greedy", "eager") * 20, "polite"]:
                tasks.create_task(work(tenant))
        assert order.index("polite") < 6
        assert order.count("greedy") == order.count("eager") == 20

    run(main())


def test_46_a_new_request_does_not_overtake_waiting_ones():
    async def main() -> None:
        admission = Admission(1, 10)
        await admission.enter("")
        first = await waiting(admission)
        admission.leave("")  # the place goes to `first`, whose task has not run yet
        assert not admission.try_enter("")
        await first
        admission.leave("")

    run(main())


def test_46_a_request_beyond_the_queue_is_refused_at_once_with_the_limits():
    async def main() -> None:
        admission = Admission(2, 1)
        await admission.enter("")
        await admission.enter("")
        task = await waiting(admission)
        with pytest.raises(QueueFull, match="2 requests are in flight and 1 wait") as refused:
            await admission.enter("")
        assert refused.value.status == 429
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert admission.waiting == 0

    run(main())


def test_46_a_free_place_goes_to_the_tenant_with_the_fewest_in_flight():
    async def main() -> None:
        admission = Admission(3, 10)
        for _ in range(3):
            await admission.enter("many")
        again, few = await waiting(admission, "many"), await waiting(admission, "few")
        admission.leave("many")
        await few
        assert not again.done()
        admission.leave("few")
        await again
        for _ in range(3):
            admission.leave("many")

    run(main())


def test_46_a_full_queue_replaces_a_request_of_the_tenant_with_the_most_waiting():
    async def main() -> None:
        admission = Admission(1, 3)
        await admission.enter("many")
        tasks = [await waiting(admission, "many") for _ in range(3)]
        few = await waiting(admission, "few")
        with pytest.raises(QueueFull):
            await tasks[2]  # the newest of them
        with pytest.raises(QueueFull):
            await admission.enter("many")
        admission.leave("many")
        await tasks[0]  # neither tenant has anything in flight: the first in the queue is first
        admission.leave("many")
        await few  # then it is the other tenant's turn
        admission.leave("few")
        await tasks[1]
        admission.leave("many")
        assert (admission.in_flight, admission.waiting) == (0, 0)

    run(main())


def test_46_a_request_that_arrives_while_another_leaves_the_queue():
    """The waiting request that would be refused in its place is cancelled, but its task has not run yet."""

    async def main() -> None:
        admission = Admission(1, 2)
        await admission.enter("many")
        tasks = [await waiting(admission, "many") for _ in range(2)]
        tasks[1].cancel()
        few = asyncio.create_task(admission.enter("few"))
        few_first = asyncio.create_task(admission.enter("other"))
        await asyncio.gather(tasks[1], return_exceptions=True)
        admission.leave("many")
        for task in (tasks[0], few, few_first):
            task.cancel()
        results = await asyncio.gather(tasks[0], few, few_first, return_exceptions=True)
        assert not any(isinstance(result, asyncio.InvalidStateError) for result in results)

    run(main())


def test_a_wait_that_is_cancelled_as_it_ends_releases_its_place():
    async def main() -> None:
        admission = Admission(1, 10)
        await admission.enter("")
        first, second = await waiting(admission), await waiting(admission)
        admission.leave("")  # given to `first`
        first.cancel()  # cancelled in the same iteration of the loop
        await asyncio.gather(first, return_exceptions=True)
        await second
        assert admission.in_flight == 1
        admission.leave("")
        assert (admission.in_flight, admission.waiting) == (0, 0)

    run(main())


def test_without_a_limit_no_request_waits():
    admission = Admission(None, 0)
    assert all(admission.try_enter("x") for _ in range(1000))
    assert admission.in_flight == 1000


@pytest.mark.parametrize("seed", range(20))
def test_46_under_random_operations_the_limit_holds_and_every_place_is_released(seed: int):
    rng = random.Random(seed)
    admission = Admission(3, 5)
    ended: Counter[str] = Counter()

    async def visit(tenant: str) -> None:
        try:
            async with admission.place(tenant):
                assert admission.in_flight <= 3 and admission.waiting <= 5
                for _ in range(rng.choice((1, 1, 10))):  # iterations of the loop: decided by the seed, not by time
                    await asyncio.sleep(0)
                if rng.random() < 0.2:
                    raise ValueError
            ended["well"] += 1
        except QueueFull:
            ended["refused"] += 1
        except ValueError:
            ended["failed"] += 1

    async def main() -> None:
        tasks = []
        for _ in range(200):
            tasks.append(asyncio.create_task(visit(rng.choice("abc"))))
            if rng.random() < 0.3:
                rng.choice(tasks).cancel()
            if rng.random() < 0.5:
                await asyncio.sleep(0)
        results = await asyncio.gather(*tasks, return_exceptions=True)
        wrong = [r for r in results if isinstance(r, BaseException) and not isinstance(r, asyncio.CancelledError)]
        assert wrong == []
        assert (admission.in_flight, admission.waiting) == (0, 0)
        assert min(ended["well"], ended["refused"], ended["failed"]) > 0

    run(main())
