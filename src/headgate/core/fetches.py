"""Fetches of KV from other engines: which sequences wait for one to start, and which fetches are under way.

Steps run in launch order; a transfer keeps no order with them. A fetch therefore starts only when no launched step
touches the blocks that it fills. A sequence has a hold for each fetch under way.
"""

from __future__ import annotations

from collections import deque

from headgate.core.sequence import Sequence
from headgate.protocol.plan import Fetch


class FetchTable:
    def __init__(self, block_size: int) -> None:
        self.waiting: dict[Sequence, None] = {}  # LOADING, and nothing fills their blocks yet
        self.touched: deque[tuple[int, list[int]]] = deque()  # released blocks, and the last step to touch them
        self._block_size = block_size
        self._started: dict[int, Sequence] = {}

    def __len__(self) -> int:
        """Fetches under way."""
        return len(self._started)

    def fills(self, seq: Sequence) -> bool:
        """Whether a fetch fills the blocks of `seq`."""
        return self._started.get(seq.id) is seq

    def start_ready(self) -> list[Fetch]:
        """Start the fetches whose blocks no launched step touches."""
        touched = {block for _, blocks in self.touched for block in blocks}
        ready = [seq for seq in self.waiting if touched.isdisjoint(seq.blocks[seq.published :])]
        return [self._start(seq) for seq in ready]

    def _start(self, seq: Sequence) -> Fetch:
        assert seq.ticket is not None
        del self.waiting[seq]
        self._started[seq.id] = seq
        seq.holds += 1
        skip, end = seq.published, -(-seq.ticket.tokens // self._block_size)
        return Fetch(seq.id, seq.ticket, skip, tuple(seq.blocks[skip:end]))

    def end(self, id: int) -> Sequence:
        """The fetch for sequence `id` no longer touches its blocks."""
        seq = self._started.pop(id)
        seq.holds -= 1
        return seq

    def step_landed(self, step: int) -> None:
        """Steps land in order, so blocks that no later step touches may be filled."""
        while self.touched and self.touched[0][0] <= step:
            self.touched.popleft()
