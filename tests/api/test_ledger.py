"""Admission and accounting: every admitted request is counted once at its end (guarantees 46, 47, 53, 63)."""

from __future__ import annotations

import asyncio
import random
import time
from contextlib import AsyncExitStack, suppress

import pytest

from headgate.api.accounting.ledger import Ledger
from headgate.api.accounting.metrics import ServerMetrics
from headgate.contract.errors import QueueFull
from headgate.contract.requests import UsageRecord
from headgate.edge.sharing import Sharing
from headgate.errors import DuplicateId, EngineDead, RequestError, Unavailable
from headgate.shares import Shares

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def ended() -> list[UsageRecord]:
    return []


@pytest.fixture
def ledger(clock, ended) -> Ledger:
    return Ledger(ServerMetrics(), limit=4, listeners=[ended.append], clock=clock, history=8)


def finish(record, choice=0, reason="stop", cause="eos", output_tokens=3):
    record.finish(choice, reason, cause, prompt_tokens=10, cached_tokens=4, output_tokens=output_tokens)


async def test_a_finished_request_is_accounted_with_its_times_and_tokens(ledger, clock, ended):
    async with ledger.admit(tenant="alice", label="a", kind="chat") as record:
        clock.now_s += 0.5
        record.tokens(1)
        clock.now_s += 0.4
        record.tokens(2)
        assert ledger.metrics.received_tokens == 3  # before the end
        finish(record)
    (usage,) = ended
    assert (usage.request_id, usage.tenant, usage.kind) == ("a", "alice", "chat")
    assert (usage.finish_reason, usage.cause) == ("stop", "eos")
    assert (usage.prompt_tokens, usage.cached_tokens, usage.output_tokens) == (10, 4, 3)
    assert usage.first_token_s == pytest.approx(0.5) and usage.elapsed_s == pytest.approx(0.9)
    assert ledger.metrics.tokens == {"prompt": 10, "cached": 4, "output": 3}
    assert sum(ledger.metrics.between_tokens.counts) == 2
    assert ledger.metrics.between_tokens.sum == pytest.approx(0.4)
    assert ledger.past("a").usage is usage and ledger.in_flight == 0 and not ledger.live


async def test_the_latency_between_tokens_is_measured_per_choice(ledger, clock):
    async with ledger.admit(kind="chat", choices=2) as record:
        for _ in range(3):
            for choice in (0, 1):
                clock.now_s += 0.1
                record.tokens(1, choice)
    assert ledger.metrics.between_tokens.sum == pytest.approx(0.2 * 4)


async def test_a_record_closed_without_an_end_is_a_disconnection_with_the_tokens_so_far(ledger, ended):
    async with ledger.admit(kind="chat", choices=2) as record:
        record.prompt(10, 0)
        record.prompt(10, 1)
        record.tokens(5, 0)
        finish(record, 1)
    assert (ended[0].finish_reason, ended[0].cause) == ("abort", "client_disconnect")
    assert [choice.output_tokens for choice in ended[0].choices] == [5, 3]
    assert [choice.prompt_tokens for choice in ended[0].choices] == [10, 10]
    assert ledger.metrics.aborts == {"client_disconnect": 1}


@pytest.mark.parametrize(
    ("error", "reason", "cause"),
    [
        (asyncio.CancelledError(), "abort", "client_disconnect"),
        (EngineDead("gone"), "abort", "engine_lost"),
        (Unavailable("lost", code="engine_lost"), "error", "engine_lost"),
        (ZeroDivisionError(), "error", "internal_error"),
        (BaseExceptionGroup("", [asyncio.CancelledError()]), "abort", "client_disconnect"),
    ],
)
async def test_an_error_sets_the_cause_of_a_cut_request(ledger, ended, error, reason, cause):
    with suppress(type(error)):
        async with ledger.admit(kind="chat") as record:
            record.tokens(1)
            raise error
    assert (ended[0].finish_reason, ended[0].cause) == (reason, cause)


async def test_a_request_that_an_engine_refuses_was_never_accepted(ledger, ended):
    with pytest.raises(RequestError):
        async with ledger.admit(kind="chat"):
            raise RequestError("too long", code="context_length_exceeded")
    assert not ended and ledger.metrics.refused == {"context_length_exceeded": 1}
    assert ledger.in_flight == 0


async def test_beyond_the_limit_is_429_at_once_with_a_time_to_retry(ledger):
    async with ledger.admit(kind="chat", choices=3):
        async with ledger.admit(kind="chat"):
            with pytest.raises(QueueFull) as refusal:
                async with ledger.admit(kind="chat"):
                    pass
        async with ledger.admit(kind="chat"):
            assert ledger.in_flight == 4
    assert (refusal.value.status, refusal.value.code) == (429, "queue_full")
    assert refusal.value.retry_after_s >= 1


