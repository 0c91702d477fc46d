"""The kinds of faults, and the plan of a run: which fault happens when, as a function of the seed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from headgate.errors import RequestError


@dataclass(frozen=True, slots=True)
class FaultKind:
    group: str  # faults of the group "servers" are injected into one server, and never into the last healthy one
    share: float  # relative frequency
    lasts_s: tuple[float, float] = (0.0, 0.0)


KINDS = {
    "kill_server": FaultKind("servers", 1.0),
    "kill_engine": FaultKind("servers", 1.0),
    "stop_server": FaultKind("servers", 1.0, (0.5, 13.0)),
    "stop_engine": FaultKind("servers", 1.0, (0.5, 13.0)),
    "stop_across": FaultKind("servers", 0.7, (4.0, 13.0)),
    "few_files": FaultKind("servers", 1.0, (1.0, 5.0)),
    "stop_router": FaultKind("router", 0.7, (0.2, 2.0)),
    "delay": FaultKind("network", 1.0, (1.0, 6.0)),
    "stall": FaultKind("network", 1.0, (0.5, 13.0)),
    "reset": FaultKind("network", 1.0),
    "half": FaultKind("network", 1.0),
    "partition": FaultKind("network", 1.0, (0.5, 13.0)),
    "vanish": FaultKind("clients", 1.5),
    "abort": FaultKind("clients", 1.5),
    "pause_abort": FaultKind("operators", 0.7, (0.1, 1.5)),
    "pause_drain": FaultKind("operators", 0.7, (0.1, 1.5)),
    "pause_freeze": FaultKind("operators", 0.7, (0.1, 1.5)),
    "update": FaultKind("operators", 1.0),
    "roll": FaultKind("operators", 0.7),
    "bad_update": FaultKind("operators", 0.7),
    "pause_tickets": FaultKind("operators", 0.7, (0.1, 1.5)),
    "stalled_readers": FaultKind("hostile", 0.7, (5.0, 45.0)),
    "giant_prompts": FaultKind("hostile", 0.7),
    "twins": FaultKind("hostile", 1.0),
    "burst": FaultKind("hostile", 0.5),
    "forgers": FaultKind("hostile", 0.5),
}
GROUPS = tuple(dict.fromkeys(kind.group for kind in KINDS.values()))
HARMS_A_WORKER = frozenset(name for name, kind in KINDS.items() if kind.group in ("servers", "network"))


@dataclass(frozen=True, slots=True)
class PlannedFault:
    at_s: float
    kind: str
    which: float  # from 0 to 1: selects the victim and the variant
    lasts_s: float


def draw(seed: int, seconds: float, every_s: float, kinds: Sequence[str] = tuple(KINDS)) -> list[PlannedFault]:
    """Draw one fault for every `every_s` seconds."""
    rng = random.Random(seed)
    shares = [KINDS[kind].share for kind in kinds]
    faults = []
    for number in range(1, int(seconds / every_s) + 1):
        (kind,) = rng.choices(kinds, shares)
        shortest_s, longest_s = KINDS[kind].lasts_s
        # Most faults are short; the longest exceed every timeout of the router.
        lasts_s = shortest_s + (longest_s - shortest_s) * rng.random() ** 2
        faults.append(PlannedFault(number * every_s, kind, rng.random(), lasts_s))
    return faults


def chosen(names: Sequence[str]) -> tuple[str, ...]:
    """Return the kinds of faults with these names or in these groups; all kinds if `names` is empty."""
    for name in names:
        if name not in KINDS and name not in GROUPS:
            raise RequestError(f"there is no fault {name!r}; there are {', '.join((*GROUPS, *KINDS))}")
    return tuple(kind for kind in KINDS if not names or kind in names or KINDS[kind].group in names)
