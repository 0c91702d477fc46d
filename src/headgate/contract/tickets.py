"""KV tickets as JSON: one server issues a ticket for `export_kv`, and another accepts it as `kv_ticket`.

`kv_transfer_params` carries the same ticket between clients of vLLM: a proxy sends the whole request to a prefill server,
copies `kv_transfer_params` of its answer into the request to a decode server, and reads nothing in it.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import UNSET, Meta, UnsetType

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


class KvTransferParams(msgspec.Struct, kw_only=True, frozen=True):
    """What a request says about the other half of it. Members of other systems are ignored."""

    do_remote_decode: bool | None = None  # another server will generate the answer: keep the KV of the prompt for it
    do_remote_prefill: bool | None = None  # another server has computed the prompt
    headgate_ticket: KvTicket | None = None


class KeptKv(msgspec.Struct, kw_only=True, frozen=True):
    """`kv_transfer_params` of an answer: those of the request to the decode server.

    The `remote_` members describe the ticket in vLLM's words, for logs; a decode server reads only the ticket.
    """

    do_remote_prefill: bool = True
    do_remote_decode: bool = False
    remote_engine_id: str
    remote_block_ids: list[int]  # blocks of the lease, counted from 0
    remote_host: str
    remote_port: int
    headgate_ticket: KvTicket


def kept_kv(asked: KvTransferParams | None, ticket: Ticket | None, block_size: int) -> KeptKv | UnsetType | None:
    """The member of an answer, if the request asks for it; None if there is no ticket."""
    if asked is None or not asked.do_remote_decode:
        return UNSET
    if ticket is None:
        return None
    host, _, port = ticket.engine.rpartition(":")
    return KeptKv(
        remote_engine_id=ticket.engine,
        remote_block_ids=list(range(ticket.tokens // block_size)),
        remote_host=host.strip("[]"),
        remote_port=int(port),
        headgate_ticket=kv_ticket(ticket),
    )
