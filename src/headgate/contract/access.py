"""Access control by path, for servers and routers.

Keys are checked before a request is routed, so all methods of a path have the same access. A path without a declared
operation requires the admin key.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from headgate.contract.operations.operation import Access, Operation
from headgate.contract.operations.table import OPERATIONS


def declared_access(operations: Iterable[Operation]) -> dict[str, Access]:
    """The access level of each path."""
    declared: dict[str, Access] = {}
    for operation in operations:
        if declared.setdefault(operation.path, operation.access) is not operation.access:
            raise ValueError(f"{operation.path} has methods with different access")
    return declared


DECLARED: Final = declared_access(OPERATIONS)

_BELOW: Final = {path.partition("{")[0]: access for path, access in DECLARED.items() if "{" in path}


def access_of(path: str) -> Access:
    """The access level of a request's percent-decoded path."""
    declared = DECLARED.get(path)
    if declared is not None:
        return declared
    return next((access for prefix, access in _BELOW.items() if path.startswith(prefix)), Access.ADMIN)
