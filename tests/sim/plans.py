"""Helpers for hand-written plans: a few requests, and actions on the fleet."""

from __future__ import annotations

from typing import Any

from headgate.testing.sim import vocabulary
from headgate.testing.sim.caller import ClientBehaviour
from headgate.testing.sim.engine import EngineProfile
from headgate.testing.sim.hosts import MODEL, ServerSettings
from headgate.testing.sim.network import NetworkConditions
from headgate.testing.sim.script import ROUTER, PlannedAction, PlannedRequest, SimulationPlan

PLAN = SimulationPlan(
    servers=2,
    settings=ServerSettings(),
    profile=EngineProfile(step_s=0.02),
    network=NetworkConditions(),
    policy="round_robin",
    requests=[],
    actions=[],
)


def request(
    name: str, at_s: float = 0.0, to: str = ROUTER, headers: dict[str, str] | None = None, **body: Any
) -> PlannedRequest:
    """A request for sixty tokens, which takes more than a second."""
    prompt = (3, 4, 5, *name.encode())
    content = {
        "model": MODEL,
        "prompt": list(prompt),
        "max_tokens": 60,
        "seed": 1,
        "ignore_eos": True,
        "stream": True,
    }
    content |= {"return_token_ids": True, "return_weight_versions": True, "tags": {"run": "a"}, **body}
    headers = {"x-request-id": name} | (headers or {})
    path = "/v1/completions"
    return PlannedRequest(
        name=name,
        at_s=at_s,
        to=to,
        path=path,
        body=content,
        prompt=prompt,
        behaviour=ClientBehaviour(),
        headers=headers,
    )


def make_chat(request: PlannedRequest) -> None:
    """Send a chat message instead of the prompt."""
    del request.body["prompt"]
    request.path = "/v1/chat/completions"
    request.body["messages"] = [{"role": "user", "content": "tell me"}]
    text = vocabulary.template().render(request.body["messages"], add_generation_prompt=True)
    request.prompt = tuple(vocabulary.tokenizer().encode(text, add_special=False))


def action(
    at_s: float,
    kind: str,
    target: str = "server0",
    duration_s: float = 1.0,
    via: str = ROUTER,
    undo_via: str = ROUTER,
    **details: Any,
) -> PlannedAction:
    return PlannedAction(
        at_s=at_s, kind=kind, target=target, via=via, undo_via=undo_via, duration_s=duration_s, details=details
    )


SHORT_DRAIN: dict[str, Any] = {"settings": ServerSettings(drain_s=0.2)}
