"""A worker as the router sees it: where it is, what it can do, how it fares, and how much of its work is ours."""

from __future__ import annotations

from math import inf
from typing import Literal

from headgate.contract.fleet import Role

Kind = Literal["unknown", "headgate", "sglang", "vllm", "openai"]
WorkerState = Literal["starting", "ready", "paused", "draining", "outdated", "stopping", "down"]


class Worker:
    """Changed only by its fleet, in the event loop's thread; policies read it as a snapshot."""

    __slots__ = (
        "cached_tokens",
        "changes",
        "errors",
        "expected_tokens",
        "failures",
        "free_blocks",
        "generation",
        "horizon_s",
        "in_flight",
        "key",
        "kind",
        "life",
        "listed",
        "managed",
        "max_running",
        "models",
        "name",
        "open_until_s",
        "others",
        "pending_tokens",
        "pid",
        "probes",
        "prompt_tokens",
        "role",
        "running",
        "state",
        "successes",
        "total_blocks",
        "trips",
        "url",
        "version",
        "waiting",
    )

    def __init__(self, url: str, role: Role = "mixed", *, name: str | None = None) -> None:
        self.url = url
        self.name = name or url
        self.role: Role = role
        self.kind: Kind = "unknown"
        self.models: frozenset[str] = frozenset()  # empty: not known
        self.state: WorkerState = "starting"
        self.changes = 0  # of its state
        self.probes = 0  # that have found it ready
        self.key: str | None = None  # what it wants to see, if not what all do
        self.listed = False  # in the file of workers
        self.managed = False  # registered by itself, and gone when its heartbeats stop
        self.pid: int | None = None
        # Ours, taken and given back by `Workers.taking`.
        self.in_flight = 0
        self.pending_tokens = 0  # of prompts whose first token has not come
        # Its own report, from `/v1/loads`.
        self.running = 0
        self.waiting = 0
        self.others = 0  # of its requests, those that came another way than through us, at the last report
        self.free_blocks = 0
        self.total_blocks = 0
        self.max_running = 0
        self.version: int | None = None  # of its weights
        self.horizon_s = -inf  # our clock: prefixes last used before this have left its cache
        self.generation = 0  # grows when it restarts
        self.life: str | None = None  # what it calls this life of its; another one after a restart
        # The circuit.
        self.failures = 0  # in a row
        self.successes = 0  # in a row, after failures
        self.trips = 0  # times it went down without an answer in between
        self.open_until_s = -inf
        self.errors = 0
        # Prompts of answers that tell: all their tokens, those we expected in its cache, and those that were there.
        self.prompt_tokens = 0
        self.expected_tokens = 0
        self.cached_tokens = 0

    def __repr__(self) -> str:
        return f"<Worker {self.name} {self.role} {self.state}, {self.in_flight} in flight>"

    @property
    def load(self) -> int:
        """Requests it has, as far as we know: ours now, and others' at its last report."""
        return self.in_flight + self.others

    @property
    def available(self) -> bool:
        return self.state == "ready"
