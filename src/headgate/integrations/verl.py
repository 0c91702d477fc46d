"""verl rollouts on Headgate servers.

    VERL_USE_EXTERNAL_MODULES=headgate.integrations.verl python -m verl.trainer.main_ppo \\
        actor_rollout_ref.rollout.name=headgate ...

verl imports this module in every process, and finds the replica and the rollout under the name `headgate`. A replica
starts one `headgate serve` on its worker's machine. Weights reach it through shared memory; an update is all or nothing.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import ray
import torch
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from verl.workers.rollout.base import _ROLLOUT_REGISTRY, BaseRollout
from verl.workers.rollout.replica import RolloutMode, RolloutReplica, RolloutReplicaRegistry, TokenOutput

from headgate.integrations.verl_server import RolloutServer, RolloutSettings
from headgate.weights import publish

NAME = "headgate"
DEVICES = "CUDA_VISIBLE_DEVICES"


class VerlServer(RolloutServer):
    """The Ray actor to which verl's clients send prompts."""

    async def generate(
        self,
        prompt_ids: Iterable[int],
        sampling_params: Mapping[str, Any],
        request_id: str,
        image_data: Any = None,
        video_data: Any = None,
        audio_data: Any = None,
        mm_processor_kwargs: Any = None,
    ) -> TokenOutput:
        if image_data or video_data or audio_data:
            raise ValueError("headgate serves text models; the prompt has images, videos or audio")
        return TokenOutput(**await self.sample(prompt_ids, sampling_params, request_id))


class VerlReplica(RolloutReplica):  # type: ignore[misc]
    """One server with `data_parallel_size` engines of `tensor_model_parallel_size` ranks, on one machine."""

    async def launch_servers(self) -> None:
        if self.nnodes != 1:
            raise NotImplementedError(f"a headgate replica is on one machine; this one needs {self.nnodes}")
        places = await asyncio.gather(*[worker.__ray_call__.remote(_place) for worker in self.workers])
        (node,) = {node for node, _, _ in places}
        devices = ",".join(sorted({devices for _, _, devices in places if devices}))
        actor = ray.remote(VerlServer).options(
            name=server_name(self.replica_rank, self.name_suffix),
            scheduling_strategy=NodeAffinitySchedulingStrategy(node_id=node, soft=False),
            max_concurrency=self.max_concurrency,
        )
        server = actor.remote(self._settings(host=places[0][1], devices=devices))
        self.servers, self._server_handle = [server], server
        self._server_address = await server.launch.remote()

    def _settings(self, host: str, devices: str) -> RolloutSettings:
        config = self.config
        context = config.max_model_len or config.prompt_length + config.response_length
        more = dict((config.engine_kwargs or {}).get(NAME) or {})
        flags = {
            "host": host,
            "replicas": config.data_parallel_size,
            "tensor_parallel": config.tensor_model_parallel_size,
            "max_context": context,
            "max_running": config.max_num_seqs,
            **more,
        }
        arguments = [part for flag, value in flags.items() for part in (f"--{flag.replace('_', '-')}", str(value))]
        return RolloutSettings(
            arguments=(str(self.model_config.path), *arguments),
            prompt_length=config.prompt_length,
            response_length=config.response_length,
            max_model_len=context,
            environ=dict(os.environ) | ({DEVICES: devices} if devices else {}),
            logprobs_mode=config.logprobs_mode,
            ignore_eos=config.ignore_eos,
            frees_memory=config.free_cache_engine,
            standalone=self.rollout_mode is RolloutMode.STANDALONE,
        )


def server_name(replica_rank: int, suffix: str = "") -> str:
    return f"headgate_server_{replica_rank}{suffix}"


def _place(worker: Any) -> tuple[str, str, str]:
    """The node, address and GPUs of a worker."""
    return ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address(), os.environ.get(DEVICES, "")


class VerlRollout(BaseRollout):  # type: ignore[misc]
    """In the process of a trainer or checkpoint worker: sends weights to the server of its replica."""

    def __init__(self, config: Any, model_config: Any, device_mesh: Any, replica_rank: int = -1) -> None:
        super().__init__(config, model_config, device_mesh)
        world_size = self.config.tensor_model_parallel_size * self.config.data_parallel_size
        rank = int(os.environ["RANK"])
        self.replica_rank = rank // world_size if replica_rank == -1 else replica_rank
        self.is_leader_rank = rank % world_size == 0

    async def resume(self, tags: Sequence[str]) -> None:
        """Weights that sleep are not read again: the update that follows brings them."""
        if others := [tag for tag in tags if tag != "weights"]:
            await self._call("wake_up", others)

    async def release(self) -> None:
        await self._call("sleep")

    async def update_weights(
        self,
        weights: Iterable[tuple[str, torch.Tensor]],
        global_steps: int | None = None,
        wire_format: str = "named_tensors",
        peft_config: Any = None,
        **unused: Any,
    ) -> None:
        if wire_format != "named_tensors" or peft_config is not None:
            raise NotImplementedError("headgate takes whole models: no deltas, and adapters merged (lora.merge=True)")
        # Every rank reads all weights, because gathering them is a collective operation. A copy of each: the next one
        # may reuse its buffer.
        tensors = {name: _copy(tensor) for name, tensor in weights if self._wants(name)}
        if self.is_leader_rank:
            with publish(tensors) as files:
                await self._call("update_weights", files.path, global_steps)

    def _wants(self, name: str) -> bool:
        tied = getattr(self.model_config.hf_config, "tie_word_embeddings", False)
        return self.is_leader_rank and not (tied and name == "lm_head.weight")

    async def _call(self, method: str, *arguments: Any) -> None:
        if self.is_leader_rank:
            server = ray.get_actor(server_name(self.replica_rank))
            await getattr(server, method).remote(*arguments)


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", copy=True).contiguous()


RolloutReplicaRegistry.register(NAME, lambda: VerlReplica)
_ROLLOUT_REGISTRY[(NAME, "async")] = f"{__name__}.VerlRollout"
