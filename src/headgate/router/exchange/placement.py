"""A placement: the worker that answers a request, and the worker that computes its prompt, if that is another one."""

from __future__ import annotations

from collections.abc import Sequence

from headgate.router.fleet.fleet import LoadShare, Workers
from headgate.router.fleet.prefix_index import Visit, WorkerPrefix
from headgate.router.fleet.worker import Worker


class Placement(LoadShare):
    """The worker chosen for a request, and the request's share of its load, given back when the attempt ends."""

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
        LoadShare.__init__(self, fleet, worker, tokens)  # faster than `super`
        self.reason = reason
        self.found = found  # the part of the prompt that the router expects in the worker's cache
        self.visits = visits
        self.prefill = prefill

    def give_back(self) -> None:
        LoadShare.give_back(self)
        now_s = self._fleet.clock()
        for visit in self.visits:
            visit.last_s = now_s

    def undo(self) -> None:
        """Remove the prompt from the prefix index, because the worker has not computed it."""
        for visit in self.visits:
            visit.undo()
