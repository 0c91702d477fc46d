"""The load of this server as a header of its answers, for load balancers that request it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from starlette.requests import Request

from headgate.api.accounting.metrics import load_of, query_engines
from headgate.api.host import host_of
from headgate.contract.load_report import FORMAT_HEADER, HEADER, load_report
from headgate.engine.replicas import Replica

QUERY_TIMEOUT_S = 0.25  # an answer is delayed by at most this; engines answer pings outside their steps


@dataclass(frozen=True, slots=True)
class LoadHeader:
    format: str
    replicas: Sequence[Replica]

    async def now(self) -> list[tuple[bytes, bytes]]:
        """The header with the current load; none if no engine answers, or if the format is unknown."""
        load = load_of(await query_engines(self.replicas, QUERY_TIMEOUT_S))
        if load is None:
            return []
        metrics = {"kv_cache_usage_perc": load.cache_usage, "num_requests_waiting": float(load.waiting)}
        report = load_report(self.format, metrics)
        return [] if report is None else [(HEADER, report.encode())]


def load_header_of(request: Request) -> LoadHeader | None:
    """None if the request does not ask for it."""
    format = request.headers.get(FORMAT_HEADER)
    return None if format is None else LoadHeader(format, host_of(request).replicas)
