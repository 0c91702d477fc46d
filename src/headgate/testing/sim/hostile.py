"""Additional actors: slow, hostile or strict clients, other tenants, workers with false answers, badly timed stops.

These actors are drawn from a random stream of their own and added to the plan of the seed, so the rest of the plan is
the same with and without them. About half of all plans have none.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any

from headgate.testing.sim import script, vocabulary
from headgate.testing.sim.caller import ClientBehaviour, ReceivedAnswer
from headgate.testing.sim.hosts import MODEL
from headgate.testing.sim.script import ROUTERS, WINDOW_S, PlannedAction, PlannedRequest, SimulationPlan

NONE = 0.5  # share of plans without any of these actors
STREAM = "actors 1558"  # with this number, the seeds of earlier failure reports draw no actors
ANN, BOB = "ann", "bob"  # tenants; the requests of the plan belong to ann
TENANTS = (ANN, BOB)
GIANT = 20_000  # characters of a prompt; the context holds 160 tokens

# Actions of hostile clients, and control calls during which a process is stopped. See `hostile_actions`.
HARMLESS = ("squat", "forge", "probe_salts", "pry", "ask_politely", "lie")  # must not affect other clients
STOPS = ("stop_across", "pause_and_crash")  # faults, like any stopped or killed process
ACTIONS = (*HARMLESS, *STOPS)
# Actions that send generation requests of their own.
GENERATING = (
    "squat",
    "forge",
    "probe_salts",
    "ask_politely",
)

MALFORMED_ANSWERS: tuple[bytes, ...] = (
    b"",
    b"{",
    b"\xff\xfe",
    b"[]",
    b"null",
    b"7",
    b'"done"',
    b"{}",
    b'{"result":null}',
    b'{"result":[]}',
    b'{"result":7}',
    b'{"result":{}}',
    b'{"result":{"aborted":5,"not_found":6,"already_finished":7,"errors":8}}',
    b'{"result":{"aborted":[{"request_id":5}],"not_found":{},"already_finished":[[]],"errors":[3]}}',
    b'{"result":{"aborted":[{}],"not_found":[null],"already_finished":[{}],"errors":[{"odd":1}]}}',
    b'{"result":{"state":5,"engines":[7],"mode":[],"asleep":3,"aborted":"many","finished":[],"forced":5,"blocks":"x"}}',
    b'{"result":{"state":[],"engines":[{"odd":1}],"aborted":1e999,"finished":null,"weight_version":"new"}}',
    b'{"result":{"state":"asleep","engines":{},"aborted":-5,"finished":-7,"forced":[5],"blocks":null}}',
    b'{"requests":5,"result":{"requests":[7]},"data":3,"world_size":"many"}',
)


Actor = Callable[[random.Random, "PlanDraft"], None]


@dataclass
class PlanDraft:
    """A plan to which actors are being added."""

    plan: SimulationPlan
    requests: list[PlannedRequest]
    actions: list[PlannedAction]
    changes: dict[str, Any] = field(default_factory=dict)
    actors: Sequence[Actor] = ()

    @property
    def servers(self) -> list[str]:
        return [f"server{i}" for i in range(self.plan.servers)]

    @property
    def routers(self) -> tuple[str, ...]:
        return ROUTERS[: self.plan.routers]


def draw(seed: int, only: tuple[str, ...] | None = None) -> SimulationPlan:
    """Draw the plan of a seed with its actors; `only` keeps only actions of these kinds."""
    plan = script.draw(seed, only)
    rng = random.Random(f"{STREAM} {seed}")
    if rng.random() < NONE:
        return plan
    draft = PlanDraft(plan, list(plan.requests), list(plan.actions))
    if rng.random() < 0.6:
        _give_keys(draft)
    actors = rng.sample(ACTORS, min(rng.randint(1, 3), len(ACTORS)))
    if _burst in actors:  # in a burst, all but a few requests belong to one tenant
        actors = [actor for actor in actors if actor not in (_twins, _pry)]
    draft.actors = actors
    for actor in actors:
        actor(rng, draft)
    actions = [action for action in draft.actions if only is None or action.kind in only]
    actions.sort(key=lambda action: action.at_s)
    return replace(plan, requests=draft.requests, actions=actions, **draft.changes)


def _give_keys(draft: PlanDraft) -> None:
    """Give the fleet API keys. All requests of the plan belong to one tenant."""
    draft.changes["tenants"] = TENANTS
    for request in draft.requests:
        assign(request, request.tenant or ANN)


def _with_keys(draft: PlanDraft) -> None:
    if "tenants" not in draft.changes:
        _give_keys(draft)


def assign(request: PlannedRequest, tenant: str) -> None:
    request.tenant = tenant
    request.headers = {**request.headers, **key_of(tenant)}


def key_of(tenant: str) -> dict[str, str]:
    return {"authorization": f"Bearer key-of-{tenant}"} if tenant else {}


# -------------------------------------------------------------------------------------------------------------- actors


def _add_request(
    rng: random.Random, draft: PlanDraft, name: str, at_s: float, tenant: str = "", **body: Any
) -> PlannedRequest:
    """Add a completion with a random prompt, sent to a router."""
    prompt = body.pop("prompt_ids", None) or tuple(
        rng.randrange(1, vocabulary.VOCAB_SIZE) for _ in range(rng.randint(4, 30))
    )
    content: dict[str, Any] = {"model": MODEL, "prompt": list(prompt), "max_tokens": 20, "seed": rng.randrange(2**31)}
    content |= {"return_token_ids": True, "return_weight_versions": True, "tags": {"run": "c"}, **body}
    request = PlannedRequest(
        name=name,
        at_s=at_s,
        to=rng.choice(draft.routers),
        path="/v1/completions",
        body=content,
        prompt=prompt,
        behaviour=ClientBehaviour(),
        headers={"x-request-id": name},
    )
    if "tenants" in draft.changes:
        assign(request, tenant or BOB)
    draft.requests.append(request)
    return request


def _stalled_readers(rng: random.Random, draft: PlanDraft) -> None:
    """Clients that request long answers and read nothing."""
    at_s = rng.uniform(0, WINDOW_S / 2)
    for i in range(rng.randint(1, 3)):
        body: dict[str, Any] = {
            "n": rng.choice((1, 4, 8)),
            "stream": rng.random() < 0.8,
            "max_tokens": 80,
            "ignore_eos": True,
        }
        request = _add_request(rng, draft, f"stalled-{i}", at_s + rng.uniform(0, 0.2), **body)
        request.behaviour = ClientBehaviour(stalls=True, leaves_after_s=draft.plan.stall_s * 4)
        request.to = rng.choice((*draft.routers, *draft.servers))
    if rng.random() < 0.5:
        kind, details = rng.choice((("abort_all", {}), ("pause", {"mode": "abort", "timeout": 5.0})))
        action = PlannedAction(
            at_s=at_s + 1.0,
            kind=kind,
            via=draft.routers[0],
            undo_via=draft.routers[0],
            duration_s=0.5,
            details=details,
        )
        draft.actions.append(action)


def _oversized_prompts(rng: random.Random, draft: PlanDraft) -> None:
    """Prompts longer than the context, which must be refused before they are tokenised."""
    at_s = rng.uniform(0, WINDOW_S)
    for i in range(rng.randint(1, 3)):
        request = _add_request(rng, draft, f"giant-{i}", at_s)
        request.to = rng.choice((*draft.routers, *draft.servers))
        request.body["prompt"], request.giant = "fox " * (GIANT // 4), True
        if rng.random() < 0.3:
            request.path = "/v1/chat/completions"
            request.body["messages"] = [{"role": "user", "content": request.body.pop("prompt")}]


def _twins(rng: random.Random, draft: PlanDraft) -> None:
    """Requests of another tenant with the same ids, at about the same time."""
    _with_keys(draft)
    named = {name for action in draft.actions for name in action.details.get("req_ids", ())}
    free = [request for request in draft.requests if request.tenant == ANN and request.name not in named]
    for request in rng.sample(free, min(len(free), rng.randint(2, 5))):
        twin = deepcopy(request)
        twin.name, twin.reply = f"{request.name}@{BOB}", ReceivedAnswer()
        twin.headers = {name: value for name, value in request.headers.items() if name != "idempotency-key"}
        twin.retries, twin.behaviour = False, ClientBehaviour()
        twin.headers["x-request-id"] = request.id
        twin.at_s = max(request.at_s + rng.choice((-0.01, 0.0, 0.01, 0.1)), 0.0)
        assign(twin, BOB)
        draft.requests.append(twin)
    if rng.random() < 0.5:
        _pry(rng, draft)


def _pry(rng: random.Random, draft: PlanDraft) -> None:
    """A tenant that tries to list and abort requests of another tenant."""
    _with_keys(draft)
    names = [request.id for request in draft.requests if request.tenant == ANN]
    tenant = BOB
    if {_twins, _burst, _salts}.isdisjoint(draft.actors) and rng.random() < 0.5:
        # A router without keys treats every caller as anonymous; the servers behind it must do the same.
        draft.changes["keys_at"] = ("servers",)
        names, tenant = [request.id for request in draft.requests if request.tenant == ANN and not request.routed], ""
    for _ in range(rng.randint(1, 2)):
        details = {"tenant": tenant, "req_ids": rng.sample(names, min(len(names), 4))}
        draft.actions += [_action(rng, draft, "pry", details)] if names else []


def _squatter(rng: random.Random, draft: PlanDraft) -> None:
    """A client that guesses the ids that other requests will get, and uses them itself."""
    draft.actions.append(_action(rng, draft, "squat", {"tries": rng.randint(2, 6), "aborts": rng.random() < 0.5}))


def _burst(rng: random.Random, draft: PlanDraft) -> None:
    """More requests of one tenant than can be admitted, and single requests of another tenant."""
    _with_keys(draft)
    at_s = rng.uniform(0, WINDOW_S / 2)
    # Spread the plan's requests, which would otherwise be a second burst, by the tenant with single requests.
    for request in draft.requests:
        assign(request, BOB)
    for i in range(rng.randint(15, 25)):
        _add_request(rng, draft, f"burst-{i}", at_s + rng.uniform(0, 0.05), max_tokens=30, ignore_eos=True)
    for request in draft.requests:
        request.to = draft.routers[0] if request.routed else request.to
    polite = _action(rng, draft, "ask_politely", {"times": rng.randint(2, 5)})
    draft.actions.append(replace(polite, at_s=at_s + rng.uniform(0, 0.3), via=draft.routers[0]))
    draft.changes["settings"] = replace(draft.plan.settings, most_choices=rng.choice((8, 8, 64)))
    if rng.random() < 0.5:
        draft.changes |= {"max_in_flight": 3, "max_queue": rng.choice((2, 8))}


def _strict(rng: random.Random, draft: PlanDraft) -> None:
    """Clients that accept only OpenAI's finish reasons."""
    for request in draft.requests:
        if rng.random() < 0.6:
            request.headers = {**request.headers, "x-openai-strict": "true"}


