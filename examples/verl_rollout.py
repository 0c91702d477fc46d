"""verl's rollout classes over a Headgate server, on a CPU: `python examples/verl_rollout.py`, about a minute.

verl's `LLMServerManager`, its load balancer, its clients and its checkpoint worker run unchanged; `rollout.name=headgate`
selects Headgate's replica. The script generates, changes the weights in the middle of an answer, and generates again.
verl's trainers need GPUs, so the weights come from a checkpoint instead of a trainer. Ray is told of one GPU, because
verl's standalone rollouts reserve one; nothing uses it.
"""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

os.environ["VERL_USE_EXTERNAL_MODULES"] = "headgate.integrations.verl"

import ray
import torch
from hydra import compose, initialize_config_module
from omegaconf import DictConfig
from safetensors.torch import load_file
from verl.workers.rollout.base import get_rollout_class
from verl.workers.rollout.llm_server import FullyAsyncLLMServerClient, LLMServerManager

from headgate.testing.tiny import tiny_model

PROMPT = list(b"1: ")


def configuration(model: Path) -> DictConfig:
    """verl's own defaults, with the settings that select Headgate and fit a tiny model."""
    settings = {
        "actor_rollout_ref.model.path": model,
        "actor_rollout_ref.rollout.name": "headgate",
        "actor_rollout_ref.rollout.tensor_model_parallel_size": 1,
        "actor_rollout_ref.rollout.prompt_length": 64,
        "actor_rollout_ref.rollout.response_length": 2000,
        "actor_rollout_ref.rollout.nnodes": 1,
        "actor_rollout_ref.rollout.n_gpus_per_node": 1,
        "+actor_rollout_ref.rollout.engine_kwargs.headgate.host": "127.0.0.1",
        "+actor_rollout_ref.rollout.engine_kwargs.headgate.device": "cpu",
        "+actor_rollout_ref.rollout.engine_kwargs.headgate.kv_blocks": 512,
    }
    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose("ppo_trainer", overrides=[f"{name}={value}" for name, value in settings.items()])


@contextmanager
def rollouts(config: DictConfig) -> Iterator[LLMServerManager]:
    """verl's manager with one replica, on a Ray cluster of this process."""
    variables = {name: os.environ[name] for name in ("VERL_USE_EXTERNAL_MODULES", "PYTHONPATH") if name in os.environ}
    ray.init(num_cpus=4, num_gpus=1, include_dashboard=False, runtime_env={"env_vars": variables})
    try:
        manager = LLMServerManager.create(config)
        yield manager
        ray.get([server.shutdown.remote() for server in manager.server_handles], timeout=60)
    finally:
        ray.shutdown()


def rollout_worker(config: DictConfig, rank: int = 0) -> Any:
    """verl's rollout of this process, which sends weights to the server of its replica."""
    os.environ["RANK"] = str(rank)
    rollout = config.actor_rollout_ref.rollout
    return get_rollout_class("headgate")(rollout, config.actor_rollout_ref.model, device_mesh=None)


def weights(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    yield from load_file(folder / "model.safetensors").items()


async def across_an_update(manager: LLMServerManager, worker: Any, new: Path) -> dict[str, Any]:
    """Answers before, during and after an update. verl's client continues the answer that the update interrupts."""
    client = manager.get_client(FullyAsyncLLMServerClient)
    (replica,) = manager.get_replicas()
    sampling = {"temperature": 0.0, "logprobs": True, "ignore_eos": True}
    before = await client.generate("a", prompt_ids=PROMPT, sampling_params=sampling | {"max_tokens": 8})
    running = asyncio.create_task(client.generate("b", prompt_ids=PROMPT, sampling_params=sampling))
    await asyncio.sleep(1)
    await replica.abort_all_requests()
    await replica.release_kv_cache()
    await worker.update_weights(weights(new), global_steps=1)
    await replica.resume_kv_cache()
    await replica.resume_generation()
    across = await running
    after = await client.generate("c", prompt_ids=PROMPT, sampling_params=sampling | {"max_tokens": 8})
    return {
        "before": before.token_ids,
        "across the update": {"tokens": len(across.token_ids), "log_probs": len(across.log_probs)},
        "after": after.token_ids,
        "step": after.extra_fields["global_steps"],
    }


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="verl-") as parent:
        old = tiny_model(Path(parent, "old"), max_position_embeddings=4096)
        new = tiny_model(Path(parent, "new"), seed=1, max_position_embeddings=4096)
        config = configuration(old)
        with rollouts(config) as manager:
            result = asyncio.run(across_an_update(manager, rollout_worker(config), new))
    print(json.dumps(result))


if __name__ == "__main__":
    main()
