"""Which worker answers a request, why, and which one computes the prompt if that is another."""

from __future__ import annotations

from collections.abc import Sequence

from headgate.router.fleet.fleet import LoadShare, Workers
from headgate.router.fleet.prefix_index import Visit, WorkerPrefix
from headgate.router.fleet.worker import Worker


class Placement(LoadShare):
    """Given back when the attempt is over."""

    __slots__ = ("found", "prefill", "reason", "visits")

    def __init__(
        self,
        fleet: Workers,
        worker: Worker,
        tokens: int,
        reason: str,
        found: WorkerPrefix | None,
        visits: Sequence[Visit],
        prefill: Worker | None,
    ) -> None:
        LoadShare.__init__(self, fleet, worker, tokens)  # as `super` would, in less time
        self.reason = reason
        self.found = found  # of its prompt in that worker's cache, as far as the router knows
        self.visits = visits
        self.prefill = prefill

    def give_back(self) -> None:
        LoadShare.give_back(self)
        now_s = self._fleet.clock()
        for visit in self.visits:
            visit.last_s = now_s

    def undo(self) -> None:
        """The worker has never had the request, or has it no more."""
        for visit in self.visits:
            visit.undo()
