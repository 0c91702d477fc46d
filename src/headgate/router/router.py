"""The router: distributes the requests that arrive at one address over many workers.

It owns the fleet, the prefix index, the requests in flight and the limits on them. `worker_choice` selects a worker
for a request, `exchange` relays the bytes, `fleet/monitor` probes the workers, and `control` implements calls to the
whole fleet.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from itertools import count
from math import inf
from typing import TYPE_CHECKING

import msgspec

from headgate.config import SYSTEM_CAS, RouteConfig
from headgate.contract import ids
from headgate.contract.errors import MethodNotAllowed
from headgate.contract.keys import Keys, is_loopback
from headgate.contract.operations.table import RELAYED
from headgate.edge.admission import Admission
from headgate.edge.cors import Cors
from headgate.edge.departures import Departures
from headgate.edge.sharing import Sharing
from headgate.errors import DuplicateId, RequestError, Unavailable
from headgate.protocol.command import PauseMode
from headgate.router.control.fan_out import WorkerCalls
from headgate.router.counters import RouterCounters
from headgate.router.data_path.downstream import Answering, Connections, Downstream, Head, HttpRequest, error_answer
from headgate.router.data_path.fast_path import PYTHON, FastPath
from headgate.router.data_path.forwarding import Forwarder
from headgate.router.data_path.request_info import read_request_info
from headgate.router.data_path.upstream import Headers
from headgate.router.exchange.attempt import Answered, Lost, Outcome
from headgate.router.exchange.placement import Placement
from headgate.router.exchange.prefill import PREFILL
from headgate.router.exchange.relay import EndedExchange, Exchange, NoWorker
from headgate.router.exchange.retry_state import RetryBudget, RetryState
from headgate.router.exchange.timeline import MovedRequest, MovedRequests
from headgate.router.fleet.fleet import Workers
from headgate.router.fleet.prefix_hits import record_hits
from headgate.router.fleet.prefix_index import PrefixIndex
from headgate.router.fleet.scaler import Scaler
from headgate.router.fleet.worker import Worker
from headgate.router.worker_choice import WorkerChooser, was_kept_out
from headgate.tls import client_context

if TYPE_CHECKING:
    from headgate.router.data_path.bridge import Bridge

log = logging.getLogger(__name__)

# Headgate workers send keep-alives while they compute these.
JOURNALLED = frozenset(("/v1/chat/completions", "/v1/completions", "/v1/messages"))
KEEP_ALIVE_S = 10.0
SESSION_HEADERS = (b"x-session-id", b"x-smg-routing-key", b"x-routing-key")  # the first one given counts
ENDED_KEPT = 1000  # how many ended requests the dashboard may show
SUMMARIES_PER_S = 100
REFRESH_INTERVAL_S = 0.1  # least time between two rounds of probes for requests that would be refused as paused
RETURNING = ("starting", "stopping", "down", "outdated")  # states that workers may leave without a resume
AWAITED = (*RETURNING, "ready")  # states of workers that are worth waiting for

Key = tuple[str, str, int]  # tenant, id, and the number of a retry that attaches to the running request; otherwise 0


class HeadFacts(msgspec.Struct, frozen=True, gc=False):
    """The facts that the router needs from a request head; kept with the head, because clients repeat heads."""

    tenant: str
    request_id: str | None  # given by the client
    session: str | None


class Router:
    def __init__(self, config: RouteConfig, *, seed: int | None = None, fast_path: FastPath = PYTHON) -> None:
        self.config = config
        self.read_whole = fast_path.read_whole
        self._peek = fast_path.peek
        self.loop = asyncio.get_running_loop()
        self.random = random.Random(seed)
        self.worker_tls = None if config.worker_tls == SYSTEM_CAS else client_context(config.worker_tls)
        self.fleet = Workers(
            connect_timeout_s=config.connect_timeout_s, clock=self.loop.time, fast_path=fast_path, tls=self.worker_tls
        )
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
        self.ended: deque[EndedExchange] = deque(maxlen=ENDED_KEPT)
        self._summaries = 0  # made in the current second
        self._second_ends_s = -inf
        self.counters = RouterCounters()
        self.departures = Departures(log)
        self.cors = Cors(config.cors_origins)
        self.connections = Connections(
            self.handle, config.max_body_bytes, config.client_stall_timeout_s, self.fleet.outbox, fast_path, self.cors
        )
        self.draining = False
        self.holding = False  # the fleet is paused or being paused: requests that a worker ends are not retried
        self.queueing = False  # new requests wait until the pause ends
        self._emptied = asyncio.Event()  # set while draining, when no request is in flight
        self.choose = WorkerChooser(config, self.fleet, self.index, self.counters, self.random).choose
        self._ids = ids.Ids()
        self._retries = count(1)
        self._changed = asyncio.Event()
        self._refreshing = asyncio.Lock()
        self._refreshed_s = -inf
        self.bridge: Bridge | None = None
        self.probe: Callable[[Worker], Awaitable[None]] | None = None  # probes a worker at once
        self.scaler: Scaler | None = None  # set by `headgate up`, which starts the workers
        self._deadline: asyncio.Timeout | None = None

    # -- requests in ------------------------------------------------------------------

    def handle(self, client: Downstream, request: HttpRequest) -> Answering | None:
        head = request.head
        if head.path not in RELAYED or self.cors.preflight(head.method, head.headers) is not None:
            assert self.bridge is not None
            return self.bridge(client, request)
        try:
            facts = head.memo.get(HeadFacts)
            if facts is None:
                facts = head.memo[HeadFacts] = self._read_head(head)
            return self._relay(client, request, facts)
        except RequestError as error:
            id = self._id_of_refused(head)
            client.write(error_answer(error, [(ids.HEADER, id.encode())], path=head.path, request_id=id))
            client.finished()
            return None

    def _read_head(self, head: Head) -> HeadFacts:
        """Read a request head, after the same checks as in the control plane's gate, in the same order."""
        given_id = ids.given(head.headers)
        caller = self.keys.caller(head.path, head.headers)
        if head.method != "POST":
            raise MethodNotAllowed(f"{head.path} takes POST, not {head.method}", "POST")
        sessions = (head.first.get(name, b"").decode("latin-1") for name in SESSION_HEADERS)
        return HeadFacts(caller.tenant, given_id, next(filter(None, sessions), None))

    def _id_of_refused(self, head: Head) -> str:
        """Return the id of a request that is refused."""
        try:
            return ids.given(head.headers) or self._ids.draw()
        except RequestError:
            return self._ids.draw()

    def _relay(self, client: Downstream, request: HttpRequest, facts: HeadFacts) -> Answering:
        if self.draining:
            raise Unavailable("the router is shutting down", code="shutting_down")
        path, body, tenant = request.head.path, request.body, facts.tenant
        info = read_request_info(path, body, session=facts.session, tenant=tenant, peek=self._peek)
        exchange = Exchange(self, client, request, info, tenant)
        self._register(exchange, info.request_id or facts.request_id)
        self.retry_budget.earn()
        self.counters.requests += 1
        exchange.begin()
        return exchange

    def _register(self, exchange: Exchange, given_id: str | None) -> None:
        """Register the request under its tenant and its id, which is generated if the client gave none."""
        exchange.id = id = self._ids.draw() if given_id is None else checked_id(given_id)
        key = exchange.tenant, id, 0
        if key in self.live:
            if exchange.request.header(b"idempotency-key") is None:
                raise DuplicateId(f"a request with the id {id!r} is running", param="request_id")
            # This is a retry by the client; the worker attaches it to the running request.
            key = exchange.tenant, id, next(self._retries)
        exchange.key = key
        self.live[key] = exchange

    def exchange_ended(self, exchange: Exchange) -> None:
        if self.live.get(exchange.key) is exchange:
            del self.live[exchange.key]
            self._summarise(exchange)
            if exchange.departures:
                moved = MovedRequest(exchange.began, self.loop.time(), exchange.departures)
                self.moved.keep(exchange.tenant, exchange.id, moved)
            if self.draining and not self.live:
                self._emptied.set()

    def _summarise(self, exchange: Exchange) -> None:
        """Keep a summary for the dashboard. Under load most requests get none, because it would cost 5 % of a request."""
        now_s = self.loop.time()
        if now_s >= self._second_ends_s:
            self._second_ends_s, self._summaries = now_s + 1, 0
        if self._summaries < SUMMARIES_PER_S:
            self._summaries += 1
            self.ended.append(exchange.summary(now_s))

    # -- placement --------------------------------------------------------------------

    async def place(self, exchange: Exchange, retry_state: RetryState) -> Placement | None:
        """Wait for a placement for the next attempt; None if no worker can become ready."""
        backoff_s = retry_state.backoff_s
        while not self.holding or await self._resumed(exchange, retry_state):
            if backoff_s:
                await asyncio.sleep(backoff_s)
                backoff_s = 0.0
            elif (placement := await self._wait_for_placement(exchange, retry_state)) is not None or not self.holding:
                return placement
        return None

    async def _resumed(self, exchange: Exchange, retry_state: RetryState) -> bool:
        """Wait until the fleet is resumed. Returns False at once if the request does not wait out the pause."""
        while self.holding and exchange.waits_out_a_pause(retry_state, queueing=self.queueing):
            if not await self.fleet_changed(KEEP_ALIVE_S):
                exchange.keep_alive()
        return not self.holding

    async def admit(self, exchange: Exchange) -> None:
        """Wait until the limit on requests in flight admits a new request."""
        if self.holding and not (self.queueing or exchange.held):
            raise self.no_worker()
        await self.admission.enter(exchange.tenant, exchange.keep_alive, KEEP_ALIVE_S)

    def hold(self, *, queue: bool, mode: PauseMode = "freeze") -> tuple[Exchange, ...]:
        """Stop placing requests, because the fleet is paused. Returns the requests that were accepted before."""
        self.holding, self.queueing = True, queue
        accepted = tuple(self.live.values())
        for exchange in accepted:
            exchange.hold(mode)
        self._fleet_changed()
        return accepted

    def hold_again(self, accepted: Iterable[Exchange], *, queue: bool, mode: PauseMode) -> None:
        """Restore a pause that a later one had replaced. `accepted` are the requests accepted before it began."""
        self.queueing, before = queue, set(accepted)
        for exchange in self.live.values():
            exchange.held = mode if exchange in before else None
        self._fleet_changed()

    def release(self) -> None:
        for exchange in self.live.values():
            if exchange.held is not None or self.queueing:
                exchange.release()
        self.holding = self.queueing = False
        self._fleet_changed()

    async def _wait_for_placement(self, exchange: Exchange, retry_state: RetryState) -> Placement | None:
        """Wait for a ready worker and return a placement; None at the timeout or if the fleet is paused meanwhile."""
        with suppress(TimeoutError):
            async with asyncio.timeout(self.config.patience_s):
                while not self.holding:
                    placement = self.choose(exchange, retry_state)
                    if placement is None and self._needs_refresh(retry_state):
                        await self._refresh(retry_state)
                        continue
                    if placement is not None or not self._is_worth_waiting(exchange, retry_state):
                        return placement
                    if not await self.fleet_changed(KEEP_ALIVE_S):
                        exchange.keep_alive()
        return None

    def _needs_refresh(self, retry_state: RetryState) -> bool:
        """Whether the request would be refused because of an old probe, which showed a pause by another caller."""
        known = retry_state.last is not None or any(worker.state == "paused" for worker in self.fleet)
        return known and retry_state.would_report_a_pause and not retry_state.refreshed

    async def _refresh(self, retry_state: RetryState) -> None:
        """Probe the workers again, because workers that were paused may run again, such as after a rolling update."""
        retry_state.refreshed = True
        began_s = self.loop.time()
        async with self._refreshing:
            if self._refreshed_s < began_s:  # unless another request has refreshed them meanwhile
                await asyncio.sleep(self._refreshed_s + REFRESH_INTERVAL_S - self.loop.time())
                self._refreshed_s = self.loop.time()
                await self._probe_doubtful()
        for worker in self.fleet:
            if worker.available:
                retry_state.ask_again(worker)

    async def _probe_doubtful(self) -> None:
        assert self.probe is not None
        doubtful = [worker for worker in self.fleet if worker.state in ("ready", "paused")]
        await asyncio.gather(*map(self.probe, doubtful))

    def _is_worth_waiting(self, exchange: Exchange, retry_state: RetryState) -> bool:
        """Whether to wait until a worker becomes ready, instead of sending the client a paused worker's refusal."""
        if self.fleet.rolling and not retry_state.queue_was_full:
            return True  # the worker that is being updated returns soon
        if exchange.overtaken:
            return True
        if retry_state.rescheduled:  # KV memory becomes free, even at a worker that another caller has paused briefly
            return any(worker.state in (*AWAITED, "paused") for worker in self.fleet)
        if retry_state.last is not None and not (retry_state.may_return or was_kept_out(exchange, retry_state)):
            # A partial answer is worth a wait, because another worker may return soon.
            others = (worker for worker in self.fleet if worker not in retry_state.excluded)
            return retry_state.was_cut and any(worker.state in RETURNING for worker in others)
        # A request whose worker was lost has no refusal to report, so it also waits for paused workers. So does a
        # request that waited through a pause: the worker has been resumed, and a probe is about to show it.
        awaited = (*AWAITED, "paused") if retry_state.was_lost or exchange.kept else AWAITED
        return any(worker.state in awaited for worker in self.fleet)

    def no_worker(self) -> RequestError:
        states = Counter(worker.state for worker in self.fleet)
        if self.holding or (states["paused"] and not states["ready"]):
            return Unavailable("the fleet is paused; try again when it has been resumed", code="paused")
        summary = ", ".join(f"{number} {state}" for state, number in sorted(states.items()))
        return NoWorker(f"no worker can take this request ({summary or 'there are none'})")

    # -- outcomes ---------------------------------------------------------------------

    def attempt_ended(self, exchange: Exchange, placement: Placement, outcome: Outcome) -> None:
        worker = placement.worker
        self.counters.count_attempt(worker, outcome)
        if isinstance(outcome, Lost):
            placement.undo()
            # A worker may disconnect when the client does not read, and may be merely busy when a deadline passes.
            if not (exchange.slow or exchange.graces):
                self.fleet.failed(worker, outcome.why)
        elif not (isinstance(outcome, Answered) and outcome.status >= 500):
            self.fleet.answered(worker)
            record_hits(exchange.info, exchange.journal, placement, outcome)

    def failed(self, exchange: Exchange, error: RequestError) -> None:
        self.counters.refused[error.code] += 1
        log.debug("%s: %s", exchange.id, error.message)

    def client_left(self, exchange: Exchange) -> None:
        cause = exchange.departure_cause
        self.counters.clients_left[cause] += 1
        if exchange.info.stream:
            self.departures.note(exchange.client.peer, exchange.id, exchange.journal.tokens, cause)

    def _worker_lost(self, worker: Worker, why: str) -> None:
        for exchange in tuple(self.live.values()):
            attempt = exchange.attempt
            if attempt is not None and attempt.worker is worker and attempt.outcome is None:
                attempt.fail(why)
            if exchange.prefill_request is not None and exchange.prefill_request.worker is worker:
                exchange.prefill_request.give_up(why)

    def last_byte_s(self, worker: Worker) -> float:
        """Return when the worker last sent a byte in answer to a request."""
        now_s = self.loop.time()
        return max(
            (
                exchange.attempt.last_data_s(now_s)
                for exchange in self.live.values()
                if exchange.attempt is not None and exchange.attempt.worker is worker and exchange.attempt.status
            ),
            default=-inf,
        )

    # -- time -------------------------------------------------------------------------

    def _fleet_changed(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def fleet_changed(self, timeout_s: float) -> bool:
        """Wait until a worker joins, leaves or changes its state. Returns False at the timeout."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()
        except TimeoutError:
            return False
        return True

    async def sweep(self) -> None:
        """Once a second, fail attempts whose worker has been silent for too long."""
        while True:
            await asyncio.sleep(1.0)
            now_s = self.loop.time()
            self.connections.sweep(now_s)
            self.fleet.sweep()
            for exchange in tuple(self.live.values()):
                self._check_silence(exchange, now_s)

    def _check_silence(self, exchange: Exchange, now_s: float) -> None:
        attempt = exchange.attempt
        if attempt is None or attempt.outcome is not None:
            return
        last_s = attempt.last_data_s(now_s)
        if exchange.full:
            return
        keeps_alive = attempt.status or (attempt.worker.kind == "headgate" and exchange.request.path in JOURNALLED)
        limit_s = self.config.idle_timeout_s if keeps_alive else self.config.first_byte_timeout_s
        if now_s - last_s > limit_s:
            attempt.fail(f"it has sent nothing for {limit_s:g} s")

    # -- shutdown ---------------------------------------------------------------------

    async def drain(self) -> None:
        """Accept no new requests, and let those in flight finish within the drain timeout."""
        self.draining = True
        if not self.live:
            self._emptied.set()
        self.connections.close()
        log.info("stopping: %d requests may finish within %g s", len(self.live), self.config.drain_timeout_s)
        with suppress(TimeoutError):
            async with asyncio.timeout(self.config.drain_timeout_s) as self._deadline:
                await self._emptied.wait()

    def hurry(self) -> None:
        """End the drain now, unless its timeout has passed."""
        if self._deadline is not None:
            with suppress(RuntimeError):
                self._deadline.reschedule(self.loop.time())

    async def close(self) -> None:
        """End the remaining requests; their clients receive an error."""
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

    # -- credentials ------------------------------------------------------------------

    def credentials(self, worker: Worker, headers: Headers, tenant: str | None) -> Headers:
        """Return the headers that authenticate a call to a worker.

        They have the client's own key if workers check keys, otherwise the worker's key and the tenant. `tenant` is
        the caller's, empty without a key; None for the router itself or an admin of the fleet.
        """
        is_headgate = worker.kind in ("headgate", "unknown")
        key = worker.key or (self.config.worker_key if is_headgate else None)
        if self.config.api_keys or self.config.admin_key or key:
            headers = [header for header in headers if header[0] not in (b"authorization", b"x-api-key")]
        if key is not None:
            headers.append((b"authorization", b"Bearer " + key.encode()))
        if tenant is not None and is_headgate:
            headers.append((b"x-headgate-tenant", tenant.encode()))
        return headers


def checked_id(id: str) -> str:
    if ids.checked(id, "request_id").endswith(PREFILL):
        raise RequestError(f"request_id must not end with {PREFILL}, which is reserved", param="request_id")
    return id
