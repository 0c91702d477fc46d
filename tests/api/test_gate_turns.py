"""The gate with several tenants: requests begin in turn, and callers without a free place are refused early.

Guarantee 63.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

from headgate.api.accounting.ledger import Ledger
from headgate.api.accounting.metrics import ServerMetrics
from headgate.api.bodies import FREE_BYTES
from headgate.api.intake import BEGUN_AT_ONCE, Intake
from headgate.contract.keys import Keys
from headgate.edge.gate import Gate
from headgate.edge.sharing import Sharing

TENANTS = {"greedy": "kg", "polite": "kp"}


class Stage:
    """A gate, and the requests that passed it."""

    def __init__(self, tenants: dict[str, str], limit: int = 10) -> None:
        self.ledger = Ledger(ServerMetrics(), limit=limit, sharing=Sharing(tenants))
        keys = Keys(tenants)
        self.intake = Intake(self._app, keys, self.ledger, 1 << 20)
        self.gate = Gate(self.intake, keys, refused=self.ledger.refuse)
        self.passed = 0
        self.sent: list[Any] = []

    async def _app(self, scope: Any, receive: Any, send: Any) -> None:
        self.passed += 1

    async def _send(self, message: Any) -> None:
        self.sent.append(message)

    async def ask(self, key: str, *headers: tuple[bytes, bytes], path: str = "/v1/completions") -> int | None:
        """Send a request; returns its status if it was refused, else None."""
        self.sent = []
        await self.gate(scope_of(key, *headers, path=path), self._never, self._send)
        return next((message["status"] for message in self.sent if "status" in message), None)

    async def _never(self) -> Any:
        raise AssertionError("the body was read")


def scope_of(key: str, *headers: tuple[bytes, bytes], path: str = "/v1/completions") -> dict[str, Any]:
    given = [(b"authorization", b"Bearer " + key.encode()), *headers]
    return {"type": "http", "method": "POST", "path": path, "headers": given, "client": ("127.0.0.1", 1)}


def test_63_a_tenant_that_has_all_its_places_is_refused_before_its_body_is_read():
    async def main() -> None:
        stage = Stage(TENANTS)
        async with stage.ledger.admit(tenant="greedy", kind="completion", choices=8):
            assert await stage.ask("kg") == 429
            assert stage.passed == 0 and stage.ledger.metrics.refused["queue_full"] == 1
            assert await stage.ask("kp") is None
            assert stage.passed == 1
        assert await stage.ask("kg") is None

    asyncio.run(main())


def test_63_calls_that_need_no_place_are_not_refused_without_one():
    async def main() -> None:
        stage = Stage(TENANTS)
        async with stage.ledger.admit(tenant="greedy", kind="completion", choices=8):
            assert await stage.ask("kg", path="/v1/requests") is None
            assert await stage.ask("kg", (b"idempotency-key", b"again")) is None
            # The sender of a large body must be told if it can never be accepted, so it is not refused as busy.
            assert await stage.ask("kg", (b"content-length", b"%d" % (FREE_BYTES + 1))) is None

    asyncio.run(main())


def test_63_a_request_does_not_wait_for_all_requests_of_another_tenant_to_begin():
    async def main() -> None:
        stage, begun = Stage(TENANTS), []
        for key in ["kg"] * 1000 + ["unknown"] * 1000 + ["kp"]:
            stage.intake.begin(scope_of(key), partial(begun.append, key))
        for _ in range(10):
            await asyncio.sleep(0)
        assert "kp" in begun and len(begun) <= 11 * BEGUN_AT_ONCE
        async with asyncio.timeout(60):
            while len(begun) < 2001:
                await asyncio.sleep(0)

    asyncio.run(main())


def test_63_with_one_tenant_every_request_begins_at_once():
    async def main() -> None:
        stage, begun = Stage({}), []
        for i in range(1000):
            stage.intake.begin(scope_of("none"), partial(begun.append, i))
        assert begun == [*range(1000)]

    asyncio.run(main())
