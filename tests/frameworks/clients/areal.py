"""AReaL's `RemoteSGLangEngine`: rollouts that an update interrupts, scores, and weights from files and over its own group.

The package requires an older torch, so it is installed without its dependencies. Its client and its process group are
unchanged; on a machine without a GPU the group is gloo.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch
import torch.distributed
from areal.api import ModelAllocation, ModelRequest, ParamSpec, RolloutWorkflow, WeightUpdateMeta
from areal.api.cli_args import GenerationHyperparameters, InferenceEngineConfig, NameResolveConfig
from areal.engine.core.distributed import init_custom_process_group
from areal.engine.sglang_remote import RemoteSGLangEngine, SGLangBackend
from areal.infra.platforms import current_platform
from areal.utils import name_resolve, names
from safetensors.torch import load_file, save_file

from tests.frameworks.clients.checks import Servers, ask, free_port, given, in_flight, run_checks, wait_until

PROMPT = [1, 2, 3]
EXPERIMENT, TRIAL = "headgate", "check"
ALLOCATION = "sglang:d2"
LONG = 4000  # tokens: seconds of work, so that a rollout is interrupted before its end
DEADLINE_S = 120.0


class Rollout(RolloutWorkflow):
    """One greedy answer per prompt, as a trainer receives it."""

    def __init__(self, tokens: int) -> None:
        self._sampling = GenerationHyperparameters(greedy=True, max_new_tokens=tokens, ignore_eos=True)

    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> dict[str, torch.Tensor]:
        answer = await engine.agenerate(ModelRequest(input_ids=data["prompt"], gconfig=self._sampling))
        ids = answer.input_tokens + answer.output_tokens
        prompt = len(answer.input_tokens)
        return {
            "input_ids": torch.tensor([ids]),
            "attention_mask": torch.ones(1, len(ids), dtype=torch.bool),
            "loss_mask": torch.tensor([[0] * prompt + [1] * len(answer.output_tokens)]),
            "logprobs": torch.tensor([[0.0] * prompt + answer.output_logprobs]),
            "versions": torch.tensor([[-1] * prompt + answer.output_versions]),
        }


@contextmanager
def engine_of(servers: Servers) -> Iterator[RemoteSGLangEngine]:
    config = InferenceEngineConfig(
        experiment_name=EXPERIMENT,
        trial_name=TRIAL,
        backend=ALLOCATION,
        max_concurrent_rollouts=4,
        max_head_offpolicyness=100,
        request_timeout=DEADLINE_S,
    )
    engine = RemoteSGLangEngine(config)
    engine.initialize(addr=[urlsplit(url).netloc for url in servers.urls])
    try:
        yield engine
    finally:
        engine.destroy()


def greedy(url: str, tokens: int, prompt: list[int] = PROMPT) -> list[int]:
    """What a server answers with the weights that it has now."""
    sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
    return list(ask(f"{url}/generate", {"input_ids": prompt, "sampling_params": sampling})["output_ids"])


def rollout(engine: RemoteSGLangEngine, tokens: int) -> dict[str, torch.Tensor]:
    engine.submit({"prompt": PROMPT}, Rollout(tokens))
    return finished(engine)


def finished(engine: RemoteSGLangEngine) -> dict[str, torch.Tensor]:
    (result,) = engine.wait(1, timeout=DEADLINE_S)
    assert result is not None
    return result


def other_weights(servers: Servers, folder: Path, seed: int) -> dict[str, torch.Tensor]:
    """A checkpoint of the same shape with other numbers; it is also written to `folder`."""
    shutil.copytree(servers.model, folder)
    draw = torch.Generator().manual_seed(seed)
    tensors = load_file(folder / "model.safetensors")
    tensors = {name: each + torch.randn(each.shape, generator=draw) * 0.1 for name, each in tensors.items()}
    save_file(tensors, folder / "model.safetensors")
    return tensors


def rollouts_equal_the_servers_answers(engine: RemoteSGLangEngine, servers: Servers) -> None:
    result = rollout(engine, 16)
    assert result["input_ids"][0].tolist() == PROMPT + greedy(servers.url, 16)
    assert (result["logprobs"][0, len(PROMPT) :] < 0).all()


def scores_equal_the_log_probabilities_of_the_answer(engine: RemoteSGLangEngine, servers: Servers) -> None:
    """With AReaL's request. Its parser is not called: it fails on the entry without a score, with which SGLang's lists
    begin too."""
    result = rollout(engine, 16)
    asked = SGLangBackend().build_score_request(result["input_ids"][0].tolist(), 16, with_lora=False, version=0)
    scored = ask(f"{servers.url}{asked.endpoint}", asked.payload)["meta_info"]["input_token_logprobs"]
    assert len(scored) == 17 and scored[0][0] is None
    scores = torch.tensor([value for value, *_ in scored[1:]])
    assert torch.allclose(scores, result["logprobs"][0, len(PROMPT) :], atol=1e-3)


def weights_from_disk_interrupt_a_rollout_that_continues(engine: RemoteSGLangEngine, servers: Servers) -> None:
    """AReaL's order: hold new work, pause the servers, update, continue. The client submits what was cut once more."""
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent, "new")
        other_weights(servers, folder, seed=1)
        before = greedy(servers.url, 16)
        engine.submit({"prompt": PROMPT}, Rollout(LONG))
        wait_until(lambda: any(in_flight(url) for url in servers.urls), "the rollout has reached a server")
        engine.pause()
        update_from_disk(engine, folder)
        engine.set_version(1)
        engine.resume()
        result = finished(engine)
    assert result["input_ids"].shape[1] == len(PROMPT) + LONG
    versions = result["versions"][0, len(PROMPT) :].tolist()
    assert versions == sorted(versions) and set(versions) == {0, 1}, set(versions)
    assert greedy(servers.url, 16) != before
    expect_continuation(servers, result, versions.count(0))


