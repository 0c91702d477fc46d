"""Operations on requests (list, show, abort) and on engines (pause, resume, update, sleep, wake up, flush)."""

from __future__ import annotations

from typing import Any, Final

from headgate.contract.abort import AbortAnswer, AbortRequest
from headgate.contract.control import (
    ControlAnswer,
    ControlBody,
    FleetUpdate,
    MemoryRequest,
    PauseRequest,
    UpdateRequest,
)
from headgate.contract.operations.operation import (
    CONTROLLED,
    FOUND,
    POSTED,
    Access,
    Operation,
    RouterHandler,
)
from headgate.contract.requests import RequestDetails, RequestList


def _control(path: str, summary: str, body: Any, router_body: Any = None) -> Operation:
    return Operation(
        method="POST",
        path=path,
        summary=summary,
        body=body,
        router_body=router_body,
        answer=ControlAnswer,
        errors=CONTROLLED,
        access=Access.ADMIN,
        fan_out=RouterHandler(),
        answers_202=True,
    )


ABORT_REQUESTS: Final = Operation(
    method="POST",
    path="/v1/abort_requests",
    summary="Abort requests; their clients receive the partial answers",
    body=AbortRequest,
    answer=AbortAnswer,
    errors=POSTED,
    access=Access.TENANT,
    fan_out=RouterHandler(),
    answers_202=True,
)
LIST_REQUESTS: Final = Operation(
    method="GET",
    path="/v1/requests",
    summary="List requests in flight",
    answer=RequestList,
    access=Access.TENANT,
    fan_out=RouterHandler(),
)
SHOW_REQUEST: Final = Operation(
    method="GET",
    path="/v1/requests/{id}",
    summary="Show the events of a request, and its usage once it has ended",
    answer=RequestDetails,
    errors=FOUND,
    access=Access.TENANT,
    fan_out=RouterHandler(),
)
DELETE_REQUEST: Final = Operation(
    method="DELETE",
    path="/v1/requests/{id}",
    summary="Abort a request",
    answer=AbortAnswer,
    errors=FOUND,
    access=Access.TENANT,
    fan_out=RouterHandler(),
    answers_202=True,
)
PAUSE: Final = _control("/v1/pause", "Pause all engines", PauseRequest)
RESUME: Final = _control("/v1/resume", "Resume all engines", ControlBody)
UPDATE_WEIGHTS: Final = _control(
    "/v1/update_weights", "Load new weights into paused engines", UpdateRequest, FleetUpdate
)
SLEEP: Final = _control("/v1/sleep", "Release memory of paused engines", MemoryRequest)
WAKEUP: Final = _control("/v1/wakeup", "Restore memory that a sleep released", MemoryRequest)
FLUSH_CACHE: Final = _control("/v1/flush_cache", "Drop cached prefixes that no request uses", ControlBody)
IS_PAUSED: Final = Operation(
    method="GET",
    path="/v1/is_paused",
    summary="Report the state of the engines",
    answer=ControlAnswer,
    access=Access.TENANT,
    fan_out=RouterHandler(),
)
