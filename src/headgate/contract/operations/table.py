"""All operations, and subsets of them. Defining an `Operation` in one of these modules declares it."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import Final

from headgate.contract.operations import control, fleet, generation, pages, sglang, status, trl, vllm
from headgate.contract.operations.operation import Operation, Relay


def _declared_in(module: ModuleType) -> Iterator[Operation]:
    return (value for value in vars(module).values() if isinstance(value, Operation))


# Routing tables keep this order, so the operations that are called most come first.
OPERATIONS: Final[tuple[Operation, ...]] = (
    *(
        each
        for module in (generation, status, control, fleet, sglang, vllm, trl, pages)
        for each in _declared_in(module)
    ),
    *pages.ASSETS,
)

ON_SERVERS: Final = tuple(operation for operation in OPERATIONS if operation.on_server)
ON_ROUTERS: Final = tuple(operation for operation in OPERATIONS if operation.fan_out is not None)

# Paths whose requests count against the limit of requests in flight.
GENERATING: Final = frozenset(operation.path for operation in OPERATIONS if operation.generates)
# Paths that a router's data path serves; its control plane serves all others.
RELAYED: Final = frozenset(operation.path for operation in ON_ROUTERS if isinstance(operation.fan_out, Relay))
# Paths of generating requests that start anew when another worker takes them over.
RESTARTED: Final = frozenset(operation.path for operation in ON_ROUTERS if operation.restarts)
