"""A prefill request, which computes the prompt of another request, is not listed or counted itself (guarantee 72)."""

from __future__ import annotations

import asyncio

from headgate.api.accounting.ledger import PREFILL, Ledger
from headgate.api.accounting.metrics import ServerMetrics
from headgate.api.control.abort import FoundRequests, accept, find, find_all
from headgate.contract.abort import AbortResult
from headgate.contract.keys import Caller


def test_72_a_request_and_its_prefill_request_are_one_entry_and_one_count():
    async def main() -> tuple[FoundRequests, AbortResult, AbortResult, ServerMetrics]:
        ledger = Ledger(ServerMetrics(), limit=8)
        admin = Caller("", admin=True)
        async with ledger.admit(label="X", kind="chat"), ledger.admit(label="X-prefill", kind=PREFILL):
            found = find_all(ledger, admin)
            return found, accept(found), accept(find(ledger, admin, ["X-prefill"])), ledger.metrics

    found, everything, named, metrics = asyncio.run(main())
    assert [target.name for target in found.targets] == ["X", "X-prefill"]  # both end
    assert (everything.accepted, named.accepted) == (["X"], ["X-prefill"])
    assert sum(metrics.requests.values()) == 1
