"""Weights from vLLM's, SkyRL's and SGLang's trainers on real GPUs: real CUDA handles in real pickles, real NCCL."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from headgate.api.compat.handles import sglang_part, vllm_part
from headgate.contract.sampling import SamplingParams
from headgate.device.weights.loading import SafetensorsFolder, type_name
from headgate.device.weights.nccl import NcclBroadcasts, new_id
from headgate.errors import RequestError
from headgate.offline import LLM
from headgate.protocol.command import (
    Collected,
    CollectWeights,
    GroupPart,
    JoinGroup,
    Part,
    Pause,
    Resume,
    StagedSource,
    TensorSpec,
    UpdateWeights,
)
from headgate.testing.tiny import tiny_model
from tests.ports import own_port
from tests.updates.ipc_trainer import FORMS, ipc_trainer

pytestmark = pytest.mark.gpu

PARAMS = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
PROMPTS = [[1, 2, 3], list(range(40)), [200] * 17]
LIMIT_S = 60.0

# vLLM's trainer: a store, the pickled id in it, a communicator with a sum, and packed buffers.
NCCL_TRAINER = """
import sys, time, torch, torch.distributed as dist
from datetime import timedelta
from headgate.device.weights.loading import SafetensorsFolder
from headgate.device.weights.nccl import NcclBroadcasts, new_id
from headgate.errors import HeadgateError
from tests.updates.vllm_trainer import pickled_id

folder, port, most, place = sys.argv[1:]
device = torch.device(place)
torch.cuda.set_device(device)
tensors = {name: tensor.to(device) for name, tensor in SafetensorsFolder(folder)}
store = dist.TCPStore("127.0.0.1", int(port), 2, True, timedelta(seconds=60), wait_for_workers=True, use_libuv=False)
unique_id = new_id()
store.set("broadcast_from/0/0", pickled_id(unique_id))
due_s = time.monotonic() + 60
def left_s():
    if time.monotonic() > due_s:
        raise TimeoutError
    return 1.0
try:
    group = NcclBroadcasts(unique_id, 0, 2, device, left_s)
    buffer = []
    for tensor in tensors.values():
        buffer.append(tensor.contiguous().view(-1).view(torch.uint8))
        if sum(map(len, buffer)) > int(most):
            group.receive(torch.cat(buffer), left_s)
            buffer = []
    if buffer:
        group.receive(torch.cat(buffer), left_s)
    print("sent", flush=True)
except HeadgateError as error:
    print(f"{type(error).__name__}: {error}", flush=True)
