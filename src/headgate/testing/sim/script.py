"""What happens in a run, drawn from its seed: the fleet, what clients ask, what operators do, what goes wrong.

A `Plan` is data, made before anything runs, so that it can be read, and so that one draw never depends on the run.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

from headgate.testing.sim import words
from headgate.testing.sim.caller import Manners, Reply
from headgate.testing.sim.engine import Pace
from headgate.testing.sim.hosts import MODEL, ServerSettings
from headgate.testing.sim.network import Weather

WINDOW_S = 4.0  # in which everything is begun
STOPS = ("STOP", "stop", "é", "fox.", "ok", "\n", " über")
MESSAGES = ("tell me", "data: [DONE]", "why? ünï", "one two three four five six", "🦊")
ROUTER = "router"


@dataclass(eq=False, kw_only=True)
class Ask:
    """A request as its client means it, and what came of it."""

    name: str
    at_s: float
    to: str  # a router or a server
    path: str
    body: dict[str, Any]
    prompt: tuple[int, ...]
    manners: Manners
    headers: dict[str, str] = field(default_factory=dict)
    reply: Reply = field(default_factory=Reply)
    disturbed: bool = False  # its own connection was broken by the network, or its router died
    retries: bool = False  # with its Idempotency-Key, when no whole answer has come

    def __repr__(self) -> str:
        return f"<{self.name} to {self.to}, {self.path}, {self.body}>"

    @property
    def n(self) -> int:
        return int(self.body.get("n", 1))

    @property
    def stream(self) -> bool:
        return bool(self.body.get("stream"))

    @property
    def stops(self) -> tuple[str, ...]:
        return tuple(self.body.get("stop", ()))

    @property
    def tells_ids(self) -> bool:
        return bool(self.body.get("return_token_ids"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Deed:
    """Something that an operator does, or that goes wrong."""

    at_s: float
    what: str
    who: str = ""
    lasts_s: float = 0.0
    more: dict[str, Any] = field(default_factory=dict)

    def ends(self, ask: Ask) -> bool:
        """Whether it asks for the end of that request."""
        match self.what:
            case "abort_all":
                return True
            case "abort":
                return ask.name in self.more["req_ids"]
            case "abort_tags":
                return bool(ask.body["tags"] == self.more["tags"])
        return False


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    servers: int
    settings: ServerSettings
    pace: Pace
    weather: Weather
    policy: str
    asks: list[Ask]
    deeds: list[Deed]
    update_breaks: float = 0.0
    max_in_flight: int | None = None
    max_queue: int = 64

    @property
    def calm(self) -> bool:
        """Nothing is done to the fleet, so that everybody must get a whole answer."""
        return not self.deeds


def draw(seed: int, only: tuple[str, ...] | None = None) -> Plan:
    """The plan of a seed; `only` leaves out all deeds but those of these kinds."""
    rng = random.Random(f"plan {seed}")
    servers = rng.choice((1, 2, 2, 2, 3))
    settings = ServerSettings(engines=rng.choice((1, 1, 2)), most_choices=rng.choice((8, 64, 64)))
    pace = Pace(
        step_s=rng.choice((0.004, 0.02, 0.05)),
        blocks=rng.choice((32, 48, 96)),
        rows=rng.choice((2, 4, 8)),
        batch_tokens=rng.choice((16, 64)),
        run_ahead=rng.choice((1, 1, 2)),
        reschedules=rng.random() < 0.3,
    )
    weather = Weather(
        delay_s=rng.choice((0.0001, 0.0005, 0.005)),
        jitter_s=rng.choice((0.0001, 0.001, 0.02)),
        splits=rng.choice((0.0, 0.1, 0.5)),
        high_water=rng.choice((512, 4096, 65536)),
    )
    names = [f"server{i}" for i in range(servers)]
    asks = _asks(rng, names)
    deeds = [] if rng.random() < 0.1 else _deeds(rng, names, asks)
    if only is not None:
        deeds = [deed for deed in deeds if deed.what in only]
    return Plan(
        servers=servers,
        settings=settings,
        pace=pace,
        weather=weather,
        policy=rng.choice(("cache_aware", "cache_aware", "least_requests", "power_of_two", "round_robin")),
        asks=asks,
        deeds=sorted(deeds, key=lambda deed: deed.at_s),
        update_breaks=rng.choice((0.0, 0.0, 0.0, 0.3)),
        max_in_flight=rng.choice((None, None, 3)),
        max_queue=rng.choice((2, 64, 64)),
    )


# ------------------------------------------------------------------------------------------------------------- clients


def _asks(rng: random.Random, servers: list[str]) -> list[Ask]:
    shared = [_ids(rng, rng.randint(4, 40)) for _ in range(2)]
    bursts = [rng.uniform(0, WINDOW_S) for _ in range(3)]
    return [_ask(rng, f"ask-{i}", servers, shared, bursts) for i in range(rng.randint(5, 16))]


def _ids(rng: random.Random, count: int) -> tuple[int, ...]:
    return tuple(rng.randrange(1, words.VOCABULARY) for _ in range(count))


def _ask(
    rng: random.Random, name: str, servers: list[str], shared: list[tuple[int, ...]], bursts: list[float]
) -> Ask:
    body: dict[str, Any] = {
        "model": MODEL,
        "max_tokens": rng.choice((1, 12, 30, 60, 60)),
        "return_token_ids": True,
        "return_weight_versions": True,
        "tags": {"run": rng.choice(("a", "b"))},
    }
    chat = rng.random() < 0.4
    prompt = _chat(rng, body) if chat else _completion(rng, body, shared)
    _sampling(rng, body)
    if rng.random() < 0.15:
        del body["return_token_ids"], body["return_weight_versions"]
    headers = {} if "request_id" in body else {"x-request-id": name}
    keyed = rng.random() < 0.15
    if keyed:
        headers["idempotency-key"] = f"key-{name}"
    return Ask(
        name=name,
        at_s=rng.choice(bursts) if rng.random() < 0.5 else rng.uniform(0, WINDOW_S),
        to=ROUTER if rng.random() < 0.85 else rng.choice(servers),
        path="/v1/chat/completions" if chat else "/v1/completions",
        body=body,
        prompt=prompt,
        manners=_manners(rng),
        headers=headers,
        retries=keyed and rng.random() < 0.7,
    )


def _chat(rng: random.Random, body: dict[str, Any]) -> tuple[int, ...]:
    body["messages"] = [{"role": "user", "content": rng.choice(MESSAGES)}]
    text = words.template().render(body["messages"], add_generation_prompt=True)
    return tuple(words.tokenizer().encode(text, add_special=False))


def _completion(rng: random.Random, body: dict[str, Any], shared: list[tuple[int, ...]]) -> tuple[int, ...]:
    if rng.random() < 0.3:
        body["prompt"] = rng.choice(MESSAGES)
        return tuple(words.tokenizer().encode(body["prompt"]))
    prompt = (*rng.choice(shared), *_ids(rng, rng.randint(0, 12)))
    body["prompt"] = list(prompt)
    return prompt


def _sampling(rng: random.Random, body: dict[str, Any]) -> None:
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


def _manners(rng: random.Random) -> Manners:
    draw = rng.random()
    if draw < 0.12:
        return Manners(leaves_after_s=rng.choice((0.001, 0.05, 0.3, 1.0)))
    if draw < 0.2:
        return Manners(slow_s=rng.choice((0.02, 0.2)))
    return Manners()


# --------------------------------------------------------------------------------------------------- what is done to it

TROUBLE = (
    "kill_engine",
    "kill_server",
    "kill_router",
    "lose_machine",
    "stop_engine",
    "stop_server",
    "cut",
    "break",
    "shutdown",
    "jump_clock",
)
# What no client of a router with several workers notices.
MADE_UP_FOR = (
    "break",
    "kill_engine",
    "jump_clock",
    "abort",
    "abort_all",
    "abort_tags",
    "roll",
    "flush",
    "remove",
    "look",
)
CONTROL = ("abort", "abort_all", "abort_tags", "pause", "pause_one", "update", "roll", "flush", "remove", "look")


def _deeds(rng: random.Random, servers: list[str], asks: list[Ask]) -> list[Deed]:
    # A router that dies excuses too much to be part of every other run.
    trouble = TROUBLE if rng.random() < 0.2 else [what for what in TROUBLE if what != "kill_router"]
    kinds = rng.sample(trouble, rng.randint(0, 4)) + rng.sample(CONTROL, rng.randint(0, 3))
    return [_deed(rng, what, servers, asks) for what in kinds for _ in range(rng.choice((1, 1, 2)))]


def _moment(rng: random.Random, asks: list[Ask]) -> float:
    """Most often when somebody has just asked."""
    if rng.random() < 0.3:
        return rng.uniform(0, WINDOW_S)
    return min(rng.choice(asks).at_s + rng.uniform(0, 1.0), WINDOW_S)


def _deed(rng: random.Random, what: str, servers: list[str], asks: list[Ask]) -> Deed:
    more: dict[str, Any] = {}
    match what:
        case "abort":
            more = {"req_ids": [ask.name for ask in rng.sample(asks, min(len(asks), rng.randint(1, 3)))]}
            more |= {"wait": rng.random() < 0.8}
        case "abort_tags":
            more = {"tags": {"run": rng.choice(("a", "b"))}}
        case "pause" | "pause_one":
            more = {"mode": rng.choice(("abort", "drain", "freeze")), "new_requests": rng.choice(("reject", "queue"))}
            more |= {"timeout": rng.choice((0.2, 5.0))}
        case "update":
            more = {"mode": rng.choice(("abort", "drain", "freeze"))}
        case "jump_clock":
            more = {"by_s": rng.choice((-3600, -1, 1, 86400))}
        case "stop_engine" | "kill_engine":
            more = {"which": rng.random()}
        case "break":
            more = {"which": [rng.random() for _ in range(rng.randint(1, 4))]}
    return Deed(
        at_s=_moment(rng, asks),
        what=what,
        who=rng.choice(servers),
        lasts_s=rng.choice((0.05, 0.5, 2.0, 8.0)),
        more=more,
    )
