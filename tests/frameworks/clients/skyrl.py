"""SkyRL's two clients: `RemoteInferenceClient` for rollouts, and `SkyrlWeightSyncClient`, which trainers update with.

Both are unchanged. SkyRL needs Python 3.12, for which there may be no CPU build of torch, so an empty module takes its
place (`stubs/skyrl`); the clients do not compute. The trainer's end of the weights' wire is ours (`vllm_trainer.py`),
because SkyRL's own sends by NCCL, and runs in our environment.
"""

from __future__ import annotations

import asyncio
import json
import os
import struct
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp
from skyrl.backends.skyrl_train.inference_servers.remote_inference_client import RemoteInferenceClient
from skyrl.backends.skyrl_train.weight_sync.control_plane import SkyrlWeightSyncClient, nccl_init_payloads

from tests.frameworks.clients.checks import MODEL, Servers, ask, free_port, given, in_flight, run_checks, wait_until

PROMPTS = [[1, 2, 3], [4, 5]]
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 8, "ignore_eos": True, "logprobs": 0}
LONG = GREEDY | {"max_tokens": 2000}  # seconds of work, so that a pause finds the request running
TRAINER = Path(__file__).parents[2] / "updates/vllm_trainer.py"
BUFFER_BYTES = 20_000  # several buffers per update
DEADLINE_S = 120.0


def within(servers: Servers, use: Callable[[RemoteInferenceClient], Awaitable[None]]) -> None:
    """Run `use` with a client of both servers, which is closed afterwards."""

    async def run() -> None:
        client = RemoteInferenceClient(servers.url, list(servers.urls), data_parallel_size=1, model_name=MODEL)
        try:
            await asyncio.wait_for(use(client), DEADLINE_S)
        finally:
            await client.teardown()

    asyncio.run(run())


def greedy(url: str) -> list[int]:
    body = {"prompt": PROMPTS[0], "return_token_ids": True, **GREEDY}
    (choice,) = ask(f"{url}/v1/completions", body)["choices"]
    return list(choice["token_ids"])


def generate_returns_ids_text_and_log_probabilities(servers: Servers) -> None:
    async def use(client: RemoteInferenceClient) -> None:
        batch = {"prompt_token_ids": PROMPTS, "sampling_params": GREEDY, "session_ids": ["a", "b"], "cache_salt": "7"}
        answer = await client.generate(batch)
        assert answer["response_ids"][0] == greedy(servers.url)
        assert answer["responses"] == await client.detokenize(answer["response_ids"])
        assert [len(each) for each in answer["response_logprobs"]] == [8, 8]
        assert answer["stop_reasons"] == ["length", "length"]

    within(servers, use)


def tinkers_samples_have_scores_of_the_prompt(servers: Servers) -> None:
    async def use(client: RemoteInferenceClient) -> None:
        body = {
            "prompt": {"chunks": [{"tokens": PROMPTS[0]}]},
            "num_samples": 2,
            "sampling_params": {"temperature": 1.0, "max_tokens": 8, "seed": 1, "top_k": -1, "top_p": 1.0},
            "session_id": "a",
            "include_prompt_logprobs": True,
            "topk_prompt_logprobs": 3,
        }
        answer = await client.sample({"json": body})
        assert [len(each["logprobs"]) for each in answer["sequences"]] == [
            len(each["tokens"]) for each in answer["sequences"]
        ]
        assert len(answer["sequences"]) == 2
        first, *others = answer["prompt_logprobs"]
        assert first is None and len(others) == 2 and all(value < 0 for value in others)
        assert [each and len(each) for each in answer["topk_prompt_logprobs"]] == [None, 3, 3]

    within(servers, use)


