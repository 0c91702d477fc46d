"""Guarantee 56: the constraints and extras of an answer survive preemption, a pause and a move to another engine."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

from headgate.testing.tiny import tiny_model
from tests.api.clients import Missed, Told, post, unless_missed, until
from tests.api.live import LiveServer, live_server
from tests.api.test_pause import pause, resume

MANY = {"type": "array", "items": {"type": "integer"}, "minItems": 120}
COMMON = {"temperature": 1, "max_tokens": 500, "return_token_ids": True}
TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {
            "type": "object",
            "properties": {"numbers": MANY},
            "required": ["numbers"],
            "additionalProperties": False,
        },
    },
}
MESSAGES = [{"role": "user", "content": "go"}]
SCHEMA = {"type": "json_schema", "json_schema": {"name": "many", "schema": MANY}}

FEATURES: dict[str, tuple[str, dict[str, Any]]] = {
    "structured": ("/v1/chat/completions", {"messages": MESSAGES, "response_format": SCHEMA}),
    "tool_calls": ("/v1/chat/completions", {"messages": MESSAGES, "tools": [TOOL], "tool_choice": "required"}),
    "penalties": (
        "/v1/completions",
        {"prompt": "go", "ignore_eos": True, "repetition_penalty": 1.2, "presence_penalty": 0.5},
    ),
    "logprobs": ("/v1/completions", {"prompt": "go", "ignore_eos": True, "logprobs": 3}),
    "stop": ("/v1/completions", {"prompt": "go", "ignore_eos": True, "stop": ["\x00\x01\x02", "zzz", "qqq"]}),
}


async def ask_all(server: LiveServer) -> list[Told]:
    asked = [
        post(server.url, path, COMMON | body | {"seed": seed})
        for seed in range(3)
        for path, body in FEATURES.values()
    ]
    return await asyncio.gather(*asked)


def answers(told: list[Told]) -> list[Any]:
    assert {each.status for each in told} == {200}
    choices = [each.body["choices"][0] for each in told]
    for choice in choices:
        for call in choice.get("message", {}).get("tool_calls", ()):
            del call["id"]  # made from the request's own id
    return choices


def rounded(value: Any) -> Any:
    """Round all numbers, because log-probabilities of a recomputed prefix may differ in the last digit."""
    match value:
        case float():
            return round(value, 4)
        case dict():
            return {key: rounded(each) for key, each in value.items()}
        case list():
            return [rounded(each) for each in value]
    return value


def test_56_answers_do_not_change_after_preemption_a_freeze_a_reload_of_the_weights_and_a_killed_engine(
    tmp_path: Path,
):
    model = tiny_model(tmp_path, max_position_embeddings=2048)

    async def main(server: LiveServer) -> None:
        undisturbed = answers(await ask_all(server))
        asked = asyncio.create_task(ask_all(server))

        def busy() -> bool:
            if asked.done():
                raise Missed
            live = list(server.api.ledger.live.values())
            return len(live) == 15 and sum(record.outputs(0) > 20 for record in live) >= 8

        await until(busy)
        await pause(server, mode="freeze", new_requests="queue")  # for requests whose grammar is not ready yet
        await post(server.url, "/v1/update_weights", {"path": str(model)})
        await resume(server)
        pid = server.host.replicas[0].pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        disturbed = answers(await asked)
        assert rounded(disturbed) == rounded(undisturbed)
        preempted = [server.status(i).preemptions for i in (1,)]
        assert sum(preempted) > 0, "too many blocks: nothing was preempted"

    # 15 answers of 500 tokens need 250 blocks of 32; one engine alone has 80.
    with live_server(model, device="cpu", kv_blocks=80, max_running=16, count=2) as server:
        unless_missed(lambda _: main(server))
