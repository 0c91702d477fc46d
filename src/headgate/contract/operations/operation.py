"""The declaration of an operation: all facts about one HTTP call that servers, routers, clients and documentation need."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any, Final, Literal

from headgate.contract.errors import ErrorBody, ErrorFormat

ERRORS: Final = {
    400: "The request is malformed or a value is out of range; `param` names the field",
    401: "The API key is missing or unknown",
    403: "The key does not allow this call",
    404: "Not found",
    409: "A request with the same id is still running, or the state of the engines does not allow this",
    413: "The body is too large",
    422: "The Idempotency-Key was used for another request",
    429: "The queue is full; `Retry-After` gives the time to wait before a retry",
    500: "Internal server error",
    501: "This router did not start its servers and cannot change their number",
    502: "The trainer did not send the announced weights",
    503: "Shutting down, paused, or the engine was lost; `Retry-After` gives the time to wait before a retry",
}
ANY: Final = (400, 401, 403, 500)  # an invalid X-Request-Id, keys, our bugs
FOUND: Final = (*ANY, 404)
POSTED: Final = (*FOUND, 413)
GENERATED: Final = (*POSTED, 409, 422, 429, 503)
CONTROLLED: Final = (*POSTED, 409, 502, 503)


class Access(Enum):
    OPEN = "open"  # no key: for probes and scrapers, and for the dashboard page, which prompts for a key
    TENANT = "tenant"  # callers with a key, or any caller if the server has no API keys
    ADMIN = "admin"


@dataclass(frozen=True, slots=True)
class Relay:
    """One worker answers; the router's data path forwards the bytes."""


@dataclass(frozen=True, slots=True)
class RouterHandler:
    """The router has a handler for this operation."""


@dataclass(frozen=True, slots=True)
class AskOne:
    """The router returns the answer of the first worker that is up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AskAll:
    """The router sends the call unchanged to all workers. If all succeed, it returns one of their answers."""

    pauses: bool = False
    resumes: bool = False
    holds_requests: bool = False  # new requests wait at the router while running workers are updated
    moves_memory: bool = False  # reads or loads all weights, or changes memory, which takes long
    updates_weights: bool = False  # the router chooses the number of the new version, the same for all workers
    names_weights: bool = False  # gives the weights of all workers another label
    drops_prefixes: bool = False  # empties the prefix caches of the workers
    assigns_ranks: bool = (
        False  # a trainer and all engines form a group; the router sets the first rank of each worker
    )


FanOut = Relay | RouterHandler | AskOne | AskAll


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Operation:
    method: Literal["GET", "POST", "DELETE"]
    path: str  # a parameter in braces matches the rest of the path
    summary: str
    fan_out: FanOut | None  # how a router answers; None: routers do not have this operation
    on_server: bool = True
    access: Access = Access.ADMIN  # the default is the most restrictive
    body: Any = None  # a type
    router_body: Any = None  # a type, if a router takes a different body
    answer: Any = None  # a type; str: plain text; None: no body
    errors: tuple[int, ...] = ANY
    error: type[ErrorFormat] = ErrorBody
    generates: bool = False  # counts against the limit of requests in flight, and may answer with an event stream
    restarts: bool = False  # an answer that moves to another worker starts anew, instead of being resumed
    answers_503: bool = False  # may answer 503, with the same body as 200
    answers_202: bool = False  # may answer 202, with the same body, before the operation is complete
    in_api: bool = True  # False: for browsers; left out of the API description

    def __str__(self) -> str:
        return f"{self.method} {self.path}"
