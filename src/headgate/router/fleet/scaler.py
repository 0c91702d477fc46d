"""The interface through which a router changes the number of servers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol


class Scaler(Protocol):
    @property
    def wanted(self) -> Mapping[str, int]:
        """The wanted number of servers, by role."""

    @property
    def running(self) -> Mapping[str, int]:
        """The number of servers that accept requests, by role."""

    async def scale(self, counts: Mapping[str, int], timeout_s: float) -> bool:
        """Scale to `counts`. Returns True when these numbers are reached, False at the timeout."""
