"""Answers of workers to control calls and probes: malformed JSON is that worker's error, never a 500."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from hypothesis import strategies as st

from headgate.router.router import Router
from tests.fuzzing.properties import fuzzed
from tests.fuzzing.test_worker_answers import logged
from tests.router.client import Response, Wire, routing, until
from tests.router.mock import Connection, Mock
from tests.router.run import run

PAUSED = {"is_paused": True, "state": "paused", "mode": "abort", "weight_version": 1, "asleep": [], "engines": []}
ENTRY = {
    "request_id": "one",
    "tenant": "",
    "kind": "chat",
    "phase": "running",
    "age_s": 1.0,
    "output_tokens": 3,
    "tags": {},
    "choices": [],
}
CALLS: list[tuple[str, str, dict[str, Any] | None]] = [
    ("POST", "/v1/abort_requests", {"req_ids": ["one"], "timeout": 20}),
    ("POST", "/v1/abort_requests", {"abort_all": True, "timeout": 20}),
    ("POST", "/v1/abort_requests", {"abort_all": True, "wait": False}),
    ("DELETE", "/v1/requests/one", None),
    ("GET", "/v1/requests", None),
    ("GET", "/v1/requests/one", None),
    ("POST", "/v1/pause", {}),
    ("GET", "/v1/is_paused", None),
    ("POST", "/v1/update_weights", {"path": "/nowhere"}),
    ("POST", "/v1/update_weights", {"group": {"init_method": "tcp://x:1", "world_size": 3}}),
    ("POST", "/v1/sleep", {}),
    ("POST", "/v1/wakeup", {}),
    ("POST", "/v1/flush_cache", {}),
    ("POST", "/v1/resume", {}),
    ("GET", "/v1/loads", None),
    ("GET", "/v1/models", None),
    ("GET", "/v1/models/mock", None),
    ("GET", "/get_world_size", None),
    ("GET", "/is_paused", None),
    ("GET", "/is_sleeping", None),
    ("POST", "/pause_generation", {}),
    ("POST", "/continue_generation", {}),
    ("POST", "/flush_cache", {}),
    ("GET", "/model_info", None),
]


def right(path: str) -> dict[str, Any]:
    """The answer of a healthy worker."""
    match path.removeprefix("/v1/").partition("/")[0]:
        case "abort_requests":
            aborted = {"request_id": "one", "output_token_count": 3}
            result: dict[str, Any] = {"aborted": [aborted], "not_found": [], "already_finished": [], "errors": []}
        case "requests" if path.count("/") == 2:
            return {"object": "list", "data": [ENTRY]}
        case "requests":
            event = {"event": "accepted", "at_s": 0.0, "choice": None}
            return {"request_id": "one", "status": "in_flight", "events": [event], "request": ENTRY, "usage": None}
        case "get_world_size":
            return {"world_size": 1}
        case _:
            result = PAUSED
    return {"request_id": "x", "status": "success", "result": result}


class Speaking(Connection):
    def on_message_complete(self) -> None:
        mock, path = self._mock, self._url.decode().partition("?")[0]
        assert isinstance(mock, Speaker)
        probe = path in ("/v1/models", "/v1/loads")
        if mock.hangs and not probe:
            return
        if mock.lie is None or (probe and not mock.lies_in_probes):
            self._probe(path) if probe else self._send_json(200, json.dumps(right(path)).encode())
        else:
            self._send_json(200, mock.lie(path))


class Speaker(Mock):
    """Answers control calls like a healthy worker, or with a malformed body."""

    lie: Callable[[str], bytes] | None = None
    lies_in_probes = False
    hangs = False  # answers only probes

    async def start(self) -> Mock:
        listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.port = listener.getsockname()[1]
        self._server = await asyncio.get_running_loop().create_server(lambda: Speaking(self), sock=listener)
        return self


numbers = st.one_of(st.integers(), st.floats(allow_nan=False, allow_infinity=False), st.just(10**30))
scalars = st.one_of(st.none(), st.booleans(), numbers, st.text(max_size=8), st.sampled_from(("running", "paused")))
values = st.recursive(
    scalars, lambda v: st.lists(v, max_size=3) | st.dictionaries(st.text(max_size=6), v, max_size=3)
)
BODIES = st.one_of(
    values.map(lambda value: json.dumps(value).encode()),
    st.sampled_from(
        (b"", b"NaN", b'{"result": NaN}', b"[" * 5000, b'{"a":' * 5000, b'{"result":1e400}', b"\xff", b"{")
    ),
)


@st.composite
def mutations(draw: Any) -> Callable[[str], bytes]:
    """A valid answer with one value replaced, or a body of any shape."""
    if draw(st.booleans()):
        body: bytes = draw(BODIES)
        return lambda _: body
    at, value, removed = draw(st.integers(0, 40)), draw(values), draw(st.booleans())
    return lambda path: json.dumps(mutated(right(path), at, value, removed=removed)).encode()


def mutated(answer: Any, at: int, value: Any, *, removed: bool) -> Any:
    answer = json.loads(json.dumps(answer))
    places: list[tuple[Any, Any]] = []
    _places(answer, places)
    holder, key = places[at % len(places)]
    if removed:
        del holder[key]
    else:
        holder[key] = value
    return answer


def _places(value: Any, into: list[tuple[Any, Any]]) -> None:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        into.append((value, key))
        _places(inner, into)


async def call(url: str, method: str, path: str, body: dict[str, Any] | None) -> Response:
    wire = await Wire.open(url)
    content = b"" if body is None else json.dumps(body).encode()
    head = (
        f"{method} {path} HTTP/1.1\r\nhost: {url.removeprefix('http://')}\r\ncontent-length: {len(content)}\r\n\r\n"
    )
    wire.send(head.encode() + content)
    try:
        return await wire.response()
    finally:
        wire.close()


def with_pair(main: Callable[[Speaker, Speaker, Router, str], Awaitable[None]], **settings: Any) -> None:
    mistakes: list[str] = []

    async def body() -> None:
        async with Speaker() as liar, Speaker() as honest, routing(liar, honest, **settings) as (router, url):
            assert isinstance(liar, Speaker) and isinstance(honest, Speaker)
            await main(liar, honest, router, url)

    with logged(mistakes):
        run(body())
    assert not mistakes


@fuzzed(st.lists(mutations(), min_size=1, max_size=4), few=6)
def test_70_a_malformed_answer_is_its_workers_error_and_never_a_500(lies: list[Callable[[str], bytes]]) -> None:
    async def main(liar: Speaker, honest: Speaker, router: Router, url: str) -> None:
        for liar.lie in lies:
            for method, path, body in CALLS:
                answer = await call(url, method, path, body)
                assert answer.complete and answer.status != 500, (path, answer.body)
                workers = answer.json.get("result", {}).get("workers", {}) if path.startswith("/v1/") else {}
                if honest.url in workers:
                    assert "error" not in workers[honest.url], (path, answer.body)

    with_pair(main, probe_interval_s=60.0)


@fuzzed(st.lists(mutations(), min_size=1, max_size=4), few=4)
def test_70_a_malformed_probe_is_its_workers_failure_alone(lies: list[Callable[[str], bytes]]) -> None:
    async def main(liar: Speaker, honest: Speaker, router: Router, url: str) -> None:
        liar.lies_in_probes = True
        for liar.lie in lies:
            before = honest.probes["/v1/loads"]
            await until(lambda before=before: honest.probes["/v1/loads"] > before + 2)
            for path in ("/v1/loads", "/v1/models", "/v1/workers", "/health", "/metrics"):
                answer = await call(url, "GET", path, None)
                assert answer.complete and answer.status == 200, (path, answer.body)
            assert router.fleet.find(honest.url).available

    with_pair(main, probe_interval_s=0.02)


def test_70_a_worker_that_answers_a_pause_with_garbage_is_named():
    async def main(liar: Speaker, honest: Speaker, router: Router, url: str) -> None:
        liar.lie = lambda _: b'{"result": {"state": 7}}'
        answer = await call(url, "POST", "/v1/pause", {"timeout": 2})
        assert answer.status == 502 and "cannot be read" in answer.json["error"]["message"]
        workers = answer.json["result"]["workers"]
        assert "cannot be read" in workers[liar.url]["error"] and workers[honest.url]["state"] == "paused"

    with_pair(main, probe_interval_s=60.0)


UNREADABLE = [
    ("/v1/models", b'{"data":[{"id":"x"}],"\xff":1}'),
    ("/v1/models", b'{"data":[{"id":"x","y":"\xff"}]}'),
    ("/v1/loads", b'{"loads":[{"\xff":1}]}'),
    ("/v1/requests/one", b'{"status":"in_flight","events":[],"request":{"age_s":1},"\xff":1}'),
]


@pytest.mark.parametrize(("path", "lie"), UNREADABLE)
def test_70_a_relayed_answer_is_validated_as_a_whole(path: str, lie: bytes):
    """Regression: only the fields that a router reads were checked."""

    async def main(liar: Speaker, honest: Speaker, router: Router, url: str) -> None:
        liar.lies_in_probes, liar.lie = True, lambda _: lie
        answer = await call(url, "GET", path, None)
        assert answer.status == 200 and answer.json, answer.body

    with_pair(main, probe_interval_s=60.0)
