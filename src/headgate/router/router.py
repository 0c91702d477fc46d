"""The router: what comes in at one address goes to one of many workers.

It owns the fleet, the prefix index, the requests in flight and the limits on them. It decides who gets a request; `relay`
carries the bytes, `monitor` watches the workers, `control` speaks for the whole fleet.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from itertools import count
from math import inf
from typing import TYPE_CHECKING

from headgate.config import RouteConfig
from headgate.contract import ids
from headgate.contract.errors import MethodNotAllowed
from headgate.contract.keys import Caller, Keys, is_loopback
from headgate.contract.operations.table import RELAYED
from headgate.edge.admission import Admission
from headgate.edge.departures import Departures
from headgate.edge.sharing import Sharing
from headgate.edge.tenant_store import TenantStore
from headgate.errors import DuplicateId, RequestError, Unavailable
from headgate.protocol.command import PauseMode
from headgate.protocol.output import Cause
from headgate.router.control.fan_out import WorkerCalls
from headgate.router.counters import RouterCounters
from headgate.router.data_path.downstream import Answering, Connections, Downstream, Head, HttpRequest, error_answer
from headgate.router.data_path.fast_path import PYTHON, FastPath
from headgate.router.data_path.forwarding import Forwarder
from headgate.router.data_path.request_info import RequestInfo, read_ask
from headgate.router.data_path.upstream import Headers
from headgate.router.exchange.attempt import Answered, Lost, Outcome
from headgate.router.exchange.placement import Placement
from headgate.router.exchange.prefill import PREFILL
from headgate.router.exchange.relay import Exchange, NoWorker
from headgate.router.exchange.retry_state import RetryBudget, RetryState
from headgate.router.exchange.timeline import MovedRequest, MovedRequests
from headgate.router.fleet.fleet import Half, Workers
from headgate.router.fleet.policy import POLICIES, Policy
from headgate.router.fleet.prefix_hits import note as note_hits
from headgate.router.fleet.prefix_index import Match, Path, PrefixIndex, WorkerPrefix
from headgate.router.fleet.scaler import Scaler
from headgate.router.fleet.worker import Worker

if TYPE_CHECKING:
    from headgate.router.data_path.bridge import Bridge

log = logging.getLogger(__name__)

JOURNALLED = frozenset(("/v1/chat/completions", "/v1/completions"))  # our workers show life while they compute these
EXPORTING = JOURNALLED | {"/v1/responses"}  # and take `export_kv` and `kv_ticket` with these
KEEP_ALIVE_S = 10.0
LOOK_EVERY_S = 0.1  # at most, on behalf of clients that would hear of a pause
AWAITED = ("starting", "stopping", "down", "outdated", "ready")  # states of workers that are worth waiting for

Key = tuple[str, str, int]  # tenant, id, and the number of a retry that attaches to the running request; else 0
KEPT_KEYS = 10_000  # Idempotency-Keys, each with the worker that has its answer


def _missing(ask: RequestInfo, found: WorkerPrefix | None) -> int:
    """Tokens of the prompt that are not in a worker's cache, as far as we know."""
    return ask.tokens if found is None else int(ask.tokens * (1 - found.size / len(ask.prompt)))


def _was_kept_out(exchange: Exchange, retry_state: RetryState) -> bool:
    """Whether a pause of the fleet has kept it, and a worker that has not heard of its end has refused it."""
    return exchange.kept and retry_state.was_refused_as_paused


def _may_return(exchange: Exchange, retry_state: RetryState) -> bool:
    """Whether a worker that was tried may be asked again, if there is no other."""
    return retry_state.may_return or retry_state.was_cut or _was_kept_out(exchange, retry_state)


