"""P's side of blocks that go beside the connection: copied into slots that D gives back in the order it heard of them."""

from __future__ import annotations

import socket
import struct
from collections import deque
from collections.abc import Callable

from headgate.transfer.frames import BadFrame, FrameHeader, FrameKind, encode
from headgate.transfer.serving import LeaseServer, Offer
from headgate.transfer.transport import BlockMemory, Event

AHEAD = 2  # slots of one connection: one is read while the next is filled
PLACE = struct.Struct("<Q")  # where in the slots; what READY says


class SlotServer(LeaseServer):
    """Whoever lends slots is one of these, and says by `give` how one comes home."""

    def __init__(
        self,
        give: Callable[[int], None],
        sock: socket.socket,
        memory: BlockMemory,
        find: Callable[[int], Offer | None],
        tell: Callable[[Event], None],
        lease_s: float,
        clock: Callable[[], float],
    ) -> None:
        super().__init__(sock, memory, find, tell, lease_s, clock)
        self._give = give
        self._lent: deque[int] = deque()  # the first that was told of first

    @property
    def must_wait(self) -> bool:
        return len(self._lent) >= AHEAD

    def heard(self, header: FrameHeader) -> None:
        if header.kind is FrameKind.TOOK:
            self._take_back()
        else:
            super().heard(header)

    def more(self) -> None:
        # Whoever waits for a slot still hears at once that there is nothing more to wait for.
        if not self.must_wait or self.offer is None or self.offer.withdrawn:
            super().more()

    def say_ready(self, stop: int, place: int, digest: bytes) -> int:
        """The blocks up to `stop` are at `place`; returns how many bytes they are."""
        count, body = stop - self._next, PLACE.pack(place)
        self.say(encode(FrameHeader(FrameKind.READY, self._next, count, len(body), digest), body))
        self._next = stop
        return count * self._memory.block_bytes

    def _take_back(self) -> None:
        if not self._lent:
            raise BadFrame("took what it was not given")
        self._give(self._lent.popleft())

    def _done(self) -> None:
        super()._done()
        self._take_all_back()

    def hang_up(self) -> None:
        super().hang_up()
        self._take_all_back()

    def _take_all_back(self) -> None:
        while self._lent:
            self._take_back()
