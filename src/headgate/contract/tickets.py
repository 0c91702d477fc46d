"""KV tickets as JSON: one server issues a ticket for `export_kv`, and another accepts it as `kv_ticket`."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from headgate.contract.journal import VERSION_DIGITS
from headgate.protocol.request import Ticket

NEWEST_VERSION = 10**VERSION_DIGITS - 1  # of weights
Version = Annotated[int, Meta(ge=0, le=NEWEST_VERSION)]
Hex64 = Annotated[str, Meta(pattern="^[0-9a-f]{16}$(?!\n)")]
Hex128 = Annotated[str, Meta(pattern="^[0-9a-f]{32}$(?!\n)")]


class KvTicket(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, frozen=True):
    """64-bit numbers are hexadecimal text, because many JSON parsers round large numbers."""

    address: Annotated[str, Meta(min_length=1, max_length=128)]
    lease: Hex64
    generation: Hex64
    tokens: Annotated[int, Meta(ge=1, le=2**31 - 1)]
    version: Version
    key: Hex128

    def to_engine(self) -> Ticket:
        lease, generation = int(self.lease, 16), int(self.generation, 16)
        return Ticket(self.address, lease, generation, self.tokens, self.version, bytes.fromhex(self.key))


def kv_ticket(ticket: Ticket) -> KvTicket:
    return KvTicket(
        address=ticket.engine,
        lease=f"{ticket.lease:016x}",
        generation=f"{ticket.generation:016x}",
        tokens=ticket.tokens,
        version=ticket.version,
        key=ticket.key.hex(),
    )
