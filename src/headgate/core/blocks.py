"""The pool of KV blocks: which are held, which are cached for reuse, which are free.

Rules: a block is either *held* (by a counted number of sequences), *cached* (held by none, but published under a key)
or *free*. A cached block is evicted only when no block is free, and the least recently used goes first. One number
therefore tells which blocks have been evicted: the *horizon*, the release time of the most recently evicted block.
All groups of layers share the pool; a block holds KV of the layers of one group.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Mapping
from math import inf

from headgate.protocol.groups import ABSENT, LayerGroups, group_keys
from headgate.protocol.keys import Key


class BlockPool:
    def __init__(self, num_blocks: int, block_size: int, windows: tuple[int | None, ...] = (None,)) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.groups = LayerGroups(block_size, windows)
        self.now_s = 0.0  # set by the scheduler
        self.horizon_s = -inf  # blocks released before this time are no longer in the cache
        self._holders = [0] * num_blocks
        self._free = deque(range(num_blocks))
        self._cached: OrderedDict[int, float] = OrderedDict()  # block -> time of its release
        self._key_of: dict[int, Key] = {}
        self._block_of: dict[Key, int] = {}

    def __repr__(self) -> str:
        return f"<BlockPool {self.held} held, {len(self._cached)} cached, {len(self._free)} free>"

    @property
    def available(self) -> int:
        return len(self._free) + len(self._cached)

    @property
    def held(self) -> int:
        return self.num_blocks - self.available

    @property
    def cached(self) -> int:
        return len(self._cached)

    def allocate(self, count: int) -> list[int]:
        """Take `count` blocks; the caller has checked that they are available."""
        return [self._take() for _ in range(count)]

    def _take(self) -> int:
        if self._free:
            block = self._free.popleft()
        else:
            block, used_s = self._cached.popitem(last=False)
            self.horizon_s = max(self.horizon_s, used_s)
            self._forget(block)
        self._holders[block] = 1
        return block

    def retain(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            if self._holders[block] == 0:
                del self._cached[block]
            self._holders[block] += 1

    def release(self, blocks: list[int]) -> None:
        # Last block first, so that the tail of a prefix is evicted before its head.
        holders = self._holders
        for block in reversed(blocks):
            holders[block] = left = holders[block] - 1
            assert left >= 0, f"block {block} released more often than taken"
            if left == 0:
                if block in self._key_of:
                    self._cached[block] = self.now_s
                else:
                    self._free.append(block)

    def lookup(self, keys: list[Key]) -> list[int]:
        """Return the blocks of the longest published prefix of the stripes with `keys` after which one can continue.

        Blocks that are not needed after the prefix are absent.
        """
        find, groups = self._block_of.get, self.groups
        if not groups.windowed:
            blocks = [*(find(key, ABSENT) for key in keys), ABSENT]
            return blocks[: blocks.index(ABSENT)]
        found = [find(key, ABSENT) for key in group_keys(keys, len(groups))]
        stripes = groups.usable_prefix(found)
        blocks = [ABSENT] * (stripes * len(groups))
        for place in groups.places_for(stripes * self.block_size, stripes):
            blocks[place] = found[place]
        return blocks

    def idle(self, blocks: Iterable[int]) -> int:
        """Count those of `blocks` that no sequence holds; retaining `blocks` makes that many unavailable."""
        return [self._holders[block] for block in blocks].count(0)

    def publish(self, block: int, key: Key) -> None:
        """Let `lookup` find a held block by `key`. If another block already has this key, nothing changes."""
        if key not in self._block_of and block not in self._key_of:
            self._block_of[key] = block
            self._key_of[block] = key

    def flush(self) -> int:
        """Free every cached block; returns how many there were."""
        dropped = list(self._cached)
        for block in dropped:
            self._forget(block)
        self._cached.clear()
        self._free.extend(dropped)
        self.move_horizon()
        return len(dropped)

    def move_horizon(self) -> None:
        """Record that no block released before now is in the cache."""
        self.horizon_s = self.now_s

    def _forget(self, block: int) -> None:
        del self._block_of[self._key_of.pop(block)]

    def check(self, holders: Mapping[int, int]) -> None:
        """Assert that every block is accounted for; `holders` counts the holders of each held block."""
        free, cached = set(self._free), set(self._cached)
        held = {block for block, count in enumerate(self._holders) if count}
        assert self._holders == [holders.get(block, 0) for block in range(self.num_blocks)]
        assert len(free) + len(cached) + len(held) == self.num_blocks == len(free | cached | held)
        assert len(free) == len(self._free)
        released = list(self._cached.values())
        assert released == sorted(released), "eviction order differs from release order"
        assert cached == self._key_of.keys() - held
        assert {key: block for block, key in self._key_of.items()} == self._block_of