async def test_the_time_to_retry_follows_how_quickly_requests_end(ledger, clock):
    for _ in range(10):
        async with ledger.admit(kind="chat"):
            clock.now_s += 7
    async with ledger.admit(kind="chat", choices=4):
        with pytest.raises(QueueFull) as refusal:
            async with ledger.admit(kind="chat"):
                pass
    assert 6 <= refusal.value.retry_after_s <= 7


async def test_a_request_larger_than_the_limit_gets_in_alone(ledger):
    async with ledger.admit(kind="chat", choices=9):
        assert ledger.in_flight == 9
        with pytest.raises(QueueFull):
            async with ledger.admit(kind="chat"):
                pass


async def test_a_duplicate_of_a_live_id_is_409_and_a_later_one_is_fine(ledger):
    async with ledger.admit(label="a", kind="chat"):
        with pytest.raises(DuplicateId):
            async with ledger.admit(label="a", kind="chat"):
                pass
    async with ledger.admit(label="a", kind="chat"):
        assert ledger.named("a")


async def test_tenants_may_use_the_same_id_and_keep_their_own_records(ledger, clock):
    async with ledger.admit(tenant="alice", label="a", kind="chat") as alices:
        clock.now_s += 1
        async with ledger.admit(tenant="bob", label="a", kind="chat") as bobs:
            assert ledger.named("a", "alice") == [alices] and ledger.named("a", "bob") == [bobs]
            assert ledger.named("a") == [alices, bobs] and ledger.named("a", "carol") == []
            finish(bobs, output_tokens=7)
        assert ledger.named("a") == [alices] and ledger.past("a", "alice") is None
    assert ledger.past("a", "bob").usage is bobs.usage and ledger.past("a", "alice").usage is alices.usage
    assert ledger.past("a").usage is bobs.usage  # the latest


async def test_80_the_latest_request_of_a_name_does_not_depend_on_the_wall_clock(ledger, clock, monkeypatch):
    for tenant, wall_s in (("alice", 2e9), ("bob", 1e9)):  # set back by thirty years between the two
        monkeypatch.setattr(time, "time", lambda wall_s=wall_s: wall_s)
        clock.now_s += 1
        async with ledger.admit(tenant=tenant, label="a", kind="chat") as record:
            finish(record)
    assert ledger.past("a").usage.tenant == "bob"


async def test_a_refusal_that_is_reported_twice_counts_once(ledger):
    ledger.close()
    with pytest.raises(Unavailable) as refusal:
        async with ledger.admit(kind="chat"):
            pass
    ledger.refuse(refusal.value)
    assert ledger.metrics.refused == {"shutting_down": 1}


async def test_closing_refuses_new_requests_and_lets_the_others_end(ledger):
    async with ledger.admit(kind="chat"):
        ledger.close()
        with pytest.raises(Unavailable) as refusal:
            async with ledger.admit(kind="chat"):
                pass
        waiting = asyncio.ensure_future(ledger.emptied())
        await asyncio.sleep(0)
        assert not waiting.done()
    await asyncio.wait_for(waiting, 60)
    assert refusal.value.code == "shutting_down"


async def test_the_history_is_bounded_and_drops_the_oldest(ledger):
    for i in range(20):
        async with ledger.admit(label=str(i), kind="chat") as record:
            finish(record)
    assert ledger.past("11") is None and ledger.past("12") is not None


async def test_every_request_is_accounted_once_whatever_happens(ledger, ended):
    chance = random.Random(5)
    accepted = refused = 0

    async def one() -> None:
        nonlocal accepted, refused
        choices = chance.randint(1, 3)
        try:
            async with ledger.admit(kind="chat", choices=choices) as record:
                accepted += 1
                for choice in range(choices):
                    record.tokens(chance.randint(0, 3), choice)
                    await asyncio.sleep(0)
                    if chance.random() < 0.7:
                        finish(record, choice, *chance.choice([("stop", "eos"), ("abort", "api_abort")]))
                if chance.random() < 0.2:
                    raise EngineDead("gone")
        except QueueFull:
            refused += 1
        except EngineDead:
            pass

    for _ in range(50):
        await asyncio.gather(*(one() for _ in range(10)))
    metrics = ledger.metrics
    assert accepted + refused == 500 and refused > 50
    assert sum(metrics.requests.values()) == len(ended) == accepted == sum(metrics.whole_request.counts)
    assert metrics.refused["queue_full"] == refused
    assert metrics.tokens["output"] == sum(usage.output_tokens for usage in ended)
    assert sum(metrics.aborts.values()) == sum(c.finish_reason == "abort" for usage in ended for c in usage.choices)
    assert ledger.in_flight == 0 and not ledger.live


