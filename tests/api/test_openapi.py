from __future__ import annotations

import re
from typing import Any

import jsonschema
import pytest

from headgate.api.app import ROUTES
from headgate.contract.openapi import OPERATIONS, describe
from tests.api.live import LiveServer


def schema(name: str) -> dict[str, Any]:
    return {"$ref": f"#/components/schemas/{name}", "components": describe("0")["components"]}


def test_every_route_is_described_and_nothing_else():
    routes = {
        (re.sub(r":\w+}", "}", route.path), method.lower()) for route in ROUTES for method in route.methods - {"HEAD"}
    }
    assert {(operation.path, operation.method) for operation in OPERATIONS} == routes


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
        ("/v1/completions", {"prompt": "a", "logprobs": 1, "echo": True}, "Completion"),
        ("/v1/responses", {"input": "a", "max_output_tokens": 4}, "ResponseObject"),
        ("/tokenize", {"prompt": "a"}, "Tokenized"),
        ("/detokenize", {"tokens": [1]}, "Detokenized"),
        ("/detokenize", {"tokens": 1}, "ErrorBody"),
    ],
)
def test_answers_are_as_described(server: LiveServer, path: str, body: Any, kind: str):
    ours = {"return_token_ids": True, "return_weight_versions": True} if path.startswith("/v1") else {}
    jsonschema.validate(server.post(path, body | ours).json(), schema(kind))
