"""The dashboard's event stream: the source is sampled once a second for all viewers together.

Without viewers nothing is sampled. There is no background task: one of the waiting viewers takes the next sample
under a lock, and the others reuse it. A slow reader gets the latest frame and misses those in between.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from math import inf

import msgspec

from headgate.dashboard.frame import FleetView, Frame, Point, Source, Viewer
from headgate.dashboard.meter import Meter, percentile, together
from headgate.errors import RequestError

INTERVAL_S = 1.0
STALE = 3  # number of intervals after which a sample is too old to show
HISTORY = 240  # number of points kept, one per second
MOST_WATCHERS = 32
MOST_REQUESTS = 50  # most requests in flight listed in a frame
MOST_ENDED = 10  # most ended requests listed in a frame

encode = msgspec.json.Encoder().encode


class TooManyWatchers(RequestError):
    status = 429
    code = "too_many_watchers"


class Feed:
    def __init__(self, source: Source, *, interval_s: float = INTERVAL_S, most_watchers: int = MOST_WATCHERS) -> None:
        self._source = source
        self._interval_s = interval_s
        self._most_watchers = most_watchers
        self._watchers = 0
        self._unwatched = False  # all viewers have left since the last sample
        self._meter = Meter()
        self._history: deque[Point] = deque(maxlen=HISTORY)
        self._number = 0  # number of the last sample
        self._sampled_s = -inf
        self._view: FleetView | None = None
        self._point: Point | None = None
        self._lock = asyncio.Lock()

    @contextmanager
    def watching(self) -> Iterator[None]:
        if self._watchers >= self._most_watchers:
            raise TooManyWatchers(f"{self._watchers} dashboards are open, which is the maximum; close one")
        self._watchers += 1
        try:
            yield
        finally:
            self._watchers -= 1
            self._unwatched = not self._watchers

    async def events(self, viewer: Viewer) -> AsyncIterator[bytes]:
        """Yield server-sent events until the source ends; the first one has the history."""
        seen = 0
        while True:
            view = await self._next(seen)
            event = b"data: %b\n\n" % encode(self._frame(view, viewer, first=not seen))
            seen = self._number  # read before `yield`, because the reader may be slow
            yield event
            if view.over:
                return

    async def _next(self, seen: int) -> FleetView:
        if not self._has_newer(seen):
            async with self._lock:
                if not self._has_newer(seen):
                    await self._sample()
        assert self._view is not None
        return self._view

    def _has_newer(self, seen: int) -> bool:
        """Whether there is a newer sample that is not stale, as one taken before all viewers left would be."""
        return self._number > seen and not self._is_stale()

    def _is_stale(self) -> bool:
        return asyncio.get_running_loop().time() - self._sampled_s >= STALE * self._interval_s

    async def _sample(self) -> None:
        clock = asyncio.get_running_loop().time
        await asyncio.sleep(max(0.0, self._sampled_s + self._interval_s - clock()))
        if self._unwatched and self._is_stale():
            self._meter = Meter()  # what has grown meanwhile did not grow within one second
        self._unwatched = False
        began_s = clock()
        view = await self._source.look()
        self._sampled_s = began_s
        self._meter.read(began_s, view.sources)
        self._set_rates(view)
        self._point = self._measure(view)
        if self._point is not None:
            self._history.append(self._point)
        self._view = view
        self._number += 1

    def _set_rates(self, view: FleetView) -> None:
        step, step_s = self._meter.step(), self._meter.step_s
        for card in view.cards:
            own = [counts.tokens for name, counts in step.items() if name.startswith(f"{card.id}/")]
            card.tokens_s = round(sum(own) / step_s, 1) if own else None

    def _measure(self, view: FleetView) -> Point | None:
        step_s = self._meter.step_s
        if not step_s:
            return None
        step, window, bounds = together(self._meter.step().values()), self._meter.window(), self._source.bounds
        return Point(
            at=round(time.time(), 2),
            tokens_s=round(step.tokens / step_s, 1),
            requests_s=round(step.requests / step_s, 2),
            running=sum(card.running for card in view.cards),
            waiting=sum(card.waiting for card in view.cards),
            first_token_p50=_short(percentile(bounds.first_token, window.first_token, 0.5)),
            first_token_p99=_short(percentile(bounds.first_token, window.first_token, 0.99)),
            between_tokens_p50=_short(percentile(bounds.between_tokens, window.between_tokens, 0.5)),
            between_tokens_p99=_short(percentile(bounds.between_tokens, window.between_tokens, 0.99)),
            hit_rate=_short(window.cached_tokens / window.prompt_tokens) if window.prompt_tokens else None,
            retries=step.retries,
            resumes=step.resumes,
            aborts=step.aborts,
        )

    def _frame(self, view: FleetView, viewer: Viewer, *, first: bool) -> Frame:
        requests, total = self._source.requests(viewer, MOST_REQUESTS) if viewer.sees_requests else ([], 0)
        ended = self._source.ended(viewer, MOST_ENDED) if viewer.sees_requests else []
        return Frame(
            kind=self._source.kind,
            version=self._source.version,
            model=view.model,
            state=view.state,
            cards=view.cards,
            tenant=viewer.tenant,
            admin=viewer.admin,
            sees_requests=viewer.sees_requests,
            requests=requests,
            total=total,
            ended=ended,
            now=self._point,
            history=list(self._history) if first else None,
        )


def _short(value: float | None) -> float | None:
    """Round to four significant digits, enough for a chart."""
    return None if value is None else float(f"{value:.4g}")