def chats_completions_and_tokens_pass(servers: Servers) -> None:
    async def use(client: RemoteInferenceClient) -> None:
        messages = [{"role": "user", "content": "Hello"}]
        chat = await client.chat_completion({"json": {"messages": messages, "max_tokens": 4, "session_id": "a"}})
        assert chat["choices"][0]["message"]["role"] == "assistant"
        text = await client.completion({"json": {"prompt": "Hello", "max_tokens": 4}})
        assert text["usage"]["completion_tokens"] <= 4
        (tokens,) = await client.tokenize(["Hello"])
        assert await client.detokenize([tokens]) == ["Hello"]

    within(servers, use)


def a_request_held_by_a_pause_continues_after_the_resume(servers: Servers) -> None:
    async def use(client: RemoteInferenceClient) -> None:
        running = asyncio.create_task(client.generate({"prompt_token_ids": PROMPTS[:1], "sampling_params": LONG}))
        await asyncio.to_thread(wait_until, lambda: bool(in_flight(servers.url)), "the request is running")
        await client.pause_generation()
        assert all(ask(f"{url}/is_paused")["is_paused"] for url in servers.urls) and not running.done()
        await client.resume_generation()
        assert len((await running)["response_ids"][0]) == LONG["max_tokens"]

    within(servers, use)


def all_servers_sleep_and_wake(servers: Servers) -> None:
    async def use(client: RemoteInferenceClient) -> None:
        before = greedy(servers.url)
        await client.sleep(level=1)
        assert await client.is_sleeping()
        await client.wake_up(["weights"])
        await client.wake_up(["kv_cache"])
        await client.reset_prefix_cache(reset_running_requests=True)
        assert not await client.is_sleeping() and greedy(servers.url) == before

    within(servers, use)


def the_world_size_is_that_of_all_servers(servers: Servers) -> None:
    async def use(client: RemoteInferenceClient) -> None:
        assert await client.get_world_size() == (2, 1)

    within(servers, use)


def adapters_and_deltas_are_refused(servers: Servers) -> None:
    async def use(client: RemoteInferenceClient) -> None:
        calls = (client.load_lora_adapter("a", "/tmp/a"), client.fetch_weights(1, sync_dir="/tmp/sync"))
        answers = await asyncio.gather(*calls, return_exceptions=True)
        assert [isinstance(each, aiohttp.ClientResponseError) and each.status for each in answers] == [404, 404]

    within(servers, use)


class Trainer:
    """The trainer's end of the wire, and SkyRL's calls to the servers at the other ends."""

    def __init__(self, process: subprocess.Popen[str], sync: SkyrlWeightSyncClient, model: Path) -> None:
        self._process = process
        self._sync = sync
        self._tensors = headers(model / "model.safetensors")

    def send(self, label: str) -> None:
        self._sync.start_weight_update()
        assert self._process.stdin is not None and self._process.stdout is not None
        print("packed", BUFFER_BYTES, *self._tensors, file=self._process.stdin, flush=True)
        names, found = list(self._tensors), self._tensors.values()
        update = {
            "names": names,
            "dtype_names": ["float32"] * len(names),
            "shapes": [each["shape"] for each in found],
        }
        self._sync.update_weights(update)
        assert self._process.stdout.readline() == "sent\n"
        self._sync.finish_weight_update(label)


def headers(file: Path) -> dict[str, dict[str, Any]]:
    """The tensors of a safetensors file, without their values."""
    data = file.read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    found: dict[str, dict[str, Any]] = json.loads(data[8 : 8 + size])
    found.pop("__metadata__", None)
    assert {each["dtype"] for each in found.values()} == {"F32"}
    return found


