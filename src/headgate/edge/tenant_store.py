"""A bounded store that tenants share: what is too much goes from the tenant that has most, its oldest first.

So the entries of one tenant never push out another's, as long as that one has no more than its part. Every call costs the
same however much is kept; only what pushes something out looks at each tenant once.
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
    """Values by tenant and key."""

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
        """As the newest of its tenant's."""
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
        """One after another, so that whoever asks often meets all of them."""
        if not self._tenants:
            return None
        tenant = next(iter(self._tenants))
        self._tenants[tenant] = self._tenants.pop(tenant)
        return tenant

    def _drop_oldest(self, tenant: str) -> None:
        self.drop(tenant, next(iter(self._tenants[tenant].entries)))
