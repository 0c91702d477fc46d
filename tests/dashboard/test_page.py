"""The page and its feed on real servers and routers."""

from __future__ import annotations

import re
import threading
import time
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import Any

import httpx
import pytest

from headgate.api.accounting.dashboard import phase_of
from headgate.contract.keys import Keys
from headgate.dashboard import page
from headgate.dashboard.feed import MOST_WATCHERS
from tests.api.live import live_server
from tests.api.serving import serving, wait_until
from tests.dashboard.conftest import ENGINE
from tests.dashboard.watching import client, first_frame, frames, streaming
from tests.router.fleets import fake_worker, live_router

ASSETS = Path(page.__file__).parent / "assets"
KEYS = {"blue": "blue-key", "red": "red-key"}


@pytest.fixture(params=["server", "router"])
def url(request):
    return request.getfixturevalue(request.param).url


# -------------------------------------------------------------------------------------------------------------- files


@pytest.mark.parametrize("path", page.ASSETS)
def test_the_page_is_served_under_a_strict_policy(url, path):
    with client(url) as http:
        answer = http.get(path)
    assert answer.status_code == 200 and len(answer.content) > 200
    assert answer.headers["content-type"].split(";")[0] == page.ASSETS[path][1]
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "script-src 'self'" in policy and "unsafe" not in policy
    assert "frame-ancestors 'none'" in policy and answer.headers["x-content-type-options"] == "nosniff"


def test_the_root_leads_to_the_dashboard_and_the_description(url):
    with client(url) as http:
        shown, listed = http.get("/", headers={"Accept": "text/html,*/*"}), http.get("/").json()
        assert shown.headers["content-type"].startswith("text/html") and "unsafe" not in str(shown.headers)
        links = re.findall(r'(?:href)="([^"]+)"', shown.text)
        assert {"dashboard", "openapi.json"} <= set(links) and listed["dashboard"] == "/dashboard"
        assert {http.get(f"/{link}").status_code for link in links} == {200}


def test_the_page_loads_nothing_from_other_hosts_and_has_no_inline_code():
    for file in ASSETS.iterdir():
        text = file.read_text("utf-8").replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"https?://|//cdn|@import|url\(", text), file.name
    html = (ASSETS / "page.html").read_text("utf-8")
    assert not re.search(r"<script(?![^>]*\bsrc=)|<style|\sstyle=|\son\w+=", html)
    script = (ASSETS / "page.js").read_text("utf-8")
    assert not re.search(
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function|localStorage", script
    )


def test_every_element_that_the_script_uses_is_in_the_page():
    html, script = (ASSETS / "page.html").read_text("utf-8"), (ASSETS / "page.js").read_text("utf-8")
    wanted = set(re.findall(r'\$\("([\w-]+)"\)', script))
    assert len(wanted) > 20 and wanted <= set(re.findall(r'\bid="([\w-]+)"', html))


def test_the_page_is_not_part_of_the_openapi_document(url):
    with client(url) as http:
        assert not [path for path in http.get("/openapi.json").json()["paths"] if path.startswith(page.PATH)]


# --------------------------------------------------------------------------------------------------------------- feed


def test_the_feed_reports_engines_requests_and_rates(server):
    def is_complete(frame: dict[str, Any]) -> bool:
        """Whether a frame has all numbers. On a busy machine, an engine may have generated nothing for a second."""
        return frame["cards"][0]["state"] == "running" and frame["now"] is not None and frame["now"][1] > 10

    with streaming(server.url, "seen-1", "seen-2"), frames(server.url) as coming:
        first = next(coming)
        last = next(filter(is_complete, islice(coming, 2, 30)))
    assert first["kind"] == "server" and first["admin"] is True and last["state"] == "running"
    (card,) = last["cards"]
    assert card["state"] == "running" and card["running"] == 2 and card["held"] > 0
    assert card["held"] + card["cached"] <= card["total"] == ENGINE["kv_blocks"]
    requests = {request[0]: request for request in last["requests"]}
    assert set(requests) == {"seen-1", "seen-2"} and last["total"] == 2
    _, tenant, kind, phase, age_s, tokens, worker, moves, first_token_s = requests["seen-1"]
    assert (tenant, kind, phase, worker, moves) == ("", "completion", "decode", "0", 0)
    assert age_s > 1 and tokens > 10 and 0 < first_token_s < age_s
    _, tokens_s, _, running, _, _, _, between_p50, between_p99, *_ = last["now"]
    assert card["tokens_s"] == tokens_s and running == 2
    assert 0 < between_p50 <= between_p99 < 10


