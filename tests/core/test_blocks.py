from __future__ import annotations

import pytest

from headgate.core.blocks import BlockPool


def test_cached_blocks_are_evicted_last_and_least_recently_used_first():
    pool = BlockPool(4, 4)
    blocks = pool.allocate(3)
    for block, key in zip(blocks, (b"a", b"b", b"c"), strict=True):
        pool.publish(block, key)
    pool.release(blocks)
    assert (pool.held, pool.cached, pool.available) == (0, 3, 4)
    pool.allocate(2)
    assert pool.lookup([b"a", b"b", b"c"]) == blocks[:2], "the tail of a prefix goes before its head"


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


def test_two_holders_must_both_let_go():
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


def test_the_first_block_under_a_key_stays():
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
