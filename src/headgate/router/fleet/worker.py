"""A worker as the router sees it: its address, capabilities, health, and its load from this router."""

from __future__ import annotations

from math import inf
from typing import Literal

from headgate.contract.fleet import Role

Kind = Literal["unknown", "headgate", "sglang", "vllm", "openai"]
WorkerState = Literal["starting", "ready", "paused", "draining", "outdated", "stopping", "down"]


class Worker:
    """One worker. Only the fleet changes its fields, on the event loop's thread; policies read the current values."""

    __slots__ = (
        "boot_id",
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
        "listed",
        "managed",
        "max_running",
        "models",
        "name",
        "open_until_s",
        "other_requests",
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
        self.models: frozenset[str] = frozenset()  # empty if unknown
        self.state: WorkerState = "starting"
        self.changes = 0  # number of state changes and restarts
        self.probes = 0  # number of probes that found the worker ready
        self.key: str | None = None  # API key for this worker, if it differs from the fleet's key
        self.listed = False  # whether it is in the workers file
        self.managed = False  # whether it registered itself; it is then removed when its heartbeats stop
        self.pid: int | None = None
        # Load from this router. `Workers.add_load` adds to it and `LoadShare.give_back` subtracts.
        self.in_flight = 0
        self.pending_tokens = 0  # prompt tokens of requests without a first token
        # The worker's own report, from `/v1/loads`.
        self.running = 0
        self.waiting = 0
        self.other_requests = 0  # requests in the last report that did not come through this router
        self.free_blocks = 0
        self.total_blocks = 0
        self.max_running = 0
        self.version: int | None = None  # weight version
        self.horizon_s = -inf  # on our clock; prefixes last used before this time have been evicted
        self.generation = 0  # incremented when cached KV becomes invalid because the weights changed
        self.boot_id: str | None = None  # changes at a restart, and so reveals one shorter than the probe interval
        # The circuit breaker.
        self.failures = 0  # consecutive failures
        self.successes = 0  # consecutive good probes after going down
        self.trips = 0  # times the worker went down without answering a request in between
        self.open_until_s = -inf
        self.errors = 0
        # Totals over answers that report cache hits: prompt tokens, tokens expected in the cache, tokens found there.
        self.prompt_tokens = 0
        self.expected_tokens = 0
        self.cached_tokens = 0

    def __repr__(self) -> str:
        return f"<Worker {self.name} {self.role} {self.state}, {self.in_flight} in flight>"

    @property
    def load(self) -> int:
        """The number of requests at the worker: this router's now, and all others at the last report."""
        return self.in_flight + self.other_requests

    @property
    def available(self) -> bool:
        return self.state == "ready"
