"""The gate around every handler of a server and of a router's control plane.

It assigns the request id, authenticates the caller, and converts exceptions to responses. It is one ASGI layer
instead of a middleware stack, because every layer would cost one more call per streamed token. Handlers raise
`RequestError`s and Starlette's exceptions; `contract/error_answers.py` defines the body of every error response.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from headgate.contract import ids
from headgate.contract.errors import status_of
from headgate.contract.keys import Caller, Keys
from headgate.edge.cors import NO_PAGES, Cors, Headers
from headgate.edge.responses import error_response, refusal_of
from headgate.errors import HeadgateError, RequestError

log = logging.getLogger(__name__)

Respond = Callable[[BaseException, str, str], Response]  # takes an error, the request's id and its path


def caller_of(request: Request) -> Caller:
    """Return the caller of a request that has passed the gate."""
    return Caller(request.state.tenant, request.state.admin)


def _uncounted(refusal: RequestError) -> None:
    pass


class Gate:
    """Sets request_id, tenant and admin in `scope["state"]`, then calls `app`. Calls `refused` for each refusal."""

    def __init__(
        self,
        app: ASGIApp,
        keys: Keys,
        *,
        respond: Respond = error_response,
        refused: Callable[[RequestError], None] = _uncounted,
        cors: Cors = NO_PAGES,
    ) -> None:
        self._app = app
        self._keys = keys
        self._respond = respond
        self._refused = refused
        self._cors = cors
        self._ids = ids.Ids()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return None  # the lifespan protocol and WebSockets are not supported
        state = scope.setdefault("state", {})
        state["request_id"] = self._ids.draw()
        answer = _GatedResponse(state, send, self._cors.headers(scope["headers"]))
        if self._cors and (headers := self._cors.preflight(scope["method"], scope["headers"])) is not None:
            headers = [*headers, (b"content-length", b"0")]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            return await send({"type": "http.response.body", "body": b""})
        try:
            state["request_id"] = ids.given(scope["headers"]) or state["request_id"]
            caller = self._keys.caller(scope["path"], scope["headers"])
            state["tenant"], state["admin"] = caller.tenant, caller.admin
            await self._app(scope, receive, answer.send)
        except ClientDisconnect:
            log.debug("%s: the client has disconnected", state["request_id"])
        except asyncio.CancelledError:
            # At shutdown the HTTP server closes connections and cancels the remaining handlers; no answer can be
            # sent.
            log.debug("%s: cancelled at shutdown", state["request_id"])
        except HTTPException as error:
            await self._explain(refusal_of(error, scope), answer, scope, receive)
        except Exception as error:
            await self._explain(error, answer, scope, receive)
            _forget_frames(error)

    async def _explain(self, error: Exception, answer: _GatedResponse, scope: Scope, receive: Receive) -> None:
        if answer.started:
            raise error  # the HTTP server logs it and breaks the connection, which marks the answer as incomplete
        id = str(answer.state["request_id"])
        status = status_of(error)
        if status >= 500 and not isinstance(error, RequestError):
            trace = None if isinstance(error, HeadgateError) else error
            log.error("%s: %s %s failed: %r", id, scope["method"], scope["path"], error, exc_info=trace)
        else:
            log.debug("%s: %s %s answered %d: %s", id, scope["method"], scope["path"], status, error)
        if isinstance(error, RequestError):
            self._refused(error)
        await self._respond(error, id, scope["path"])(scope, receive, answer.send)


class _GatedResponse:
    """Adds the request id, and `more`, to the headers of a response. Handlers may change the id until it starts."""

    __slots__ = ("_more", "_send", "started", "state")

    def __init__(self, state: dict[str, object], send: Send, more: Headers) -> None:
        self.state = state
        self.started = False
        self._send = send
        self._more = more

    async def send(self, message: Message) -> None:
        if not self.started and message["type"] == "http.response.start":
            self.started = True
            message["headers"] = [
                *message.get("headers", ()),
                (ids.HEADER, str(self.state["request_id"]).encode("latin-1", "replace")),
                *self._more,
            ]
        await self._send(message)


def _forget_frames(error: BaseException) -> None:
    """Drop an error's references to its frames now, instead of at the next garbage collection.

    The frames may hold a prompt of megabytes. They are not cleared, because several requests may share one error, and
    some of its frames may still be running.
    """
    seen: BaseException | None = error
    while seen is not None:
        seen.__traceback__, seen = None, seen.__cause__ or seen.__context__
