"""Pauses and resumes of one router are carried out in the order in which it sent them."""

from __future__ import annotations

import pytest

from headgate.contract.orders import MOST_ROUTERS, OWN, RUNNING, UNORDERED, UNRESUMED, Order, Orders, Overtaken
from headgate.errors import RequestError
from headgate.protocol.command import Pause, Resume
from tests.api.test_control import PAUSED, Engines, controls
from tests.simulated import run


def taken(orders: Orders, order: Order, *, paused: bool = False, resumes: bool = False) -> bool:
    try:
        orders.take(order, paused=paused, resumes=resumes)
    except Overtaken:
        return False
    return True


def test_24_a_pause_that_arrives_after_a_later_resume_of_its_router_is_refused():
    async def main() -> None:
        engines = Engines({0: PAUSED, 1: PAUSED}, {0: PAUSED, 1: PAUSED})
        engines.free.set()
        control, _ = controls(engines)
        await control.resume(order=Order("a", 2))
        with pytest.raises(Overtaken) as refused:
            await control.pause(Pause(), Order("a", 1))
        assert refused.value.status == 409 and refused.value.code == "overtaken"
        await control.pause(Pause(), Order("b", 1))  # routers number their calls independently
        assert [type(command) for command in engines.commands] == [Resume, Pause]

    run(main())


def test_24_a_call_may_be_repeated_with_its_number():
    orders = Orders()
    assert taken(orders, Order("a", 3)) and taken(orders, Order("a", 3)) and not taken(orders, Order("a", 2))


@pytest.mark.parametrize("other", [Order("b", 1), UNORDERED], ids=["a router", "an operator"])
def test_24_a_resume_can_be_conditional_on_no_call_by_others_since(other: Order):
    orders = Orders()
    assert not taken(orders, Order("a", 1, OWN))
    assert taken(orders, Order("a", 2)) and taken(orders, Order("a", 3, OWN))
    assert taken(orders, other) and not taken(orders, Order("a", 4, OWN))


def test_24_a_pause_can_be_conditional_on_a_running_server():
    orders = Orders()
    assert not taken(orders, Order("a", 1, RUNNING), paused=True)
    assert taken(orders, Order("a", 2, RUNNING))
    assert taken(orders, Order("a", 3), paused=True)


def test_24_a_pause_can_be_conditional_on_no_resume_by_a_router():
    orders = Orders()
    assert taken(orders, Order("a", 1, UNRESUMED))
    assert taken(orders, Order("b", 1), resumes=True) and not taken(orders, Order("a", 2, UNRESUMED))
    assert taken(orders, Order("b", 2), paused=False) and taken(orders, Order("a", 3, UNRESUMED))


@pytest.mark.parametrize("own", [Order("b", 2, OWN), UNORDERED], ids=["by a router", "by the server"])
def test_29_75_a_resume_that_ends_an_update_of_one_server_does_not_prevent_a_pause(own: Order):
    orders = Orders()
    update = Order("b", 1, RUNNING) if own.router else UNORDERED
    assert taken(orders, update) and taken(orders, own, resumes=True)
    assert taken(orders, Order("a", 1, UNRESUMED))


def test_24_a_server_reports_that_a_router_has_resumed_it():
    async def main() -> None:
        engines = Engines({0: PAUSED}, {0: PAUSED})
        engines.free.set()
        control, _ = controls(engines)
        await control.resume(order=Order("b", 1))
        with pytest.raises(Overtaken) as refused:
            await control.pause(Pause(), Order("a", 1, UNRESUMED))
        assert refused.value.status == 409 and refused.value.code == "resumed"

    run(main())


def test_24_the_numbers_of_a_bounded_count_of_routers_are_kept():
    orders = Orders()
    for i in range(MOST_ROUTERS + 1):
        assert taken(orders, Order(f"r{i}", 5))
    assert len(orders._newest) == MOST_ROUTERS and not taken(orders, Order(f"r{MOST_ROUTERS}", 4))


@pytest.mark.parametrize("value", ["a:x", "a:", "a:-1", "a:" + "9" * 19, "a" * 65 + ":1", "a:\u0663"])
def test_an_order_that_cannot_be_read_is_refused(value: str):
    with pytest.raises(RequestError, match="ROUTER:NUMBER"):
        Order.of({"x-headgate-order": value})


@pytest.mark.parametrize("headers", [{}, {"x-headgate-order": ""}, {"x-headgate-only-if": OWN}])
def test_a_call_without_an_order_is_always_carried_out(headers: dict[str, str]):
    assert Order.of(headers) == UNORDERED
