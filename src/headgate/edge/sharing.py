"""Among whom the places of a server are shared: tenants and, for callers without a key, network addresses.

Whether there is more than one is known from the keys, from a router that names its tenants, or from the second address that
takes something. Until then nothing is kept back for others. A probe, a scrape or a control call takes nothing.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import lru_cache
from ipaddress import IPv6Address, ip_address, ip_network

NETWORK_BITS = 64  # of an IPv6 address: a client has all addresses of its network


class Sharing:
    def __init__(self, tenants: Collection[str] = ()) -> None:
        self.several = len(tenants) > 1
        self._known = frozenset(tenants)
        self._first: str | None = None

    def name(self, tenant: str, peer: str | None, *, admin: bool = False) -> str:
        """Whose share a request counts towards."""
        if tenant and not admin and tenant not in self._known:
            self.several = True  # a router has named it, and has more of them
        return tenant or network(peer or "")

    def takes(self, share: str) -> None:
        """A request takes a place, a thread or memory of that share."""
        if self._first is None:
            self._first = share
        elif share != self._first:
            self.several = True


@lru_cache(1024)
def network(address: str) -> str:
    """What stands for the client at `address`."""
    try:
        parsed = ip_address(address)
    except ValueError:
        return address
    if isinstance(parsed, IPv6Address):
        return str(ip_network((parsed, NETWORK_BITS), strict=False))
    return address
