"""Leases: blocks we keep for another engine until it has fetched them, or until its time is up.

Rules: every lease has a deadline and the generation of the engine that granted it, so that a fetch meant for an earlier
life of this engine is recognised and refused. The table decides and returns blocks; its owner gives them back.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count


@dataclass(frozen=True, slots=True)
class Lease:
    id: int
    generation: int
    blocks: list[int]
    until_s: float


class LeaseTable:
    def __init__(self, generation: int) -> None:
        self.generation = generation
        self._leases: dict[int, Lease] = {}
        self._ids = count(1)

    def __len__(self) -> int:
        return len(self._leases)

    def __iter__(self) -> Iterator[Lease]:
        return iter(self._leases.values())

    def grant(self, blocks: list[int], until_s: float) -> Lease:
        lease = Lease(next(self._ids), self.generation, blocks, until_s)
        self._leases[lease.id] = lease
        return lease

    def find(self, id: int, generation: int) -> Lease | None:
        lease = self._leases.get(id)
        return lease if lease is not None and lease.generation == generation else None

    def renew(self, id: int, generation: int, until_s: float) -> bool:
        lease = self.find(id, generation)
        if lease is not None:
            self._leases[id] = Lease(id, generation, lease.blocks, until_s)
        return lease is not None

    def end(self, id: int, generation: int) -> list[int]:
        """The blocks to give back: none if the lease is unknown, ended before, or of another generation."""
        if self.find(id, generation) is None:
            return []
        return self._leases.pop(id).blocks

    def expire(self, now_s: float) -> list[Lease]:
        expired = [lease for lease in self if lease.until_s <= now_s]
        for lease in expired:
            del self._leases[lease.id]
        return expired
