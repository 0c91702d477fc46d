from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import jsonschema
import msgspec
import pytest
from starlette.routing import Route

from headgate.api.app import ROUTES
from headgate.contract.openapi import router_description, server_description
from headgate.contract.operations.table import RELAYED
from headgate.dashboard import page
from tests.api.live import LiveServer
from tests.router.fleets import live_router


def schema(name: str) -> dict[str, Any]:
    components = msgspec.json.decode(server_description("0"))["components"]
    return {"$ref": f"#/components/schemas/{name}", "components": components}


def calls_of(routes: Iterable[Route]) -> set[tuple[str, str]]:
    """The operations that a description must have; the dashboard and the page that leads to it are not part of the API."""
    return {
        (route.path.replace(":path}", "}"), method.lower())
        for route in routes
        for method in (route.methods or set()) - {"HEAD"}
        if route.path != page.ROOT and not route.path.startswith(page.PATH)
    }


def described_by(description: bytes) -> set[tuple[str, str]]:
    paths = msgspec.json.decode(description)["paths"]
    return {(path, method) for path, methods in paths.items() for method in methods}


def test_every_route_of_a_server_is_described_and_nothing_else():
    assert described_by(server_description("0")) == calls_of(ROUTES)


def test_every_route_of_a_router_is_described_and_nothing_else():
    with live_router() as router:
        assert router.router.bridge is not None
        app: Any = router.router.bridge._app
        routes = calls_of(app.routes)
    relayed = {(path, "post") for path in RELAYED}
    assert described_by(router_description("0")) == routes | relayed


def test_a_router_describes_the_body_that_only_a_router_takes():
    paths = msgspec.json.decode(router_description("0"))["paths"]
    body = paths["/v1/update_weights"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert body == {"$ref": "#/components/schemas/FleetUpdate"}


def test_any_call_to_a_router_may_find_no_worker():
    paths = msgspec.json.decode(router_description("0"))["paths"]
    assert all({"502", "503"} <= set(call["responses"]) for calls in paths.values() for call in calls.values())


def test_the_description_is_served_and_its_references_resolve(server: LiveServer):
    with server.http as http:
        described = http.get("/openapi.json").json()
    assert described["openapi"].startswith("3.1")
    names = set(re.findall(r"#/components/schemas/(\w+)", str(described)))
    assert names <= set(described["components"]["schemas"])


@pytest.mark.parametrize(
    ("path", "body", "kind"),
    [
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "a"}], "logprobs": True},
            "ChatCompletion",
        ),
        ("/v1/completions", {"prompt": "a", "logprobs": 1, "echo": True}, "TextCompletion"),
        ("/v1/responses", {"input": "a", "max_output_tokens": 4}, "ResponseObject"),
        ("/v1/messages", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 4}, "MessageObject"),
        ("/v1/messages", {"messages": []}, "MessageErrorBody"),
        ("/tokenize", {"prompt": "a"}, "Tokenized"),
        ("/detokenize", {"tokens": [1]}, "Detokenized"),
        ("/detokenize", {"tokens": 1}, "ErrorBody"),
    ],
)
def test_answers_are_as_described(server: LiveServer, path: str, body: Any, kind: str):
    ours = {"return_token_ids": True, "return_weight_versions": True} if path.startswith("/v1") else {}
    jsonschema.validate(server.post(path, body | ours).json(), schema(kind))
