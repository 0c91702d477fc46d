"""Generated request ids: 128 random bits each, so that knowing one says nothing about any other.

Bits are drawn for many ids at once, because a system call for each request would be noticeable in a router.
"""

from __future__ import annotations

import secrets
from typing import Final

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