async def test_the_longest_time_without_progress_is_reported(ledger, clock):
    assert ledger.oldest_without_progress_s == 0
    async with ledger.admit(kind="chat") as record:
        clock.now_s += 3
        assert ledger.oldest_without_progress_s == 3
        record.tokens(1)
        assert ledger.oldest_without_progress_s == 0


async def test_63_one_tenant_cannot_take_the_last_places_while_there_may_be_others():
    ledger = Ledger(ServerMetrics(), limit=100, sharing=Sharing(["greedy", "polite"]))
    async with AsyncExitStack() as stack:
        for _ in range(80):
            await stack.enter_async_context(ledger.admit(tenant="greedy", kind="chat"))
        with pytest.raises(QueueFull, match="you have 80 of 100 places, and the rest is reserved for others"):
            await stack.enter_async_context(ledger.admit(tenant="greedy", kind="chat"))
        await stack.enter_async_context(ledger.admit(tenant="polite", kind="chat", choices=10))
        assert ledger.in_flight == 90
    assert ledger.in_flight == 0


async def test_63_a_single_tenant_has_all_places_until_another_address_sends_a_request():
    ledger = Ledger(ServerMetrics(), limit=4)
    first = ledger.admit(share=ledger.sharing.name("", "10.0.0.1"), kind="chat", choices=4)
    async with first, ledger.admit(share=ledger.sharing.name("", "10.0.0.2"), kind="chat"):
        assert ledger.in_flight == 5
    async with ledger.admit(share="10.0.0.1", kind="chat", choices=3):
        with pytest.raises(QueueFull):
            await ledger.admit(share="10.0.0.1", kind="chat").__aenter__()
        async with ledger.admit(share="10.0.0.2", kind="chat"):
            assert ledger.in_flight == 4


async def test_68_resumed_tokens_are_not_counted_when_the_client_disconnects():
    ledger = Ledger(ServerMetrics(), limit=4)
    async with ledger.admit(kind="chat", choices=2) as record:
        for choice in range(2):
            record.prompt(5, choice)
            record.resume(choice, 100)
            record.tokens(7, choice)
        finish(record, output_tokens=107)
        record.client_left("client_disconnect")
    assert ledger.metrics.tokens["output"] == 14


@pytest.mark.parametrize(
    ("tenants", "asked", "several"),
    [
        ([], [("", "10.0.0.1"), ("", "10.0.0.1")], False),
        ([], [("", "10.0.0.1"), ("", "10.0.0.2")], True),
        ([], [("", "2001:db8::1"), ("", "2001:db8::2")], False),  # the same network
        ([], [("", "2001:db8::1"), ("", "2001:db8:0:1::1")], True),
        ([], [("alice", "127.0.0.1")], True),  # named by a router, which has more tenants
        (["alice"], [("alice", "10.0.0.1"), ("alice", "10.0.0.2")], False),
        (["alice", "bob"], [], True),
    ],
)
def test_63_places_are_shared_once_there_may_be_others(
    tenants: list[str], asked: list[tuple[str, str]], several: bool
):
    sharing = Sharing(tenants)
    for tenant, peer in asked:
        sharing.takes(sharing.name(tenant, peer))
    assert sharing.several is several


def test_63_probes_and_control_calls_use_no_share_so_a_single_tenant_keeps_all_places():
    sharing = Sharing(["alice"])
    sharing.takes(sharing.name("alice", "10.0.0.1"))
    sharing.name("", "10.0.0.2")  # a probe
    sharing.name("admin", "10.0.0.3", admin=True)  # a control call
    assert not sharing.several
    sharing.takes(sharing.name("admin", "10.0.0.3", admin=True))
    assert sharing.several


def test_63_a_tenant_with_nothing_in_flight_always_finds_a_place():
    draw = random.Random(63)
    for _ in range(200):
        shares, held = Shares(draw.randrange(8, 300)), []
        for _ in range(400):
            tenant, count = f"t{draw.randrange(5)}", draw.choice((1, 1, 1, 4))
            if held and draw.random() < 0.3:
                shares.give_back(*held.pop(draw.randrange(len(held))))
            elif shares.may_take(tenant, count, several=True):
                shares.take(tenant, count)
                held.append((tenant, count))
            assert 0 <= shares.taken <= shares.total
            assert shares.may_take("newcomer", several=True) or shares.free == 0
            assert all(count <= 0.8 * shares.total + 1 for count in shares.held.values())


@pytest.mark.parametrize("count", [8, 64])
def test_63_a_request_that_is_alone_and_takes_all_places_leaves_some_to_others(count: int):
    shares = Shares(8)
    shares.take("greedy", count)
    assert not shares.may_take("greedy", several=True)
    for polite in ("ann", "bob"):
        assert shares.may_take(polite, several=True)
        shares.take(polite)
    assert not shares.may_take("eve", several=True)