def _dishonest_worker(rng: random.Random, draft: PlanDraft) -> None:
    """A worker whose control answers are malformed, or name requests that it does not have."""
    target = rng.choice(draft.servers)
    at_s = rng.uniform(0, WINDOW_S - 1)
    ids = [request.id for request in rng.sample(draft.requests, min(len(draft.requests), 3))]
    details = {"lie": rng.randrange(len(MALFORMED_ANSWERS)) if rng.random() < 0.8 else None, "ids": ids}
    draft.actions.append(
        replace(_action(rng, draft, "lie", details), at_s=at_s, target=target, duration_s=rng.choice((1.0, 3.0)))
    )
    for kind in rng.sample(("abort_all", "abort", "pause", "flush", "look", "update"), rng.randint(2, 4)):
        call = script.draw_action(rng, kind, draft.servers, draft.plan.requests, draft.routers)
        draft.actions.append(replace(call, at_s=at_s + rng.uniform(0.1, 0.9), duration_s=rng.choice((0.05, 0.5))))


def _stopped_across(rng: random.Random, draft: PlanDraft) -> None:
    """A process that is stopped when a control call reaches it."""
    for _ in range(rng.randint(1, 2)):
        details = {
            "whole": rng.random() < 0.5,
            "which": rng.random(),
            "after_s": rng.choice((0.0, 0.0, 0.001, 0.01)),
            "call": rng.choice(("pause", "pause", "abort_all", "abort", "flush", "is_paused", "requests")),
            "mode": rng.choice(("abort", "drain", "freeze")),
            "timeout": rng.choice((0.5, 2.0)),
            "direct": rng.random() < 0.3,
            "req_ids": [request.id for request in rng.sample(draft.requests, min(len(draft.requests), 3))],
        }
        draft.actions.append(
            replace(_action(rng, draft, "stop_across", details), duration_s=rng.choice((3.0, 8.0, 20.0)))
        )


