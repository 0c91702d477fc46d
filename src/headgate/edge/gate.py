"""The gate around every handler of a server and of a router's control plane: names the request, authenticates its caller,
and turns what is raised into a response. One pure ASGI layer instead of a stack, because each would cost every streamed
token a call.

Handlers below it raise `RequestError`s and whatever Starlette raises; every error has the body of `contract/errors.py`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from headgate.contract import ids
from headgate.contract.errors import status_of
from headgate.contract.keys import Keys
from headgate.edge.responses import error_response, refusal_of
from headgate.errors import HeadgateError, RequestError

log = logging.getLogger(__name__)

Respond = Callable[[BaseException, str], Response]  # to an error of the request with that id


def _uncounted(refusal: RequestError) -> None:
    pass


class Gate:
    """`scope["state"]` has request_id, tenant and admin when `app` is called. `refused` is called for each refusal."""

    def __init__(
        self,
        app: ASGIApp,
        keys: Keys,
        *,
        respond: Respond = error_response,
        refused: Callable[[RequestError], None] = _uncounted,
    ) -> None:
        self._app = app
        self._keys = keys
        self._respond = respond
        self._refused = refused
        self._ids = ids.Ids()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return  # no lifespan, no web sockets
        state = scope.setdefault("state", {})
        state["request_id"] = self._ids.draw()
        answer = _GatedResponse(state, send)
        try:
            state["request_id"] = ids.given(scope["headers"]) or state["request_id"]
            caller = self._keys.caller(scope["path"], scope["headers"])
            state["tenant"], state["admin"] = caller.tenant, caller.admin
            await self._app(scope, receive, answer.send)
        except ClientDisconnect:
            log.debug("%s: the client has gone", state["request_id"])
        except asyncio.CancelledError:
            # A process that shuts down has closed the connection and cancels what is left; no client can be answered.
            log.debug("%s: broken off", state["request_id"])
        except HTTPException as error:
            await self._explain(refusal_of(error, scope), answer, scope, receive)
        except Exception as error:
            await self._explain(error, answer, scope, receive)
            _forget_frames(error)

    async def _explain(self, error: Exception, answer: _GatedResponse, scope: Scope, receive: Receive) -> None:
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
            self._refused(error)
        await self._respond(error, id)(scope, receive, answer.send)


class _GatedResponse:
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
                (ids.HEADER, str(self.state["request_id"]).encode("latin-1", "replace")),
            ]
        await self._send(message)


def _forget_frames(error: BaseException) -> None:
    """What the frames of a refusal know, a prompt of megabytes among it, goes now and not with the collector.

    They are not cleared: several requests may have been given the same error, and those that go on have frames in it.
    """
    seen: BaseException | None = error
    while seen is not None:
        seen.__traceback__, seen = None, seen.__cause__ or seen.__context__
