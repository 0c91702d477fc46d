"""P's side of transfers that bypass the connection: P copies blocks into slots, and D returns the slots in order."""

from __future__ import annotations

import socket
import struct
from collections import deque
from collections.abc import Callable

from headgate.transfer.frames import BadFrame, FrameHeader, FrameKind, encode
from headgate.transfer.serving import LeaseServer, ServingSettings

AHEAD = 2  # slots per connection: one is read while the next is filled
PLACE = struct.Struct("<Q")  # body of READY: the position in the slots


class SlotServer(LeaseServer):
    """Base class of servers that lend slots. `give` returns a slot to its pool."""

    def __init__(self, give: Callable[[int], None], sock: socket.socket, shared: ServingSettings) -> None:
        super().__init__(sock, shared)
        self._give = give
        self._lent: deque[int] = deque()  # slots in the order in which they were announced

    @property
    def must_wait(self) -> bool:
        return len(self._lent) >= AHEAD

    def received(self, header: FrameHeader) -> None:
        if header.kind is FrameKind.TOOK:
            self._take_back()
        else:
            super().received(header)

    def more(self) -> None:
        # Even if D holds all slots, it must be notified at once that the offer is withdrawn.
        if not self.must_wait or self.offer is None or self.offer.withdrawn:
            super().more()

    def queue_ready(self, stop: int, place: int, digest: bytes) -> int:
        """Announce that the blocks up to `stop` are at `place`. Returns their size in bytes."""
        count, body = stop - self._next, PLACE.pack(place)
        self.queue(encode(FrameHeader(FrameKind.READY, self._next, count, len(body), digest), body))
        self._next = stop
        return count * self._memory.block_bytes

    def _take_back(self) -> None:
        if not self._lent:
            raise BadFrame("TOOK without a lent slot")
        self._give(self._lent.popleft())

    def _done(self) -> None:
        super()._done()
        self._take_all_back()

    def release(self) -> None:
        super().release()
        self._take_all_back()

    def _take_all_back(self) -> None:
        while self._lent:
            self._take_back()
