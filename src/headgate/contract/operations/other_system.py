"""Declares operations that are compatible with another system's API."""

from __future__ import annotations

from typing import Any, Literal

from headgate.contract.operations.operation import GENERATED, Access, FanOut, Operation


def named_by(
    system: str,
    method: Literal["GET", "POST", "DELETE"],
    path: str,
    access: Access,
    fan_out: FanOut | None,
    *,
    body: Any = None,
    answer: Any = Any,
    generates: bool = False,
    on_server: bool = True,
    restarts: bool = False,
) -> Operation:
    return Operation(
        method=method,
        path=path,
        summary=f"Compatible with {system}",
        body=body,
        answer=answer,
        errors=GENERATED,
        access=access,
        fan_out=fan_out,
        generates=generates,
        on_server=on_server,
        restarts=restarts,
    )
