"""Queues kept in order: insertion and removal by binary search, the front always at hand."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator

from headgate.core.sequence import Sequence

Rank = tuple[float, ...]


class OrderedQueue:
    """Sequences sorted by a rank that ends in a unique number, so that two never compare equal."""

    def __init__(self) -> None:
        self._entries: list[tuple[Rank, Sequence]] = []

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Sequence]:
        return (seq for _, seq in self._entries)

    def front(self) -> Sequence:
        return self._entries[0][1]

    def add(self, rank: Rank, seq: Sequence) -> None:
        insort(self._entries, (rank, seq))

    def remove(self, rank: Rank, seq: Sequence) -> None:
        # A one-tuple sorts just before the entry of the same rank, and sequences are never compared.
        index = bisect_left(self._entries, (rank,))
        assert self._entries[index][1] is seq
        del self._entries[index]


class FairQueue:
    """A queue per tenant. Which tenant is next is the caller's to say; within one, the rank decides."""

    def __init__(self) -> None:
        self._queues: dict[str, OrderedQueue] = {}

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))

    def __iter__(self) -> Iterator[Sequence]:
        return (seq for queue in self._queues.values() for seq in queue)

    def fronts(self) -> list[Sequence]:
        """The first of each tenant."""
        return [queue.front() for queue in self._queues.values()]

    def add(self, rank: Rank, seq: Sequence) -> None:
        self._queues.setdefault(seq.request.tenant, OrderedQueue()).add(rank, seq)

    def remove(self, rank: Rank, seq: Sequence) -> None:
        queue = self._queues[seq.request.tenant]
        queue.remove(rank, seq)
        if not queue:
            del self._queues[seq.request.tenant]
