"""The simulated routers and servers of one run, and what the run records about them.

`SimFleet` builds the hosts of a plan, makes control calls to them, provides weights, and checks the conditions that
must hold after every control call. `actions` and `hostile_actions` act on it; `world` runs it.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from headgate.config import EngineConfig, RouteConfig
from headgate.device.weights.file_stamps import Stamps
from headgate.router.data_path.fast_path import PYTHON, FastPath
from headgate.router.exchange.relay import Exchange
from headgate.router.fleet.worker import Worker
from headgate.testing.sim import contract_rules, hostile
from headgate.testing.sim.caller import ClientBehaviour, ReceivedAnswer, call
from headgate.testing.sim.engine import EngineProcesses
from headgate.testing.sim.hosts import KEY, SimHost, SimRouter, SimServer, workers
from headgate.testing.sim.loop import SimLoop, SimProcess
from headgate.testing.sim.network import SimNetwork
from headgate.testing.sim.report import SimulationReport
from headgate.testing.sim.script import (
    CALLS_WITH_KILL,
    FAULTS,
    KV_FAULTS,
    ROUTERS,
    TOLERATED,
    PlannedAction,
    PlannedRequest,
    SimulationPlan,
)

CALL_S = 120.0  # longest time for any control call to be answered, whatever its own timeout
GONE_S = 0.25  # longest time for a client's disconnect to reach its engine, under good network conditions


class SimFleet:
    loop: SimLoop
    network: SimNetwork
    processes: EngineProcesses
    clients: SimProcess
    operator: SimProcess

    def __init__(
        self, seed: int, plan: SimulationPlan, *, chatty: bool, folder: Path, fast_path: FastPath = PYTHON
    ) -> None:
        self.report = SimulationReport(seed)
        self.chatty = chatty
        self.plan = plan
        self._seed = seed
        self._fast_path = fast_path
        self._folder = folder  # the folder for weights and crash files
        self.roles = plan.roles or ("mixed",) * plan.servers
        self.version = 0  # version of the newest weights that were sent to any server
        self.agreed = True  # whether the last update has reached all servers
        self.floor_versions: dict[str, int] = {}  # router -> version of its last successful update
        self.resumes = 0  # number of calls that may have ended a pause
        self.pauses = 0
        self.asked_to_end: dict[str, set[str]] = {name: set() for name in ROUTERS}  # router -> ids
        self._held: dict[str, tuple[SimProcess, int]] = {}  # server -> its process, and the weights it has
        self._spoiled: Counter[str] = Counter()  # weights files that were replaced
        self._jobs: list[asyncio.Task[None]] = []  # tasks of actions
        self._paused = False  # whether a pause was requested during the run
        self._aborted: dict[str, int] = {}  # id -> the number of tokens that an abort call reported
        self._retried_s: dict[str, float] = {}  # name -> when the client retried with its Idempotency-Key
        self._calls = 0
        self.dishonest: dict[str, None] = {}  # servers that have given false answers
        # (router, id) of requests that a dishonest server claims to have, but the router did not have.
        self._unknown_claims: set[tuple[str, str]] = set()
        self._ids = Counter(request.id for request in plan.requests)
        self._choices = Counter(name for request in plan.requests for name in request.choice_names)
        self.placements: dict[tuple[str, str], list[str]] = {}  # (router, id) -> addresses of workers
        # (router, tenant, id) of requests that ended when no worker could have continued them.
        self._abandoned: set[tuple[str, str, str]] = set()
        self._held_live: dict[str, list[tuple[Exchange, ...]]] = {}  # router -> its live requests at each pause
        self._before_pause: dict[str, set[str]] = {}  # router -> ids that it had accepted before a pause
        self._pausers: set[str] = set()  # hosts that received a pause call

    def note(self, host: SimProcess | None, what: str) -> None:
        self.report.trace.append((self.loop.time(), host.name if host else "-", what))

    def fail(self, what: str) -> None:
        self.report.failures.append(what)
        self.note(None, f"WRONG: {what}")

    def _rng(self, use: str) -> random.Random:
        return random.Random(f"{use} {self._seed}")

    def build(self) -> None:
        plan, kv = self.plan, self.plan.kv
        engine = [EngineConfig(kv_listen=None) if kv is None else kv.config(i) for i in range(plan.servers)]
        keys = {tenant: f"key-of-{tenant}" for tenant in plan.tenants}
        self.servers = [
            SimServer(
                self.loop,
                f"server{i}",
                plan.settings,
                engine[i],
                keys if "servers" in plan.keys_at else {},
                self._tokenised,
                plan.stall_s,
            )
            for i in range(plan.servers)
        ]
        config = RouteConfig(
            workers=workers(self.servers, self.roles),
            policy=plan.policy,
            max_in_flight=plan.max_in_flight,
            max_queue=plan.max_queue,
            disaggregate_tokens=256 if kv is None else kv.disaggregate_tokens,
            ticket_timeout_s=10.0 if kv is None else kv.ticket_timeout_s,
            api_keys=keys if "routers" in plan.keys_at else {},
            client_stall_timeout_s=plan.stall_s,
            admin_key=KEY,
            worker_key=KEY,
        )
        names = ROUTERS[: plan.routers]
        self.routers = [
            SimRouter(self.loop, name, config, self._seed + i, self, self._fast_path) for i, name in enumerate(names)
        ]
        self.hosts: dict[str, SimHost] = {host.name: host for host in (*self.routers, *self.servers)}

    @property
    def router(self) -> SimRouter:
        return self.routers[0]

    def engine_states(self, server: SimServer) -> list[str]:
        """Return the states of the server's engines; empty while any engine is not connected."""
        replicas = [] if server.engines is None or not server.alive else server.engines.replicas
        if any(replica.client is None for replica in replicas):
            return []
        processes = {engine.get_pid(): engine for engine in self.processes.living}
        loops = [processes[r.pid].loop for r in replicas if r.pid in processes]
        return [loop.control.state for loop in loops if loop is not None]

    def worker(self, router: str, server: SimServer) -> Worker | None:
        """Return a router's worker object for a server; None if the server is not in the router's fleet."""
        host = next(host for host in self.routers if host.name == router)
        workers = host.router.fleet if host.router is not None else ()
        return next((worker for worker in workers if worker.url == server.url), None)

    def holds(self, router: str) -> bool:
        host = next(host for host in self.routers if host.name == router)
        return host.router is not None and host.alive and host.router.holding

    # -- events that routers and servers report ----------------------------------------------

    def placed(self, router: str, exchange: Exchange, url: str) -> None:
        self.placements.setdefault((router, exchange.id), []).append(url)
        if exchange.cut:
            return  # the request has ended, and a worker is asked only for the text of its tokens
        if exchange.ending or (exchange.id in self.asked_to_end[router] and self._ids[exchange.id] == 1):
            self.fail(f"{exchange.id} was sent to another worker after its abort was requested")

    def exchange_ended(self, router: str, exchange: Exchange) -> None:
        """Record whether the request could not have been continued (guarantee 74)."""
        takers = [server for server in self.servers if self._takes_requests(router, server)]
        if not takers or contract_rules.is_given_up(exchange):
            self._abandoned.add((router, exchange.tenant, exchange.id))

    def _takes_requests(self, router: str, server: SimServer) -> bool:
        """Whether a router regards a server as ready, and the server in fact is."""
        worker, states = self.worker(router, server), self.engine_states(server)
        ready = worker is not None and worker.available and not server.stopping
        return ready and bool(states) and set(states) == {"running"}

    def _was_abandoned(self, request: PlannedRequest) -> bool:
        tenant = request.tenant if "routers" in self.plan.keys_at else ""
        return (request.to, tenant, request.id) in self._abandoned

    def record_aborted(self, router: str, abort_s: float, tokens: dict[str, int]) -> None:
        """Record the answer of an abort call, without requests of other routers, which may have moved before it."""
        targets = {
            name
            for request in self.plan.requests
            if request.to == router and self._is_meant(request, abort_s)
            for name in (request.name, *request.choice_names)
        }
        reported = {name: count for name, count in tokens.items() if name in targets}
        self._aborted |= reported
        self.asked_to_end[router] |= reported.keys()

    def _is_meant(self, request: PlannedRequest, abort_s: float) -> bool:
        """Whether an abort sent at `abort_s` can only refer to the attempt whose answer the client received.

        A request with an Idempotency-Key may have been retried since, or answered while a worker still generates it
        for the key. A router may have ended a request whose worker had a fault; the worker is then notified later.
        """
        may_outlive_answer = "idempotency-key" in request.headers or self._may_fail(request)
        answered = request.reply.whole and request.reply.ended_s <= abort_s and may_outlive_answer
        retried_s = self._retried_s.get(request.name, -1.0)
        return (
            retried_s < abort_s and not answered and self._ids[request.name] == 1 and self._is_known(request, abort_s)
        )

    def _is_known(self, request: PlannedRequest, abort_s: float) -> bool:
        """Whether the router had the request. For others, it can only repeat the claims of dishonest workers."""
        in_router = 0 < request.reply.began_s < abort_s - GONE_S and not 0 < request.reply.ended_s <= abort_s
        return not self.dishonest or (in_router and (request.to, request.id) not in self._unknown_claims)

    def claimed(self, ids: Iterable[str]) -> None:
        """Record that a dishonest worker claims to have aborted these requests."""
        for host in self.routers:
            live = {id for _, id, _ in host.router.live} if host.router is not None else set()
            self._unknown_claims |= {(host.name, id) for id in ids if id not in live}

    def _tokenised(self, text: str) -> None:
        if len(text) > contract_rules.LONGEST_TEXT:
            self.fail(f"64: a text of {len(text)} characters was tokenised, although it cannot fit the context")

    def held(self, router: str, live: tuple[Exchange, ...]) -> None:
        """Record the live requests of a router that is being paused."""
        self._held_live.setdefault(router, []).append(live)
        self._before_pause.setdefault(router, set()).update(exchange.id for exchange in live)

    def is_only_fault(self, action: PlannedAction) -> bool:
        """Whether no other action of the run stops, kills or pauses a process, or forges its answers."""
        kinds = (
            *FAULTS,
            *KV_FAULTS,
            *CALLS_WITH_KILL,
            *hostile.STOPS,
            "pause",
            "pause_one",
            "update",
            "roll",
            "remove",
            "lie",
        )
        return not any(other.kind in kinds for other in self.plan.actions if other is not action)

    # -- control calls ------------------------------------------------------------------------

    async def control(
        self, to: str, method: str, path: str, body: Any = None, tenant: str | None = None
    ) -> ReceivedAnswer:
        """Make a control call and check its answer. A running router must always answer."""
        self._calls += 1
        self._paused |= path == "/v1/pause"
        self.pauses += path == "/v1/pause"
        self.resumes += path in ("/v1/resume", "/v1/update_weights")
        named = "/v1/requests/ID" if path.startswith("/v1/requests/") else path.partition("?")[0]
        self.report.controls[f"{method} {named}"] += 1
        number, address = self._calls, self.hosts[to].address
        self.note(self.operator, f"call {number} to {to}: {method} {path} {body or ''}")
        headers = {"authorization": f"Bearer {KEY}"} if tenant is None else self._key(tenant)
        called, began_s, holds = self.hosts[to].host, self.loop.time(), len(self._held_live.get(to, ()))
        resumes, stopped_s = self.resumes, called.stopped_s
        if path == "/v1/pause":
            self._pausers.add(to)
        reply = await call(address, method, path, body, headers, ClientBehaviour(patience_s=CALL_S))
        self.note(self.operator, f"call {number}: {reply.status} {bytes(reply.body)[:300]!r} {reply.broken}")
        if reply.broken.startswith("not complete"):
            self.fail(f"{method} {path} to {to} was not answered within {CALL_S:g} s")
        self.resumes += path in ("/v1/resume", "/v1/update_weights")
        if reply.broken and to in ROUTERS and not self.report.actions["kill_router"]:
            self.fail(f"{method} {path}: the router closed the connection without an answer: {reply.broken}")
        if not reply.broken:
            self._check_answer(to, path, body, reply, called.stopped_s - stopped_s)
        if path == "/v1/pause" and reply.status == 200:
            self._check_paused()
            held = self._held_live.get(to, [])[holds:]
            if resumes == self.resumes and body and body.get("mode", "abort") == "abort":
                timeout_s = contract_rules.timeout_of(path, body)
                self._check_obeyed(held, out_of_time=reply.ended_s - began_s > timeout_s)
        if reply.status >= 500 and reply.status not in (502, 503, 504):
            self.fail(f"{method} {path} to {to} answered {reply.status}: {bytes(reply.body)!r}")
        return reply

    def _check_paused(self) -> None:
        """Check that an engine that is paused with mode abort has no sequence that was started."""
        for engine in self.processes.living:
            if engine.loop is None or (engine.loop.control.state, engine.loop.control.mode) != ("paused", "abort"):
                continue
            begun = [seq for seq in engine.loop.scheduler.sequences.values() if seq.started_s is not None]
            if begun:
                self.fail(f"{engine.host.name} is paused, but still has {begun}")

    def _key(self, tenant: str) -> dict[str, str]:
        return hostile.key_of(tenant if self.plan.tenants else "")

    def _check_answer(self, to: str, path: str, body: Any, reply: ReceivedAnswer, stopped_s: float) -> None:
        """Check one answer to a control call. Which checks apply depends on the faults of the run."""
        complaints: list[str] = []
        isolated = any(action.kind == "lose_machine" and action.target == to for action in self.plan.actions)
        if not isolated and not (path == "/v1/update_weights" and body and "strategy" in body):
            complaints += contract_rules.late_answer(
                f"{path} to {to}", reply, contract_rules.timeout_of(path, body), stopped_s
            )
        if reply.status in (200, 202) and to in ROUTERS and not self.dishonest:
            answer = reply.json()
            if path != "/v1/requests" or len(self.routers) == 1:  # a single router knows where each request is
                complaints += contract_rules.listed_twice(path, answer, self._ids + self._choices)
            if (
                reply.status == 200
                and path == "/v1/pause"
                and not any(action.kind in hostile.GENERATING for action in self.plan.actions)
            ):
                # Another router may move a request from a paused server to one that is paused next.
                moving = [request for request in self.plan.requests if request.routed and request.to != to]
                requests = (*self.plan.requests, *moving * (len(self.servers) - 1))
                complaints += contract_rules.overcounted(answer["result"], requests, reply.began_s)
        if to in ROUTERS and self.dishonest and not self._has_other_faults() and not self.plan.update_breaks:
            others = [server.url for server in self.servers if server.name not in self.dishonest]
            complaints += contract_rules.false_blame(_result_of(reply), others, faults=self._has_faults())
        for complaint in complaints:
            self.fail(complaint)

    def _has_other_faults(self) -> bool:
        return any(action.kind not in (*hostile.HARMLESS, *TOLERATED) for action in self.plan.actions)

    def _has_faults(self) -> bool:
        return any(action.kind in (*FAULTS, *KV_FAULTS) for action in self.plan.actions)

    def _check_obeyed(self, held: list[tuple[Exchange, ...]], *, out_of_time: bool) -> None:
        """Guarantee 71: after a pause with mode abort, all requests that the router had accepted before it have ended.

        If the pause has used its whole timeout, the end of an answer may still be on its way to the client. Its worker
        has then ended the request, and nothing more is generated for it.
        """
        if len(held) != 1:
            return  # there was another pause at the same time
        # The clients of these requests may not have read the whole answer yet.
        slow = {request.id for request in self.plan.requests if request.behaviour.stalls or request.behaviour.slow_s}
        unfinished = [exchange for exchange in held[0] if not exchange.over and exchange.id not in slow]
        if out_of_time:
            unfinished = [exchange for exchange in unfinished if not self._is_on_its_way(exchange)]
        if unfinished:
            named = [exchange.id for exchange in unfinished]
            self.fail(f"71: the fleet is paused with mode abort, but {named} have not ended")

    def _is_on_its_way(self, exchange: Exchange) -> bool:
        """Whether a running worker has begun to send an answer, and no server generates it any more."""
        attempt = exchange.attempt
        servers = {server.url: server.ledger for server in self.servers if server.alive and server.ledger is not None}
        if attempt is None or attempt.status != 200 or attempt.worker.url not in servers:
            return False
        return not any(ledger.named(exchange.id, exchange.tenant) for ledger in servers.values())

    def restart(self, server: SimHost) -> None:
        if not server.alive:
            self.note(server.host, "restarts")
            server.start()

    # -- weights ------------------------------------------------------------------------------

    def new_weights(self) -> dict[str, Any]:
        """Return the body of an update call with new weights."""
        self.version += 1
        path = self._weights(self.version)
        if not path.exists():
            path.write_bytes(b"")
        return {"path": str(path), "version": self.version}

    def _weights(self, version: int) -> Path:
        return self._folder / f"weights-{version}.safetensors"

    def updated(self, via: str, version: int, reply: ReceivedAnswer, processes: dict[SimServer, SimProcess]) -> None:
        """Record the result of an update. `processes` are those at its begin; newer ones may have older weights."""
        succeeded = reply.status == 200
        self.agreed = succeeded and (self.agreed or version == self.version)  # a newer update may have been refused
        if succeeded:
            self.floor_versions[via] = max(version, self.floor_versions.get(via, 0))
            workers = reply.json()["result"]["workers"]  # other servers may not have been in the fleet at that time
            for server in self.servers:
                if server.alive and server.host is processes[server] and server.url in workers:
                    self._held[server.name] = server.host, version

    def _floor_version(self, to: str) -> int:
        """Return the oldest weights that may answer a request sent now."""
        if to in ROUTERS:
            return self.floor_versions.get(to, 0)
        host, version = self._held.get(to, (None, 0))
        return version if host is self.hosts[to].host else 0

    def spoil_weights(self) -> None:
        """Replace the newest weights file, so that a process that starts now cannot load those weights."""
        self._spoiled[self._weights(self.version).name] += 1
        self.agreed &= not self.version

    def _stamps(self, path: str | Path) -> Stamps:
        name = Path(path).name
        return {name: (1, 0, self._spoiled[name])}

    # -- failures that the plan causes --------------------------------------------------------

    @property
    def _removed(self) -> set[str]:
        """The servers that are removed from a router for a while."""
        return {action.target for action in self.plan.actions if action.kind == "remove"}

    @property
    def _outdated(self) -> set[str]:
        """The servers with an engine that restarts without the newest weights."""
        return {action.target for action in self.plan.actions if action.kind == "return_old"}

    def _may_fail(self, request: PlannedRequest) -> bool:
        """Whether the request may fail. A router with several workers hides the loss of engines and connections."""
        if request.routed and self.plan.servers - len(self._removed) > 1:
            return self._may_lack_weights() or any(
                name not in (*TOLERATED, *hostile.HARMLESS) for name in self.report.actions
            )
        if self.processes.broken_updates:
            return True  # an engine whose update failed answers nothing until another update succeeds
        return any(
            name in (*FAULTS, *CALLS_WITH_KILL, *hostile.STOPS, "remove", "roll") for name in self.report.actions
        )

    def _may_lack_weights(self) -> bool:
        """Whether there may have been a time at which no server had usable weights."""
        lacking = self.processes.quarantined | self._removed
        return bool(lacking) and len(lacking | self._outdated) >= self.plan.servers


def _result_of(reply: ReceivedAnswer) -> Any:
    """Return the field `result` of an answer or of an error."""
    answer = reply.json() if reply.whole else {}
    return answer.get("result") or answer.get("error", {}).get("result") if isinstance(answer, dict) else None
