"""The dependencies of health, metrics and control endpoints: the engine processes, and the ledger with its metrics.

Generation uses `Api` instead. Each process has one `ServerContext`, in `app.state.host`.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field

from starlette.requests import Request

from headgate.api.accounting.ledger import Ledger
from headgate.engine.replicas import Replica


@dataclass(frozen=True, slots=True)
class ServerContext:
    version: str
    model_name: str
    replicas: Sequence[Replica]
    ledger: Ledger
    boot_id: str = field(default_factory=lambda: secrets.token_hex(8))  # reveals a restart to routers


def host_of(request: Request) -> ServerContext:
    host: ServerContext = request.app.state.host
    return host