class Router:
    def __init__(self, config: RouteConfig, *, seed: int | None = None, fast_path: FastPath = PYTHON) -> None:
        self.config = config
        self.read_whole = fast_path.read_whole
        self._peek = fast_path.peek
        self.loop = asyncio.get_running_loop()
        self.random = random.Random(seed)
        self.fleet = Workers(connect_timeout_s=config.connect_timeout_s, clock=self.loop.time, fast_path=fast_path)
        self.fleet.on_lost = self._worker_lost
        self.fleet.on_change = self._fleet_changed
        self.index = PrefixIndex(config.index_nodes, fast_path)
        self.admission = Admission(config.max_in_flight, config.max_queue, Sharing(config.api_keys))
        self.retry_budget = RetryBudget()
        self.forwarder = Forwarder(self.fleet, self.credentials)
        self.worker_calls = WorkerCalls(self.fleet, self.credentials, self.fleet_changed)
        self.keys = Keys(config.api_keys, config.admin_key, exposed=not is_loopback(config.host))
        self.live: dict[Key, Exchange] = {}
        self.moved = MovedRequests()
        self.counters = RouterCounters()
        self.departures = Departures(log)
        self.connections = Connections(
            self.handle, config.max_body_bytes, config.client_stall_timeout_s, self.fleet.outbox, fast_path
        )
        self.draining = False
        self.holding = False  # the whole fleet is being paused, or is: what a worker ends goes nowhere else
        self.queueing = False  # and new requests wait until that is over
        self._emptied = asyncio.Event()  # while draining: nothing is in flight any more
        self._policies: dict[Half, Policy] = {
            "mixed": POLICIES[config.policy](),
            "prefill": POLICIES[config.prefill_policy](),
            "decode": POLICIES[config.decode_policy](),
        }
        self._ids = ids.Ids()
        self._retries = count(1)
        self._keyed: TenantStore[Worker] = TenantStore(KEPT_KEYS)  # by Idempotency-Key
        self._changed = asyncio.Event()
        self._looking = asyncio.Lock()
        self._looked_s = -inf
        self.bridge: Bridge | None = None
        self.probe: Callable[[Worker], Awaitable[None]] | None = None  # of a worker, now
        self.scaler: Scaler | None = None  # who has started the workers together with us
        self._deadline: asyncio.Timeout | None = None

    # -- requests in ------------------------------------------------------------------

    def handle(self, client: Downstream, request: HttpRequest) -> Answering | None:
        head, path = request.head, request.path
        if path not in RELAYED:
            assert self.bridge is not None
            return self.bridge(client, request)
        try:
            caller = head.memo.get(Caller)
            if caller is None:
                caller = head.memo[Caller] = self._caller(head)
            return self._relay(client, request, path, caller.tenant)
        except RequestError as error:
            client.write(error_answer(error, [(ids.HEADER, self._name(head).encode())]))
            client.finished()
            return None

    def _caller(self, head: Head) -> Caller:
        """What the gate of the control plane does, in the same order."""
        ids.given(head.headers)
        caller = self.keys.caller(head.path, head.headers)
        if head.method != "POST":
            raise MethodNotAllowed(f"{head.path} takes POST, not {head.method}", "POST")
        return caller

    def _name(self, head: Head) -> str:
        """The id of a request that is refused."""
        try:
            return ids.given(head.headers) or self._ids.draw()
        except RequestError:
            return self._ids.draw()

    def _relay(self, client: Downstream, request: HttpRequest, path: str, tenant: str) -> Answering:
        if self.draining:
            raise Unavailable("the router is shutting down", code="shutting_down")
        session = request.header(b"x-session-id") or request.header(b"x-routing-key")
        named = session.decode("latin-1") if session else None
        ask = read_ask(path, request.body, session=named, tenant=tenant, peek=self._peek)
        exchange = Exchange(self, client, request, ask, tenant)
        self._register(exchange)
        self.retry_budget.earn()
        self.counters.requests += 1
        exchange.begin()
        return exchange

    def _register(self, exchange: Exchange) -> None:
        """Enter it under its tenant and its id, which is drawn if the client gave none."""
        id = exchange.ask.request_id or _id_header(exchange.request)
        exchange.id = self._ids.draw() if id is None else checked_id(id)
        key = exchange.tenant, exchange.id, 0
        if key in self.live:
            if exchange.request.header(b"idempotency-key") is None:
                raise DuplicateId(f"a request with the id {exchange.id!r} is running", param="request_id")
            # A retry, which its worker will attach to the running request.
            key = exchange.tenant, exchange.id, next(self._retries)
        exchange.key = key
        self.live[key] = exchange

    def exchange_ended(self, exchange: Exchange) -> None:
        if self.live.get(exchange.key) is exchange:
            del self.live[exchange.key]
            if exchange.departures:
                self.moved.keep(exchange.tenant, exchange.id, MovedRequest(exchange.began, exchange.departures))
            if self.draining and not self.live:
                self._emptied.set()

    # -- who gets it --------------------------------------------------------------------

    async def place(self, exchange: Exchange, retry_state: RetryState) -> Placement | None:
        """Somebody for the next attempt; None if waiting for one is no use."""
        backoff_s = retry_state.backoff_s
        while not self.holding or await self._resumed(exchange, retry_state):
            if backoff_s:
                await asyncio.sleep(backoff_s)
                backoff_s = 0.0
            elif (placement := await self._wait_for_one(exchange, retry_state)) is not None or not self.holding:
                return placement
        return None

    async def _resumed(self, exchange: Exchange, retry_state: RetryState) -> bool:
        """Whether this request has waited until the fleet was resumed; otherwise its client is answered now."""
        while self.holding and exchange.waits_out_a_pause(retry_state, queueing=self.queueing):
            if not await self.fleet_changed(KEEP_ALIVE_S):
                exchange.keep_alive()
        return not self.holding

    async def admit(self, exchange: Exchange) -> None:
        """A place among those in flight for one that has not been tried, as soon as there is one."""
        if self.holding and not (self.queueing or exchange.held):
            raise self.no_worker()
        await self.admission.enter(exchange.tenant, exchange.keep_alive, KEEP_ALIVE_S)

    def hold(self, *, queue: bool, mode: PauseMode = "freeze") -> tuple[Exchange, ...]:
        """Send nothing to any worker: from this moment on the whole fleet is paused. Returns what was accepted before."""
        self.holding, self.queueing = True, queue
        accepted = tuple(self.live.values())
        for exchange in accepted:
            exchange.hold(mode)
        self._fleet_changed()
        return accepted

    def release(self) -> None:
        for exchange in self.live.values():
            if exchange.held is not None or self.queueing:
                exchange.release()
        self.holding = self.queueing = False
        self._fleet_changed()

    async def _wait_for_one(self, exchange: Exchange, retry_state: RetryState) -> Placement | None:
        """Somebody now, or as soon as there is one; None also when the fleet is held meanwhile."""
        with suppress(TimeoutError):
            async with asyncio.timeout(self.config.patience_s):
                while not self.holding:
                    placement = self.choose(exchange, retry_state)
                    if placement is None and self._is_in_doubt(retry_state):
                        await self._look_again(retry_state)
                        continue
                    if placement is not None or not self._worth_waiting(exchange, retry_state):
                        return placement
                    if not await self.fleet_changed(KEEP_ALIVE_S):
                        exchange.keep_alive()
        return None

    def _is_in_doubt(self, retry_state: RetryState) -> bool:
        """Whether its client would hear of a pause that was not asked for here, from a probe that may be old by now."""
        known = retry_state.last is not None or any(worker.state == "paused" for worker in self.fleet)
        return known and retry_state.would_report_a_pause and not retry_state.probed

    async def _look_again(self, retry_state: RetryState) -> None:
        """Ask the workers how they are. In an update of one after another, those that had their turn run again."""
        retry_state.probed = True
        asked_s = self.loop.time()
        async with self._looking:
            if self._looked_s < asked_s:  # or else another request has had them asked meanwhile
                await asyncio.sleep(self._looked_s + LOOK_EVERY_S - self.loop.time())
                self._looked_s = self.loop.time()
                await self._look()
        for worker in self.fleet:
            if worker.available:
                retry_state.ask_again(worker)

    async def _look(self) -> None:
        assert self.probe is not None
        doubtful = [worker for worker in self.fleet if worker.state in ("ready", "paused")]
        await asyncio.gather(*map(self.probe, doubtful))

    def _worth_waiting(self, exchange: Exchange, retry_state: RetryState) -> bool:
        """A worker may come up; one that is paused says so, and the client should hear it."""
        if self.fleet.rolling and not retry_state.was_full:
            return True  # the worker that is being updated is back in a moment
        if exchange.overtaken:
            return True
        if retry_state.rescheduled:  # room comes back, also at a worker that somebody else holds for a moment
            return any(worker.state in (*AWAITED, "paused") for worker in self.fleet)
        if retry_state.last is not None and not (retry_state.may_return or _was_kept_out(exchange, retry_state)):
            # A part of an answer is worth more than that: another worker may be back in a moment.
            others = (worker for worker in self.fleet if worker not in retry_state.excluded)
            return retry_state.was_cut and any(worker.state in ("starting", "stopping", "down") for worker in others)
        # An answer whose worker was lost has nothing to tell of a pause, which others may be in. A worker that a request
        # which was kept in a pause finds paused is about to be known as resumed.
        awaited = (*AWAITED, "paused") if retry_state.was_lost or exchange.kept else AWAITED
        return any(worker.state in awaited for worker in self.fleet)

    def choose(self, exchange: Exchange, retry_state: RetryState | None = None) -> Placement | None:
        """Somebody who is there, of whose load this request is a part from now on; `retry_state`: after what was tried."""
        ask, going_on = exchange.ask, bool(exchange.moves and exchange.journal.choices)
        half: Half = "decode" if self.fleet.disaggregated else "mixed"
        if retry_state is None:
            workers = self.fleet.candidates(half, ask.model)
        else:
            workers = self._left(half, exchange, retry_state, going_on)
        if not workers:
            return None
        path, match = self._look_up(ask, half)
        key = exchange.request.header(b"idempotency-key")
        worker, reason = None if key is None else self._keyed_worker(exchange.tenant, key, workers), "idempotency_key"
        if worker is None:
            worker = (
                workers[0] if len(workers) == 1 else self._policies[half].choose(workers, ask, match, self.random)
            )
            reason = "resume" if going_on else "cache" if worker in match.found else "load"
        splits = half == "decode" and not going_on and exchange.request.path in EXPORTING
        prefill = self._prefiller(worker, ask, match, retry_state) if splits else None
        visits = [] if path is None else [self.index.insert(path, worker)]
        if path is not None and prefill is not None:
            visits.append(self.index.insert(path, prefill))
        if key is not None:
            self._keyed.put(
                exchange.tenant, key, worker
            )  # now: a client that leaves may ask again before it has ended
        self.counters.chosen[reason] += 1
        found = match.found.get(worker)
        return Placement(self.fleet, worker, _missing(ask, found), reason, found, visits, prefill)

    def _left(self, half: Half, exchange: Exchange, retry_state: RetryState, going_on: bool) -> tuple[Worker, ...]:
        """Workers that may be asked after what has been tried."""
        model = exchange.ask.model
        workers = self._able(half, model, retry_state.excluded, going_on)
        if not workers and not retry_state.rescheduled:
            workers = self._able("any", model, retry_state.excluded, going_on)  # rather than back to who has failed
        if not workers and (self.fleet.rolling or _may_return(exchange, retry_state)):
            # Workers that failed, or that were full or paused then, may be well again.
            workers = self._able(half, model, retry_state.unwilling, going_on)
            if not workers and not retry_state.rescheduled:
                workers = self._able("any", model, retry_state.unwilling, going_on)
        return workers

    def _look_up(self, ask: RequestInfo, half: Half) -> tuple[Path | None, Match]:
        if half == "mixed" and not self._policies[half].uses_index:
            return None, Match({}, [])
        path = self.index.path(ask.root, ask.prompt, chat=ask.chat)
        return path, self.index.match(path)

    def _able(
        self, half: Half, model: str | None, excluded: set[Worker] | tuple[()], going_on: bool
    ) -> tuple[Worker, ...]:
        workers = self.fleet.candidates(half, model, excluded)
        if going_on:
            return tuple(worker for worker in workers if worker.kind == "headgate")
        return workers

    def _keyed_worker(self, tenant: str, key: bytes, workers: tuple[Worker, ...]) -> Worker | None:
        """Who has the answer of an Idempotency-Key, or makes it."""
        worker = self._keyed.get(tenant, key)
        return worker if worker in workers else None

    def _prefiller(
        self, worker: Worker, ask: RequestInfo, match: Match, retry_state: RetryState | None
    ) -> Worker | None:
        """Somebody else for the prompt, unless it is short or `worker` has most of it."""
        missing = _missing(ask, match.found.get(worker))
        if worker.kind != "headgate" or ask.n > 1 or missing < self.config.disaggregate_tokens:
            return None
        others = tuple(
            other
            for other in self.fleet.candidates(
                "prefill", ask.model, retry_state.excluded if retry_state is not None else ()
            )
            if other is not worker
            and other.kind == "headgate"
            and other.role != "decode"
            and other.version == worker.version  # KV of other weights would be computed for nothing
        )
        return self._policies["prefill"].choose(others, ask, match, self.random) if others else None

    def no_worker(self) -> RequestError:
        states = Counter(worker.state for worker in self.fleet)
        if self.holding or (states["paused"] and not states["ready"]):
            return Unavailable("the fleet is paused; try again when it has been resumed", code="paused")
        told = ", ".join(f"{number} {state}" for state, number in sorted(states.items()))
        return NoWorker(f"no worker can take this request ({told or 'there are none'})")

    # -- how it went ----------------------------------------------------------------------

    def attempt_ended(self, exchange: Exchange, placement: Placement, outcome: Outcome) -> None:
        worker = placement.worker
        self.counters.attempt(worker, outcome)
        if isinstance(outcome, Lost):
            placement.undo()
            # A worker may have given up a client that did not read; one that is late for a deadline may be busy.
            if not (exchange.slow or exchange.graces):
                self.fleet.failed(worker, outcome.why)
        elif not (isinstance(outcome, Answered) and outcome.status >= 500):
            self.fleet.answered(worker)
            note_hits(exchange.ask, exchange.journal, placement, outcome)

    def failed(self, exchange: Exchange, error: RequestError) -> None:
        self.counters.refused[error.code] += 1
        log.debug("%s: %s", exchange.id, error.message)

    def client_left(self, exchange: Exchange) -> None:
        cause: Cause = "client_stalled" if exchange.client.stalled else "client_disconnect"
        self.counters.left[cause] += 1
        if exchange.ask.stream:
            self.departures.note(exchange.client.peer, exchange.id, exchange.journal.tokens, cause)

    def _worker_lost(self, worker: Worker, why: str) -> None:
        for exchange in tuple(self.live.values()):
            attempt = exchange.attempt
            if attempt is not None and attempt.worker is worker and attempt.outcome is None:
                attempt.fail(why)
            if exchange.prefill_request is not None and exchange.prefill_request.worker is worker:
                exchange.prefill_request.give_up(why)

    def last_byte_s(self, worker: Worker) -> float:
        """When something last came from that worker in answer to a request."""
        now_s = self.loop.time()
        return max(
            (
                exchange.attempt.last_data_s(now_s)
                for exchange in self.live.values()
                if exchange.attempt is not None and exchange.attempt.worker is worker and exchange.attempt.status
            ),
            default=-inf,
        )

    # -- time -------------------------------------------------------------------------------

    def _fleet_changed(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def fleet_changed(self, timeout_s: float) -> bool:
        """Wait until a worker joins, leaves or changes its state; False if none does in time."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()
        except TimeoutError:
            return False
        return True

    async def sweep(self) -> None:
        """Once a second: give up what has been silent for too long."""
        while True:
            await asyncio.sleep(1.0)
            now_s = self.loop.time()
            self.connections.sweep(now_s)
            self.fleet.sweep()
            for exchange in tuple(self.live.values()):
                self._look_at(exchange, now_s)

    def _look_at(self, exchange: Exchange, now_s: float) -> None:
        attempt = exchange.attempt
        if attempt is None or attempt.outcome is not None:
            return
        heard_s = attempt.last_data_s(now_s)
        if exchange.full:
            return
        shows_life = attempt.status or (attempt.worker.kind == "headgate" and exchange.request.path in JOURNALLED)
        limit_s = self.config.idle_timeout_s if shows_life else self.config.first_byte_timeout_s
        if now_s - heard_s > limit_s:
            attempt.fail(f"it has said nothing for {limit_s:g} s")

    # -- the end ------------------------------------------------------------------------------

    async def drain(self) -> None:
        """Take nothing new, and let what there is end, for a while."""
        self.draining = True
        if not self.live:
            self._emptied.set()
        self.connections.close()
        log.info("stopping: %d requests may finish within %g s", len(self.live), self.config.drain_timeout_s)
        with suppress(TimeoutError):
            async with asyncio.timeout(self.config.drain_timeout_s) as self._deadline:
                await self._emptied.wait()

    def hurry(self) -> None:
        """Make the deadline now, unless it has passed."""
        if self._deadline is not None:
            with suppress(RuntimeError):
                self._deadline.reschedule(self.loop.time())

    async def close(self) -> None:
        """End what is still there; clients are told."""
        exchanges = tuple(self.live.values())
        ends = [exchange.when_over() for exchange in exchanges]
        for exchange in exchanges:
            exchange.cancel()
        await asyncio.gather(*ends)
        if self.bridge is not None:
            await self.bridge.close()
        self.connections.close()
        self.connections.abort()
        self.fleet.close()

    # -- who we are to workers ----------------------------------------------------------------

    def credentials(self, worker: Worker, headers: Headers, tenant: str | None) -> Headers:
        """The client's own key where workers check keys; else the worker's, and in whose name.

        `tenant` is the caller's, empty without a key; None is the router itself, or an admin of the fleet.
        """
        ours = worker.kind in ("headgate", "unknown")
        key = worker.key or (self.config.worker_key if ours else None)
        if self.config.api_keys or self.config.admin_key or key:
            headers = [header for header in headers if header[0] not in (b"authorization", b"x-api-key")]
        if key is not None:
            headers.append((b"authorization", b"Bearer " + key.encode()))
        if tenant is not None and ours:
            headers.append((b"x-headgate-tenant", tenant.encode()))
        return headers


def _id_header(request: HttpRequest) -> str | None:
    value = request.header(ids.HEADER)
    return None if value is None else value.decode("latin-1")


def checked_id(id: str) -> str:
    if ids.checked(id, "request_id").endswith(PREFILL):
        raise RequestError(f"must not end with {PREFILL}, which names the prefill of a request", param="request_id")
    return id
