"""`--cors-origin`: which web pages may call a server (here) and a router (`tests/router/test_cors.py`)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest

from headgate.config import RouteConfig, ServerConfig
from headgate.edge.cors import Cors
from headgate.engine.client import Chunk
from headgate.errors import RequestError
from headgate.protocol.output import Ended, Timings
from headgate.protocol.request import GenerateRequest
from headgate.testing.tiny import tiny_model
from tests.api.scripted import Client, ScriptedEngines, scripted_app

PAGE = "http://page.example"
ASKING = {"access-control-request-method": "POST", "access-control-request-headers": "authorization,content-type"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"))


async def ended(request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
    yield Chunk(ended=Ended(request.id, "stop", "eos", len(request.prompt), 0, 0, Timings(0.0, 0.0, 0.0, 0.0)))


def answered(model: Path, allowed: list[str], method: str = "POST", origin: str | None = PAGE, **options) -> Client:
    headers = ({} if origin is None else {"origin": origin}) | options.get("headers", {})
    app = scripted_app(model, ScriptedEngines(ended), cors=Cors(allowed))
    body = {"prompt": "a"} | options.get("body", {})
    client = Client(app, options.get("path", "/v1/completions"), body, headers, method)
    asyncio.run(client.call())
    return client


def named(client: Client) -> str | None:
    return client.headers.get("access-control-allow-origin")


@pytest.mark.parametrize("body", [{}, {"stream": True}, {"frobnicate": 1}])
def test_an_answer_a_stream_and_a_refusal_name_the_page(model: Path, body: dict[str, object]):
    client = answered(model, [PAGE, "http://other.example"], body=body)
    assert named(client) == PAGE and client.headers["vary"] == "Origin"
    assert client.status == (400 if "frobnicate" in body else 200)
    assert named(answered(model, ["*"], body=body)) == "*"


def test_a_refusal_of_a_key_or_a_path_names_the_page(model: Path):
    client = answered(model, [PAGE], path="/nowhere")
    assert client.status in (403, 404) and named(client) == PAGE


def test_a_browser_is_told_in_advance_what_a_page_may_send(model: Path):
    client = answered(model, [PAGE], "OPTIONS", headers=ASKING)
    assert client.status == 200 and named(client) == PAGE and client.body == b""
    assert client.headers["access-control-allow-methods"] == "DELETE, GET, POST"
    assert client.headers["access-control-allow-headers"] == ASKING["access-control-request-headers"]


@pytest.mark.parametrize(("allowed", "origin"), [([], PAGE), (["http://other.example"], PAGE), ([PAGE], None)])
def test_other_pages_and_other_callers_are_told_nothing(model: Path, allowed: list[str], origin: str | None):
    assert named(answered(model, allowed, origin=origin)) is None
    client = answered(model, allowed, "OPTIONS", origin=origin, headers=ASKING)
    assert client.status == 405 and named(client) is None


def test_without_the_flag_no_header_is_added(model: Path):
    assert not {name for name in answered(model, []).headers if name.startswith(("access-control", "vary"))}


@pytest.mark.parametrize("origin", ["page.example", "http://page.example/", "http://a.example,http://b.example", ""])
def test_an_origin_that_no_browser_sends_is_refused(origin: str):
    for make in (RouteConfig, lambda **given: ServerConfig(model=Path(), model_name="m", **given)):
        with pytest.raises(RequestError, match="an origin is"):
            make(cors_origins=(origin,))