def _pause_while_waiting(rng: random.Random, draft: PlanDraft) -> None:
    """A pause while prompts wait for KV tickets and requests wait for admission in the router."""
    at_s, via = rng.uniform(0, WINDOW_S / 2), draft.routers[0]
    for i in range(rng.randint(3, 6)):
        prompt = tuple(rng.randrange(1, vocabulary.VOCAB_SIZE) for _ in range(rng.randint(20, 60)))
        body = {"stream": rng.random() < 0.5, "ignore_eos": True, "prompt_ids": prompt}
        _add_request(rng, draft, f"waiting-{i}", at_s + rng.uniform(0, 0.01), ANN, **body).to = via
    details = {"mode": rng.choice(("abort", "drain", "freeze")), "new_requests": rng.choice(("reject", "queue"))}
    pause = PlannedAction(
        at_s=at_s + rng.choice((0.002, 0.01, 0.03, 0.1)),
        kind="pause",
        via=via,
        undo_via=via,
        duration_s=rng.choice((0.05, 0.5, 2.0)),
        details=details | {"timeout": 5.0},
    )
    draft.actions.append(pause)
    if rng.random() < 0.5:
        draft.changes["max_in_flight"] = 2
    if rng.random() < 0.3:
        draft.actions.append(
            PlannedAction(
                at_s=at_s, kind="stop_engine", target="server0", duration_s=0.5, details={"which": rng.random()}
            )
        )


