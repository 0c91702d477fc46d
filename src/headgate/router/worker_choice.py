"""Selects the worker for a request: by Idempotency-Key, or by the policy for the wanted role.

In a disaggregated fleet, a decode worker answers. If the prompt is long and mostly missing from that worker's cache,
a prefill worker computes it. From then on, the load of the chosen workers and the prefix index include the request
(`Placement`).
"""

from __future__ import annotations

import random
from typing import Final

from headgate.config import RouteConfig
from headgate.edge.tenant_store import TenantStore
from headgate.router.counters import RouterCounters
from headgate.router.data_path.request_info import RequestInfo
from headgate.router.exchange.placement import Placement
from headgate.router.exchange.relay import Exchange
from headgate.router.exchange.retry_state import RetryState
from headgate.router.fleet.fleet import WantedRole, Workers
from headgate.router.fleet.policy import POLICIES, Policy
from headgate.router.fleet.prefix_index import Match, Path, PrefixIndex, WorkerPrefix
from headgate.router.fleet.worker import Worker

# Paths on which Headgate workers accept `export_kv` and `kv_ticket`.
EXPORTING: Final = frozenset(("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"))
MAX_KEYS: Final = 10_000  # most remembered Idempotency-Keys, each with the worker that has its answer


class WorkerChooser:
    def __init__(
        self,
        config: RouteConfig,
        fleet: Workers,
        index: PrefixIndex,
        counters: RouterCounters,
        rng: random.Random,
    ) -> None:
        self._config = config
        self._fleet = fleet
        self._index = index
        self._counters = counters
        self._random = rng
        self._policies: dict[WantedRole, Policy] = {
            "mixed": POLICIES[config.policy](),
            "prefill": POLICIES[config.prefill_policy](),
            "decode": POLICIES[config.decode_policy](),
        }
        self._keyed: TenantStore[Worker] = TenantStore(MAX_KEYS)  # Idempotency-Key -> worker

    def choose(self, exchange: Exchange, retry_state: RetryState | None = None) -> Placement | None:
        """Return a placement on a ready worker; None if there is none. `retry_state` has the earlier attempts."""
        info, resuming = exchange.info, bool(exchange.moves and exchange.journal.choices)
        role: WantedRole = "decode" if self._fleet.disaggregated else "mixed"
        if retry_state is None:
            workers = self._fleet.candidates(role, info.model)
        else:
            workers = self._remaining(role, exchange, retry_state, resuming)
        if not workers:
            return None
        path, match = self._match_prefix(info, role)
        key = exchange.request.header(b"idempotency-key")
        worker, reason = None if key is None else self._keyed_worker(exchange.tenant, key, workers), "idempotency_key"
        if worker is None:
            worker = (
                workers[0] if len(workers) == 1 else self._policies[role].choose(workers, info, match, self._random)
            )
            reason = "resume" if resuming else "cache" if worker in match.found else "load"
        splits = role == "decode" and not resuming and exchange.request.path in EXPORTING
        prefill = self._prefill_worker(worker, info, match, retry_state) if splits else None
        visits = [] if path is None else [self._index.insert(path, worker)]
        if path is not None and prefill is not None:
            visits.append(self._index.insert(path, prefill))
        if key is not None:
            # Stored before the request ends, because a client that disconnects may retry before that.
            self._keyed.put(exchange.tenant, key, worker)
        self._counters.chosen[reason] += 1
        found = match.found.get(worker)
        return Placement(self._fleet, worker, _missing_tokens(info, found), reason, found, visits, prefill)

    def _remaining(
        self, role: WantedRole, exchange: Exchange, retry_state: RetryState, resuming: bool
    ) -> tuple[Worker, ...]:
        """Return the candidates for an attempt that follows earlier ones."""
        model = exchange.info.model
        workers = self._candidates(role, model, retry_state.excluded, resuming)
        if not workers and not retry_state.rescheduled:
            # A worker of any role is preferred to one that has failed.
            workers = self._candidates("any", model, retry_state.excluded, resuming)
        if not workers and (self._fleet.rolling or _may_return(exchange, retry_state)):
            # Workers that failed, or that were full or paused, may have recovered.
            workers = self._candidates(role, model, retry_state.unwilling, resuming)
            if not workers and not retry_state.rescheduled:
                workers = self._candidates("any", model, retry_state.unwilling, resuming)
        return workers

    def _candidates(
        self, role: WantedRole, model: str | None, excluded: set[Worker] | tuple[()], resuming: bool
    ) -> tuple[Worker, ...]:
        workers = self._fleet.candidates(role, model, excluded)
        if resuming:
            return tuple(worker for worker in workers if worker.kind == "headgate")
        return workers

    def _match_prefix(self, info: RequestInfo, role: WantedRole) -> tuple[Path | None, Match]:
        if role == "mixed" and not self._policies[role].uses_index:
            return None, Match({}, [])
        path = self._index.path(info.root, info.prompt, chat=info.chat)
        return path, self._index.match(path)

    def _keyed_worker(self, tenant: str, key: bytes, workers: tuple[Worker, ...]) -> Worker | None:
        """Return the candidate that has or computes the answer for an Idempotency-Key; None if there is none."""
        worker = self._keyed.get(tenant, key)
        return worker if worker in workers else None

    def _prefill_worker(
        self, worker: Worker, info: RequestInfo, match: Match, retry_state: RetryState | None
    ) -> Worker | None:
        """Return another worker to compute the prompt; None if the prompt is short or mostly cached by `worker`."""
        missing = _missing_tokens(info, match.found.get(worker))
        if worker.kind != "headgate" or info.n > 1 or missing < self._config.disaggregate_tokens:
            return None
        others = tuple(
            other
            for other in self._fleet.candidates(
                "prefill", info.model, retry_state.excluded if retry_state is not None else ()
            )
            if other is not worker
            and other.kind == "headgate"
            and other.role != "decode"
            and other.version == worker.version  # KV of other weights cannot be used
        )
        return self._policies["prefill"].choose(others, info, match, self._random) if others else None


def _missing_tokens(info: RequestInfo, found: WorkerPrefix | None) -> int:
    """Return the number of prompt tokens that are not in a worker's cache, as far as the router knows."""
    return info.tokens if found is None else int(info.tokens * (1 - found.size / len(info.prompt)))


def was_kept_out(exchange: Exchange, retry_state: RetryState) -> bool:
    """Whether the request waited through a pause of the fleet and was then refused by a worker not yet resumed."""
    return exchange.kept and retry_state.was_refused_as_paused


def _may_return(exchange: Exchange, retry_state: RetryState) -> bool:
    """Whether a worker that was tried may be tried again, if there is no other."""
    return retry_state.may_return or retry_state.was_cut or was_kept_out(exchange, retry_state)
