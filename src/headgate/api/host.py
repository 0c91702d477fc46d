"""What the operator's endpoints are given: the engines as processes, and the ledger with its numbers.

Generation sees `Api`; health and metrics see this. One per process, in `app.state.host`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from starlette.requests import Request

    from headgate.api.ledger import Ledger
    from headgate.engine.replicas import Replica


@dataclass(frozen=True, slots=True)
class Host:
    version: str
    model_name: str
    replicas: Sequence[Replica]
    ledger: Ledger


def host_of(request: Request) -> Host:
    host: Host = request.app.state.host
    return host
