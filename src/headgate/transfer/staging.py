"""The memory that NIXL reads and writes: separate slots, never the cache.

A read that was started may write until NIXL reports its end, even if its fetch was abandoned or the other engine was
stopped. Reads therefore write to slots, and a slot is kept until its read has ended, while the blocks are free at
once. Peers also read only slots, for two reasons: sleep releases and reallocates pages of the cache, which a network
adapter would not notice; and a peer that may read one slot must not be able to read all KV.

Only the transport's thread uses this module. NIXL's own progress thread is disabled, because it would never sleep.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from math import inf
from typing import Any
from uuid import uuid4

import numpy as np

from headgate.errors import RequestError
from headgate.transfer.frames import Checksum
from headgate.transfer.link import PeerGone
from headgate.transfer.transport import Portion, Words

log = logging.getLogger(__name__)

SLOTS = 16  # slots that peers read; there are as many again that we read into
MOST_REMOTES = 64
# The thread polls without sleeping until BUSY_POLL_S after the last activity of a read, and then every POLL_S.
BUSY_POLL_S, POLL_S = 0.1, 0.002


class Slots:
    """Equal parts of one buffer."""

    def __init__(self, count: int, slot_bytes: int) -> None:
        self._words = np.empty((count, slot_bytes // 8), np.uint64)
        self._free = deque(range(count))
        self.count, self.slot_bytes = count, slot_bytes

    @property
    def region(self) -> tuple[int, int]:
        """Address and length of the buffer."""
        return self._words.ctypes.data, self._words.nbytes

    @property
    def taken(self) -> int:
        return self.count - len(self._free)

    def take(self) -> int | None:
        return self._free.popleft() if self._free else None

    def give(self, slot: int) -> None:
        self._free.append(slot)

    def offset(self, slot: int) -> int:
        return slot * self.slot_bytes

    def write(self, slot: int, portions: Iterable[Portion]) -> bytes:
        """Copy portions into a slot; returns their checksum."""
        checksum = Checksum()
        for run, place in self._places(slot, portions):
            checksum.add([run])
            np.copyto(place, run)
        return checksum.digest()

    def read(self, slot: int, portions: Iterable[Portion]) -> bytes:
        """Copy a slot into portions; returns the checksum of the data."""
        checksum = Checksum()
        for run, place in self._places(slot, portions):
            np.copyto(run, place)
            checksum.add([run])
        return checksum.digest()

    def _places(self, slot: int, portions: Iterable[Portion]) -> Iterator[tuple[Words, Words]]:
        """Yield each run of words with its memory in the slot."""
        start = 0
        for run in (run for portion in portions for run in portion):
            yield run, self._words[slot, start : start + run.size].reshape(run.shape)
            start += run.size


@dataclass(slots=True, eq=False)
class Remote:
    """Another engine's agent. It is removed when it has failed and has no users left."""

    metadata: bytes
    name: Any
    users: int = 0
    failed: bool = False


@dataclass(slots=True, eq=False)
class Read:
    remote: Remote
    handle: Any
    slot: int


