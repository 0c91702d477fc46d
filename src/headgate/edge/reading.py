"""Reads and decodes the bodies of control calls."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request

from headgate.contract.decoding import T, convert, decode
from headgate.errors import RequestError

LARGE_BYTES = 1 << 18  # larger bodies are checked before they are decoded
CONTROL_VALUES = 1 << 20  # the most values in the body of a control call


async def read_object(request: Request) -> dict[str, Any]:
    """Return the body of a request as an object, empty without a body. The fields are not validated yet."""
    body = await request.body()
    if len(body) > LARGE_BYTES and body.count(b",") > CONTROL_VALUES:
        raise RequestError(f"the body has more than {CONTROL_VALUES} values", code="too_many_values")
    read: dict[str, Any] = decode(body, dict[str, Any]) if body.strip() else {}
    return read


async def read_control(request: Request, kind: type[T]) -> T:
    body: T = convert(await read_object(request), kind, "")
    return body
