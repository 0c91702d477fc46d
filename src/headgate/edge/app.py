"""The ASGI application of a server and of a router's control plane."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from starlette.applications import Starlette
from starlette.routing import BaseRoute
from starlette.types import ASGIApp

from headgate.edge.gate import Gate


class GatedApp(Starlette):
    """Starlette's routes and state behind a `Gate` instead of Starlette's middleware. `gate` wraps the routes."""

    def __init__(self, routes: Sequence[BaseRoute], gate: Callable[[ASGIApp], Gate]) -> None:
        super().__init__(routes=routes)
        self.router.redirect_slashes = False
        self._gate = gate(self.router)

    def build_middleware_stack(self) -> ASGIApp:
        return self._gate