class Agent:
    def __init__(self, slot_bytes: int) -> None:
        self.out, self.into = Slots(SLOTS, slot_bytes), Slots(SLOTS, slot_bytes)
        self._agent = _open_agent()
        self._registered = [self._register(slots) for slots in (self.out, self.into)]
        # Peers have no use for the slots that we read into.
        self.metadata: bytes = self._agent.get_partial_agent_metadata(self._registered[0], True, ["UCX"])
        self._remotes: dict[bytes, Remote] = {}
        self._reads: set[Read] = set()
        self._abandoned: set[Read] = set()
        self._last_activity_s = -inf
        self.sent_bytes = self.received_bytes = 0

    def _register(self, slots: Slots) -> Any:
        return self._agent.register_memory([(*slots.region, 0, "")], "DRAM")

    # -- other agents ---------------------------------------------------------------

    def add_remote(self, metadata: bytes) -> Remote:
        """Add the agent with this metadata, or share an existing one. Must be paired with `leave`."""
        remote = self._remotes.get(metadata)
        if remote is not None and remote.failed:
            raise PeerGone("read failed")  # its last users are about to leave
        if remote is None:
            self._make_room()
            with _failing():
                remote = self._remotes[metadata] = Remote(metadata, self._agent.add_remote_agent(metadata))
        remote.users += 1
        return remote

    def leave(self, remote: Remote) -> None:
        remote.users -= 1
        if remote.failed and not remote.users:
            self._forget(remote)

    def _make_room(self) -> None:
        idle = [remote for remote in self._remotes.values() if not remote.users]
        if len(self._remotes) >= MOST_REMOTES and idle:
            self._forget(idle[0])

    def _forget(self, remote: Remote) -> None:
        del self._remotes[remote.metadata]
        with suppress(Exception):  # the agent may already be gone
            self._agent.remove_remote_agent(remote.name)

    # -- reads ----------------------------------------------------------------------

    def read(self, remote: Remote, address: int, length: int) -> Read | None:
        """Start a read of the peer's memory; returns None if there is no free slot to read into."""
        if (slot := self.into.take()) is None:
            return None
        try:
            with _failing(remote):
                handle = self._begin(remote, address, length, slot)
        except PeerGone:
            self.into.give(slot)  # no read was started
            raise
        read = Read(remote, handle, slot)
        remote.users += 1
        self._reads.add(read)
        self.note_activity()
        return read

    def _begin(self, remote: Remote, address: int, length: int, slot: int) -> Any:
        ours = [(self.into.region[0] + self.into.offset(slot), length, 0)]
        descs = [self._agent.get_xfer_descs(pieces, "DRAM") for pieces in (ours, [(address, length, 0)])]
        handle = self._agent.initialize_xfer("READ", *descs, remote.name, b"")
        if self._agent.transfer(handle) == "ERR":
            raise RuntimeError("a read cannot be posted")
        return handle

    def is_over(self, read: Read) -> bool:
        """Whether the read is complete. Raises PeerGone if it has failed."""
        with _failing(read.remote):
            state = self._agent.check_xfer_state(read.handle)
            if state not in ("DONE", "PROC"):
                raise RuntimeError(f"a read has ended as {state}")
        return bool(state == "DONE")

    def finish(self, read: Read) -> None:
        """Release a completed read and its slot."""
        self._reads.discard(read)
        with suppress(Exception):  # a handle that cannot be released now is released with the agent
            self._agent.release_xfer_handle(read.handle)
        self.into.give(read.slot)
        self.leave(read.remote)
        self.note_activity()

    def abandon(self, read: Read) -> None:
        """Stop waiting for a read. Its slot is kept until the read has ended."""
        self._abandoned.add(read)

    @property
    def stuck(self) -> bool:
        """Whether abandoned reads occupy half of our slots, so that KV should travel over the connection instead."""
        return len(self._abandoned) >= self.into.count // 2

    # -- progress ---------------------------------------------------------------------

    def note_activity(self) -> None:
        self._last_activity_s = time.monotonic()

    def make_progress(self) -> None:
        """Let NIXL serve the reads of peers, and release abandoned reads that have ended."""
        with suppress(Exception):  # an error of a lost peer is raised again where that peer is used
            self._agent.get_new_notifs()
        for read in list(self._abandoned):
            if self._is_abandoned_read_over(read):
                self._abandoned.discard(read)
                self.finish(read)

    def _is_abandoned_read_over(self, read: Read) -> bool:
        try:
            return self.is_over(read)
        except PeerGone:
            return True

    @property
    def poll_timeout_s(self) -> float | None:
        """How long the transport's thread may sleep; None if nothing is in progress."""
        if not self._reads and not self.out.taken:
            return None
        return 0.0 if time.monotonic() - self._last_activity_s < BUSY_POLL_S else POLL_S

    def close(self) -> None:
        for read in list(self._reads):
            with suppress(Exception):
                self._agent.release_xfer_handle(read.handle)
        for remote in list(self._remotes.values()):
            self._forget(remote)
        for registered in self._registered:
            with suppress(Exception):
                self._agent.deregister_memory(registered)
        del self._agent


@contextmanager
def _failing(remote: Remote | None = None) -> Iterator[None]:
    """Raise PeerGone for any of NIXL's exceptions, and mark `remote` as failed."""
    try:
        yield
    except Exception as error:
        if remote is not None:
            remote.failed = True
        log.info("NIXL: %s", error)
        raise PeerGone("read failed") from error


def _open_agent() -> Any:
    try:
        from nixl._api import nixl_agent, nixl_agent_config
    except ImportError as error:
        raise RequestError(f"KV over NIXL needs its package: pip install 'headgate[nixl]' ({error})") from error
    logging.getLogger("nixl").setLevel(logging.WARNING)
    agent = nixl_agent(uuid4().hex, nixl_agent_config(enable_prog_thread=False, backends=["UCX"]))
    if "UCX" not in agent.backends:
        raise RequestError("KV over NIXL needs its UCX backend, which does not start here; use --kv-transport tcp")
    return agent
