"""What grows and shrinks a fleet, as a router sees it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol


class Scaler(Protocol):
    @property
    def wanted(self) -> Mapping[str, int]:
        """How many there should be, by role."""

    @property
    def running(self) -> Mapping[str, int]:
        """How many take requests."""

    async def scale(self, counts: Mapping[str, int], timeout_s: float) -> bool:
        """Have so many; True when it is so, False at the timeout."""
