"""Device rows: which are free, and how many each tenant has."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from headgate.core.sequence import Sequence
from headgate.shares import Shares


class RowPool:
    def __init__(self, total: int) -> None:
        self.free = list(reversed(range(total)))  # rows are taken from the end, so the lowest comes last
        self.shares = Shares(total)  # how many rows each tenant has, and may have

    def take(self, tenant: str) -> int:
        """Take a row; the caller has checked that one is free."""
        self.shares.take(tenant)
        return self.free.pop()

    def give_back(self, row: int, tenant: str) -> None:
        self.free.append(row)
        self.shares.give_back(tenant)

    def check(self, owners: Collection[Sequence]) -> None:
        """Assert that each row is free or has one owner, and that each owner's tenant is charged for it."""
        rows = [seq.row for seq in owners] + self.free
        assert sorted(rows) == list(range(self.shares.total))
        assert self.shares.held == Counter(seq.request.tenant for seq in {*owners} if seq.row >= 0)
