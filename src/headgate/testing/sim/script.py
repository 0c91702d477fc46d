"""The plan of a run, drawn from its seed: the fleet, the requests of clients, the actions of operators, and the faults.

A `SimulationPlan` is data, and complete before the run starts. It can therefore be inspected, and no draw depends on
the run.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from headgate.testing.sim import vocabulary
from headgate.testing.sim.caller import ClientBehaviour, ReceivedAnswer
from headgate.testing.sim.engine import EngineProfile
from headgate.testing.sim.hosts import MODEL, ServerSettings
from headgate.testing.sim.kv import STAGES, KvSettings
from headgate.testing.sim.network import NetworkConditions

WINDOW_S = 4.0  # all requests and actions begin within this time
STOPS = ("STOP", "stop", "é", "fox.", "ok", "\n", " über")
MESSAGES = ("tell me", "data: [DONE]", "why? ünï", "one two three four five six", "🦊")
ROUTER = "router"
ROUTERS = (ROUTER, "router1")
NAMING = ("abort", "abort_and_kill")  # actions whose details name the requests to end


@dataclass(eq=False, kw_only=True)
class PlannedRequest:
    """A request of a client, and its answer."""

    name: str
    at_s: float
    to: str  # a router or a server
    path: str
    body: dict[str, Any]
    prompt: tuple[int, ...]
    behaviour: ClientBehaviour
    headers: dict[str, str] = field(default_factory=dict)
    reply: ReceivedAnswer = field(default_factory=ReceivedAnswer)
    disturbed: bool = False  # a fault broke its own connection, or killed its router
    floor_version: int = 0  # the answer must not come from older weights than these
    retries: bool = False  # the client retries with its Idempotency-Key if the answer is not whole
    tenant: str = ""  # the tenant whose API key it carries, in a fleet with keys
    giant: bool = False  # its prompt does not fit the context
    stopped_s: float = 0.0  # how long the called process was stopped while the request ran

    def __repr__(self) -> str:
        return f"<{self.name} to {self.to}, {self.path}, {self.body}>"

    @property
    def id(self) -> str:
        """The request id on the wire. A request of another tenant may use the same id."""
        return str(self.headers.get("x-request-id") or self.body.get("request_id") or self.name)

    @property
    def strict(self) -> bool:
        return "x-openai-strict" in self.headers

    @property
    def n(self) -> int:
        return int(self.body.get("n", 1))

    @property
    def choice_names(self) -> tuple[str, ...]:
        return tuple(f"{self.id}-{index}" for index in range(self.n))

    @property
    def routed(self) -> bool:
        return self.to in ROUTERS

    @property
    def stream(self) -> bool:
        return bool(self.body.get("stream"))

    @property
    def stops(self) -> tuple[str, ...]:
        return tuple(self.body.get("stop", ()))

    @property
    def returns_ids(self) -> bool:
        return bool(self.body.get("return_token_ids"))


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedAction:
    """An action of an operator or of a hostile client, or a fault."""

    at_s: float
    kind: str
    target: str = ""
    via: str = ROUTER  # the router that receives the control call
    undo_via: str = ROUTER  # the router that receives the call that undoes it
    duration_s: float = 0.0
    details: dict[str, Any] = field(default_factory=dict)

    def ends(self, request: PlannedRequest) -> bool:
        """Whether the action requests the end of `request`."""
        match self.kind:
            case "abort_all":
                return True
            case "stop_across":
                call = self.details["call"]
                return bool(call == "abort_all" or (call == "abort" and self._names(request)))
            case "pry":
                return bool(request.tenant == self.details["tenant"])
            case kind if kind in NAMING:
                return self._names(request)  # an operator's abort ends the requests of all tenants with that id
            case "abort_tags":
                return bool(request.body["tags"] == self.details["tags"])
        return False

    def ends_choice(self, request: PlannedRequest, index: int) -> bool:
        """Whether the action requests the end of one choice of `request`, or of all."""
        names = self.details["req_ids"] if self.kind in NAMING else None
        return self.ends(request) and (names is None or not {request.id, f"{request.id}-{index}"}.isdisjoint(names))

    def _names(self, request: PlannedRequest) -> bool:
        """Whether the action names the request, or one of its choices."""
        return not {request.id, *request.choice_names}.isdisjoint(self.details["req_ids"])


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationPlan:
    servers: int
    settings: ServerSettings
    profile: EngineProfile
    network: NetworkConditions
    policy: str
    requests: list[PlannedRequest]
    actions: list[PlannedAction]
    update_breaks: float = 0.0
    max_in_flight: int | None = None
    max_queue: int = 64
    routers: int = 1
    roles: tuple[str, ...] = ()  # the roles of the servers; if empty, all are mixed
    kv: KvSettings | None = None  # None: no KV is transferred between engines
    tenants: tuple[str, ...] = ()  # each has an API key; empty: requests need no key
    # Which kinds of hosts have tenant keys; routers and servers always have an admin key.
    keys_at: tuple[str, ...] = (
        "routers",
        "servers",
    )
    stall_s: float = 6.0  # client stall timeout

    @property
    def calm(self) -> bool:
        """Whether the plan has no actions, so that every client must get a whole answer."""
        return not self.actions


def draw(seed: int, only: tuple[str, ...] | None = None) -> SimulationPlan:
    """Draw the plan of a seed; `only` keeps only actions of these kinds."""
    rng = random.Random(f"plan {seed}")
    servers = rng.choice((1, 2, 2, 2, 3))
    settings = ServerSettings(engines=rng.choice((1, 1, 2)), most_choices=rng.choice((8, 64, 64)))
    profile = EngineProfile(
        step_s=rng.choice((0.004, 0.02, 0.05)),
        blocks=rng.choice((32, 48, 96)),
        rows=rng.choice((2, 4, 8)),
        batch_tokens=rng.choice((16, 64)),
        run_ahead=rng.choice((1, 1, 2)),
        reschedules=rng.random() < 0.3,
    )
    network = NetworkConditions(
        delay_s=rng.choice((0.0001, 0.0005, 0.005)),
        jitter_s=rng.choice((0.0001, 0.001, 0.02)),
        splits=rng.choice((0.0, 0.1, 0.5)),
        high_water=rng.choice((512, 4096, 65536)),
    )
    names, routers = [f"server{i}" for i in range(servers)], ROUTERS[: rng.choice((1, 1, 1, 2))]
    roles, kv = _draw_roles(rng, servers)
    requests = _draw_requests(rng, names, routers)
    flooded = rng.random() < 0.05
    requests += _draw_flood(rng, names, routers) if flooded else []
    actions = [] if rng.random() < 0.1 else _draw_actions(rng, names, requests, routers, kv=kv is not None)
    if only is not None:
        actions = [action for action in actions if action.kind in only]
    return SimulationPlan(
        servers=servers,
        settings=settings,
        profile=profile,
        network=network,
        policy=rng.choice(("cache_aware", "cache_aware", "least_requests", "power_of_two", "round_robin")),
        requests=requests,
        actions=sorted(actions, key=lambda action: action.at_s),
        update_breaks=rng.choice((0.0, 0.0, 0.0, 0.3)),
        max_in_flight=3 if flooded else rng.choice((None, None, 3)),
        max_queue=2 if flooded else rng.choice((2, 64, 64)),
        routers=len(routers),
        roles=roles,
        kv=kv,
    )


def name_choices(seed: int, plan: SimulationPlan) -> SimulationPlan:
    """Let some aborts name single choices in place of requests. All other parts of the plan stay the same."""
    rng = random.Random(f"choices {seed}")
    choices = {request.name: request.choice_names for request in plan.requests}
    actions = [
        replace(action, details=action.details | {"req_ids": _with_choices(rng, action.details["req_ids"], choices)})
        if action.kind in NAMING
        else action
        for action in plan.actions
    ]
    return replace(plan, actions=actions)


def _with_choices(rng: random.Random, names: list[str], choices: Mapping[str, tuple[str, ...]]) -> list[str]:
    return [rng.choice(choices.get(name, (name,))) if rng.random() < 0.4 else name for name in names]


def _draw_roles(rng: random.Random, servers: int) -> tuple[tuple[str, ...], KvSettings | None]:
    """Draw the roles of the servers. KV is transferred only between servers with roles."""
    if servers == 1 or rng.random() < 0.5:
        return ("mixed",) * servers, None
    rest = ("decode",) * (servers - 1) if rng.random() < 0.7 else ("decode", *["mixed"] * (servers - 2))
    kv = KvSettings(
        lease_s=rng.choice((0.5, 2.0, 10.0)),
        wait_s=rng.choice((0.3, 1.0, 5.0)),
        export_wait_s=rng.choice((0.5, 5.0)),
        disaggregate_tokens=rng.choice((4, 8, 16)),
        ticket_timeout_s=rng.choice((0.3, 2.0)),
    )
    return ("prefill", *rest), kv


# ------------------------------------------------------------------------------------------------------------- clients


def _draw_requests(rng: random.Random, servers: list[str], routers: tuple[str, ...]) -> list[PlannedRequest]:
    shared = [_draw_ids(rng, rng.randint(4, 40)) for _ in range(2)]
    bursts = [rng.uniform(0, WINDOW_S) for _ in range(3)]
    return [_draw_request(rng, f"ask-{i}", servers, routers, shared, bursts) for i in range(rng.randint(5, 16))]


def _draw_flood(rng: random.Random, servers: list[str], routers: tuple[str, ...]) -> list[PlannedRequest]:
    """Draw more simultaneous requests than the fleet has capacity for."""
    at_s, shared = rng.uniform(0, WINDOW_S), [_draw_ids(rng, 4)]
    flood = [_draw_request(rng, f"flood-{i}", servers, routers, shared, [at_s]) for i in range(rng.randint(12, 24))]
    for request in flood:
        request.at_s, request.to = at_s, routers[0]
    return flood


def _draw_ids(rng: random.Random, count: int) -> tuple[int, ...]:
    return tuple(rng.randrange(1, vocabulary.VOCAB_SIZE) for _ in range(count))


def _draw_request(
    rng: random.Random,
    name: str,
    servers: list[str],
    routers: tuple[str, ...],
    shared: list[tuple[int, ...]],
    bursts: list[float],
) -> PlannedRequest:
    body: dict[str, Any] = {
        "model": MODEL,
        "max_tokens": rng.choice((1, 12, 30, 60, 60)),
        "return_token_ids": True,
        "return_weight_versions": True,
        "tags": {"run": rng.choice(("a", "b"))},
    }
    chat = rng.random() < 0.4
    prompt = _draw_chat(rng, body) if chat else _draw_completion(rng, body, shared)
    _draw_sampling(rng, body)
    if rng.random() < 0.15:
        del body["return_token_ids"], body["return_weight_versions"]
    headers = {} if "request_id" in body else {"x-request-id": name}
    keyed = rng.random() < 0.15
    if keyed:
        headers["idempotency-key"] = f"key-{name}"
    return PlannedRequest(
        name=name,
        at_s=rng.choice(bursts) if rng.random() < 0.5 else rng.uniform(0, WINDOW_S),
        to=rng.choice(routers if rng.random() < 0.85 else servers),
        path="/v1/chat/completions" if chat else "/v1/completions",
        body=body,
        prompt=prompt,
        behaviour=_draw_behaviour(rng),
        headers=headers,
        retries=keyed and rng.random() < 0.7,
    )


def _draw_chat(rng: random.Random, body: dict[str, Any]) -> tuple[int, ...]:
    body["messages"] = [{"role": "user", "content": rng.choice(MESSAGES)}]
    text = vocabulary.template().render(body["messages"], add_generation_prompt=True)
    return tuple(vocabulary.tokenizer().encode(text, add_special=False))


def _draw_completion(rng: random.Random, body: dict[str, Any], shared: list[tuple[int, ...]]) -> tuple[int, ...]:
    if rng.random() < 0.3:
        body["prompt"] = rng.choice(MESSAGES)
        return tuple(vocabulary.tokenizer().encode(body["prompt"]))
    prompt = (*rng.choice(shared), *_draw_ids(rng, rng.randint(0, 12)))
    body["prompt"] = list(prompt)
    return prompt


def _draw_sampling(rng: random.Random, body: dict[str, Any]) -> None:
    if rng.random() < 0.7:
        body["seed"] = rng.randrange(2**31)
    if rng.random() < 0.6:
        body["stream"] = True
        if rng.random() < 0.5:
            body["stream_options"] = {"include_usage": True}
    if rng.random() < 0.25:
        body["n"] = rng.choice((2, 3))
    if rng.random() < 0.3:
        body["stop"] = rng.sample(STOPS, rng.randint(1, 2))
    if rng.random() < 0.5:
        body["ignore_eos"] = True
    if rng.random() < 0.1:
        body["deadline_ms"] = rng.choice((30, 200, 5000))
    if rng.random() < 0.2:
        body["priority"] = rng.randint(-2, 2)
    if rng.random() < 0.2:
        body["cache_salt"] = rng.choice(("x", "y"))


def _draw_behaviour(rng: random.Random) -> ClientBehaviour:
    draw = rng.random()
    if draw < 0.12:
        return ClientBehaviour(leaves_after_s=rng.choice((0.001, 0.05, 0.3, 1.0)))
    if draw < 0.2:
        return ClientBehaviour(slow_s=rng.choice((0.02, 0.2)))
    return ClientBehaviour()


# ------------------------------------------------------------------------------------------------------------- actions

FAULTS = (
    "kill_engine",
    "kill_server",
    "kill_router",
    "lose_machine",
    "stop_engine",
    "stall_engine",
    "slow_engine",
    "stop_server",
    "cut",
    "slow_network",
    "reset",
    "shutdown",
    "jump_clock",
    "return_old",
)
KV_FAULTS = ("corrupt_kv", "cut_kv_short", "cut_peers", "kill_in_transfer")
# Faults that a router with several workers hides from its clients.
TOLERATED = (
    *KV_FAULTS,
    "reset",
    "kill_engine",
    "slow_engine",
    "slow_network",
    "jump_clock",
    "return_old",
    "abort",
    "abort_all",
    "abort_tags",
    "roll",
    "pause",
    "pause_one",
    "update",
    "flush",
    "remove",
    "look",
)
CALLS_WITH_KILL = ("abort_and_kill", "pause_and_kill")  # control calls during which a process is killed
CONTROL = (
    "abort",
    "abort_and_kill",
    "abort_all",
    "abort_tags",
    "pause",
    "pause_one",
    "pause_and_kill",
    "update",
    "roll",
    "flush",
    "remove",
    "look",
)


def _draw_actions(
    rng: random.Random, servers: list[str], requests: list[PlannedRequest], routers: tuple[str, ...], *, kv: bool
) -> list[PlannedAction]:
    # A killed router excuses so many failed answers that only few runs may contain this fault.
    faults = [kind for kind in FAULTS if kind != "kill_router" or rng.random() < 0.2]
    kinds = rng.sample(faults, rng.randint(0, 4)) + rng.sample(CONTROL, rng.randint(0, 3))
    kinds += rng.sample(KV_FAULTS, rng.randint(0, 3)) if kv else []
    return [
        draw_action(rng, kind, servers, requests, routers) for kind in kinds for _ in range(rng.choice((1, 1, 2)))
    ]


def draw_moment(rng: random.Random, requests: list[PlannedRequest]) -> float:
    """Draw the time of an action; usually shortly after a request is sent."""
    if rng.random() < 0.3:
        return rng.uniform(0, WINDOW_S)
    return min(rng.choice(requests).at_s + rng.uniform(0, 1.0), WINDOW_S)


def draw_action(
    rng: random.Random, kind: str, servers: list[str], requests: list[PlannedRequest], routers: tuple[str, ...]
) -> PlannedAction:
    details: dict[str, Any] = {}
    match kind:
        case "abort" | "abort_and_kill":
            details = {
                "req_ids": [request.name for request in rng.sample(requests, min(len(requests), rng.randint(1, 3)))]
            }
            details |= {"wait": rng.random() < 0.8}
            if kind == "abort_and_kill":
                details |= {"whole": rng.random() < 0.5, "after_s": rng.choice((0.0, 0.001, 0.005, 0.02))}
        case "abort_tags":
            details = {"tags": {"run": rng.choice(("a", "b"))}}
        case "pause" | "pause_one":
            details = {
                "mode": rng.choice(("abort", "drain", "freeze")),
                "new_requests": rng.choice(("reject", "queue")),
            }
            details |= {"timeout": rng.choice((0.2, 5.0))}
        case "update":
            details = {"mode": rng.choice(("abort", "drain", "freeze"))}
        case "pause_and_kill":
            details = {"mode": rng.choice(("abort", "freeze")), "whole": rng.random() < 0.5, "which": rng.random()}
        case "slow_engine":
            details = {"times": rng.choice((5.0, 30.0))}
        case "slow_network":
            details = {"most_s": rng.choice((0.05, 0.4))}
        case "corrupt_kv" | "cut_kv_short":
            details = {"share": rng.choice((0.1, 0.5))}
        case "kill_in_transfer":
            details = {
                "stage": rng.choice(STAGES),
                "peer": rng.random() < 0.3,
                "after_s": rng.choice((0.0, 0.001, 0.02)),
            }
        case "jump_clock":
            details = {"by_s": rng.choice((-3600, -1, 1, 86400))}
        case "stop_engine" | "stall_engine" | "kill_engine" | "return_old":
            details = {"which": rng.random()}
        case "reset":
            details = {"which": [rng.random() for _ in range(rng.randint(1, 4))]}
    return PlannedAction(
        at_s=draw_moment(rng, requests),
        kind=kind,
        target=rng.choice(routers if kind == "kill_router" else servers),
        via=rng.choice(routers),
        undo_via=rng.choice(routers),
        duration_s=rng.choice((0.05, 0.5, 2.0, 8.0)),
        details=details,
    )
