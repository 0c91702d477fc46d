"""Operations that report models, health, metrics and the API description."""

from __future__ import annotations

from typing import Any, Final

from headgate.contract.operations.operation import FOUND, Access, Operation, RouterHandler
from headgate.contract.status import Health, ModelEntry, ModelList, Readiness


def _report(path: str, summary: str, answer: Any, *, answers_503: bool = False) -> Operation:
    return Operation(
        method="GET",
        path=path,
        summary=summary,
        answer=answer,
        access=Access.OPEN,
        fan_out=RouterHandler(),
        answers_503=answers_503,
    )


MODELS: Final = Operation(
    method="GET",
    path="/v1/models",
    summary="List the models that are served",
    answer=ModelList,
    access=Access.TENANT,
    fan_out=RouterHandler(),
)
MODEL: Final = Operation(
    method="GET",
    path="/v1/models/{model}",
    summary="Show one model that is served",
    answer=ModelEntry,
    errors=FOUND,
    access=Access.TENANT,
    fan_out=RouterHandler(),
)
LIVE: Final = _report("/live", "Report that the process responds", dict[str, str])
READY: Final = _report("/ready", "Report whether a request would be accepted now", Readiness, answers_503=True)
HEALTH: Final = _report("/health", "Report whether the engines make progress", Health, answers_503=True)
METRICS: Final = _report("/metrics", "Metrics in Prometheus format", str)
OPENAPI: Final = _report("/openapi.json", "This API description", dict[str, Any])
