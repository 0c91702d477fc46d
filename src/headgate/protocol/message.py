"""What a client may send an engine. Control is values: a new verb is a new struct here and a handler in the loop."""

from __future__ import annotations

import msgspec

from headgate.protocol.output import Cause
from headgate.protocol.request import GenerateRequest


class Submit(msgspec.Struct, frozen=True, array_like=True, tag="submit"):
    requests: list[GenerateRequest]


class Abort(msgspec.Struct, frozen=True, array_like=True, tag="abort"):
    """Ids that are no longer live are skipped; each live one gets its terminal output."""

    ids: list[int]
    cause: Cause


Message = Submit | Abort

# The high bits of a request id name the client it belongs to, so that a reused label never reaches another's request.
CLIENT_SHIFT = 40


def client_of(id: int) -> int:
    return id >> CLIENT_SHIFT
