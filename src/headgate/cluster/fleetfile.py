"""The fleet file: the servers of a fleet by role, in TOML, or in JSON with the same names."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from headgate.cluster.autoscale import ScaleBounds
from headgate.errors import RequestError

Number = Annotated[int, Meta(ge=0)]


class RoleSection(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, frozen=True):
    """The servers of one role."""

    count: Number | None = None  # initial number; default: the least that autoscale allows, or 1
    autoscale: str | None = None  # LEAST:MOST
    cpus: Annotated[float, Meta(gt=0)] | None = None  # reserved by Ray for each server
    gpus: Annotated[float, Meta(ge=0)] | None = None
    serve: list[str] = []  # flags of `headgate serve` for this role; they follow those for all roles

    @property
    def bounds(self) -> ScaleBounds | None:
        return None if self.autoscale is None else ScaleBounds.of(self.autoscale, "autoscale")

    @property
    def number(self) -> int:
        if self.count is not None:
            return self.count
        return self.bounds.least if self.bounds is not None else 1


class FleetFile(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, frozen=True):
    model: str | None = None
    served_name: str | None = None
    serve: list[str] = []  # flags of `headgate serve` for all roles
    mixed: RoleSection | None = None
    prefill: RoleSection | None = None
    decode: RoleSection | None = None

    @property
    def groups(self) -> dict[str, RoleSection]:
        listed = {"mixed": self.mixed, "prefill": self.prefill, "decode": self.decode}
        return {role: group for role, group in listed.items() if group is not None}


def read_fleet_file(path: Path) -> FleetFile:
    decode = msgspec.json.decode if path.suffix == ".json" else msgspec.toml.decode
    try:
        file = decode(path.read_bytes(), type=FleetFile)
    except OSError as error:
        raise RequestError(f"the fleet file {path} cannot be read: {error.strerror}") from None
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise RequestError(f"{path}: {error}") from None
    for role, group in file.groups.items():
        try:
            bounds = group.bounds
        except RequestError as error:
            raise RequestError(f"{path}, {role}: {error}") from None
        if bounds is not None and not bounds.least <= group.number <= bounds.most:
            raise RequestError(f"{path}, {role}: count {group.number} is outside autoscale {group.autoscale}")
    return file
