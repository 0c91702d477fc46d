"""`headgate.integrations.verl_server`: the calls of verl in their order, on a real server."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from headgate.client import FleetError
from headgate.integrations.verl_server import RolloutServer, RolloutSettings, completion_fields
from headgate.testing.tiny import tiny_model
from headgate.weights import publish

SETTINGS = RolloutSettings(arguments=(), prompt_length=64, response_length=400, max_model_len=464)
GREEDY = {"temperature": 0.0, "ignore_eos": True, "logprobs": True}
PROMPT = [1, 2, 3]


def serving(model: Path, check: Callable[[RolloutServer], Awaitable[object]]) -> None:
    async def run() -> None:
        async with server_of(model) as server:
            await asyncio.wait_for(check(server), 200)

    asyncio.run(run())


@asynccontextmanager
async def server_of(model: Path) -> AsyncIterator[RolloutServer]:
    arguments = (str(model), "--device", "cpu", "--kv-blocks", "64", "--max-context", "464")
    settings = RolloutSettings(arguments, 64, 400, 464, environ=dict(os.environ))
    server = RolloutServer(settings)
    await server.launch()
    try:
        yield server
    finally:
        await server.shutdown()


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("verl") / "old")


@pytest.fixture(scope="module")
def new(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("verl") / "new", seed=1)


async def answer(server: RolloutServer, tokens: int = 12) -> dict[str, Any]:
    return await server.sample(PROMPT, GREEDY | {"max_tokens": tokens}, f"request-{os.urandom(4).hex()}")


async def load(server: RolloutServer, model: Path, step: int) -> None:
    with publish(load_file(model / "model.safetensors")) as files:
        await server.update_weights(files.path, step)


async def has_begun(server: RolloutServer) -> None:
    while not await server._fleet.requests():
        await asyncio.sleep(0.01)


@pytest.mark.parametrize(
    ("sampling", "prompt_tokens", "max_tokens"),
    [
        ({}, 10, 400),
        ({}, 100, 364),  # what is left of prompt and answer together
        ({"max_tokens": 7}, 10, 7),
        ({"max_new_tokens": 7}, 10, 7),
        ({"max_tokens": 4000}, 64, 400),  # what is left of the context
        ({"max_tokens": None}, 10, 400),
    ],
)
def test_the_length_of_an_answer_is_limited_as_in_verls_other_engines(
    sampling: dict[str, Any], prompt_tokens: int, max_tokens: int
):
    assert completion_fields(SETTINGS, prompt_tokens, sampling)["max_tokens"] == max_tokens


def test_log_probabilities_are_those_of_the_configured_mode():
    assert "logprobs" not in completion_fields(SETTINGS, 1, {"logprobs": False})
    fields = completion_fields(SETTINGS, 1, {"logprobs": True, "top_k": -1})
    assert fields["logprobs"] == 0 and fields["logprobs_mode"] == "processed" and fields["top_k"] == -1


@pytest.mark.parametrize(("sampling", "tokens"), [({"prompt_logprobs": 0}, 1), ({}, 464)])
def test_what_cannot_be_answered_is_refused(sampling: dict[str, Any], tokens: int):
    with pytest.raises(ValueError, match="prompt"):
        completion_fields(SETTINGS, tokens, sampling)


def test_an_interrupted_answer_continues_after_an_update_with_the_new_weights(old: Path, new: Path):
    async def check(server: RolloutServer) -> None:
        before = await answer(server)
        assert before["stop_reason"] == "completed" and len(before["log_probs"]) == 12
        running = asyncio.create_task(answer(server, 400))
        await has_begun(server)
        assert await server.abort_all_requests() == {"aborted_count": 1}
        cut = await running
        assert cut["stop_reason"] == "aborted" and len(cut["token_ids"]) < 400
        waiting = asyncio.create_task(answer(server))
        await server.release_kv_cache()
        await load(server, new, 7)
        await server.resume_kv_cache()
        assert not waiting.done()
        await server.resume_generation()
        after = await waiting
        assert after["token_ids"] != before["token_ids"]
        steps = {"global_steps": 7, "min_global_steps": 7, "max_global_steps": 7}
        assert after["extra_fields"] == steps and cut["extra_fields"]["global_steps"] is None

    serving(old, check)


def test_a_server_that_left_the_load_balancer_ends_new_requests_at_once(old: Path):
    async def check(server: RolloutServer) -> None:
        await server.abort_all_requests(reject_request=True)
        rejected = await answer(server)
        assert rejected["stop_reason"] == "aborted" and rejected["token_ids"] == []
        await server.resume_generation()
        assert (await answer(server))["stop_reason"] == "completed"

    serving(old, check)


def test_a_sleeping_server_gets_its_weights_with_the_update_and_runs_when_all_is_awake(old: Path, new: Path):
    async def check(server: RolloutServer) -> None:
        before = await answer(server)
        await server.sleep()
        await load(server, new, 1)
        waiting = asyncio.create_task(answer(server))
        await has_begun(server)
        assert not waiting.done()
        await server.wake_up(["kv_cache"])
        assert (await waiting)["token_ids"] != before["token_ids"]

    serving(old, check)


def test_an_update_of_a_running_server_keeps_its_requests_and_a_refused_one_changes_nothing(old: Path, new: Path):
    async def check(server: RolloutServer) -> None:
        before = await answer(server)
        with pytest.raises(FleetError):
            await server.update_weights("/nowhere", 1)
        assert (await answer(server))["token_ids"] == before["token_ids"]
        running = asyncio.create_task(answer(server, 400))
        await has_begun(server)
        await load(server, new, 2)
        assert len((await running)["token_ids"]) == 400
        assert (await answer(server))["extra_fields"]["global_steps"] == 2

    serving(old, check)


def test_a_server_that_does_not_start_is_reported(tmp_path: Path):
    with pytest.raises(RuntimeError, match="did not start"):
        serving(tmp_path, answer)
