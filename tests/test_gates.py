"""A server and a router refuse the same bad requests alike: status, code, body and headers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field

import httpx
import pytest

from headgate.contract.keys import Keys
from headgate.contract.operations.table import ON_ROUTERS, ON_SERVERS
from headgate.testing.tiny import tiny_model
from tests.api.live import live_server
from tests.router.fleets import live_router

TENANTS = {"alice": "of-alice"}
ADMIN = {"Authorization": "Bearer of-root"}
ALICE = {"Authorization": "Bearer of-alice"}
SHOWN = ("content-type", "www-authenticate", "allow", "retry-after")


@dataclass(frozen=True)
class Bad:
    status: int
    code: str
    method: str
    path: str
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b"{}"


# Requests that the gate refuses, on a control path and on a path that a router relays.
AT_THE_GATE = [
    bad
    for path in ("/v1/pause", "/v1/completions")
    for bad in (
        Bad(400, "invalid_request", "POST", path, ADMIN | {"X-Request-Id": "x" * 257}),
        Bad(400, "invalid_request", "POST", path, ADMIN | {"X-Request-Id": ""}),
        Bad(400, "invalid_request", "POST", path, ADMIN | {"X-Request-Id": "a\tb"}),
        Bad(400, "invalid_request", "POST", path, {"X-Request-Id": "x" * 257}),  # the id is read before the key
        Bad(401, "missing_api_key", "POST", path, {"X-Request-Id": "mine"}),
        Bad(401, "invalid_api_key", "POST", path, {"X-API-Key": "wrong"}),
        Bad(403, "forbidden", "POST", path, ALICE | {"X-Headgate-Tenant": "bob"}),
        Bad(400, "invalid_request", "POST", path, ADMIN | {"X-Headgate-Tenant": "a:b"}),
        Bad(405, "method_not_allowed", "PUT", path, ADMIN),
        Bad(405, "method_not_allowed", "GET", path, ADMIN),
        Bad(401, "missing_api_key", "PUT", path),  # the key is checked before the method
    )
]
BEHIND_IT = [
    Bad(403, "forbidden", "POST", "/v1/pause", ALICE),
    Bad(404, "not_found", "GET", "/nowhere", ADMIN),
    Bad(403, "forbidden", "GET", "/nowhere", ALICE),
    Bad(400, "invalid_json", "POST", "/v1/pause", ADMIN, b"{"),
    Bad(400, "unknown_parameter", "POST", "/v1/pause", ADMIN, b'{"when": 1}'),
    Bad(400, "invalid_type", "POST", "/v1/resume", ADMIN, b'{"timeout": -1}'),
    Bad(400, "invalid_request", "POST", "/v1/abort_requests", ALICE, b"{}"),
    Bad(400, "unknown_parameter", "POST", "/v1/abort_requests", ALICE, b'{"stop_all": true}'),
    Bad(404, "request_not_found", "GET", "/v1/requests/none", ALICE),
    Bad(404, "request_not_found", "DELETE", "/v1/requests/none", ALICE),
]
# The same under the names of SGLang and vLLM: some of these calls a router answers, others its workers.
COMPATIBLE = [
    *(
        Bad(400, "invalid_json", "POST", operation.path, ADMIN, b"{")
        for operation in ON_ROUTERS
        if operation.summary.startswith("Compatible with") and operation.body and operation in ON_SERVERS
    ),
    Bad(400, "invalid_json", "POST", "/abort_requests", ALICE, b""),
    Bad(400, "invalid_type", "POST", "/abort_request", ALICE, b"[]"),
    Bad(400, "invalid_type", "POST", "/abort_request", ALICE, b'{"rid": 1}'),
    Bad(400, "invalid_type", "POST", "/abort_requests", ALICE, b'{"request_ids": [""]}'),
    Bad(400, "invalid_request", "POST", "/abort_requests", ALICE, b'{"request_ids": []}'),
    Bad(400, "unknown_parameter", "POST", "/abort_requests", ALICE, b'{"abort_all": true}'),
    Bad(400, "invalid_type", "POST", "/pause_generation", ADMIN, b'{"mode": "later"}'),
    Bad(400, "invalid_request", "POST", "/pause?mode=later", ADMIN),
    Bad(400, "invalid_request", "POST", "/sleep?mode=later", ADMIN),
    Bad(400, "invalid_request", "POST", "/sleep?level=9", ADMIN),
    Bad(400, "invalid_type", "POST", "/sleep?tags=all", ADMIN),
    Bad(400, "invalid_type", "POST", "/wake_up?tags=all", ADMIN),
    Bad(400, "invalid_type", "GET", "/server_info?config_format=xml", ADMIN),
    Bad(400, "missing_required_parameter", "POST", "/update_weights_from_disk", ADMIN),
    Bad(400, "missing_required_parameter", "POST", "/update_weight_version", ADMIN),
    Bad(400, "unknown_parameter", "POST", "/update_weight_version", ADMIN, b'{"new_version": "1", "force": true}'),
    Bad(400, "missing_required_parameter", "POST", "/init_weights_update_group", ADMIN),
    Bad(400, "invalid_type", "POST", "/init_weights_update_group", ADMIN, b'{"world_size": "many"}'),
    Bad(400, "missing_required_parameter", "POST", "/init_weight_transfer_engine", ADMIN),
    Bad(
        *(400, "unsupported_transfer", "POST", "/init_weight_transfer_engine", ADMIN),
        b'{"init_info": {"transport": "other"}}',
    ),
    Bad(400, "invalid_request", "POST", "/update_weights", ADMIN),
    Bad(409, "not_paused", "POST", "/update_weights", ADMIN, b'{"update_info": {"path": "/nowhere"}}'),
    Bad(400, "no_group", "POST", "/update_weights", ADMIN, b'{"update_info": {}}'),
    Bad(400, "invalid_type", "POST", "/release_memory_occupation", ADMIN, b'{"tags": "all"}'),
    *(
        Bad(405, "method_not_allowed", "DELETE", path, ADMIN)
        for path in [
            "/generate",
            "/abort_request",
            "/pause",
            "/sleep",
            "/server_info",
            "/get_load",
            "/weight_info",
            "/liveness",
        ]
    ),
    *(
        Bad(403, "forbidden", "POST", path, ALICE)
        for path in [
            "/pause",
            "/sleep",
            "/update_weights",
            "/update_weight_version",
            "/flush_cache",
            "/init_weight_transfer_engine",
        ]
    ),
    Bad(404, "not_found", "GET", "/server_info/", ADMIN),
]
# Failures of a weight update, with SGLang's body.
FAILED = [
    ("/update_weights_from_disk", {"model_path": "/nowhere"}),
    ("/end_weight_update", {}),
    ("/destroy_weights_update_group", {"group_name": "unknown"}),
    ("/update_weights_from_distributed", {"group_name": "unknown"}),
]


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[httpx.Client, httpx.Client]]:
    model = tiny_model(tmp_path_factory.mktemp("model"))
    with ExitStack() as stack:
        server = stack.enter_context(live_server(model, keys=Keys(TENANTS, "of-root")))
        router = stack.enter_context(
            live_router(server.url, api_keys=TENANTS, admin_key="of-root", worker_key="of-root")
        )
        clients = (httpx.Client(base_url=url, timeout=60) for url in (server.url, router.url))
        yield stack.enter_context(next(clients)), stack.enter_context(next(clients))


@pytest.mark.parametrize(
    "bad", AT_THE_GATE + BEHIND_IT + COMPATIBLE, ids=lambda bad: f"{bad.method} {bad.path} {bad.code}"
)
def test_a_server_and_a_router_refuse_a_bad_request_alike(both: tuple[httpx.Client, httpx.Client], bad: Bad):
    answers = [http.request(bad.method, bad.path, headers=bad.headers, content=bad.body) for http in both]
    for answer in answers:
        assert (answer.status_code, answer.json()["error"]["code"]) == (bad.status, bad.code)
        assert answer.headers["x-request-id"] == "mine" or answer.headers["x-request-id"].startswith("req-")
    server, router = (
        (answer.json(), {name: answer.headers.get(name) for name in SHOWN}, answer.headers["x-request-id"] == "mine")
        for answer in answers
    )
    assert server == router


@pytest.mark.parametrize(("path", "body"), FAILED)
def test_77_a_server_and_a_router_report_a_failed_update_alike(
    both: tuple[httpx.Client, httpx.Client], path: str, body: dict[str, str]
):
    server, router = (http.post(path, headers=ADMIN, json=body) for http in both)
    assert server.status_code == router.status_code == 400
    assert server.json() == router.json() and server.json()["success"] is False
    assert server.headers["content-type"] == router.headers["content-type"]
