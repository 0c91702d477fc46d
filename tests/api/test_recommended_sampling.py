"""`--generation-config`: the sampling parameters of requests that do not set them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest

from headgate.contract.sampling import SamplingParams
from headgate.engine.client import Chunk
from headgate.protocol.output import Ended, Timings
from headgate.protocol.request import GenerateRequest
from headgate.testing.tiny import tiny_model
from tests.api.scripted import Client, ScriptedEngines, scripted_app

SERVERS = {"temperature": 0.2, "top_p": 0.9, "top_k": 20, "max_tokens": 300}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"))


def asked(model: Path, path: str, body: dict[str, Any]) -> SamplingParams:
    seen = []

    async def ended(request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        seen.append(request.sampling)
        yield Chunk(ended=Ended(request.id, "stop", "eos", len(request.prompt), 0, 0, Timings(0.0, 0.0, 0.0, 0.0)))

    client = Client(scripted_app(model, ScriptedEngines(ended), sampling=SERVERS), path, body)
    asyncio.run(client.call())
    assert client.status == 200, client.body
    return seen[0]


CALLS: list[tuple[str, dict[str, Any], str | None, int]] = [  # path, body, member with the parameters, longest answer
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}, None, 300),
    ("/v1/responses", {"input": "a"}, None, 300),
    ("/v1/completions", {"prompt": "a"}, None, 16),  # this API and SGLang's have lengths of their own
    ("/generate", {"input_ids": [1]}, "sampling_params", 128),
    ("/inference/v1/generate", {"token_ids": [1]}, "sampling_params", 300),
]


@pytest.mark.parametrize(("path", "body", "member", "longest"), CALLS)
def test_the_servers_parameters_apply_where_a_request_sets_none(
    model: Path, path: str, body: dict[str, Any], member: str | None, longest: int
):
    def sampling(**given: Any) -> tuple[float, float, int]:
        params = asked(model, path, body | ({member: given} if member else given))
        assert params.max_tokens == longest
        return params.temperature, params.top_p, params.top_k

    assert sampling() == (0.2, 0.9, 20)
    assert sampling(temperature=0) == (0, 0.9, 20)
    assert sampling(temperature=1, top_p=1, top_k=-1) == (1, 1, 0)
    assert sampling(temperature=None) == (0.2, 0.9, 20)


def test_a_longer_minimum_raises_the_servers_length(model: Path):
    body = {"messages": [{"role": "user", "content": "a"}], "min_tokens": 400}
    assert asked(model, "/v1/chat/completions", body).max_tokens == 400


def test_calls_that_score_and_those_of_trl_are_not_changed(model: Path):
    params = asked(model, "/generate/", {"prompts": [[1]]})
    assert (params.temperature, params.top_p) == (1, 1)
