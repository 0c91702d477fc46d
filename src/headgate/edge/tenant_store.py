"""A bounded store that tenants share. When it is full, the oldest entry of the tenant that uses the most is dropped.

A tenant that uses no more than its share therefore never loses an entry to another tenant. Every call takes constant
time, except for a `put` that drops entries, which scans the tenants once.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, TypeVar

V = TypeVar("V")


class _Share(Generic[V]):
    """One tenant's entries with their weights, oldest first."""

    __slots__ = ("entries", "weight")

    def __init__(self) -> None:
        self.entries: OrderedDict[object, tuple[V, int]] = OrderedDict()
        self.weight = 0


class TenantStore(Generic[V]):
    """A store of values by tenant and key."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._weight = 0
        self._tenants: dict[str, _Share[V]] = {}

    def __len__(self) -> int:
        return sum(len(share.entries) for share in self._tenants.values())

    def get(self, tenant: str, key: object) -> V | None:
        share = self._tenants.get(tenant)
        entry = None if share is None else share.entries.get(key)
        return None if entry is None else entry[0]

    def put(self, tenant: str, key: object, value: V, weight: int = 1) -> None:
        """Add the value as its tenant's newest entry."""
        self.drop(tenant, key)
        share = self._tenants.setdefault(tenant, _Share())
        share.entries[key] = value, weight
        share.weight += weight
        self._weight += weight
        while self._weight > self._most:
            self._drop_oldest(max(self._tenants, key=lambda name: self._tenants[name].weight))

    def drop(self, tenant: str, key: object) -> None:
        share = self._tenants.get(tenant)
        if share is None or key not in share.entries:
            return
        _, weight = share.entries.pop(key)
        share.weight -= weight
        self._weight -= weight
        if not share.entries:
            del self._tenants[tenant]

    def oldest(self, tenant: str) -> tuple[object, V] | None:
        share = self._tenants.get(tenant)
        if share is None:
            return None
        key = next(iter(share.entries))
        return key, share.entries[key][0]

    def next_tenant(self) -> str | None:
        """Return the tenants in turn: repeated calls visit all of them."""
        if not self._tenants:
            return None
        tenant = next(iter(self._tenants))
        self._tenants[tenant] = self._tenants.pop(tenant)
        return tenant

    def _drop_oldest(self, tenant: str) -> None:
        self.drop(tenant, next(iter(self._tenants[tenant].entries)))
