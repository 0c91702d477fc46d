"""A queue kept in order: insertion and removal by binary search, the front always at hand."""

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
