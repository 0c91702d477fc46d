"""The first half of a request whose prompt is computed by one worker and answered by another.

The prefill worker is asked with `export_kv` and answers with a ticket as soon as KV can be fetched, long before the prompt
is computed. Its connection stays open for as long as somebody may want the rest: closing it is how it learns that nobody
does. Whatever goes wrong here costs time, never an answer: without a ticket the other worker computes the prompt itself.
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
PREFILL = "#prefill"  # ends no id of a client: the router refuses those
LONGEST_NAME = 240  # of a request, to which that is added


class NoTicket(Exception):
    """The worker is well, and has nothing to fetch: the prompt is too short, or it has no room."""


class PrefillRequest(Reader):
    """Reads the prefill worker's answer: a ticket, and then its end. Gives the worker's load back when that comes."""

    def __init__(self, taken: LoadShare) -> None:
        self.worker = taken.worker
        self.ticket: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self.upstream: Upstream | None = None
        self._taken = taken
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
            self._no_ticket(WorkerLost("it sends no ticket"))

    def ended(self) -> None:
        self._no_ticket(NoTicket(f"it answered {self._status}: {self._body[:200]!r}"))
        self._end()

    def lost(self, why: str) -> None:
        self._no_ticket(WorkerLost(why))
        self.leave()

    def give_up(self, why: str) -> None:
        """Wait no longer for its ticket; what it has given one for may still be fetched."""
        if not self.ticket.done():
            self.lost(why)

    def leave(self) -> None:
        """Nobody wants the rest: the worker learns that by the closing of its connection."""
        if self.upstream is not None and self.upstream.answers(self):
            self.upstream.drop()
        if self.ticket.done() and not self.ticket.cancelled():
            self.ticket.exception()  # seen
        self._end()

    def _end(self) -> None:
        if not self._over:
            self._over = True
            self._taken.give_back()

    def _no_ticket(self, error: Exception) -> None:
        if not self.ticket.done():
            self.ticket.set_exception(error)


def prefill_name(id: str) -> str:
    """Its own: the worker may yet be asked for the answer, before it has noticed that nobody wants its KV."""
    if len(id) > LONGEST_NAME:
        digest = blake2b(id.encode(), digest_size=16).hexdigest()
        id = f"{id[: LONGEST_NAME - len(digest)]}{digest}"
    return id + PREFILL


def prefill_body(body: bytes, id: str, *, named: bool) -> bytes:
    """`named`: the body has an id of its own, which this one replaces."""
    body = splice(body, "export_kv", b"true")
    return splice(body, "request_id", msgspec.json.encode(id)) if named else body  # the last of two counts


async def request_ticket(leg: PrefillRequest, pool: Pool, request: bytes, timeout_s: float) -> bytes:
    """A ticket for the KV of the prompt, which the worker computes until the leg is left; NoTicket or WorkerLost if not."""
    try:
        async with asyncio.timeout(timeout_s):
            # A fresh connection: a kept one may be closed by the worker in this very moment.
            leg.upstream = await pool.connect()
            leg.upstream.send(request, leg, once=True)
            return await leg.ticket
    except TimeoutError:
        raise NoTicket(f"no ticket within {timeout_s:g} s") from None
