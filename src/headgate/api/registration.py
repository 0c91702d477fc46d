"""A server that tells a router where it is, again and again; the router lets it go when that stops.

A router that does not answer is no reason to stop serving: it is told again until it hears.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from typing import Any
from urllib.parse import quote, urlsplit

import msgspec

from headgate.config import Registration, ServerConfig
from headgate.contract.operations.fleet import ADD_WORKER, REMOVE_WORKER
from headgate.httpclient import HttpAddress, HttpFailure, call

log = logging.getLogger(__name__)

BEAT_S = 2.0
TTL_S = 10.0  # a few beats may be lost
ANSWER_S = 5.0
WILDCARDS = ("0.0.0.0", "::", "")  # compared with, not bound  # nosec B104


class RegistrationRefused(Exception):
    pass


class Heartbeats:
    def __init__(self, registration: Registration, config: ServerConfig, url: str) -> None:
        self._router = HttpAddress.of(registration.router)
        self._key = registration.key
        self._name = registration.router
        self._url = url if config.host not in WILDCARDS else reachable_from(self._router, url)
        self._body: dict[str, Any] = {"url": self._url, "role": registration.role, "ttl_s": TTL_S}
        if (key := config.worker_key or config.admin_key) is not None:
            self._body["key"] = key
        self._known: bool | None = None  # to the router; None: not tried yet

    async def run(self) -> None:
        while True:
            await self._beat()
            await asyncio.sleep(BEAT_S)

    async def _beat(self) -> None:
        try:
            await self._call(ADD_WORKER.method, ADD_WORKER.path, msgspec.json.encode(self._body))
        except RegistrationRefused as error:
            if self._known is not False:
                log.warning("the router %s does not take us: %s; trying again", self._name, error)
            self._known = False
        else:
            if not self._known:
                log.info("registered at %s as %s", self._name, self._url)
            self._known = True

    async def leave(self) -> None:
        """Before we stop: from now on the router sends nothing new."""
        if self._known:
            try:
                await self._call(
                    REMOVE_WORKER.method, f"{REMOVE_WORKER.path}?url={quote(self._url, safe='')}&timeout=0.1"
                )
            except RegistrationRefused as error:
                log.warning("the router %s was not told that we leave: %s", self._name, error)

    async def _call(self, method: str, path: str, body: bytes = b"") -> None:
        try:
            async with asyncio.timeout(ANSWER_S), call(self._router, method, path, body, self._key) as answer:
                told = await answer.body()
                if answer.status >= 400:
                    raise RegistrationRefused(f"{answer.status}: {told.decode('utf-8', 'replace')[:200]}")
        except (OSError, EOFError, TimeoutError, HttpFailure) as error:
            raise RegistrationRefused(str(error) or type(error).__name__) from None


def reachable_from(router: HttpAddress, url: str) -> str:
    """Our address as the router sees it, if we listen on all of them."""
    port = urlsplit(url).port
    try:
        family, kind, _, _, where = socket.getaddrinfo(router.host, router.port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(where)  # sends nothing: only the way there is looked up
            host = probe.getsockname()[0]
    except OSError:
        return url
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
