"""Sorted queues of sequences: insertion and removal by binary search."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from math import inf

from headgate.core.sequence import Sequence

Rank = tuple[float, ...]


class OrderedQueue:
    """Sequences sorted by rank. A rank ends in a unique number, so that no two are equal."""

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
        # The one-tuple sorts just before the pair with the same rank, so no sequences are compared.
        index = bisect_left(self._entries, (rank,))
        assert self._entries[index][1] is seq
        del self._entries[index]


class DeadlineQueue:
    """Sequences that have a deadline, the earliest first."""

    def __init__(self) -> None:
        self._queue = OrderedQueue()

    @property
    def next_s(self) -> float:
        """The earliest deadline."""
        return self._queue.front().deadline_s if self._queue else inf

    def overdue(self, now_s: float) -> Sequence | None:
        return self._queue.front() if self._queue and self.next_s <= now_s else None

    def add(self, seq: Sequence) -> None:
        if seq.deadline_s < inf:
            self._queue.add(_deadline_rank(seq), seq)

    def remove(self, seq: Sequence) -> None:
        if seq.deadline_s < inf:
            self._queue.remove(_deadline_rank(seq), seq)


def _deadline_rank(seq: Sequence) -> Rank:
    return (seq.deadline_s, seq.order[-1])


class FairQueue:
    """One queue of sequences per tenant, each sorted by rank. The caller decides which tenant is next."""

    def __init__(self) -> None:
        self._queues: dict[str, OrderedQueue] = {}

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))

    def __iter__(self) -> Iterator[Sequence]:
        return (seq for queue in self._queues.values() for seq in queue)

    def fronts(self) -> list[Sequence]:
        """The first sequence of each tenant."""
        return [queue.front() for queue in self._queues.values()]

    def add(self, rank: Rank, seq: Sequence) -> None:
        self._queues.setdefault(seq.request.tenant, OrderedQueue()).add(rank, seq)

    def remove(self, rank: Rank, seq: Sequence) -> None:
        queue = self._queues[seq.request.tenant]
        queue.remove(rank, seq)
        if not queue:
            del self._queues[seq.request.tenant]
