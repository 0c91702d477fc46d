"""The bodies of control calls, from a request."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request

from headgate.contract.decoding import T, convert, decode
from headgate.errors import RequestError

LARGE_BYTES = 1 << 18  # of a body that is looked at before it is decoded
CONTROL_VALUES = 1 << 20  # of the body of a control call


async def read_object(request: Request) -> dict[str, Any]:
    """A body that may be left out, as an object that is yet to be checked."""
    body = await request.body()
    if len(body) > LARGE_BYTES and body.count(b",") > CONTROL_VALUES:
        raise RequestError(f"the body has more than {CONTROL_VALUES} values", code="too_many_values")
    read: dict[str, Any] = decode(body, dict[str, Any]) if body.strip() else {}
    return read


async def read_control(request: Request, kind: type[T]) -> T:
    body: T = convert(await read_object(request), kind, "")
    return body