@contextmanager
def trainer(servers: Servers, model: Path) -> Iterator[Trainer]:
    """A trainer with the weights of `model`, joined by both servers."""
    port, sync = free_port(), SkyrlWeightSyncClient(servers.urls, init_payload_fn=nccl_init_payloads)
    command = [os.environ["HEADGATE_PYTHON"], str(TRAINER), str(model), str(port), "3"]
    paths = {"PYTHONPATH": os.environ["HEADGATE_PYTHONPATH"]}  # not that of our stand-in for torch
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ | paths
    )
    try:
        place = {"master_address": "127.0.0.1", "master_port": port, "rank_offset": 1, "world_size": 3}
        packed = {"packed": True, "packed_buffer_size_bytes": BUFFER_BYTES}
        sync.init_weight_transfer_engine(place | packed | {"backend": "gloo"})  # the backend is our addition
        assert process.stdout is not None and process.stdout.readline() == "joined\n"
        yield Trainer(process, sync, model)
    finally:
        sync.close()
        process.kill()
        process.communicate(timeout=DEADLINE_S)


def weights_are_updated_while_requests_are_held(servers: Servers) -> None:
    """SkyRL's order for trainers on other devices: pause with `keep`, send, resume."""

    async def use(client: RemoteInferenceClient) -> None:
        before = greedy(servers.url)
        with trainer(servers, other_model(servers)) as sender:
            running = asyncio.create_task(client.generate({"prompt_token_ids": PROMPTS[:1], "sampling_params": LONG}))
            await asyncio.to_thread(wait_until, lambda: bool(in_flight(servers.url)), "the request is running")
            await client.pause_generation()
            await asyncio.to_thread(sender.send, "step-1")
            await client.resume_generation()
            assert len((await running)["response_ids"][0]) == LONG["max_tokens"]
        after = [greedy(url) for url in servers.urls]
        assert after[0] == after[1] != before
        assert {ask(f"{url}/get_weight_version")["weight_version"] for url in servers.urls} == {"step-1"}

    within(servers, use)


def colocated_trainers_update_weights_while_memory_is_released(servers: Servers) -> None:
    """SkyRL's order on one device; the weights in service came over the wire, so they cannot be read again."""

    async def use(client: RemoteInferenceClient) -> None:
        with trainer(servers, servers.model) as sender:
            await client.sleep(level=2)
            await client.wake_up(["weights"])
            await asyncio.to_thread(sender.send, "step-2")
            await client.wake_up(["kv_cache"])
            colocated = greedy(servers.url)
            running = asyncio.create_task(client.generate({"prompt_token_ids": PROMPTS[:1], "sampling_params": LONG}))
            await asyncio.to_thread(wait_until, lambda: bool(in_flight(servers.url)), "the request is running")
            await client.pause_generation()
            await client.sleep_for_weight_sync(offload_kv=False)
            await client.wake_for_weight_sync(["weights"])
            await asyncio.to_thread(sender.send, "step-3")
            await client.wake_for_weight_sync(["kv_cache"])
            await client.resume_generation()
            assert len((await running)["response_ids"][0]) == LONG["max_tokens"]
        assert greedy(servers.url) == colocated

    within(servers, use)


def other_model(servers: Servers) -> Path:
    """A checkpoint of the same shape with other numbers, beside the servers' own."""
    other = servers.model.parent / "other"
    if not other.exists():
        code = "from headgate.testing.tiny import tiny_model; import sys; tiny_model(sys.argv[1], seed=1)"
        paths = {"PYTHONPATH": os.environ["HEADGATE_PYTHONPATH"]}
        command = [os.environ["HEADGATE_PYTHON"], "-c", code, str(other)]
        subprocess.run(command, check=True, timeout=DEADLINE_S, env=os.environ | paths)
    return other


CHECKS = (
    generate_returns_ids_text_and_log_probabilities,
    tinkers_samples_have_scores_of_the_prompt,
    chats_completions_and_tokens_pass,
    a_request_held_by_a_pause_continues_after_the_resume,
    all_servers_sleep_and_wake,
    the_world_size_is_that_of_all_servers,
    adapters_and_deltas_are_refused,
    weights_are_updated_while_requests_are_held,
    colocated_trainers_update_weights_while_memory_is_released,
)

if __name__ == "__main__":
    sys.exit(run_checks("skyrl", CHECKS, given()))
