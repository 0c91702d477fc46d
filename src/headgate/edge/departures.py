"""Logs each client that disconnects before the end of its stream, at a limited rate."""

from __future__ import annotations

import asyncio
import logging
import math

MOST_LINES = 10  # most lines per second; one further line gives the number of clients beyond that


class Departures:
    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._since_s = -math.inf  # start of the second whose lines are counted
        self._lines = 0
        self._suppressed = 0

    def note(self, client: str, request_id: str, tokens: int, cause: str) -> None:
        loop = asyncio.get_running_loop()
        if loop.time() - self._since_s >= 1.0:
            self._since_s, self._lines = loop.time(), 0
        self._lines += 1
        if self._lines <= MOST_LINES:
            self._log.info(
                "%s: client %s disconnected from the stream after %d tokens (%s)",
                *(request_id, client or "unknown", tokens, cause),
                extra={"fields": {"request_id": request_id, "client": client, "tokens": tokens, "cause": cause}},
            )
            return
        if not self._suppressed:
            loop.call_later(self._since_s + 1.0 - loop.time(), self._summarise)
        self._suppressed += 1

    def _summarise(self) -> None:
        suppressed, self._suppressed = self._suppressed, 0
        self._log.info("%d more clients disconnected from their streams within a second", suppressed)
