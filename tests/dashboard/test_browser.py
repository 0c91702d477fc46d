"""The dashboard in a real browser, with a real server and a real fleet.

Needs Chromium (Debian: `apt-get install chromium`); $CHROMIUM names another executable. Screenshots are kept in
pytest's temporary folder of the test (`--basetemp`).
"""

from __future__ import annotations

import os
import re
import shutil
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from headgate.contract.keys import Keys
from tests.api.live import LiveServer, live_server
from tests.api.serving import serving, wait_until
from tests.dashboard.conftest import ENGINE
from tests.dashboard.watching import client, streaming
from tests.router.fleets import LiveRouter, live_router

pytestmark = pytest.mark.slow

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
SOON_MS = 15_000


def find_chromium() -> str:
    given = os.environ.get("CHROMIUM")
    found = given or next(filter(None, map(shutil.which, NAMES)), None)
    assert found, "these tests need a browser: install Chromium, or set $CHROMIUM"
    return found


@pytest.fixture(scope="module")
def browser():
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=find_chromium(), args=["--no-sandbox"])
        yield browser
        browser.close()


class OpenPage:
    """An open page, and the errors in its console."""

    def __init__(self, browser, url: str, at: str = "", **options) -> None:
        self.context = browser.new_context(viewport={"width": 1280, "height": 900}, **options)
        self.page = self.context.new_page()
        self.page.set_default_timeout(SOON_MS)
        self.errors: list[str] = []
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("console", lambda entry: self.errors.append(entry.text) if entry.type == "error" else None)
        self.page.goto(at or f"{url}/dashboard")

    def text(self, selector: str) -> str:
        return self.page.locator(selector).inner_text()

    def wait(self, selector: str, **options) -> None:
        self.page.wait_for_selector(selector, **options)

    def wait_text(self, selector: str, pattern: str) -> str:
        matching = re.compile(pattern)
        self.page.locator(selector, has_text=matching).first.wait_for()
        return self.text(selector)

    def row(self, id: str):
        return self.page.locator(f'.row[data-key="{id}"]')

    def screenshot(self, path: Path, **options) -> None:
        self.page.evaluate("scrollTo(0, 0)")
        self.page.screenshot(path=path, **options)
        assert path.stat().st_size > 10_000

    def close(self) -> None:
        self.context.close()


@pytest.fixture
def look(browser) -> Iterator[object]:
    """Yield a function that opens pages; at the end of the test, check that no page had errors."""
    opened: list[OpenPage] = []

    def open_page(url: str, **options) -> OpenPage:
        opened.append(OpenPage(browser, url, **options))
        return opened[-1]

    yield open_page
    for seen in opened:
        seen.close()
    assert [error for seen in opened for error in seen.errors] == []


WIDTHS = "spans => spans.map(span => ({tone: span.dataset.tone, width: parseFloat(span.style.width)}))"
# Elements of the charts that are wider than their box.
TOO_WIDE = """() => [...document.querySelectorAll(".line, .line-head, .line-value")]
    .filter(each => each.scrollWidth > each.clientWidth + 1).map(each => each.textContent)"""


def live(seen: OpenPage) -> None:
    seen.wait('#link[data-link="live"]')


def tokens_of(seen: OpenPage, id: str) -> int:
    return int(re.sub(r"\D", "", seen.row(id).locator(".row-tokens").inner_text()))


# ---------------------------------------------------------------------------------------------------------- a server


def test_numbers_change_under_load_and_a_click_shows_the_timeline_of_a_request(server: LiveServer, look, tmp_path):
    seen = look(server.url)
    live(seen)
    assert "tiny" in seen.text("#what") and seen.text("#state") == "running"
    seen.wait_text("#none", "No requests in flight")
    with streaming(server.url, "timeline-1", "timeline-2"):
        seen.row("timeline-1").wait_for()
        before = tokens_of(seen, "timeline-1")
        wait_until(lambda: tokens_of(seen, "timeline-1") > before, 10)
        seen.wait_text(".card dd >> nth=0", "^2$")
        wait_until(lambda: int(re.sub(r"\D", "", seen.text(".line-value >> nth=0")) or 0) > 0, 10)
        seen.row("timeline-1").locator(".row-id").click()
        seen.wait_text("#details-events", "accepted.*queued.*prefill.*decode")
        seen.screenshot(tmp_path / "light.png", full_page=True)
        seen.page.emulate_media(color_scheme="dark")
        seen.screenshot(tmp_path / "dark.png", full_page=True)
        assert (tmp_path / "light.png").read_bytes() != (tmp_path / "dark.png").read_bytes()
    seen.wait_text("#details-events", "finished: abort, client disconnect")
    seen.wait_text("#none", "No requests in flight")