def update_from_disk(engine: RemoteSGLangEngine, folder: Path) -> None:
    """As AReaL's FSDP engine does, after it has saved its weights."""
    engine.pause_generation()
    meta = WeightUpdateMeta(type="disk", path=str(folder), clear_checkpoint_after_load=False)
    loaded = engine.update_weights_from_disk(meta)
    saved = names.update_weights_from_disk(EXPERIMENT, TRIAL, engine.get_version())
    name_resolve.add(saved, str(datetime.now().timestamp()), keepalive_ttl=120, replace=True)
    loaded.result(DEADLINE_S)
    engine.continue_generation()


def expect_continuation(servers: Servers, result: dict[str, torch.Tensor], cut: int) -> None:
    """The second part of the rollout is what the new weights answer to the prompt and the first part."""
    ids = result["input_ids"][0].tolist()
    assert ids[len(PROMPT) + cut :][:16] == greedy(servers.url, 16, ids[: len(PROMPT) + cut])


def weights_over_areals_process_group_reach_all_servers(engine: RemoteSGLangEngine, servers: Servers) -> None:
    """As AReaL's FSDP engine sends them: one call per bucket while the trainer broadcasts, between pause and continue."""
    allocation = ModelAllocation.from_str(ALLOCATION, name="rollout")
    meta = WeightUpdateMeta.from_fsdp_xccl(allocation)
    meta.nccl_master_address, meta.nccl_master_port = "127.0.0.1", free_port()
    meta.nccl_group_name = "update_weight_group"
    with tempfile.TemporaryDirectory() as parent:
        tensors = other_weights(servers, Path(parent, "new"), seed=2)
    before = [greedy(url, 16) for url in servers.urls]
    joined: Future[None] = engine.init_weights_update_group(meta)
    group = init_custom_process_group(
        backend=current_platform.communication_backend,
        world_size=allocation.parallel.world_size + 1,
        init_method=f"tcp://127.0.0.1:{meta.nccl_master_port}",
        rank=0,
        group_name=meta.nccl_group_name,
        timeout=timedelta(seconds=DEADLINE_S),
    )
    joined.result(DEADLINE_S)
    engine.pause_generation()
    named = sorted(tensors.items())
    for bucket in (named[: len(named) // 2], named[len(named) // 2 :]):
        specs = [ParamSpec(name, tuple(each.shape), str(each.dtype).removeprefix("torch.")) for name, each in bucket]
        received = engine.update_weights_from_distributed(meta, specs)
        for _, tensor in bucket:
            torch.distributed.broadcast(tensor, src=0, group=group)
        received.result(DEADLINE_S)
    engine.continue_generation()
    after = [greedy(url, 16) for url in servers.urls]
    assert after[0] == after[1] and after != before


def colocated_training_updates_weights_while_memory_is_released(engine: RemoteSGLangEngine, servers: Servers) -> None:
    """The weights in service came over the group, so they cannot be read again."""
    before = greedy(servers.url, 16)
    engine.offload()
    assert all(ask(f"{url}/is_sleeping")["is_sleeping"] for url in servers.urls)
    engine.onload(["weights"])
    update_from_disk(engine, servers.model)
    engine.onload(["kv_cache"])
    after = [greedy(url, 16) for url in servers.urls]
    assert after[0] == after[1] and after[0] != before


CHECKS = (
    rollouts_equal_the_servers_answers,
    scores_equal_the_log_probabilities_of_the_answer,
    weights_from_disk_interrupt_a_rollout_that_continues,
    weights_over_areals_process_group_reach_all_servers,
    colocated_training_updates_weights_while_memory_is_released,
)


def main() -> int:
    with tempfile.TemporaryDirectory() as records, engine_of(given()) as engine:
        name_resolve.reconfigure(NameResolveConfig(type="nfs", nfs_record_root=records))
        return run_checks("areal", CHECKS, engine, given())


if __name__ == "__main__":  # AReaL sends updates from other processes, which import this module
    sys.exit(main())
