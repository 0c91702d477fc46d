"""Access control: every route of server and router, with every kind of caller and every configuration of keys.

The routes come from the routing tables. The expected status follows by the rule in `expected` from the literals OPEN
and TENANTS_TOO, and not from the declarations in `headgate.contract.operations`: an undeclared route fails here, and so
does one that is declared for more or fewer callers. Run with `-s` to print the table.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from starlette.responses import PlainTextResponse
from starlette.routing import BaseRoute, Route

from headgate.api.accounting.ledger import Ledger
from headgate.api.accounting.metrics import ServerMetrics
from headgate.api.app import ROUTES, ServerApp
from headgate.api.host import ServerContext
from headgate.contract.access import DECLARED
from headgate.contract.errors import Forbidden, Unauthorized
from headgate.contract.keys import Keys
from headgate.contract.operations.operation import Access
from headgate.contract.operations.table import RELAYED
from tests.router.fleets import live_router

CALLERS = {
    "stranger": {},
    "tenant": {"Authorization": "Bearer of-alice"},
    "other tenant": {"Authorization": "Bearer of-bob"},
    "admin": {"Authorization": "Bearer of-root"},
    # A router that sends a request on behalf of a tenant.
    "worker key": {"Authorization": "Bearer of-router", "X-Headgate-Tenant": "alice"},
}
TENANTS = {"alice": "of-alice", "bob": "of-bob"}
SERVERS: dict[str, dict[str, Any]] = {
    "keys": {"tenants": TENANTS, "admin": "of-root"},
    "admin key": {"admin": "of-root"},
    "no keys": {},
    "worker's keys": {"admin": "of-root", "worker": "of-router"},
}
ROUTERS: dict[str, dict[str, Any]] = {
    "keys": {"api_keys": TENANTS, "admin_key": "of-root", "worker_key": "of-router"},
    "admin key": {"admin_key": "of-root", "worker_key": "of-router"},
    "no keys": {"worker_key": "of-router"},
}
KNOWN = {
    "keys": {"tenant": "tenant", "other tenant": "tenant", "admin": "admin"},
    "admin key": {"admin": "admin"},
    "no keys": {},
    "worker's keys": {"admin": "admin", "worker key": "admin"},
}
HOSTS = {"loopback": "127.0.0.1", "exposed": "0.0.0.0"}  # only the config differs; tests listen on loopback
# The paths that do not require the admin key, independent of the declarations: a wrong declaration fails here.
OPEN = {
    "/",
    "/dashboard",
    "/dashboard/icon.svg",
    "/dashboard/page.css",
    "/dashboard/page.js",
    "/health",
    "/health/",
    "/live",
    "/liveness",
    "/metrics",
    "/openapi.json",
    "/ready",
    "/version",
}
TENANTS_TOO = {
    "/abort_request",
    "/abort_requests",
    "/chat/",
    "/dashboard/events",
    "/dashboard/numbers",
    "/detokenize",
    "/generate",
    "/generate/",
    "/get_load",
    "/get_model_info",
    "/get_sequence_logprobs/",
    "/get_server_info",
    "/get_weight_version",
    "/get_world_size",
    "/get_world_size/",
    "/health_generate",
    "/inference/v1/generate",
    "/is_paused",
    "/is_sleeping",
    "/model_info",
    "/rerank",
    "/server_info",
    "/tokenize",
    "/v1/abort_requests",
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/embeddings",
    "/v1/is_paused",
    "/v1/loads",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/models",
    "/v1/models/{model}",
    "/v1/requests",
    "/v1/requests/{id}",
    "/v1/rerank",
    "/v1/responses",
    "/v1/score",
    "/weight_info",
    "/weight_version",
}
IN, NO_KEY, NO_RIGHT = 200, Unauthorized.status, Forbidden.status


@dataclass(frozen=True)
class Call:
    method: str
    route: str  # as in the routing table

    @property
    def path(self) -> str:
        return re.sub(r"{\w+:path}", "x", self.route)

    @property
    def declared(self) -> Access:
        return DECLARED[declared_path(self.route)]


def declared_path(route: str) -> str:
    return route.replace(":path}", "}")


def calls_of(routes: Sequence[BaseRoute]) -> list[Call]:
    found = [route for route in routes if isinstance(route, Route)]
    assert len(found) == len(routes)
    return [Call(method, route.path) for route in found for method in sorted(route.methods or ()) if method != "HEAD"]


def expected(keys: str, host: str, caller: str, access: Access) -> int:
    """Return the expected status, by the rule in docs/keys.md."""
    rights = KNOWN[keys].get(caller)
    if rights is None and keys in ("keys", "worker's keys") and access is not Access.OPEN:
        return NO_KEY
    if rights is None and keys == "no keys" and host == "loopback":
        rights = "admin"
    if caller == "worker key":  # only an admin may name a tenant, and then acts as that tenant
        if rights != "admin":
            return NO_RIGHT
        rights = "tenant"
    return NO_RIGHT if access is Access.ADMIN and rights != "admin" else IN


def pinned(path: str) -> Access:
    if path in OPEN:
        return Access.OPEN
    return Access.TENANT if path in TENANTS_TOO else Access.ADMIN


class Table:
    def __init__(self, name: str) -> None:
        self.name = name
        self.rows: dict[Call, dict[tuple[str, str, str], int]] = {}

    def note(self, call: Call, keys: str, host: str, caller: str, status: int) -> None:
        self.rows.setdefault(call, {})[keys, host, caller] = status

    def check(self) -> None:
        self.print()
        wrong = [
            f"{call.method} {call.route}: {', '.join(where)}: {status}, not {due}"
            for call, row in self.rows.items()
            for where, status in row.items()
            if status != (due := expected(*where, pinned(declared_path(call.route))))
        ]
        assert not wrong, "\n".join(wrong)

    def print(self) -> None:
        columns = list(next(iter(self.rows.values())))
        print(f"\n{self.name}: + let in, 1 refused with 401, 3 with 403. Callers: {', '.join(CALLERS)}.")
        groups = dict.fromkeys((keys, host) for keys, host, _ in columns)
        print(f"{'':52}" + " ".join(f"{keys}/{host}"[:22].ljust(22) for keys, host in groups))
        for call, row in self.rows.items():
            cells = ["".join(MARKS.get(row[(*g, caller)], "?") for caller in CALLERS) for g in groups]
            declared = call.declared.value
            print(f"{call.method:7}{call.route:38}{declared:7}" + " ".join(cell.ljust(22) for cell in cells))


MARKS = {IN: "+", NO_KEY: "1", NO_RIGHT: "3"}


async def status_of(app: ServerApp, call: Call, headers: dict[str, str]) -> int:
    statuses: list[int] = []
    raw = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
    scope = {
        "type": "http",
        "method": call.method,
        "path": call.path,
        "headers": raw,
        "query_string": b"",
        "app": app,
    }

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Any) -> None:
        if message["type"] == "http.response.start":
            statuses.append(message["status"])

    await app(scope, receive, send)
    return statuses[0]


def stubbed(routes: Sequence[BaseRoute]) -> list[BaseRoute]:
    """The same routes with handlers that return 200 and do nothing."""
    return [
        Route(route.path, PlainTextResponse("in"), methods=sorted(route.methods or ()))
        for route in routes
        if isinstance(route, Route)
    ]


def test_the_access_of_every_path_is_as_pinned_here():
    wrong = {path: access.value for path, access in DECLARED.items() if access is not pinned(path)}
    assert not wrong, f"declared otherwise than in OPEN and TENANTS_TOO: {wrong}"
    assert not (OPEN | TENANTS_TOO) - set(DECLARED)


def test_every_route_of_a_server_is_declared():
    routes = {declared_path(route.path) for route in ROUTES}
    assert routes <= set(DECLARED), f"not declared in headgate/contract/operations: {sorted(routes - set(DECLARED))}"


def test_every_route_of_a_router_is_declared_and_nothing_else_is():
    with live_router() as router:
        assert router.router.bridge is not None
        app: Any = router.router.bridge._app
        routes = {declared_path(route.path) for route in app.routes} | RELAYED
    served = {declared_path(route.path) for route in ROUTES}
    assert routes <= set(DECLARED), f"not declared in headgate/contract/operations: {sorted(routes - set(DECLARED))}"
    assert set(DECLARED) <= routes | served, f"no such route: {sorted(set(DECLARED) - routes - served)}"


def test_65_to_67_every_route_of_a_server_admits_exactly_the_allowed_callers():
    table, routes = Table("server"), ROUTES

    async def main() -> None:
        for (keys, given), host in product(SERVERS.items(), HOSTS):
            app = server_app(stubbed(routes), Keys(**given, exposed=host == "exposed"))
            for call, caller in product(calls_of(routes), CALLERS):
                table.note(call, keys, host, caller, await status_of(app, call, CALLERS[caller]))

    asyncio.run(main())
    table.check()


def test_65_to_67_every_route_of_a_router_admits_exactly_the_allowed_callers():
    table = Table("router")
    for (keys, given), host in product(ROUTERS.items(), HOSTS):
        with live_router(**given, host=HOSTS[host]) as router, router.client() as http:
            assert router.router.bridge is not None
            app: Any = router.router.bridge._app
            calls = [*calls_of(app.routes), *(Call("POST", path) for path in sorted(RELAYED))]
            router.do(lambda app=app, router=router: close_behind_the_gate(app, router.router))
            for call, caller in product(calls, CALLERS):
                answer = http.request(call.method, call.path, headers=CALLERS[caller], content=b"{}")
                behind = answer.status_code == 503 and call.route in RELAYED
                table.note(call, keys, host, caller, IN if behind else answer.status_code)
    table.check()


def close_behind_the_gate(app: Any, router: Any) -> None:
    """Requests that pass the gate get 200, or 503 from a router that is shutting down, and have no effect."""
    app.router.routes[:] = stubbed(app.router.routes)
    router.draining = True


def server_app(routes: list[BaseRoute], keys: Keys) -> ServerApp:
    ledger = Ledger(ServerMetrics(), limit=1)
    app = ServerApp(routes, keys, ledger, 1 << 20)
    app.state.host = ServerContext("0", "model", [], ledger)
    return app
