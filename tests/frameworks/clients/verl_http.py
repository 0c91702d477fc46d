"""verl's `AsyncHttpServerAdapter` and `HttpServerAdapter`, with which its workers call an SGLang server.

The adapters are unchanged. They import SGLang's server, which needs GPU kernels, for its base class and argument types;
`stubs/verl-http` has these. Handles of GPU memory, with which verl's workers update weights, do not exist here: the
check of that call is that it is refused by name, and files are loaded in its place.
"""

from __future__ import annotations

import asyncio
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
from safetensors.torch import load_file, save_file
from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqInput
from verl.workers.rollout.sglang_rollout.http_server_engine import AsyncHttpServerAdapter, HttpServerAdapter

from tests.frameworks.clients.checks import Servers, ask, given, in_flight, run_checks, wait_until

IDS = [1, 2, 3]
GREEDY: dict[str, Any] = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}
LONG = GREEDY | {"max_new_tokens": 20000}  # a minute of work: only an abort ends it within a check
DEADLINE_S = 120.0


def place(servers: Servers) -> dict[str, Any]:
    """As verl's worker connects to a server that runs already."""
    parts = urlsplit(servers.url)
    found = {"model_path": str(servers.model), "host": parts.hostname, "port": parts.port, "trust_remote_code": False}
    return found | {"launch_server": False, "timeout": DEADLINE_S}


def within(servers: Servers, use: Callable[[AsyncHttpServerAdapter], Awaitable[None]]) -> None:
    async def run() -> None:
        await asyncio.wait_for(use(AsyncHttpServerAdapter(**place(servers))), DEADLINE_S)

    asyncio.run(run())


def greedy(servers: Servers) -> list[int]:
    return list(ask(f"{servers.url}/generate", {"input_ids": IDS, "sampling_params": GREEDY})["output_ids"])


def generate_returns_ids_and_log_probabilities(servers: Servers) -> None:
    async def use(adapter: AsyncHttpServerAdapter) -> None:
        answer = await adapter.async_generate(
            input_ids=IDS, sampling_params=GREEDY, return_logprob=True, logprob_start_len=0, top_logprobs_num=2
        )
        assert answer["output_ids"] == greedy(servers)
        scored = answer["meta_info"]["output_token_logprobs"]
        assert [token for _, token, _ in scored] == answer["output_ids"] and all(value < 0 for value, *_ in scored)
        assert len(answer["meta_info"]["input_token_logprobs"]) == len(IDS)

    within(servers, use)


def the_synchronous_adapter_generates_and_flushes(servers: Servers) -> None:
    adapter = HttpServerAdapter(**place(servers))
    answer = adapter.generate(prompt="Hello", sampling_params=GREEDY)
    assert answer["text"] == ask(f"{servers.url}/generate", {"text": "Hello", "sampling_params": GREEDY})["text"]
    assert "Cache flushed" in adapter.flush_cache()["text"]


def the_model_is_listed(servers: Servers) -> None:
    async def use(adapter: AsyncHttpServerAdapter) -> None:
        assert [each["id"] for each in (await adapter.available_models())["data"]]

    within(servers, use)


def an_abort_of_all_requests_returns_their_tokens(servers: Servers) -> None:
    async def use(adapter: AsyncHttpServerAdapter) -> None:
        running = asyncio.create_task(adapter.generate(input_ids=IDS, sampling_params=LONG))
        await asyncio.to_thread(wait_until, lambda: bool(in_flight(servers.url)), "the request is running")
        assert await adapter.abort_request(abort_all=True) == {}
        answer = await running
        assert answer["meta_info"]["finish_reason"]["type"] == "abort"

    within(servers, use)


def hybrid_training_updates_weights_while_memory_is_released(servers: Servers) -> None:
    """verl's order: release, wake the weights, update, flush, wake the KV cache. The second round has other weights,
    and wakes some whose files are gone, as weights that a trainer has sent are."""

    async def use(adapter: AsyncHttpServerAdapter) -> None:
        answers = [greedy(servers)]
        for scale in (0.5, 2.0):
            await adapter.release_memory_occupation(tags=["kv_cache", "weights"])
            await adapter.resume_memory_occupation(tags=["weights"])
            with tempfile.TemporaryDirectory() as folder:
                save_scaled(servers.model, Path(folder), scale)
                assert ask(f"{servers.url}/update_weights_from_disk", {"model_path": folder})["success"]
            assert "Cache flushed" in (await adapter.flush_cache())["text"]
            await adapter.resume_memory_occupation(tags=["kv_cache"])
            answers.append(greedy(servers))
        assert len({tuple(each) for each in answers}) == 3

    within(servers, use)


def save_scaled(model: Path, folder: Path, scale: float) -> None:
    """A checkpoint of the same shape, in which every second number is multiplied by `scale`."""
    tensors = load_file(model / "model.safetensors")
    for tensor in tensors.values():
        tensor.view(-1)[::2] *= scale
    save_file(tensors, folder / "model.safetensors")


def a_pickle_that_is_no_handle_of_gpu_memory_is_refused(servers: Servers) -> None:
    async def use(adapter: AsyncHttpServerAdapter) -> None:
        before = greedy(servers)
        harmful = pickle.dumps(subprocess.run)
        update = UpdateWeightsFromTensorReqInput([harmful], load_format="flattened_bucket", flush_cache=False)
        (answer,) = await asyncio.gather(adapter.update_weights_from_tensor(update), return_exceptions=True)
        assert isinstance(answer, aiohttp.ClientResponseError) and answer.status == 400, answer
        assert greedy(servers) == before

    within(servers, use)


CHECKS = (
    generate_returns_ids_and_log_probabilities,
    the_synchronous_adapter_generates_and_flushes,
    the_model_is_listed,
    an_abort_of_all_requests_returns_their_tokens,
    hybrid_training_updates_weights_while_memory_is_released,
    a_pickle_that_is_no_handle_of_gpu_memory_is_refused,
)

if __name__ == "__main__":
    sys.exit(run_checks("verl", CHECKS, given()))
