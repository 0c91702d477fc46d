"""`--logprobs-mode`: the log-probabilities of requests that do not select others (guarantee 76)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest

from headgate.engine.client import Chunk
from headgate.protocol.output import Ended, Timings
from headgate.protocol.request import GenerateRequest
from headgate.testing.tiny import tiny_model
from tests.api.scripted import Client, ScriptedEngines, scripted_app


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize(
    ("path", "body", "mode"),
    [
        ("/v1/completions", {"prompt": "a"}, "processed"),
        ("/v1/completions", {"prompt": "a", "logprobs_mode": "raw"}, "raw"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}, "processed"),
        ("/v1/responses", {"input": "a"}, "processed"),
        ("/v1/messages", {"messages": [{"role": "user", "content": "a"}]}, "processed"),
        ("/inference/v1/generate", {"token_ids": [1], "sampling_params": {}}, "processed"),
        ("/generate", {"input_ids": [1]}, "scaled"),
        ("/generate/", {"prompts": [[1]]}, "processed"),
    ],
)
def test_76_the_servers_default_applies_unless_the_request_or_its_api_has_another(
    model: Path, path: str, body: dict[str, Any], mode: str
):
    modes = []

    async def ended(request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        modes.append(request.sampling.logprobs_mode)
        yield Chunk(ended=Ended(request.id, "stop", "eos", len(request.prompt), 0, 0, Timings(0.0, 0.0, 0.0, 0.0)))

    client = Client(scripted_app(model, ScriptedEngines(ended), logprobs_mode="processed"), path, body)
    asyncio.run(client.call())
    assert (client.status, modes) == (200, [mode]), client.body
