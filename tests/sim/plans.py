"""Plans that are written by hand: a few requests, and what is done to the fleet meanwhile."""

from __future__ import annotations

from typing import Any

from headgate.testing.sim.caller import ClientBehaviour
from headgate.testing.sim.engine import Pace
from headgate.testing.sim.hosts import MODEL, ServerSettings
from headgate.testing.sim.network import NetworkConditions
from headgate.testing.sim.script import ROUTER, Plan, PlannedAction, PlannedRequest

PLAN = Plan(
    servers=2,
    settings=ServerSettings(),
    pace=Pace(step_s=0.02),
    weather=NetworkConditions(),
    policy="round_robin",
    asks=[],
    deeds=[],
)


def ask(
    name: str, at_s: float = 0.0, to: str = ROUTER, headers: dict[str, str] | None = None, **body: Any
) -> PlannedRequest:
    """Sixty tokens, which take more than a second."""
    prompt = (3, 4, 5, *name.encode())
    asked = {"model": MODEL, "prompt": list(prompt), "max_tokens": 60, "seed": 1, "ignore_eos": True, "stream": True}
    asked |= {"return_token_ids": True, "return_weight_versions": True, "tags": {"run": "a"}, **body}
    headers = {"x-request-id": name} | (headers or {})
    path = "/v1/completions"
    return PlannedRequest(
        name=name, at_s=at_s, to=to, path=path, body=asked, prompt=prompt, manners=ClientBehaviour(), headers=headers
    )


def deed(
    at_s: float,
    what: str,
    who: str = "server0",
    lasts_s: float = 1.0,
    via: str = ROUTER,
    back: str = ROUTER,
    **more: Any,
) -> PlannedAction:
    return PlannedAction(at_s=at_s, what=what, who=who, via=via, back=back, lasts_s=lasts_s, more=more)


HASTY: dict[str, Any] = {"settings": ServerSettings(drain_s=0.2)}
