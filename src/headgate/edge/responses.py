"""Constructors of responses, for servers and routers."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import Scope

from headgate.contract.error_answers import error_body_at
from headgate.contract.errors import MethodNotAllowed, NotFound, error_headers, status_of
from headgate.errors import RequestError


def error_response(error: BaseException, request_id: str = "", path: str = "") -> Response:
    body, headers = error_body_at(path, error, request_id), error_headers(error)
    return Response(body, status_of(error), headers, media_type="application/json")


def refusal_of(error: HTTPException, scope: Scope) -> RequestError:
    """Convert an error of Starlette's routing to a RequestError."""
    if error.status_code == 404:
        return NotFound(f"there is nothing at {scope['path']}; /openapi.json lists all paths")
    if error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "another method")
        return MethodNotAllowed(f"{scope['path']} takes {allowed}, not {scope['method']}", allowed)
    refusal = RequestError(error.detail)
    refusal.status = error.status_code
    return refusal


def json_response(body: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(body), status, media_type="application/json")
