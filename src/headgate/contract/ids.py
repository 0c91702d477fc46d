"""Request ids: given by the client in X-Request-Id, or generated.

A generated id has 128 random bits, so that ids cannot be guessed from each other. Bits are drawn for many ids at once,
because a system call for each request would be noticeable in a router.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from typing import Final

from headgate.errors import RequestError

HEADER: Final = b"x-request-id"
LONGEST: Final = 256

PREFIX: Final = "req-"
DIGITS: Final = 32  # hexadecimal
BATCH: Final = 128


class Ids:
    def __init__(self) -> None:
        self._drawn: list[str] = []

    def draw(self) -> str:
        if not self._drawn:
            digits = secrets.token_hex(BATCH * DIGITS // 2)
            self._drawn = [digits[start : start + DIGITS] for start in range(0, len(digits), DIGITS)]
        return PREFIX + self._drawn.pop()


def checked(id: str, param: str) -> str:
    """Raise unless `id` is safe to write into headers and log lines."""
    if not (0 < len(id) <= LONGEST and id.isascii() and id.isprintable()):
        raise RequestError(f"must be 1 to {LONGEST} printable ASCII characters", param=param)
    return id


def given(headers: Iterable[tuple[bytes, bytes]]) -> str | None:
    """The id in the client's X-Request-Id header, if there is one; raises if it is invalid."""
    value = next((value for name, value in headers if name == HEADER), None)
    return None if value is None else checked(value.decode("latin-1"), "X-Request-Id")
