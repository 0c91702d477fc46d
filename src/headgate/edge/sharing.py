"""Determines the parties that share a server's capacity: tenants and, for callers without a key, network addresses.

There is more than one party if there are several keys, if a router forwards the name of a tenant, or once a second
address uses capacity. Until then no capacity is reserved for others. Probes, scrapes of metrics and control calls use
no capacity.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import lru_cache
from ipaddress import IPv6Address, ip_address, ip_network

NETWORK_BITS = 64  # an IPv6 client is identified by its /64 network, because it can use any address in it


class Sharing:
    def __init__(self, tenants: Collection[str] = ()) -> None:
        self.several = len(tenants) > 1
        self._known = frozenset(tenants)
        self._first: str | None = None

    def name(self, tenant: str, peer: str | None, *, admin: bool = False) -> str:
        """Return the name of the share that a request uses."""
        if tenant and not admin and tenant not in self._known:
            self.several = True  # a router forwarded the name, so there are other tenants
        return tenant or network(peer or "")

    def takes(self, share: str) -> None:
        """Record that a request uses a place, a thread or memory of this share."""
        if self._first is None:
            self._first = share
        elif share != self._first:
            self.several = True


@lru_cache(1024)
def network(address: str) -> str:
    """Return the network that identifies the client at `address`."""
    try:
        parsed = ip_address(address)
    except ValueError:
        return address
    if isinstance(parsed, IPv6Address):
        return str(ip_network((parsed, NETWORK_BITS), strict=False))
    return address
