"""The gate around every handler: names the request, asks who sent it, bounds its body, and turns what is raised into a
response. One pure ASGI layer instead of a stack of them, because each would cost every streamed token a call.

Handlers below it raise `RequestError`s and whatever starlette raises; nothing they do ends in a body that is not OpenAI's.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from headgate.api.bodies import Bodies, Charge
from headgate.api.ledger import Ledger
from headgate.contract.access import GENERATING
from headgate.contract.errors import status_of
from headgate.contract.ids import Ids
from headgate.contract.keys import Caller, Headers, Keys
from headgate.edge.responses import error_response, refusal_of
from headgate.errors import HeadgateError, RequestError
from headgate.turns import Turns

log = logging.getLogger(__name__)

REQUEST_ID = b"x-request-id"
REPLAYED = b"idempotency-key"  # its answer may be kept, and needs no place
LONGEST_REQUEST_ID = 256
BEGUN_AT_ONCE = 2  # requests in a turn of the event loop, where there are several tenants


class Gate:
    def __init__(self, app: ASGIApp, keys: Keys, ledger: Ledger, max_body_bytes: int) -> None:
        self._app = app
        self._keys = keys
        self._ledger = ledger
        self._sharing = ledger.sharing
        self._bodies = Bodies(ledger.sharing, max_body_bytes)
        self._turns = Turns(BEGUN_AT_ONCE)
        self._ids = Ids()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return  # no lifespan, no web sockets
        state = scope.setdefault("state", {})
        state["request_id"] = self._ids.draw()
        answer, charge = _Answer(state, send), None
        try:
            headers: Headers = scope["headers"]
            state["request_id"] = _given_id(headers) or state["request_id"]
            caller = self._keys.caller(scope["path"], headers)
            state["tenant"], state["admin"] = caller.tenant, caller.admin
            state["share"] = share = self._share(caller, scope)
            state["charge"] = charge = self._bodies.charge(share)
            receive = self._bounded(headers, receive, charge)
            if self._sharing.several:
                self._check_place(scope["path"], headers, share, charge)
            await self._app(scope, receive, answer.send)
        except ClientDisconnect:
            log.debug("%s: the client has gone", state["request_id"])
        except asyncio.CancelledError:
            # A server whose time is up has closed the connection, and ends what is left; there is nobody to tell.
            log.debug("%s: broken off", state["request_id"])
        except HTTPException as error:
            await self._explain(refusal_of(error, scope), answer, scope, receive)
        except Exception as error:
            await self._explain(error, answer, scope, receive)
            _forget_frames(error)
        finally:
            if charge is not None:
                charge.release()

    def begin(self, scope: Scope, start: Callable[[], None]) -> None:
        """Start a request when it is its caller's turn; at once if there is only one tenant."""
        if not self._sharing.several:
            return start()
        try:
            caller = self._keys.caller(scope["path"], scope["headers"])
        except RequestError:
            return self._turns.call("", start)  # to be refused
        return self._turns.call(self._share(caller, scope), start)

    def _share(self, caller: Caller, scope: Scope) -> str:
        peer = (scope.get("client") or ("",))[0]
        return self._sharing.name(caller.tenant, peer, admin=caller.admin)

    def _check_place(self, path: str, headers: Headers, share: str, charge: Charge) -> None:
        """Refuse a caller that has taken all its places: here, where that costs least."""
        if path in GENERATING and not charge.charged and not any(name == REPLAYED for name, _ in headers):
            self._ledger.check_place(share, 1)

    def _bounded(self, headers: Headers, receive: Receive, charge: Charge) -> Receive:
        """`receive`, but a body beyond the limit is refused: at once if its length is told, as it comes if not."""
        length = next((value for name, value in headers if name == b"content-length"), b"0")
        if length.isdigit():
            charge.announced(int(length))
        if not any(name == b"transfer-encoding" for name, _ in headers):
            return receive  # the HTTP parser holds the body to its length
        return charge.counted(receive)

    async def _explain(self, error: Exception, answer: _Answer, scope: Scope, receive: Receive) -> None:
        if answer.started:
            raise error  # the HTTP server logs it and breaks the connection: the one way left to say "this was not all"
        id = str(answer.state["request_id"])
        status = status_of(error)
        if status >= 500 and not isinstance(error, RequestError):
            trace = None if isinstance(error, HeadgateError) else error
            log.error("%s: %s %s failed: %r", id, scope["method"], scope["path"], error, exc_info=trace)
        else:
            log.debug("%s: %s %s answered %d: %s", id, scope["method"], scope["path"], status, error)
        if isinstance(error, RequestError):
            self._ledger.refuse(error, error.code)
        await error_response(error, id)(scope, receive, answer.send)


class _Answer:
    """A response on its way out; its head gets the request's id, as it is by then."""

    __slots__ = ("_send", "started", "state")

    def __init__(self, state: dict[str, object], send: Send) -> None:
        self.state = state
        self.started = False
        self._send = send

    async def send(self, message: Message) -> None:
        if not self.started and message["type"] == "http.response.start":
            self.started = True
            message["headers"] = [
                *message.get("headers", ()),
                (REQUEST_ID, str(self.state["request_id"]).encode("latin-1", "replace")),
            ]
        await self._send(message)


def _given_id(headers: Headers) -> str | None:
    for name, value in headers:
        if name == REQUEST_ID:
            id = value.decode("latin-1")
            if not (0 < len(id) <= LONGEST_REQUEST_ID and id.isascii() and id.isprintable()):
                raise RequestError(
                    f"must be 1 to {LONGEST_REQUEST_ID} printable ASCII characters", param="X-Request-Id"
                )
            return id
    return None


def _forget_frames(error: BaseException) -> None:
    """What the frames of a refusal know, a prompt of megabytes among it, goes now and not with the collector.

    They are not cleared: several requests may have been given the same error, and those that go on have frames in it.
    """
    seen: BaseException | None = error
    while seen is not None:
        seen.__traceback__, seen = None, seen.__cause__ or seen.__context__
