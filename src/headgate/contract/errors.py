"""HTTP errors. They have OpenAI's body, `{"error": {"message", "type", "param", "code"}}`, unless the operation declares
another `ErrorFormat` (`contract/error_answers.py`).

Handlers raise; the gate around them answers (`edge/gate.py`). A stream that has begun can no longer change its status, so
it sends `error_body` as its last event. Our own messages tell the caller what to do. An unexpected exception is logged
with its traceback, and its body contains only the request id.
"""

from __future__ import annotations

import logging
from typing import Any, Protocol

import msgspec

from headgate.errors import EngineDead, HeadgateError, RequestError, Unavailable

log = logging.getLogger(__name__)

WARNING_HEADER = b"x-headgate-warning"  # of an answer: something in the request had no effect
RETRY_AFTER_S = 1
RETRIED = (429, 503)

TYPES = {
    401: "authentication_error",
    403: "permission_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable_error",
}


class Unauthorized(RequestError):
    status = 401
    code = "invalid_api_key"


class Forbidden(RequestError):
    status = 403
    code = "forbidden"


class NotFound(RequestError):
    status = 404
    code = "not_found"


class MethodNotAllowed(RequestError):
    status = 405
    code = "method_not_allowed"

    def __init__(self, message: str, allowed: str) -> None:
        super().__init__(message)
        self.allowed = allowed  # methods, in the form of the header `Allow`


class BodyTooLarge(RequestError):
    status = 413
    code = "body_too_large"


class QueueFull(RequestError):
    status = 429
    code = "queue_full"

    def __init__(self, message: str, retry_after_s: int = RETRY_AFTER_S) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Problem(msgspec.Struct, frozen=True):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorFormat(Protocol):
    """How an API writes errors."""

    @classmethod
    def of(cls, error: BaseException, request_id: str) -> Any:
        """The body, as a struct."""

    @staticmethod
    def event(body: bytes) -> bytes:
        """The event that reports an error in a stream."""


class ErrorBody(msgspec.Struct, frozen=True):
    error: Problem

    @classmethod
    def of(cls, error: BaseException, request_id: str) -> ErrorBody:
        return cls(problem_of(error, request_id))

    @staticmethod
    def event(body: bytes) -> bytes:
        return b"data: %b\n\n" % body


_encoder = msgspec.json.Encoder()


def status_of(error: BaseException) -> int:
    match error:
        case RequestError():
            return error.status
        case EngineDead():
            return 503
    return 500


def error_body(error: BaseException, request_id: str = "") -> bytes:
    """The JSON body that reports `error` to the caller. Log the error first if it is a bug of ours."""
    return _encoder.encode(ErrorBody.of(error, request_id))


def problem_of(error: BaseException, request_id: str = "") -> Problem:
    status = status_of(error)
    kind = TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    match error:
        case RequestError():
            return Problem(error.message, kind, error.param, error.code)
        case EngineDead():
            return Problem(f"no engine can continue this request: {error}", kind, None, "engine_lost")
        case HeadgateError():
            return Problem(str(error), kind, None, "internal_error")
    about = f" (request {request_id})" if request_id else ""
    return Problem(f"internal server error; see the server's log{about}", kind, None, "internal_error")


def error_headers(error: BaseException) -> dict[str, str]:
    """The headers that go with `error_body`."""
    status, headers = status_of(error), {}
    if isinstance(error, MethodNotAllowed):
        headers["allow"] = error.allowed
    if status in RETRIED:
        headers["retry-after"] = str(getattr(error, "retry_after_s", RETRY_AFTER_S))
    if status == 401:
        headers["www-authenticate"] = "Bearer"
    return headers


def cut_short(tokens: int, cause: str) -> RequestError:
    """The error for clients that do not accept `finish_reason: abort`."""
    return Unavailable(f"the answer was cut short after {tokens} tokens ({cause})", code=cause)
