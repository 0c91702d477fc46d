"""The feed: one sample for all viewers, none without viewers, and each viewer sees only its own requests."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import Any

import msgspec
import pytest
from starlette.requests import Request

from headgate.dashboard.feed import Feed, TooManyWatchers
from headgate.dashboard.frame import EndedView, FleetView, HistogramBounds, MemberView, RequestView, Viewer
from headgate.dashboard.meter import Counts
from headgate.edge import dashboard
from headgate.router.data_path.bridge import AppCall
from headgate.router.data_path.downstream import Head, HttpRequest
from tests.simulated import run

ADMIN = Viewer("admin", admin=True)


class Steady:
    """A source that generates ten tokens between two samples."""

    kind, version = "server", "0"
    bounds = HistogramBounds((0.1, 1.0), (0.01,))

    def __init__(self) -> None:
        self.looks = 0
        self.over = False
        self.live = [("", "no-tenant"), ("blue", "b1"), ("red", "r1"), ("blue", "b2")]

    async def look(self) -> FleetView:
        self.looks += 1
        await asyncio.sleep(0)
        made = Counts(tokens=10 * self.looks, first_token=(self.looks, 0, 0))
        card = MemberView(id="0", name="engine 0", detail="", state="running", running=3, waiting=1)
        return FleetView(model="m", state="running", cards=[card], sources={"0/": made}, over=self.over)

    def requests(self, viewer: Viewer, most: int) -> tuple[list[RequestView], int]:
        mine = [
            RequestView(id, tenant, "chat", "decode", 1.0, 5, "0") for tenant, id in self.live if viewer.sees(tenant)
        ]
        return mine[:most], len(mine)

    def ended(self, viewer: Viewer, most: int) -> list[EndedView]:
        past = [EndedView(f"old-{id}", tenant, "chat", 3.0, 1.5, "eos") for tenant, id in self.live]
        return [each for each in past if viewer.sees(each.tenant)][:most]


async def take(feed: Feed, viewer: Viewer, number: int) -> list[dict[str, Any]]:
    taken: list[dict[str, Any]] = []
    async with aclosing(feed.events(viewer)) as events:
        async for event in events:
            assert event.startswith(b"data: ") and event.endswith(b"\n\n") and event.count(b"\n") == 2
            taken.append(msgspec.json.decode(event[6:]))
            if len(taken) == number:
                return taken
    return taken


def test_rates_are_available_from_the_second_sample_on():
    first, second = run(take(Feed(Steady(), interval_s=0.01), ADMIN, 2))
    assert first["now"] is None and first["history"] == []
    assert second["history"] is None
    _, tokens_s, _, running, waiting, p50, p99, *_ = second["now"]
    assert 990 < tokens_s <= 1000 and second["cards"][0]["tokens_s"] == tokens_s
    assert (running, waiting) == (3, 1) and p50 == 0.05 and p99 == 0.099


def test_all_viewers_share_one_sample():
    async def main() -> tuple[int, list[list[dict[str, Any]]]]:
        source = Steady()
        feed = Feed(source, interval_s=0.02)
        return source.looks, await asyncio.gather(*(take(feed, ADMIN, 5) for _ in range(8))), source.looks

    before, seen, looks = run(main())
    assert before == 0 and looks <= 7
    assert len({frames[-1]["now"][0] for frames in seen}) <= 2


def test_nothing_is_sampled_without_viewers():
    async def main() -> tuple[int, int]:
        source = Steady()
        feed = Feed(source, interval_s=0.01)
        await take(feed, ADMIN, 2)
        before = source.looks
        await asyncio.sleep(0.1)
        return before, source.looks

    before, after = run(main())
    assert before == after


def test_a_later_viewer_gets_the_history():
    async def main() -> dict[str, Any]:
        feed = Feed(Steady(), interval_s=0.01)
        await take(feed, ADMIN, 5)
        return (await take(feed, ADMIN, 1))[0]

    assert len(run(main())["history"]) >= 4


def test_a_new_viewer_gets_the_last_sample_at_once_while_another_waits():
    async def main() -> None:
        feed = Feed(Steady(), interval_s=5)
        await take(feed, ADMIN, 1)
        waiting = asyncio.ensure_future(take(feed, ADMIN, 2))
        await asyncio.sleep(0.01)
        async with asyncio.timeout(1):
            await take(feed, ADMIN, 1)
        waiting.cancel()

    run(main())


def test_a_returning_viewer_gets_a_new_sample_instead_of_a_stale_one():
    async def main() -> int:
        source = Steady()
        feed = Feed(source, interval_s=0.01)
        await take(feed, ADMIN, 1)
        await asyncio.sleep(0.1)
        await take(feed, ADMIN, 1)
        return source.looks

    assert run(main()) == 2


def test_growth_while_nobody_watched_is_not_shown_as_a_spike():
    async def main() -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        source = Steady()
        feed = Feed(source, interval_s=0.01)
        with feed.watching():
            before = await take(feed, ADMIN, 3)
        source.looks += 1_000_000
        await asyncio.sleep(3600)
        with feed.watching():
            return before, await take(feed, ADMIN, 2)

    before, (first, second) = run(main())
    assert before[-1]["now"][1] > 0 and first["now"] is None
    assert second["now"][1] <= 1000  # ten tokens in one interval


def test_a_reloaded_page_misses_nothing():
    async def main() -> list[dict[str, Any]]:
        feed = Feed(Steady(), interval_s=0.01)
        with feed.watching():
            await take(feed, ADMIN, 2)
        with feed.watching():
            return await take(feed, ADMIN, 2)

    assert all(frame["now"] for frame in run(main()))


def test_a_slow_reader_gets_the_latest_frame_at_once():
    async def main() -> tuple[int, int]:
        source = Steady()
        feed = Feed(source, interval_s=0.1)
        async with aclosing(feed.events(ADMIN)) as slow:
            await anext(slow)
            await take(feed, ADMIN, 2)
            before = source.looks
            await anext(slow)
            return before, source.looks

    assert run(main()) == (2, 2)


def test_if_the_sampling_viewer_leaves_another_takes_the_sample():
    async def main() -> list[dict[str, Any]]:
        feed = Feed(Steady(), interval_s=0.05)
        await take(feed, ADMIN, 1)
        leaving = asyncio.ensure_future(take(feed, ADMIN, 9))
        staying = asyncio.ensure_future(take(feed, ADMIN, 3))
        await asyncio.sleep(0.02)
        leaving.cancel()
        async with asyncio.timeout(5):
            return await staying

    assert len(run(main())) == 3


def test_11_a_tenant_sees_its_own_requests_and_a_viewer_without_key_sees_none():
    async def main() -> list[dict[str, Any]]:
        feed = Feed(Steady(), interval_s=0.01)
        viewers = ADMIN, Viewer("blue", admin=False), Viewer("", admin=False), Viewer("", admin=True)
        return [(await take(feed, viewer, 1))[0] for viewer in viewers]

    admin, blue, stranger, alone = run(main())
    assert [request[0] for request in admin["requests"]] == ["no-tenant", "b1", "r1", "b2"]
    assert [request[0] for request in blue["requests"]] == ["b1", "b2"] and blue["total"] == 2
    assert [request[0] for request in blue["ended"]] == ["old-b1", "old-b2"] and stranger["ended"] == []
    assert stranger["requests"] == [] and stranger["total"] == 0 and stranger["sees_requests"] is False
    assert len(alone["requests"]) == 4 and alone["sees_requests"] is True


def test_the_number_of_viewers_is_limited_and_a_leaving_viewer_frees_its_slot():
    feed = Feed(Steady(), most_watchers=2)
    with feed.watching():
        with feed.watching(), pytest.raises(TooManyWatchers, match="close one"), feed.watching():
            pass
        with feed.watching():
            pass


def test_the_stream_ends_when_the_source_ends():
    source = Steady()
    source.over = True
    assert len(run(take(Feed(source, interval_s=0.01), ADMIN, 5))) == 1


def test_a_frame_of_a_busy_server_has_a_few_kilobytes():
    source = Steady()
    source.live = [("blue", f"req-{number:024x}") for number in range(5000)]
    feed = Feed(source, interval_s=0.01)
    frame = run(take(feed, ADMIN, 2))[1]
    assert frame["total"] == 5000 and len(frame["requests"]) == 50
    assert len(msgspec.json.encode(frame)) < 5000


def test_a_viewer_that_does_not_read_loses_its_slot(monkeypatch):
    monkeypatch.setattr(dashboard, "SEND_TIMEOUT_S", 0.05)
    feed = Feed(Steady(), interval_s=0.01, most_watchers=1)
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        await asyncio.Event().wait()
        raise AssertionError

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)
        if len(sent) == 3:
            await asyncio.Event().wait()  # its buffers are full

    async def main() -> None:
        scope = {"type": "http", "method": "GET", "headers": [], "state": {"tenant": "", "admin": True}}
        async with asyncio.timeout(5):
            await dashboard.watched(Request(scope), feed)(scope, receive, send)

    run(main())
    assert [message["type"] for message in sent] == ["http.response.start", *["http.response.body"] * 2]
    with feed.watching():
        pass


@pytest.mark.parametrize("whole", [True, False])
def test_a_router_closes_the_connection_of_an_abandoned_answer(whole):
    class Client:
        gone, aborted, ended = False, False, False

        def write(self, data: bytes) -> None: ...
        def finished(self, *, keep_alive: bool = True) -> None:
            self.ended = True

        def abort(self) -> None:
            self.aborted = True

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"x", "more_body": not whole})

    client, request = Client(), HttpRequest(Head(), b"")
    run(AppCall(client, request).run(app))
    assert (client.ended, client.aborted) == (whole, not whole)
