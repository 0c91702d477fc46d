from __future__ import annotations

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate.core.blocks import BlockPool


def test_cached_blocks_are_evicted_last_and_least_recently_used_first():
    pool = BlockPool(4, 4)
    blocks = pool.allocate(3)
    for block, key in zip(blocks, (b"a", b"b", b"c"), strict=True):
        pool.publish(block, key)
    pool.release(blocks)
    assert (pool.held, pool.cached, pool.available) == (0, 3, 4)
    pool.allocate(2)
    assert pool.lookup([b"a", b"b", b"c"]) == blocks[:2], "the tail of a prefix is evicted before its head"


def test_a_hit_block_is_not_evicted():
    pool = BlockPool(2, 4)
    (block,) = pool.allocate(1)
    pool.publish(block, b"a")
    pool.release([block])
    assert pool.idle([block]) == 1
    pool.retain([block])
    assert pool.idle([block]) == 0
    pool.allocate(1)
    assert pool.available == 0 and pool.lookup([b"a"]) == [block]


def test_a_block_with_two_holders_is_free_after_both_release_it():
    pool = BlockPool(2, 4)
    (block,) = pool.allocate(1)
    pool.retain([block])
    pool.release([block])
    assert pool.held == 1
    pool.release([block])
    assert pool.held == 0


def test_a_block_released_too_often_is_a_bug():
    pool = BlockPool(1, 4)
    blocks = pool.allocate(1)
    pool.release(blocks)
    with pytest.raises(AssertionError, match="released more often than taken"):
        pool.release(blocks)


def test_the_first_block_published_under_a_key_is_kept():
    pool = BlockPool(2, 4)
    first, second = pool.allocate(2)
    pool.publish(first, b"a")
    pool.publish(second, b"a")
    pool.publish(first, b"b")
    assert pool.lookup([b"a"]) == [first] and pool.lookup([b"b"]) == []


def test_check_notices_a_leak():
    pool = BlockPool(2, 4)
    pool.allocate(1)
    with pytest.raises(AssertionError):
        pool.check({})


def cache(pool: BlockPool, keys: list[bytes], now_s: float) -> None:
    """Use a prefix, allocate its missing blocks, and release it at `now_s`."""
    blocks = pool.lookup(keys)
    pool.retain(blocks)
    blocks += pool.allocate(len(keys) - len(blocks))
    for block, key in zip(blocks, keys, strict=True):
        pool.publish(block, key)
    pool.now_s = now_s
    pool.release(blocks)


def test_the_horizon_is_when_the_most_recently_evicted_block_was_released():
    pool = BlockPool(4, 4)
    cache(pool, [b"a", b"b"], 1.0)
    cache(pool, [b"c", b"d"], 2.0)
    assert pool.horizon_s == -inf, "nothing was evicted"
    cache(pool, [b"a"], 3.0)
    cache(pool, [b"e"], 4.0)
    assert pool.horizon_s == 1.0 and pool.lookup([b"a"]) and not pool.lookup([b"b"])
    cache(pool, [b"f"], 5.0)
    assert pool.horizon_s == 2.0


def test_a_flush_moves_the_horizon_to_now_and_old_blocks_do_not_move_it_back():
    pool = BlockPool(2, 4)
    cache(pool, [b"a"], 1.0)
    pool.now_s = 5.0
    pool.move_horizon()
    pool.allocate(2)
    assert pool.horizon_s == 5.0, "evicting an older block does not move the horizon"
    pool.now_s = 6.0
    assert pool.flush() == 0 and pool.horizon_s == 6.0


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 4)), max_size=60))
def test_every_prefix_released_after_the_horizon_is_cached(uses: list[tuple[int, int]]):
    pool, last_used = BlockPool(8, 4), dict[tuple[bytes, ...], float]()
    for now_s, (prompt, length) in enumerate(uses):
        keys = tuple(b"%d" % prompt + b"." * depth for depth in range(length))
        cache(pool, list(keys), float(now_s))
        last_used[keys] = float(now_s)
        for used, used_s in last_used.items():
            if used_s > pool.horizon_s:
                assert len(pool.lookup(used)) == len(used)
        pool.check({})


def test_check_notices_blocks_that_would_be_evicted_in_the_wrong_order():
    pool = BlockPool(2, 4)
    cache(pool, [b"a"], 2.0)
    cache(pool, [b"b"], 1.0)
    with pytest.raises(AssertionError, match="eviction order differs"):
        pool.check({})
