"""A fixed number of places shared by tenants. No tenant can take all of them from the others.

A tenant may take places as long as it then holds at most `FACTOR` times as many as remain free. One greedy tenant
gets four fifths of all places, two get four ninths each, and a tenant that holds none gets a place at once. If there
is only one tenant, it may take all places. If no place is taken, a single request may take more places than there
are. In both cases, places that a tenant holds beyond four fifths are not counted against other tenants, which
therefore exceed the total by at most a fifth.

Rules: no clock, no I/O, one thread.
"""

from __future__ import annotations

from collections import Counter

FACTOR = 4


class Shares:
    def __init__(self, total: int) -> None:
        self.total = total
        self.taken = 0
        self.held: Counter[str] = Counter()

    def __repr__(self) -> str:
        return f"<Shares {self.taken} of {self.total} taken by {len(self.held)}>"

    @property
    def free(self) -> int:
        return self.total - self.taken

    def may_take(self, tenant: str, count: int = 1, *, several: bool) -> bool:
        """Whether `tenant` may take `count` more places; `several` means that there are other tenants."""
        left = self.total - self.taken - count
        if not self.taken:
            return True  # even if `count` exceeds all places, because the request would otherwise wait forever
        if left < 0 and several:
            left += self._excess
        if left < 0 or not several:
            return left >= 0
        held = self.held[tenant]
        return (count == 1 and not held) or held + count <= FACTOR * left

    @property
    def _excess(self) -> int:
        """How many places the largest holder has beyond four fifths, the share of a single greedy tenant."""
        return max(0, max(self.held.values()) - max(1, FACTOR * self.total // (FACTOR + 1)))

    def take(self, tenant: str, count: int = 1) -> None:
        self.taken += count
        self.held[tenant] += count

    def give_back(self, tenant: str, count: int = 1) -> None:
        self.taken -= count
        self.held[tenant] -= count
        if not self.held[tenant]:
            del self.held[tenant]
