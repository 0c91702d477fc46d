"""Registers a server at a router with periodic heartbeats; the router removes the server when they stop.

If the router does not answer, the server keeps serving and retries.
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
from headgate.tls import why

log = logging.getLogger(__name__)

BEAT_S = 2.0
TTL_S = 10.0  # several heartbeats, so that a few may be lost
ANSWER_S = 5.0
WILDCARDS = ("0.0.0.0", "::", "")  # only compared, not bound  # nosec B104


class RegistrationRefused(Exception):
    pass


class Heartbeats:
    def __init__(self, registration: Registration, config: ServerConfig, url: str) -> None:
        self._router = HttpAddress.of(registration.router, registration.tls)
        self._key = registration.key
        self._name = registration.router
        self._url = registration.url or (url if config.host not in WILDCARDS else reachable_from(self._router, url))
        self._body: dict[str, Any] = {"url": self._url, "role": registration.role, "ttl_s": TTL_S}
        if (key := config.worker_key or config.admin_key) is not None:
            self._body["key"] = key
        self._registered: bool | None = None  # None: not tried yet

    async def run(self) -> None:
        while True:
            await self._beat()
            await asyncio.sleep(BEAT_S)

    async def _beat(self) -> None:
        try:
            await self._call(ADD_WORKER.method, ADD_WORKER.path, msgspec.json.encode(self._body))
        except RegistrationRefused as error:
            if self._registered is not False:
                log.warning("the router %s does not accept the registration: %s; retrying", self._name, error)
            self._registered = False
        else:
            if not self._registered:
                log.info("registered at %s as %s", self._name, self._url)
            self._registered = True

    async def leave(self) -> None:
        """Deregister before the server stops, so that the router sends no new requests."""
        if self._registered:
            try:
                await self._call(
                    REMOVE_WORKER.method, f"{REMOVE_WORKER.path}?url={quote(self._url, safe='')}&timeout=0.1"
                )
            except RegistrationRefused as error:
                log.warning("cannot deregister at the router %s: %s", self._name, error)

    async def _call(self, method: str, path: str, body: bytes = b"") -> None:
        try:
            async with asyncio.timeout(ANSWER_S), call(self._router, method, path, body, self._key) as answer:
                text = await answer.body()
                if answer.status >= 400:
                    raise RegistrationRefused(f"{answer.status}: {text.decode('utf-8', 'replace')[:200]}")
        except (OSError, EOFError, TimeoutError, HttpFailure) as error:
            raise RegistrationRefused(why(error)) from None


def reachable_from(router: HttpAddress, url: str) -> str:
    """This server's URL with the address that the router can reach, for a server that listens on all addresses."""
    parts = urlsplit(url)
    try:
        family, kind, _, _, where = socket.getaddrinfo(router.host, router.port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(where)  # UDP: sends nothing, only selects the local address for this route
            host = probe.getsockname()[0]
    except OSError:
        return url
    return f"{parts.scheme}://{f'[{host}]' if ':' in host else host}:{parts.port}"
