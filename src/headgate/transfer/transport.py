"""What a transport is: fetches KV for us, and lets others fetch ours.

Fetching: `attach` takes hold of what a ticket names and keeps its lease alive, `fetch` fills blocks with it, `leave` lets
go. Every fetch ends in exactly one `Fetched`, also one that was left. Serving: what was offered can be fetched by whoever
knows its lease, as far as it is filled. After `withdraw` has returned, nothing that is read from those blocks is passed off
as KV. `settle` is over when nobody's fetch reads the memory of the cache any more, and it can be given back.

All methods may be called from any thread and never wait for a peer. Events are posted from a thread of the transport's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from headgate.protocol.message import TransferCounts
from headgate.protocol.plan import Fetch
from headgate.protocol.request import Ticket

Words = npt.NDArray[np.uint64]
Portion = list[Words]  # runs [blocks, words] of one part of some blocks each


class Shelf(Protocol):
    """Slots of our memory that other engines on the same card can read."""

    shown: bytes  # tells them where it is
    slots: int
    blocks: int  # that a slot has room for

    def put(self, slot: int, blocks: Sequence[int]) -> bytes:
        """Copy blocks of our cache into a slot; returns their checksum, when it is done."""


class ShelfReader(Protocol):
    """Another engine's shelf. It is closed when it is dropped."""

    slots: int
    blocks: int

    def take(self, slot: int, blocks: Sequence[int]) -> bytes:
        """Copy what is in a slot to blocks of our cache; returns the checksum of what was copied, when it is done."""


class SameGpuMemory(Protocol):
    """What engines whose caches are on one card can do that others cannot."""

    name: str  # of the card

    def shelf(self) -> Shelf | None:
        """Ours, if there is room for one."""

    def open(self, shown: bytes) -> ShelfReader:
        """Another engine's; OSError says why it cannot be."""


class BlockMemory(Protocol):
    """The KV blocks of this engine as bytes. A block has several parts (keys and values of each layer).

    They are had portion by portion, small enough that what is done to one finds it in a processor's cache: the first part
    of each block, then the second of each, and so on. A portion is good until the next is asked for.
    """

    layout: str  # KV moves only between engines whose layouts have the same name
    block_bytes: int
    near: SameGpuMemory | None  # None: nobody is on the same card

    def lend(self, blocks: Sequence[int]) -> Iterator[Portion]:
        """What these blocks hold, to be read."""

    def room(self, blocks: Sequence[int]) -> Iterator[Portion]:
        """Where to write what these blocks shall hold; whoever asks for the next portion has filled the last one."""


@dataclass(frozen=True, slots=True)
class Fetched:
    """The fetch for a sequence has filled its blocks, or never will."""

    id: int
    ok: bool


@dataclass(frozen=True, slots=True)
class Renewed:
    """Whoever holds a lease of ours is alive."""

    lease: int
    generation: int
    until_s: float


@dataclass(frozen=True, slots=True)
class Released:
    """A lease of ours is of no use any more."""

    lease: int
    generation: int
    fetched: bool


Event = Fetched | Renewed | Released
Post = Callable[[Any], None]


class Transport(Protocol):
    address: str  # where others fetch from us; "" if they cannot

    def start(self, post: Post) -> None: ...

    def attach(self, id: int, ticket: Ticket) -> None: ...

    def fetch(self, fetch: Fetch) -> None: ...

    def leave(self, id: int) -> None: ...

    def offer(self, lease: int, generation: int, version: int, blocks: tuple[int, ...]) -> None: ...

    def fill(self, lease: int, blocks: int) -> None: ...

    def withdraw(self, lease: int) -> None: ...

    def settle(self) -> Future[None]: ...

    def counts(self) -> TransferCounts: ...

    def close(self) -> None: ...


class NoTransport:
    """Fetches nothing and serves nothing: every ticket becomes a local prefill."""

    address = ""

    def __init__(self) -> None:
        self._post: Post = lambda _: None

    def start(self, post: Post) -> None:
        self._post = post

    def attach(self, id: int, ticket: Ticket) -> None:
        pass

    def fetch(self, fetch: Fetch) -> None:
        self._post(Fetched(fetch.id, ok=False))

    def leave(self, id: int) -> None:
        pass

    def offer(self, lease: int, generation: int, version: int, blocks: tuple[int, ...]) -> None:
        pass

    def fill(self, lease: int, blocks: int) -> None:
        pass

    def withdraw(self, lease: int) -> None:
        pass

    def settle(self) -> Future[None]:
        settled: Future[None] = Future()
        settled.set_result(None)
        return settled

    def counts(self) -> TransferCounts:
        return TransferCounts()

    def close(self) -> None:
        pass
