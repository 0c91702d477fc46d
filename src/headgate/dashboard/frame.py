"""The data of the dashboard: one frame per second. Frames are compact, because every viewer gets each of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import msgspec

from headgate.dashboard.meter import Counts


class MemberView(msgspec.Struct, kw_only=True):
    """A worker of a router, or an engine of a server."""

    id: str  # `RequestView.worker` refers to it
    name: str
    detail: str  # a short description
    state: str
    role: str = ""
    version: int | None = None  # version of its weights
    running: int = 0
    waiting: int = 0
    total: int = 0  # KV blocks
    held: int = 0
    leased: int = 0  # KV blocks held for other engines; included in `held`
    cached: int = 0
    tokens_s: float | None = None


class RequestView(msgspec.Struct, array_like=True):
    """A request in flight, without any prompt text."""

    id: str
    tenant: str
    kind: str
    phase: str  # queued, prefill, transfer, decode, moving, unknown
    age_s: float
    tokens: int
    worker: str | None
    moves: int = 0
    first_token_s: float | None = None  # after its arrival


class EndedView(msgspec.Struct, array_like=True):
    """A request that has ended, without any text. A router has only what it knew without parsing the answer."""

    id: str
    tenant: str
    kind: str
    ago_s: float
    took_s: float
    end: str  # the cause of its end; empty if it is not known
    tokens: int | None = None
    moves: int = 0


class Point(msgspec.Struct, array_like=True):
    """One second of the charts."""

    at: float  # seconds since 1970
    tokens_s: float
    requests_s: float
    running: int
    waiting: int
    first_token_p50: float | None  # seconds, over the window
    first_token_p99: float | None
    between_tokens_p50: float | None
    between_tokens_p99: float | None
    hit_rate: float | None
    retries: int
    resumes: int
    aborts: Mapping[str, int]  # by cause


@dataclass(frozen=True, slots=True)
class Viewer:
    """The viewer of a page. Without a key, only numbers are shown, because its own requests cannot be identified."""

    tenant: str
    admin: bool

    @property
    def sees_requests(self) -> bool:
        return self.admin or bool(self.tenant)

    def sees(self, tenant: str) -> bool:
        return self.admin or self.tenant == tenant


class Frame(msgspec.Struct, kw_only=True):
    kind: str  # server, router
    version: str
    model: str
    state: str
    cards: list[MemberView]
    tenant: str
    admin: bool
    sees_requests: bool
    requests: list[RequestView]  # the oldest requests that the viewer may see
    total: int  # requests in flight that the viewer may see
    ended: list[EndedView] = []  # the latest ones that the viewer may see, latest first
    now: Point | None  # None until there are two samples
    history: list[Point] | None = None  # only in the first frame of a stream


class HistogramBounds(msgspec.Struct, frozen=True):
    """Bucket bounds of the histograms, the same for all sources."""

    first_token: tuple[float, ...]
    between_tokens: tuple[float, ...]


class FleetView(msgspec.Struct, kw_only=True):
    """A sample of a server or router, without its requests."""

    model: str
    state: str
    cards: list[MemberView]
    sources: dict[str, Counts]  # a key is the id of a member, a slash and a name
    over: bool = False  # the source has ended


class Source(Protocol):
    """A server or a router, as seen by the dashboard."""

    kind: str
    version: str
    bounds: HistogramBounds

    async def look(self) -> FleetView: ...

    def requests(self, viewer: Viewer, most: int) -> tuple[list[RequestView], int]:
        """Return the oldest requests that the viewer may see, as of the last sample, and their total number."""

    def ended(self, viewer: Viewer, most: int) -> list[EndedView]:
        """Return the latest requests that have ended and that the viewer may see, latest first."""
