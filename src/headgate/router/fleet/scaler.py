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
        """Scale to `counts`. Return True when that is reached, False at the timeout."""
