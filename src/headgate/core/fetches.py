"""Fetches of KV from other engines: which sequences wait for a fetch to start, and which fetches are under way.

Steps run in launch order, but transfers run beside them in any order. A fetch therefore starts only when no launched
step touches the blocks that it fills. A fetch under way is counted in the `holds` of its sequence.
"""

from __future__ import annotations

from collections import deque

from headgate.core.sequence import Sequence
from headgate.protocol.groups import LayerGroups
from headgate.protocol.plan import Fetch


class FetchTable:
    def __init__(self, groups: LayerGroups) -> None:
        self.waiting: dict[Sequence, None] = {}  # sequences in LOADING whose fetch has not started
        self.touched: deque[tuple[int, list[int]]] = deque()  # released blocks, and the last step to touch them
        self._groups = groups
        self._started: dict[int, Sequence] = {}

    def __len__(self) -> int:
        """The number of fetches under way."""
        return len(self._started)

    def fills(self, seq: Sequence) -> bool:
        """Whether a fetch is filling the blocks of `seq`."""
        return self._started.get(seq.id) is seq

    def start_ready(self) -> list[Fetch]:
        """Start and return the fetches whose blocks no launched step touches."""
        touched = {block for _, blocks in self.touched for block in blocks}
        fetches = {seq: self._fetch_for(seq) for seq in self.waiting}
        ready = {seq: fetch for seq, fetch in fetches.items() if touched.isdisjoint(fetch.blocks)}
        for seq in ready:
            del self.waiting[seq]
            self._started[seq.id] = seq
            seq.holds += 1
        return list(ready.values())

    def _fetch_for(self, seq: Sequence) -> Fetch:
        """The fetch that fills the blocks of `seq` after those found in the cache."""
        assert seq.ticket is not None
        tokens, count = seq.ticket.tokens, self._groups.stripes_for(seq.ticket.tokens)
        lent = self._groups.count_for(tokens, count)  # blocks of the other engine's lease
        places = self._groups.places_for(tokens, count, start=seq.found)
        return Fetch(seq.id, seq.ticket, lent - len(places), tuple(seq.blocks[place] for place in places))

    def end(self, id: int) -> Sequence:
        """Record that the fetch for sequence `id` has ended; returns the sequence."""
        seq = self._started.pop(id)
        seq.holds -= 1
        return seq

    def step_landed(self, step: int) -> None:
        """Let fetches fill the blocks that only `step` or earlier steps touched; steps land in order."""
        while self.touched and self.touched[0][0] <= step:
            self.touched.popleft()
