"""What the operator's endpoints are given: the engines as processes, and the ledger with its numbers.

Generation sees `Api`; health and metrics see this. One per process, in `app.state.host`.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from starlette.requests import Request

    from headgate.api.accounting.ledger import Ledger
    from headgate.engine.replicas import Replica


@dataclass(frozen=True, slots=True)
class ServerContext:
    version: str
    model_name: str
    replicas: Sequence[Replica]
    ledger: Ledger
    life: str = field(default_factory=lambda: secrets.token_hex(8))  # by which others know that it was started anew


def host_of(request: Request) -> ServerContext:
    host: ServerContext = request.app.state.host
    return host