@pytest.mark.slow
def test_the_feed_of_a_router_combines_its_workers(router):
    with streaming(router.url, "far-1", "far-2", "far-3"), frames(router.url) as coming:
        last = list(islice(coming, 5))[-1]
    assert last["kind"] == "router" and last["model"] == "tiny"
    assert [card["state"] for card in last["cards"]] == ["ready", "ready"]
    assert {card["role"] for card in last["cards"]} == {"mixed"}
    assert sum(card["running"] for card in last["cards"]) == 3
    workers = {card["id"] for card in last["cards"]}
    assert {request[0] for request in last["requests"]} == {"far-1", "far-2", "far-3"}
    assert all(request[3] == "decode" and request[5] > 10 and request[6] in workers for request in last["requests"])
    assert last["now"][1] > 10 and last["now"][7] is not None


@pytest.mark.slow
def test_an_abort_is_shown_with_its_cause(server):
    with frames(server.url) as coming:
        next(coming)
        with streaming(server.url, "cut-1"), client(server.url) as http:
            assert http.delete("/v1/requests/cut-1").status_code == 200
        causes = [frame["now"][12] for frame in islice(coming, 3) if frame["now"]]
    assert any(each.get("api_abort") == 1 for each in causes)


@pytest.mark.slow
def test_28_a_pause_is_shown_and_the_feed_continues(server):
    with client(server.url) as http, frames(server.url) as coming:
        next(coming)
        assert http.post("/v1/pause", json={"mode": "freeze"}).status_code == 200
        try:
            assert "paused" in [frame["state"] for frame in islice(coming, 3)]
        finally:
            http.post("/v1/resume")
        assert "running" in [frame["state"] for frame in islice(coming, 3)]


def test_a_stopping_router_closes_the_connections_of_viewers(server):
    with ExitStack() as viewing:
        with live_router(server.url) as router:
            coming = viewing.enter_context(frames(router.url))
            next(coming)
        with pytest.raises((httpx.ReadError, httpx.RemoteProtocolError)):
            list(coming)


def test_engine_phases_are_mapped_to_the_names_of_the_page():
    assert [phase_of(phase, 0) for phase in ("preparing", "waiting", "preempted", "loading", "running")] == [
        *("queued", "queued", "queued", "transfer", "prefill")
    ]
    assert phase_of("running", 1) == "decode" and phase_of("queued", 0) == "queued"
    assert phase_of("waiting", 1) == "decode"  # it has started since the engine reported
    assert phase_of("preempted", 1) == "queued"


@pytest.mark.slow
def test_a_worker_that_does_not_answer_is_shown_and_delays_no_frame(server):
    with fake_worker(slow="/dashboard/numbers") as fake, live_router(server.url, fake.url) as router:
        began_s = time.monotonic()
        with frames(router.url) as coming:
            last = list(islice(coming, 3))[-1]
        assert time.monotonic() - began_s < 8
    assert {card["id"]: card["state"] for card in last["cards"]} == {server.url: "ready", fake.url: "ready"}
    assert next(card for card in last["cards"] if card["id"] == fake.url)["tokens_s"] is None


def test_46_the_number_of_viewers_is_limited(server):
    watchers: list[tuple[httpx.Client, httpx.Response]] = []
    try:
        for _ in range(MOST_WATCHERS):
            http = client(server.url)
            watchers.append((http, http.send(http.build_request("GET", "/dashboard/events"), stream=True)))
        assert {response.status_code for _, response in watchers} == {200}
        with client(server.url) as http:
            refused = http.get("/dashboard/events")
        assert refused.status_code == 429 and refused.json()["error"]["code"] == "too_many_watchers"
    finally:
        for http, response in watchers:
            response.close()
            http.close()
    with client(server.url) as http:

        def admitted() -> bool:
            with http.stream("GET", "/dashboard/events") as answer:
                return answer.status_code == 200

        assert wait_until(admitted)


