"""Builds the requests that workers receive: the client's body, with a head that the router writes."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

from headgate.contract.control import LEAST_VERSION_HEADER
from headgate.router.data_path.downstream import HttpRequest
from headgate.router.data_path.upstream import Headers
from headgate.router.exchange.attempt import HOP_BY_HOP
from headgate.router.fleet.fleet import Workers
from headgate.router.fleet.worker import Worker

# Headers that the router writes itself, in addition to all x-headgate headers. accept-encoding is not forwarded,
# because the router must find the ends of events in the answer.
OWN = HOP_BY_HOP | {b"accept-encoding", b"host", b"content-length", b"content-type", b"expect", b"x-request-id"}
PRIVATE = b"x-headgate-"
LEAST_VERSION = LEAST_VERSION_HEADER.encode() + b": %d\r\n"
MOST_MEMOS = 64  # most request heads for workers that are cached for one head of a client

Credentials = Callable[[Worker, Headers, str | None], Headers]


@lru_cache(64)
def _own(connection: bytes | None) -> frozenset[bytes]:
    """Return the headers that are not forwarded: those the router writes, and those the client calls hop-by-hop."""
    return OWN.union(name.strip().lower() for name in (connection or b"").split(b","))


def _least(version: int | None) -> bytes:
    """Return a header that makes a worker with older weights refuse the request.

    Without it, the worker could store an outdated answer for an Idempotency-Key.
    """
    return LEAST_VERSION % version if version else b""


class Forwarder:
    def __init__(self, fleet: Workers, credentials: Credentials) -> None:
        self._fleet = fleet
        self._credentials = credentials

    def request_to(
        self,
        worker: Worker,
        request: HttpRequest,
        tenant: str,
        id: str,
        body: bytes,
        more: bytes = b"",
        *,
        part: bool = False,
    ) -> bytes:
        """Return the bytes of a request to `worker`, with further header lines `more`.

        `part` means that the request asks for the rest of an answer, which must not be stored for its
        Idempotency-Key.
        """
        head = self._head_for(worker, request, tenant, part=part)
        lines = b"%bx-request-id: %b\r\ncontent-length: %d\r\n%b\r\n"
        return lines % (head, id.encode(), len(body), more) + body  # this copies the body only once

    def _head_for(self, worker: Worker, request: HttpRequest, tenant: str, *, part: bool) -> bytes:
        """Return the part of the head that is the same for all requests with this client head to that worker."""
        floor = self._fleet.floor_version if worker.kind == "headgate" else None
        memo, key = request.head.memo, (worker, worker.kind, worker.key, tenant, part, floor)
        head: bytes | None = memo.get(key)
        if head is None:
            if len(memo) > MOST_MEMOS:
                memo.clear()
            head = memo[key] = self._make_head(worker, request, tenant, part=part) + _least(floor)
        return head

    def _make_head(self, worker: Worker, request: HttpRequest, tenant: str, *, part: bool) -> bytes:
        head, pool = request.head, self._fleet.pool(worker)
        own = _own(head.first.get(b"connection")) | ({b"idempotency-key"} if part else set())
        headers = [header for header in head.headers if header[0] not in own and header[0][:11] != PRIVATE]
        lines = b"".join([b"%b: %b\r\n" % header for header in self._credentials(worker, headers, tenant)])
        return b"%b %b%b HTTP/1.1\r\nhost: %b\r\ncontent-type: application/json\r\n%b" % (
            head.method.encode(),
            pool.prefix,
            head.target,
            pool.netloc,
            lines,
        )
