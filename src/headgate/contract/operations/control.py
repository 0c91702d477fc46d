"""Operations that list, abort, pause, resume and update."""

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
    summary="End requests; their clients get what there is",
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
    summary="What is in flight",
    answer=RequestList,
    access=Access.TENANT,
    fan_out=RouterHandler(),
)
SHOW_REQUEST: Final = Operation(
    method="GET",
    path="/v1/requests/{id}",
    summary="What happened to a request, and what it cost when it has ended",
    answer=RequestDetails,
    errors=FOUND,
    access=Access.TENANT,
    fan_out=RouterHandler(),
)
DELETE_REQUEST: Final = Operation(
    method="DELETE",
    path="/v1/requests/{id}",
    summary="End a request",
    answer=AbortAnswer,
    errors=FOUND,
    access=Access.TENANT,
    fan_out=RouterHandler(),
    answers_202=True,
)
PAUSE: Final = _control("/v1/pause", "Hold all engines", PauseRequest)
RESUME: Final = _control("/v1/resume", "Let them go on", ControlBody)
UPDATE_WEIGHTS: Final = _control(
    "/v1/update_weights", "Give paused engines other weights", UpdateRequest, FleetUpdate
)
SLEEP: Final = _control("/v1/sleep", "Have paused engines give memory back", MemoryRequest)
WAKEUP: Final = _control("/v1/wakeup", "Have them take it again", MemoryRequest)
FLUSH_CACHE: Final = _control("/v1/flush_cache", "Drop cached prefixes that no request uses", ControlBody)
IS_PAUSED: Final = Operation(
    method="GET",
    path="/v1/is_paused",
    summary="Where the engines stand",
    answer=ControlAnswer,
    access=Access.TENANT,
    fan_out=RouterHandler(),
)
