"""The prefill request of prefill/decode disaggregation: one worker computes the prompt, another one answers.

The prefill worker receives `export_kv` and answers with a ticket as soon as KV can be fetched, before the prompt is
computed. Its connection stays open while the KV may still be needed; closing it cancels the prefill. If the prefill
fails, the answer is only delayed: without a ticket, the decode worker computes the prompt itself.
"""

from __future__ import annotations

import asyncio
import re
from hashlib import blake2b

import msgspec

from headgate.router.data_path.upstream import Headers, Pool, Reader, Upstream, WorkerLost
from headgate.router.exchange.journal import splice
from headgate.router.fleet.fleet import LoadShare

TICKET = re.compile(rb'^data: \{"kv_ticket":(\{.*\})\}\r?$', re.MULTILINE)
MOST_BYTES = 2**20
PREFILL_LINE = b"x-headgate-prefill: 1\r\n"
PREFILL = "#prefill"  # the router rejects ids of clients that end in this
LONGEST_NAME = 240  # longest part of the request's id to which PREFILL is appended


class NoTicket(Exception):
    """The worker offers no KV: the prompt is too short, or the worker has too few free blocks."""


class PrefillRequest(Reader):
    """Reads the prefill worker's response: a ticket, and later the end. Then its share of the load is given back."""

    def __init__(self, load_share: LoadShare) -> None:
        self.worker = load_share.worker
        self.ticket: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self.upstream: Upstream | None = None
        self._load_share = load_share
        self._over = False
        self._status = 0
        self._body = b""

    def head(self, status: int, headers: Headers) -> None:
        self._status = status

    def data(self, data: bytes) -> None:
        if self.ticket.done():
            return
        self._body += data
        if self._status == 200 and (found := TICKET.search(self._body)):
            self.ticket.set_result(found[1])
        elif len(self._body) > MOST_BYTES:
            self._no_ticket(WorkerLost("its response has no ticket"))

    def ended(self) -> None:
        self._no_ticket(NoTicket(f"it answered {self._status}: {self._body[:200].decode('utf-8', 'replace')}"))
        self._end()

    def lost(self, why: str) -> None:
        self._no_ticket(WorkerLost(why))
        self.leave()

    def give_up(self, why: str) -> None:
        """Stop waiting for the ticket. KV whose ticket has arrived can still be fetched."""
        if not self.ticket.done():
            self.lost(why)

    def leave(self) -> None:
        """Cancel the prefill request by closing its connection."""
        if self.upstream is not None and self.upstream.answers(self):
            self.upstream.drop()
        if self.ticket.done() and not self.ticket.cancelled():
            self.ticket.exception()  # marks the exception as retrieved, so that asyncio does not log it
        self._end()

    def _end(self) -> None:
        if not self._over:
            self._over = True
            self._load_share.give_back()

    def _no_ticket(self, error: Exception) -> None:
        if not self.ticket.done():
            self.ticket.set_exception(error)


def prefill_name(id: str) -> str:
    """Return the id of the prefill request.

    It differs from the request's own id, because the same worker may get that request before it notices that the
    prefill was cancelled.
    """
    if len(id) > LONGEST_NAME:
        digest = blake2b(id.encode(), digest_size=16).hexdigest()
        id = f"{id[: LONGEST_NAME - len(digest)]}{digest}"
    return id + PREFILL


def prefill_body(body: bytes, id: str, *, named: bool) -> bytes:
    """Return the body of the prefill request. `named` means that `body` has a request id, which `id` replaces."""
    body = splice(body, "export_kv", b"true")
    return splice(body, "request_id", msgspec.json.encode(id)) if named else body  # the last of two fields counts


async def request_ticket(prefill: PrefillRequest, pool: Pool, request: bytes, timeout_s: float) -> bytes:
    """Send the prefill request and return the ticket for the KV of the prompt; raises NoTicket or WorkerLost."""
    try:
        async with asyncio.timeout(timeout_s):
            # Always a new connection, because the worker may be closing an idle one at this moment.
            prefill.upstream = await pool.connect()
            prefill.upstream.send(request, prefill, once=True)
            return await prefill.ticket
    except TimeoutError:
        raise NoTicket(f"no ticket within {timeout_s:g} s") from None