def test_a_request_has_a_page_that_can_be_linked_and_that_follows_it_to_its_end(server: LiveServer, look, tmp_path):
    id = "link+me/100%"
    seen = look(server.url)
    with streaming(server.url, id):
        seen.row(id).locator(".row-id").click()
        seen.page.click("#details-link")
        seen.wait_text("#details-log", "first token")
        assert seen.page.url.endswith("#request=link%2Bme%2F100%25") and not seen.page.is_visible("#rows")
        linked = look(server.url, at=seen.page.url)
        linked.wait_text("#details-events", "accepted.*prefill.*decode")
        assert linked.text("#details-title") == id and linked.page.title() == f"{id} · Headgate"
        linked.page.set_viewport_size({"width": 360, "height": 800})
        linked.screenshot(tmp_path / "request.png")
        linked.page.click("#details-abort")
        linked.wait_text("#details-events", "finished: abort, api abort")
    linked.page.click("#details-back")
    linked.wait_text(".ended >> nth=0", re.escape(id))


def test_the_page_of_an_unknown_request_says_so(server: LiveServer, look):
    seen = look(server.url, at=f"{server.url}/dashboard#request=nobody")
    seen.wait_text("#details-events", "there is no request 'nobody'")
    assert not seen.page.is_visible("#details-abort")
    seen.errors = [error for error in seen.errors if "404" not in error]


def test_a_bar_shows_decode_from_the_first_token_on(server: LiveServer, look):
    """The first frame that has the request may be a second late, and then has tokens already."""
    seen = look(server.url)
    with streaming(server.url, "decoding"):
        seen.row("decoding").wait_for()
        pieces = seen.row("decoding").locator(".bar > span")
        wait_until(lambda: pieces.count() > 1, 10)
        prefill, decode = pieces.evaluate_all(WIDTHS)
    assert (prefill["tone"], decode["tone"]) == ("prefill", "decode") and prefill["width"] < decode["width"]


def test_an_idle_page_shows_how_to_send_a_request_or_those_that_have_ended(server: LiveServer, look):
    seen = look(server.url)
    live(seen)
    seen.wait("#example:visible, #latest:visible")
    with streaming(server.url, "was-here"):
        seen.row("was-here").wait_for()
    seen.wait_text(".ended >> nth=0", r"was-here.*completion · client disconnect.*tok")
    assert not seen.page.is_visible("#example")
    seen.page.get_by_role("button", name="was-here").click()
    seen.wait_text("#details-events", "finished: abort, client disconnect")


def test_5_a_click_aborts_a_stream_and_its_client_gets_the_partial_answer(server: LiveServer, look):
    seen = look(server.url)
    body = {"prompt": "on and on", "max_tokens": 30_000, "ignore_eos": True, "stream": True, "request_id": "click-1"}
    with client(server.url) as http, http.stream("POST", "/v1/completions", json=body) as response:
        lines = response.iter_lines()
        next(lines)
        seen.page.get_by_role("button", name="Abort click-1").click()
        rest = list(lines)
    assert any('"finish_reason":"abort"' in line for line in rest) and "data: [DONE]" in rest
    seen.wait_text(".note", r"click-1 aborted after \d+ tokens")
    seen.row("click-1").wait_for(state="detached")


@pytest.mark.parametrize("mode", ["freeze", "abort"])
def test_18_pause_and_resume_from_the_page(server: LiveServer, look, mode):
    seen = look(server.url)
    with streaming(server.url, f"held-{mode}"):
        seen.row(f"held-{mode}").wait_for()
        seen.page.select_option("#mode", mode)
        seen.page.click("#pause")
        if mode == "abort":
            seen.wait_text("#sure-question", "abort 1 request")
            seen.page.click("#sure-yes")
        seen.wait('#state[data-state="paused"]')
        seen.wait('.card .pill[data-state="paused"]')
        if mode == "freeze":
            before = tokens_of(seen, "held-freeze")
            assert server.status().state == "paused"
        seen.page.click("#resume")
        seen.wait('#state[data-state="running"]')
        if mode == "freeze":
            wait_until(lambda: tokens_of(seen, "held-freeze") > before, 10)
        else:
            seen.row("held-abort").wait_for(state="detached")


