"""Request bodies of operations that only a router has."""

from __future__ import annotations

from typing import Annotated, Literal, get_args

import msgspec
from msgspec import UNSET, Meta, UnsetType

from headgate.contract.limits import Seconds

Role = Literal["mixed", "prefill", "decode"]
ROLES: tuple[Role, ...] = get_args(Role)
Number = Annotated[int, Meta(ge=0, le=10_000)]


class Joining(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    url: Annotated[str, Meta(min_length=1)]
    role: Role = "mixed"
    key: str | None = None  # the key that this worker requires, if it differs from the router's worker key
    ttl_s: Seconds | None = None  # the worker is removed unless it registers again within this time
    pid: int | None = None


class ScaleRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    mixed: Number | UnsetType = UNSET
    prefill: Number | UnsetType = UNSET
    decode: Number | UnsetType = UNSET
    timeout: Seconds = 600.0

    @property
    def counts(self) -> dict[str, int]:
        asked = {role: getattr(self, role) for role in ROLES}
        return {role: number for role, number in asked.items() if number is not UNSET}
