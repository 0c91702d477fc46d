"""`--cors-origin` of a router: its own answers, and those of workers that know nothing of it."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from headgate.router.data_path.downstream import with_headers
from tests.router.fleets import LiveRouter, fake_worker, live_router

PAGE = {"Origin": "http://page.example"}
ASKING = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
COMPLETIONS = "/v1/completions"


@pytest.fixture(scope="module")
def router() -> Iterator[LiveRouter]:
    with fake_worker() as worker, live_router(worker.url, cors_origins=("http://page.example",)) as router:
        yield router


def named(answer: httpx.Response) -> list[str]:
    return answer.headers.get_list("access-control-allow-origin")


def test_every_answer_names_the_page_once(router: LiveRouter):
    body = {"prompt": "a", "max_tokens": 2}
    with router.client() as http:
        for answer in (
            http.post(COMPLETIONS, json=body, headers=PAGE),
            http.post(COMPLETIONS, json=body | {"stream": True}, headers=PAGE),
            http.post(COMPLETIONS, content=b"no json", headers=PAGE),
            http.get("/v1/models", headers=PAGE),
            http.get("/nowhere", headers=PAGE),
            http.post(COMPLETIONS, content=b"x", headers=PAGE | {"X-Request-Id": "no\tid"}),
        ):
            assert named(answer) == ["http://page.example"], answer.text
        assert named(http.post(COMPLETIONS, json=body)) == []
        assert named(http.post(COMPLETIONS, json=body, headers={"Origin": "http://other.example"})) == []


@pytest.mark.parametrize("path", [COMPLETIONS, "/v1/pause"])
def test_a_browser_is_told_in_advance_what_a_page_may_send(router: LiveRouter, path: str):
    with router.client() as http:
        answer = http.options(path, headers=PAGE | ASKING)
        assert (answer.status_code, named(answer)) == (200, ["http://page.example"])
        assert answer.headers["access-control-allow-headers"] == "authorization"
        assert http.options(path, headers=ASKING).status_code == 405


def test_a_header_that_a_worker_has_set_is_not_repeated():
    headers = [(b"access-control-allow-origin", b"*")]
    whole = b"HTTP/1.1 200 OK\r\nAccess-Control-Allow-Origin: *\r\n\r\nbody"
    assert with_headers(whole, headers) == whole
    bare = b"HTTP/1.1 200 OK\r\na: b\r\n\r\naccess-control-allow-origin"
    assert with_headers(bare, headers) == bare.replace(b"a: b", b"access-control-allow-origin: *\r\na: b")
