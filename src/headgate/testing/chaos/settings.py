"""The settings of a chaos run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headgate.errors import RequestError
from headgate.testing.chaos.plan import KINDS

WARM_UP_S = (5.0, 30.0)  # the warm-up takes a tenth of the run, within these bounds


@dataclass(frozen=True, slots=True, kw_only=True)
class ChaosSettings:
    seconds: float = 600.0
    every_s: float = 2.0
    clients: int = 64
    servers: int = 3
    seed: int = 0
    kinds: Sequence[str] = tuple(KINDS)

    def __post_init__(self) -> None:
        for name, least in (("clients", 1), ("servers", 2)):
            if getattr(self, name) < least:
                raise RequestError(f"--{name} must be at least {least}")
        if not (self.seconds > 0 and self.every_s > 0):
            raise RequestError("--minutes and --every must be above 0")

    @property
    def counts(self) -> dict[str, int]:
        """The number of servers by role: one prefill server, all others mixed."""
        return {"mixed": self.servers - 1, "prefill": 1}

    @property
    def warm_up_s(self) -> float:
        least, most = WARM_UP_S
        return min(max(self.seconds / 10, least), most)
