"""Going on with an answer that another engine has begun."""

from __future__ import annotations

from headgate import LLM, SamplingParams
from headgate.protocol.message import Submit
from headgate.protocol.request import GenerateRequest


def resume(llm: LLM, prompt: list[int], params: SamplingParams, generated: list[int]) -> list[int]:
    """The rest of an answer that was begun elsewhere."""
    heard: list[int] = []
    deliver = llm.engine.loop._send
    llm.engine.loop._send = lambda _, told: heard.extend(told.outputs.tokens)
    llm.engine.loop.post(Submit([GenerateRequest(10**6, tuple(prompt), params, generated=tuple(generated))]))
    llm.engine.loop.turn()
    while llm.engine.scheduler.has_any([10**6]):
        llm.engine.loop.turn()
    llm.engine.loop._send = deliver
    return heard
