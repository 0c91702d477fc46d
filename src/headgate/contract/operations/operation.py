"""What an operation is: everything that servers, routers, clients and documentation have to know about one HTTP call."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any, Final, Literal

ERRORS: Final = {
    400: "The request cannot be understood or is out of range; `param` names the field",
    401: "No API key, or one that is not known",
    403: "The key does not allow this call",
    404: "There is no such thing",
    409: "A request with the same id is still running, or the engines are not in a state for this",
    413: "The body is too large",
    422: "The Idempotency-Key was used for another request",
    429: "The queue is full; `Retry-After` says when to try again",
    500: "The server made a mistake",
    501: "This router has not started its servers, and cannot change their number",
    502: "The weights that were promised did not come",
    503: "Not now: shutting down, paused, or the engine was lost; `Retry-After` says when to try again",
}
ANY: Final = (400, 401, 403, 500)  # a bad X-Request-Id, keys, our bugs
FOUND: Final = (*ANY, 404)
POSTED: Final = (*FOUND, 413)
GENERATED: Final = (*POSTED, 409, 422, 429, 503)
CONTROLLED: Final = (*POSTED, 409, 502, 503)


class Access(Enum):
    OPEN = "open"  # probes and scrapers have no key, and the page of the dashboard asks for one
    TENANT = "tenant"  # callers with a key; any caller where there are no API keys
    ADMIN = "admin"


@dataclass(frozen=True, slots=True)
class Relay:
    """One worker answers; the router's data path passes the bytes on."""


@dataclass(frozen=True, slots=True)
class RouterHandler:
    """The router has a handler for this operation."""


@dataclass(frozen=True, slots=True)
class AskOne:
    """The first worker that is up and answers speaks for the fleet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AskAll:
    """All workers get the call as it came. If all follow, one answer speaks for the fleet."""

    pauses: bool = False
    resumes: bool = False
    holds_requests: bool = False  # new requests wait at the router while running workers are updated
    moves_memory: bool = False  # weights or memory move, which takes long
    drops_prefixes: bool = False  # from the caches of the workers
    assigns_ranks: bool = False  # a trainer and all engines form a group; each worker gets its first rank


FanOut = Relay | RouterHandler | AskOne | AskAll


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Operation:
    method: Literal["GET", "POST", "DELETE"]
    path: str  # a parameter in braces is the rest of the path
    summary: str
    fan_out: FanOut | None  # how a router answers; None: it does not have this operation
    on_server: bool = True
    access: Access = Access.ADMIN  # an operation that does not say is closed
    body: Any = None  # a type
    router_body: Any = None  # if that of a router is another
    answer: Any = None  # a type; str: plain text; None: no body
    errors: tuple[int, ...] = ANY
    generates: bool = False  # takes a place of a server, and may answer with an event stream
    answers_503: bool = False  # with the same body as 200
    answers_202: bool = False  # with the same body, before everything is done
    in_api: bool = True  # False: for browsers or other systems' workers, and not described

    def __str__(self) -> str:
        return f"{self.method} {self.path}"