def _deadlines(rng: random.Random, draft: PlanDraft) -> None:
    """Requests with short deadlines, while engines or servers are stopped."""
    at_s = rng.uniform(0, WINDOW_S / 2)
    for i in range(rng.randint(2, 5)):
        body: dict[str, Any] = {"deadline_ms": rng.choice((300, 1000, 2000)), "stream": rng.random() < 0.5}
        request = _add_request(rng, draft, f"hasty-{i}", at_s + rng.uniform(0, 0.5), **body)
        if rng.random() < 0.2:
            request.to = rng.choice(draft.servers)
    for server in rng.sample(draft.servers, rng.randint(1, len(draft.servers))):
        kind = rng.choice(("stop_engine", "stop_engine", "stall_engine", "stop_server", "cut"))
        details = {} if kind in ("stop_server", "cut") else {"which": rng.random()}
        duration_s = rng.choice((3.0, 8.0, 15.0))
        via = rng.choice(draft.routers)
        draft.actions.append(
            PlannedAction(
                at_s=at_s + rng.uniform(0, 0.2),
                kind=kind,
                target=server,
                via=via,
                duration_s=duration_s,
                details=details,
            )
        )


def _forger(rng: random.Random, draft: PlanDraft) -> None:
    """A client that resumes an answer with forged progress, which no engine has generated."""
    for _ in range(rng.randint(1, 3)):
        draft.actions.append(_action(rng, draft, "forge", {"kind": rng.randrange(4), "direct": rng.random() < 0.3}))


def _salts(rng: random.Random, draft: PlanDraft) -> None:
    """A tenant that probes the prefix cache for prompts of another tenant."""
    _with_keys(draft)
    if rng.random() < 0.5:
        # The servers have no tenant keys and can be reached directly.
        draft.changes["keys_at"] = ("routers",)
        for request in draft.requests:
            request.to = request.to if request.routed else rng.choice(draft.routers)
    draft.actions.append(_action(rng, draft, "probe_salts", {"ids": [rng.randrange(1, 200) for _ in range(24)]}))


def _crash_in_pause(rng: random.Random, draft: PlanDraft) -> None:
    """Kill an engine or a server while it pauses; it must be paused after its restart."""
    details = {
        "mode": rng.choice(("abort", "drain", "drain", "freeze")),
        "whole": rng.random() < 0.4,
        "which": rng.random(),
        "after_s": rng.choice((0.0, 0.002, 0.02, 0.1)),
    }
    draft.actions.append(replace(_action(rng, draft, "pause_and_crash", details), duration_s=rng.choice((0.3, 1.0))))


def _action(rng: random.Random, draft: PlanDraft, kind: str, details: dict[str, Any]) -> PlannedAction:
    return PlannedAction(
        at_s=script.draw_moment(rng, draft.plan.requests),
        kind=kind,
        target=rng.choice(draft.servers),
        via=rng.choice(draft.routers),
        undo_via=rng.choice(draft.routers),
        duration_s=0.5,
        details=details,
    )


ACTORS: tuple[Actor, ...] = (
    _stalled_readers,
    _oversized_prompts,
    _twins,
    _squatter,
    _burst,
    _strict,
    _dishonest_worker,
    _stopped_across,
    _pause_while_waiting,
    _deadlines,
    _forger,
    _salts,
    _pry,
    _crash_in_pause,
)
