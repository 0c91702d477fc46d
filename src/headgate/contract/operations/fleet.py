"""Operations that only a router has: they list, add and remove workers, and change the number of servers."""

from __future__ import annotations

from typing import Any, Final

from headgate.contract.fleet import Joining, ScaleRequest
from headgate.contract.operations.operation import ANY, POSTED, Access, Operation, RouterHandler

_CHANGED: Final = (*POSTED, 409)

LIST_WORKERS: Final = Operation(
    method="GET",
    path="/v1/workers",
    summary="List workers with their state and load",
    answer=Any,
    access=Access.ADMIN,
    fan_out=RouterHandler(),
    on_server=False,
)
ADD_WORKER: Final = Operation(
    method="POST",
    path="/v1/workers",
    summary="Add a worker, or renew its registration",
    body=Joining,
    answer=Any,
    errors=_CHANGED,
    access=Access.ADMIN,
    fan_out=RouterHandler(),
    on_server=False,
)
REMOVE_WORKER: Final = Operation(
    method="DELETE",
    path="/v1/workers",
    summary="Drain and remove the worker that the query parameter `url` names",
    answer=Any,
    errors=_CHANGED,
    access=Access.ADMIN,
    fan_out=RouterHandler(),
    on_server=False,
    answers_202=True,
)
REMOVE_WORKER_BY_PATH: Final = Operation(
    method="DELETE",
    path="/v1/workers/{url}",
    summary="Drain and remove a worker",
    answer=Any,
    errors=_CHANGED,
    access=Access.ADMIN,
    fan_out=RouterHandler(),
    on_server=False,
    answers_202=True,
)
SHOW_SCALE: Final = Operation(
    method="GET",
    path="/v1/scale",
    summary="Show the number of desired and ready servers, by role",
    answer=Any,
    errors=(*ANY, 501),
    access=Access.ADMIN,
    fan_out=RouterHandler(),
    on_server=False,
)
SCALE: Final = Operation(
    method="POST",
    path="/v1/scale",
    summary="Start or stop servers until each role has the requested number",
    body=ScaleRequest,
    answer=Any,
    errors=(*_CHANGED, 501, 502),
    access=Access.ADMIN,
    fan_out=RouterHandler(),
    on_server=False,
    answers_202=True,
)