def test_a_dismissed_confirmation_changes_nothing(server: LiveServer, look):
    seen = look(server.url)
    with streaming(server.url, "spared"):
        seen.row("spared").wait_for()
        seen.page.select_option("#mode", "abort")
        seen.page.click("#pause")
        seen.wait_text("#sure-question", "abort 1 request")
        seen.page.keyboard.press("Escape")
        before = tokens_of(seen, "spared")
        wait_until(lambda: tokens_of(seen, "spared") > before, 10)
        assert seen.text("#state") == "running"


def test_chat_streams_and_stop_keeps_the_partial_answer(server: LiveServer, look, tmp_path):
    seen = look(server.url)
    live(seen)
    seen.page.fill("#most", "20000")
    answer = seen.page.locator(".said.assistant").last
    for _ in range(20):  # a random model may end an answer before the test can stop it
        seen.page.click("#forget")
        seen.page.fill("#words", "Say <b>something</b> long")
        seen.page.keyboard.press("Enter")
        wait_until(lambda: len(answer.text_content() or "") > 20, 10)
        seen.page.evaluate("document.getElementById('stop').click()")
        seen.wait("#send:enabled")
        if "stopped" in answer.inner_text():
            break
    kept, remark = answer.locator("span").first.inner_text(), answer.locator(".said-note").inner_text()
    assert len(kept) > 10 and "partial answer" in remark
    assert seen.page.locator(".said b").count() == 0 and "<b>something</b>" in seen.text(".said.user >> nth=0")
    assert not server.api.ledger.live
    seen.screenshot(tmp_path / "chat.png")


def test_names_given_by_clients_are_never_rendered_as_markup(server: LiveServer, look):
    name = "<img/src=x/onerror=alert(1)>"
    seen = look(server.url)
    with streaming(server.url, name):
        seen.page.get_by_role("button", name=name, exact=True).click()
        seen.wait_text("#details-title", "onerror")
    assert seen.page.locator("main img").count() == 0


def test_the_page_shows_a_lost_connection_and_reconnects(model: Path, look):
    with serving(model, "--device", "cpu") as served:
        seen = look(served.url)
        live(seen)
        served.process.send_signal(signal.SIGSTOP)
        try:
            seen.wait('#link[data-link="lost"]')
            assert "trying again" in seen.text("#link") and "stale" in (
                seen.page.get_attribute("body", "class") or ""
            )
        finally:
            served.process.send_signal(signal.SIGCONT)
        seen.wait('#link[data-link="live"]', timeout=30_000)
        assert "stale" not in (seen.page.get_attribute("body", "class") or "")
        seen.close()


def test_every_control_can_be_reached_by_keyboard(server: LiveServer, look):
    seen = look(server.url)
    with streaming(server.url, "by-keyboard"):
        seen.row("by-keyboard").wait_for()
        reached = set()
        for _ in range(30):
            seen.page.keyboard.press("Tab")
            reached.add(seen.page.evaluate("document.activeElement.id || document.activeElement.className"))
        assert {"mode", "pause", "resume", "key", "row-id mono", "row-abort danger", "words", "most"} <= reached
        seen.row("by-keyboard").locator(".row-abort").focus()
        seen.page.keyboard.press("Enter")
        seen.row("by-keyboard").wait_for(state="detached")


@pytest.mark.parametrize("width", [360, 768, 1280, 1920])
def test_nothing_is_wider_than_the_screen(server: LiveServer, look, tmp_path, width):
    seen = look(server.url)
    seen.page.set_viewport_size({"width": width, "height": 844})
    with streaming(server.url, "small-1"):
        seen.row("small-1").wait_for()
        seen.page.wait_for_timeout(2500)  # until numbers have their full width
        longest = "first => { first.firstChild.data = '1 min 59 s'; }"
        seen.page.locator(".line-value > span").evaluate_all(f"spans => spans.forEach({longest})")
        assert seen.page.evaluate("document.documentElement.scrollWidth") <= width
        assert seen.page.evaluate(TOO_WIDE) == []
        seen.screenshot(tmp_path / "page.png")


