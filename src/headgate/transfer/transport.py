"""The interface of a transport, which fetches KV from other engines and lets other engines fetch ours.

Fetching: `attach` attaches to the lease of a ticket and keeps the lease alive, `fetch` fills blocks with its KV,
`leave` detaches. Every fetch ends with exactly one `Fetched`, even after `leave`. Serving: any peer that knows the
lease of an offer can fetch the blocks that are filled. After `withdraw` has returned, data read from its blocks is no
longer accepted as KV by any peer. `settle` completes when no peer reads the cache memory, which can then be released.

All methods may be called from any thread and never wait for a peer. Events are posted from the transport's own
thread.
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
Portion = list[Words]  # arrays [blocks, words], each with one part of some blocks


class Shelf(Protocol):
    """A set of slots in our device memory that other engines on the same GPU can read."""

    descriptor: bytes  # what other engines need to open it
    slots: int
    blocks: int  # capacity of a slot, in blocks

    def put(self, slot: int, blocks: Sequence[int]) -> bytes:
        """Copy blocks of our cache into a slot. Returns their checksum once the copy is complete."""


class ShelfReader(Protocol):
    """Another engine's shelf. It is closed when this object is dropped."""

    slots: int
    blocks: int

    def take(self, slot: int, blocks: Sequence[int]) -> bytes:
        """Copy a slot into blocks of our cache. Returns the checksum of the copied data once the copy is complete."""


class SameGpuMemory(Protocol):
    """Memory operations between engines whose caches are on the same GPU."""

    gpu_id: str

    def shelf(self) -> Shelf | None:
        """Our shelf, or None if there is no memory for one."""

    def open(self, descriptor: bytes) -> ShelfReader:
        """Open another engine's shelf. Raises OSError, with the reason, if it cannot be opened."""


class BlockMemory(Protocol):
    """The KV blocks of this engine as bytes. A block has several parts (keys and values of each layer).

    Blocks are accessed in portions that are small enough to stay in a processor's cache while they are processed: the
    first part of each block, then the second part of each, and so on. A portion is valid until the next one is
    requested.
    """

    layout: str  # KV moves only between engines whose layouts have the same name
    block_bytes: int
    same_gpu: SameGpuMemory | None  # None: the cache cannot be shared on a GPU

    def lend(self, blocks: Sequence[int]) -> Iterator[Portion]:
        """Yield the content of these blocks, for reading."""

    def room(self, blocks: Sequence[int]) -> Iterator[Portion]:
        """Yield memory for the content of these blocks. Requesting the next portion means that the last is filled."""


@dataclass(frozen=True, slots=True)
class Fetched:
    """The fetch for a sequence has filled its blocks, or has failed."""

    id: int
    ok: bool


@dataclass(frozen=True, slots=True)
class Renewed:
    """The holder of one of our leases is alive."""

    lease: int
    generation: int
    until_s: float


@dataclass(frozen=True, slots=True)
class Released:
    """The peer no longer needs one of our leases."""

    lease: int
    generation: int
    fetched: bool


Event = Fetched | Renewed | Released
Post = Callable[[Any], None]


class Transport(Protocol):
    address: str  # where other engines fetch from us; "" if they cannot

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
    """A transport that fetches nothing and serves nothing: a request with a ticket computes its prompt locally."""

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
