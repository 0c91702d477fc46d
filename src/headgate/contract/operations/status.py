"""Operations that report: models, probes, metrics, and the description of the API."""

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
    summary="The models that are served",
    answer=ModelList,
    access=Access.TENANT,
    fan_out=RouterHandler(),
)
MODEL: Final = Operation(
    method="GET",
    path="/v1/models/{model}",
    summary="One model that is served",
    answer=ModelEntry,
    errors=FOUND,
    access=Access.TENANT,
    fan_out=RouterHandler(),
)
LIVE: Final = _report("/live", "Whether the process answers", dict[str, str])
READY: Final = _report("/ready", "Whether a request would be taken now", Readiness, answers_503=True)
HEALTH: Final = _report("/health", "Whether the engines move", Health, answers_503=True)
METRICS: Final = _report("/metrics", "Numbers for Prometheus", str)
OPENAPI: Final = _report("/openapi.json", "This description", dict[str, Any])