def test_11_an_api_key_shows_its_own_requests_and_the_admin_key_enables_controls(model: Path, look):
    with live_server(model, keys=Keys({"blue": "blue-key", "red": "red-key"}, "boss"), **ENGINE) as server:
        seen = look(server.url)
        with streaming(server.url, "of-blue", key="blue-key"), streaming(server.url, "of-red", key="red-key"):
            seen.wait("#key-dialog[open]")
            seen.page.fill("#key-value", "blue-key")
            seen.page.click("#key-dialog button[value=use]")
            seen.row("of-blue").wait_for()
            assert seen.row("of-red").count() == 0
            assert seen.page.is_disabled("#pause") and "blue" in seen.text("#what")
            seen.page.click("#key")
            seen.page.fill("#key-value", "boss")
            seen.page.keyboard.press("Enter")
            seen.row("of-red").wait_for()
            seen.wait("#pause:enabled")
            stored = seen.page.evaluate(
                "[sessionStorage.getItem('headgate.key'), localStorage.length, document.cookie]"
            )
            assert stored == ["boss", 0, ""]
        seen.errors = [error for error in seen.errors if "401" not in error]
        seen.close()


# ----------------------------------------------------------------------------------------------------------- a fleet


def test_a_fleet_is_shown_and_controlled_under_load(router: LiveRouter, look, tmp_path):
    seen = look(router.url)
    live(seen)
    assert "router" in seen.text("#what") and seen.page.locator(".card").count() == 2
    with streaming(router.url, "fleet-1", "fleet-2", "fleet-3"):
        seen.row("fleet-3").wait_for()
        before = tokens_of(seen, "fleet-1")
        wait_until(lambda: tokens_of(seen, "fleet-1") > before, 10)
        running = [seen.page.locator(".card").nth(i).locator("dd").first for i in range(2)]
        wait_until(lambda: sum(int(cell.inner_text()) for cell in running) == 3, 10)
        seen.row("fleet-2").locator(".row-id").click()
        seen.wait_text("#details-events", "accepted.*decode")
        seen.screenshot(tmp_path / "fleet.png", full_page=True)
        seen.page.get_by_role("button", name="Abort fleet-1").click()
        seen.row("fleet-1").wait_for(state="detached")
        seen.page.select_option("#mode", "freeze")
        seen.page.click("#pause")
        seen.wait('#state[data-state="paused"]')
        seen.page.click("#resume")
        seen.wait('#state[data-state="running"]')
        wait_until(lambda: tokens_of(seen, "fleet-2") > before, 10)


def test_the_timeline_covers_the_router_the_prefill_worker_and_both_decode_workers(model, look, tmp_path):
    with ExitStack() as stack:
        servers = [stack.enter_context(live_server(model, **ENGINE)) for _ in range(3)]
        roles = ("prefill", "decode", "decode")
        urls = [f"{server.url}={role}" for server, role in zip(servers, roles, strict=True)]
        router = stack.enter_context(live_router(*urls, disaggregate_tokens=16))
        seen = look(router.url)
        with streaming(router.url, "far-away", prompt="a long way to go " * 64):
            seen.row("far-away").locator(".row-id").click()
            seen.wait_text("#details-events", "accepted.*prefill.*transfer.*decode")
            first = next(each for each in servers[1:] if each.api.ledger.live)
            with client(first.url) as http:
                assert http.post("/v1/pause", json={"mode": "abort"}).status_code == 200
            seen.wait_text("#details-events", "decode.*moved.*decode")
            places = re.findall(r"at (127\.0\.0\.1:\d+)", seen.text("#details-events"))
            assert {f"http://{place}" for place in places} == {server.url for server in servers}
            seen.screenshot(tmp_path / "timeline.png", full_page=True)
        seen.wait_text("#details-events", "moved.*decode.*finished: abort, client disconnect")
        seen.close()


def test_44_a_worker_is_drained_by_a_click(server: LiveServer, model: Path, look):
    with live_server(model, **ENGINE) as second, live_router(server.url, second.url) as router:
        seen = look(router.url)
        card = seen.page.locator(f'.card[data-key="{second.url}"]')
        card.get_by_role("button", name="Drain").click()
        seen.wait_text("#sure-question", "leaves the fleet")
        seen.page.click("#sure-yes")
        card.wait_for(state="detached")
        assert list(router.states()) == [server.url]
        seen.close()
