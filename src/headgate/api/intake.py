"""The ASGI layer between the gate and the handlers of a server: it bounds request bodies, starts the requests of tenants in
turn, and refuses a caller without a free place before its body is read."""

from __future__ import annotations

from collections.abc import Callable

from starlette.types import ASGIApp, Receive, Scope, Send

from headgate.api.accounting.ledger import Ledger
from headgate.api.bodies import Bodies, Charge
from headgate.contract.keys import Caller, Headers, Keys
from headgate.contract.operations.table import GENERATING
from headgate.errors import RequestError
from headgate.turns import Turns

REPLAYED = b"idempotency-key"  # a request with this header may be answered by a replay, which needs no place
BEGUN_AT_ONCE = 2  # requests started per iteration of the event loop, if there are several tenants


class Intake:
    def __init__(self, app: ASGIApp, keys: Keys, ledger: Ledger, max_body_bytes: int) -> None:
        self._app = app
        self._keys = keys
        self._ledger = ledger
        self._sharing = ledger.sharing
        self._bodies = Bodies(ledger.sharing, max_body_bytes)
        self._turns = Turns(BEGUN_AT_ONCE)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        state, headers = scope["state"], scope["headers"]
        state["share"] = share = self._share(Caller(state["tenant"], state["admin"]), scope)
        state["charge"] = charge = self._bodies.charge(share)
        try:
            receive = _bounded(headers, receive, charge)
            if self._sharing.several:
                self._check_place(scope["path"], headers, share, charge)
            await self._app(scope, receive, send)
        finally:
            charge.release()

    def begin(self, scope: Scope, start: Callable[[], None]) -> None:
        """Start a request in its caller's turn; immediately if there is only one tenant."""
        if not self._sharing.several:
            return start()
        try:
            caller = self._keys.caller(scope["path"], scope["headers"])
        except RequestError:
            return self._turns.call("", start)  # the gate will refuse it
        return self._turns.call(self._share(caller, scope), start)

    def _share(self, caller: Caller, scope: Scope) -> str:
        peer = (scope.get("client") or ("",))[0]
        return self._sharing.name(caller.tenant, peer, admin=caller.admin)

    def _check_place(self, path: str, headers: Headers, share: str, charge: Charge) -> None:
        """Refuse a caller that has taken all its places, before its body is read."""
        if path in GENERATING and not charge.charged and not any(name == REPLAYED for name, _ in headers):
            self._ledger.check_place(share, 1)


def _bounded(headers: Headers, receive: Receive, charge: Charge) -> Receive:
    """Wraps `receive` to refuse a body over the limit: at once if its length is declared, otherwise as it arrives."""
    length = next((value for name, value in headers if name == b"content-length"), b"0")
    if length.isdigit():
        charge.announced(int(length))
    if not any(name == b"transfer-encoding" for name, _ in headers):
        return receive  # the HTTP parser enforces the declared length
    return charge.counted(receive)