sys.stdin.readline()
"""


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("old"), "qwen3", tokenizer=False)


@pytest.fixture(scope="module")
def new(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("new"), "qwen3", seed=1, tokenizer=False)


def started(folder: Path) -> LLM:
    return LLM(folder, dtype="float32", kv_blocks=100, device="cuda")


def answers(llm: LLM) -> list[list[int]]:
    return [answer.token_ids for answer in llm.generate(PROMPTS, PARAMS, progress=False)]


@pytest.fixture(scope="module")
def expected(old: Path, new: Path) -> tuple[list[list[int]], list[list[int]]]:
    found = []
    for folder in (old, new):
        with started(folder) as llm:
            found.append(answers(llm))
    assert found[0] != found[1]
    return found[0], found[1]


def part_in(payload: dict[str, Any]) -> Part:
    if "serialized_named_tensors" in payload:
        return sglang_part(payload["serialized_named_tensors"], "load_format" in payload, "serialized_named_tensors")
    specs = map(TensorSpec, payload["names"], payload["dtype_names"], map(tuple, payload["shapes"]))
    return vllm_part(payload["ipc_handles_pickled"], tuple(specs), "ipc_handles_pickled")


def line_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline()


def go_on(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


@pytest.mark.parametrize("form", FORMS)
def test_54_pickled_handles_of_real_gpu_memory_become_the_same_weights(old, new, expected, form):
    with started(old) as llm, ipc_trainer(new, form) as process:
        assert answers(llm) == expected[0]
        llm.call(Pause("freeze"))
        parts = 0
        while (line := line_of(process)).startswith("{"):
            state = llm.call(CollectWeights(part_in(json.loads(line)), timeout_s=LIMIT_S))
            assert isinstance(state, Collected) and state.on.startswith("cuda")
            parts += 1
            go_on(process)
        assert line == "untouched\n", f"the trainer failed: {line!r}"
        assert not state.missing and (parts > 1) is (form not in ("vllm", "sglang"))
        llm.call(UpdateWeights(StagedSource()))
        llm.call(Resume())
        assert answers(llm) == expected[1]
        go_on(process)
        assert int(line_of(process)) < 2 * 150_000, "the engine has released the trainer's memory"


def test_79_a_trainer_that_is_gone_leaves_the_old_weights(old, new, expected):
    with started(old) as llm:
        with ipc_trainer(new, "sglang_bucket") as process:
            first = part_in(json.loads(line_of(process)))
            llm.call(CollectWeights(first, timeout_s=LIMIT_S))
        llm.call(Pause("abort"))
        with pytest.raises(RequestError, match="lacks tensor"):
            llm.call(UpdateWeights(StagedSource()))
        llm.call(Resume())
        assert answers(llm) == expected[0]


def test_79_memory_of_a_trainer_that_is_gone_is_not_opened(old, new, expected):
    with started(old) as llm:
        with ipc_trainer(new, "vllm") as process:
            part = part_in(json.loads(line_of(process)))
        with pytest.raises(RequestError, match="the trainer's memory cannot be opened"):
            llm.call(CollectWeights(part, timeout_s=LIMIT_S))
        assert answers(llm) == expected[0]


def countdown() -> Callable[[], float]:
    due_s = time.monotonic() + LIMIT_S

    def left_s() -> float:
        assert time.monotonic() < due_s, "NCCL does not answer"
        return 1.0

    return left_s


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32, torch.float8_e4m3fn])
def test_a_communicator_of_one_rank_is_made_from_an_id_and_moves_bytes(dtype):
    device = torch.device("cuda:0")
    group = NcclBroadcasts(new_id(), 0, 1, device, countdown())
    try:
        buffer = torch.arange(1024, dtype=torch.uint8, device=device).view(dtype)
        group.receive(buffer, countdown())
        assert torch.equal(buffer.view(torch.uint8), torch.arange(1024, dtype=torch.uint8, device=device))
    finally:
        group.close()


def test_a_join_without_other_ranks_ends_at_its_deadline():
    begun_s = time.monotonic()

    def left_s() -> float:
        if time.monotonic() - begun_s > 3:
            raise TimeoutError("time is up")
        return 1.0

    with pytest.raises(TimeoutError, match="time is up"):
        NcclBroadcasts(new_id(), 1, 2, torch.device("cuda:0"), left_s)
    assert time.monotonic() - begun_s < 20


@contextmanager
def nccl_trainer(folder: Path, port: int, most: int, device: str, **env: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", NCCL_TRAINER, str(folder), str(port), str(most), device],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))} | env,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def part_of(folder: Path, most: int) -> GroupPart:
    infos = SafetensorsFolder(folder).metadata()
    return GroupPart("vllm", tuple(TensorSpec(n, type_name(i.dtype), i.shape) for n, i in infos.items()), most)


@pytest.mark.skipif("torch.cuda.device_count() < 2", reason="NCCL needs one GPU per rank")
def test_vllms_packed_transfer_by_nccl_between_gpus(old, new, expected):
    port = own_port()
    with started(old) as llm, nccl_trainer(new, port, 100_000, "cuda:1") as process:
        llm.call(JoinGroup("vllm", "127.0.0.1", port, 2, 1, "nccl", LIMIT_S, "vllm"))
        llm.call(CollectWeights(part_of(new, 100_000), timeout_s=LIMIT_S))
        assert line_of(process) == "sent\n"
        llm.call(Pause("abort"))
        llm.call(UpdateWeights(StagedSource()))
        llm.call(Resume())
        assert answers(llm) == expected[1]


@pytest.mark.skipif("torch.cuda.device_count() != 1", reason="needs exactly one GPU, which two ranks share")
def test_nccl_refuses_two_ranks_on_one_gpu_and_both_processes_survive(old, new, expected):
    port = own_port()
    with started(old) as llm, nccl_trainer(new, port, 100_000, "cuda:0") as process:
        with pytest.raises(RequestError) as refused:
            llm.call(JoinGroup("vllm", "127.0.0.1", port, 2, 1, "nccl", LIMIT_S, "vllm"))
        assert refused.value.code == "source_lost" and "NCCL reports" in refused.value.message, refused.value
        assert line_of(process).startswith("SourceLost: ") and process.poll() is None
        assert answers(llm) == expected[0]