def test_a_head_request_to_the_feed_ends(url):
    with client(url) as http:
        assert http.head("/dashboard/events").status_code == 200


# --------------------------------------------------------------------------------------------------------------- keys


def test_11_with_keys_each_tenant_of_a_server_sees_its_own_requests_and_a_key_is_required(model):
    with live_server(model, keys=Keys(KEYS, "boss"), **ENGINE) as server, client(server.url) as http:
        assert http.get("/dashboard").status_code == 200
        assert http.get("/dashboard/events").status_code == 401
        assert http.get("/dashboard/numbers").status_code == 401
        with streaming(server.url, "of-blue", key="blue-key"), streaming(server.url, "of-red", key="red-key"):
            seen = {key: first_frame(server.url, key) for key in ("blue-key", "red-key", "boss")}
        wait_until(lambda: len(first_frame(server.url, "boss")["ended"]) == 2)
        after = {key: first_frame(server.url, key)["ended"] for key in ("blue-key", "red-key", "boss")}
    ended = {key: {(request[0], request[5]) for request in requests} for key, requests in after.items()}
    both = {("of-blue", "client_disconnect"), ("of-red", "client_disconnect")}
    assert ended["boss"] == both and ended["blue-key"] | ended["red-key"] == both
    assert [len(ended[key]) for key in ("blue-key", "red-key")] == [1, 1]
    listed = {key: [request[0] for request in frame["requests"]] for key, frame in seen.items()}
    assert listed == {"blue-key": ["of-blue"], "red-key": ["of-red"], "boss": ["of-blue", "of-red"]}
    assert {key: frame["admin"] for key, frame in seen.items()} == {"blue-key": False, "red-key": False, "boss": True}


def test_11_with_keys_each_tenant_of_a_router_sees_its_own_requests(server):
    with live_router(server.url, api_keys=KEYS, admin_key="boss") as router:
        with client(router.url) as http:
            assert http.get("/dashboard").status_code == 200 and http.get("/dashboard/events").status_code == 401
        with streaming(router.url, "of-blue", key="blue-key"):
            red, boss = first_frame(router.url, "red-key"), first_frame(router.url, "boss")
        wait_until(lambda: first_frame(router.url, "boss")["ended"])
        after = {key: first_frame(router.url, key)["ended"] for key in ("blue-key", "red-key", "boss")}
    assert red["requests"] == [] and red["total"] == 0
    ((id, tenant, _, phase, *_, first_token_s),) = boss["requests"]
    assert (id, tenant, phase) == ("of-blue", "blue", "decode") and first_token_s is not None
    assert after["red-key"] == [] and after["blue-key"] != []
    assert [(id, tenant, path, cause) for id, tenant, path, _, _, cause, _, _ in after["boss"]] == [
        ("of-blue", "blue", "completions", "client_disconnect")
    ]


def test_a_page_of_another_origin_sees_no_requests(server):
    with streaming(server.url, "private"), client(server.url) as http:
        http.headers["Origin"] = "http://evil.example"
        with http.stream("GET", "/dashboard/events") as answer:
            event = next(line for line in answer.iter_lines() if line.startswith("data: "))
    assert "private" not in event and '"sees_requests":false' in event


# ---------------------------------------------------------------------------------------------------------------- end


@pytest.mark.slow
def test_an_open_dashboard_does_not_delay_a_stopping_server(model):
    with serving(model, "--device", "cpu") as served:
        ended = threading.Event()

        def watch() -> None:
            with frames(served.url) as coming:
                for _ in coming:
                    watching.set()
            ended.set()

        watching = threading.Event()
        thread = threading.Thread(target=watch)
        thread.start()
        assert watching.wait(10)
        began_s = time.monotonic()
        assert served.stop() == 0
        assert time.monotonic() - began_s < 4.5, "the server waited for the viewer until its drain timeout"
        assert ended.wait(5), "the viewer's stream broke instead of ending"
        thread.join(5)
