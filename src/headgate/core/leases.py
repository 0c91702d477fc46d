"""Leases: KV of this engine that another engine may fetch until the lease ends.

A lease belongs to a sequence that exports its KV. Both end together, so ending the sequence withdraws the KV. Every
lease has a deadline. It also carries the generation of the engine process that granted it, so that a fetch meant for
an earlier process is recognised and refused. Changes to leases are recorded in order, for the transport that serves
the fetches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Lease:
    id: int
    generation: int
    sequence: int
    version: int  # version of the weights that computed its KV
    blocks: tuple[int, ...]
    until_s: float


@dataclass(frozen=True, slots=True)
class Granted:
    lease: Lease


@dataclass(frozen=True, slots=True)
class Filled:
    """The KV of the first `blocks` blocks of a lease is written and may be fetched."""

    id: int
    blocks: int


@dataclass(frozen=True, slots=True)
class Withdrawn:
    """A lease has ended. Its blocks may be reused as soon as the next step is planned."""

    id: int


News = Granted | Filled | Withdrawn


class LeaseTable:
    def __init__(self, generation: int, draw_id: Callable[[], int]) -> None:
        self.generation = generation
        self._draw_id = draw_id
        self._leases: dict[int, Lease] = {}
        self._news: list[News] = []

    def __len__(self) -> int:
        return len(self._leases)

    def __iter__(self) -> Iterator[Lease]:
        return iter(self._leases.values())

    @property
    def blocks(self) -> int:
        return sum(len(lease.blocks) for lease in self)

    def grant(self, sequence: int, version: int, blocks: tuple[int, ...], until_s: float) -> Lease:
        lease = Lease(self._draw_id(), self.generation, sequence, version, blocks, until_s)
        self._leases[lease.id] = lease
        self._news.append(Granted(lease))
        return lease

    def find(self, id: int, generation: int) -> Lease | None:
        lease = self._leases.get(id)
        return lease if lease is not None and lease.generation == generation else None

    def renew(self, id: int, generation: int, until_s: float) -> bool:
        lease = self.find(id, generation)
        if lease is not None:
            self._leases[id] = replace(lease, until_s=until_s)
        return lease is not None

    def fill(self, id: int, blocks: int) -> None:
        self._news.append(Filled(id, blocks))

    def end(self, id: int) -> None:
        del self._leases[id]
        self._news.append(Withdrawn(id))

    def overdue(self, now_s: float) -> list[Lease]:
        return [lease for lease in self if lease.until_s <= now_s]

    def take_news(self) -> list[News]:
        news, self._news = self._news, []
        return news
