"""Cross-origin requests: which web pages a browser lets call this server or router (`--cors-origin`).

A browser asks before it sends a request with JSON or a key (the preflight, which has no key), and shows a page an answer,
or a refusal, only if its headers name the page's origin. Without origins nothing is answered and no header is added.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from headgate.contract.operations.table import OPERATIONS

Headers = list[tuple[bytes, bytes]]

ANY: Final = "*"
METHODS: Final = ", ".join(sorted({operation.method for operation in OPERATIONS})).encode()
PREFLIGHT_S: Final = b"600"  # how long a browser need not ask again
ALLOWED: Final = b"access-control-allow-origin"


class Cors:
    def __init__(self, origins: Iterable[str] = ()) -> None:
        self._any = ANY in origins
        self._origins = frozenset(origin.encode() for origin in origins)

    def __bool__(self) -> bool:
        return bool(self._origins)

    def headers(self, request: Iterable[tuple[bytes, bytes]]) -> Headers:
        """The headers of an answer to `request`; none if it is from no page, or from a page that is not allowed."""
        if not self._origins or (origin := _first(request, b"origin")) is None:
            return []
        if self._any:
            return [(ALLOWED, b"*"), (b"access-control-expose-headers", b"*")]
        if origin not in self._origins:
            return [(b"vary", b"Origin")]
        return [(ALLOWED, origin), (b"vary", b"Origin"), (b"access-control-expose-headers", b"*")]

    def preflight(self, method: str, request: Headers) -> Headers | None:
        """The headers that answer a browser's question; None if `request` is not one from an allowed page."""
        if method != "OPTIONS" or _first(request, b"access-control-request-method") is None:
            return None
        headers = self.headers(request)
        if ALLOWED not in dict(headers):
            return None
        # A star would not include `Authorization`.
        asked = _first(request, b"access-control-request-headers")
        allowed = [] if asked is None else [(b"access-control-allow-headers", asked)]
        return [
            *headers,
            (b"access-control-allow-methods", METHODS),
            *allowed,
            (b"access-control-max-age", PREFLIGHT_S),
        ]


NO_PAGES: Final = Cors()


def _first(headers: Iterable[tuple[bytes, bytes]], name: bytes) -> bytes | None:
    return next((value for each, value in headers if each == name), None)
