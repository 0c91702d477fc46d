"""Weight updates from a trainer's GPU memory to an engine's: two processes, real handles, real NCCL."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from headgate.contract.sampling import SamplingParams
from headgate.errors import RequestError
from headgate.offline import LLM
from headgate.protocol.command import (
    BroadcastSource,
    Command,
    EngineState,
    Pause,
    Resume,
    SharedMemorySource,
    UpdateWeights,
)
from headgate.testing.tiny import tiny_model

pytestmark = pytest.mark.gpu

PARAMS = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
PROMPTS = [[1, 2, 3], list(range(40)), [200] * 17]

# Reads one line before each step, so that the test controls the timing.
TRAINER = """
import sys
import msgspec, torch
from headgate.errors import HeadgateError
from headgate.weights import send_weights, share
from headgate.device.weights.loading import SafetensorsFolder

folder, how, place, device = sys.argv[1:]
tensors = {name: tensor.to(device) for name, tensor in SafetensorsFolder(folder)}
if how == "flat":
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors.values()])
    parts = flat.split([tensor.numel() for tensor in tensors.values()])
    tensors = {name: part.view(tensors[name].shape) for name, part in zip(tensors, parts)}
if how == "nccl":
    try:
        send_weights(tensors, place, 2, timeout_s=60, bucket_bytes=100_000, backend="nccl")
        print("sent", flush=True)
    except HeadgateError as error:
        print(f"{type(error).__name__}: {error}", flush=True)
else:
    sums = {name: tensor.double().sum().item() for name, tensor in tensors.items()}
    with share(tensors) as shared:
        print(msgspec.json.encode(shared).decode(), flush=True)
        sys.stdin.readline()
    assert sums == {name: tensor.double().sum().item() for name, tensor in tensors.items()}
    print("untouched", flush=True)
"""


@contextmanager
def trainer(folder: Path, how: str, place: str = "", device: str = "cuda:0") -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", TRAINER, str(folder), how, place, device],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def place() -> str:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{found.getsockname()[1]}"


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
    told = []
    for folder in (old, new):
        with started(folder) as llm:
            told.append(answers(llm))
    assert told[0] != told[1]
    return told[0], told[1]


def attempt(llm: LLM, command: Command) -> Any:
    try:
        return llm.call(command)
    except RequestError as error:
        return error


@pytest.mark.parametrize("how", ["share", "flat"])
def test_an_engine_reads_a_trainers_gpu_memory_in_place(old, new, expected, how):
    with started(old) as llm, trainer(new, how) as process:
        assert answers(llm) == expected[0]
        assert process.stdin is not None and process.stdout is not None
        shared = msgspec.json.decode(process.stdout.readline(), type=SharedMemorySource)
        llm.call(Pause("abort"))
        told = llm.call(UpdateWeights(shared, version=4))
        assert isinstance(told, EngineState) and told.version == 4
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.stdout.readline() == "untouched\n" and process.wait(30) == 0
        llm.call(Resume())
        assert answers(llm) == expected[1], "the trainer is gone, and its weights are ours"


def test_handles_of_a_dead_trainer_leave_the_old_weights(old, new, expected):
    with started(old) as llm:
        with trainer(new, "share") as process:
            assert process.stdout is not None
            shared = msgspec.json.decode(process.stdout.readline(), type=SharedMemorySource)
        llm.call(Pause("abort"))
        refused = attempt(llm, UpdateWeights(shared))
        assert isinstance(refused, RequestError) and refused.code == "source_lost"
        llm.call(Resume())
        assert answers(llm) == expected[0]


def test_handles_that_do_not_fit_the_model_are_refused_without_opening_them(old, tmp_path, expected):
    wide = tiny_model(tmp_path, "qwen3", tokenizer=False, intermediate_size=128)
    with started(old) as llm, trainer(wide, "share") as process:
        assert process.stdout is not None
        shared = msgspec.json.decode(process.stdout.readline(), type=SharedMemorySource)
        llm.call(Pause("abort"))
        refused = attempt(llm, UpdateWeights(shared))
        assert isinstance(refused, RequestError) and "the model expects [96, 64]" in refused.message
        llm.call(Resume())
        assert answers(llm) == expected[0]


@pytest.mark.skipif("torch.cuda.device_count() < 2", reason="NCCL needs one GPU per rank")
def test_weights_are_broadcast_by_nccl_between_gpus(old, new, expected):
    where = place()
    with started(old) as llm, trainer(new, "nccl", where, "cuda:1") as process:
        llm.call(Pause("abort"))
        told = llm.call(UpdateWeights(BroadcastSource(where, 2, timeout_s=60, backend="nccl")))
        assert isinstance(told, EngineState) and told.version == 1
        assert process.stdout is not None and process.stdout.readline() == "sent\n"
        llm.call(Resume())
        assert answers(llm) == expected[1]


@pytest.mark.skipif("torch.cuda.device_count() != 1", reason="needs exactly one GPU, which two ranks share")
def test_nccl_refuses_two_ranks_on_one_gpu_and_both_processes_survive(old, new, expected):
    where = place()
    with started(old) as llm, trainer(new, "nccl", where) as process:
        llm.call(Pause("abort"))
        refused = attempt(llm, UpdateWeights(BroadcastSource(where, 2, timeout_s=60, backend="nccl")))
        assert isinstance(refused, RequestError) and refused.code == "source_lost", refused
        assert process.stdout is not None and process.stdout.readline().startswith("SourceLost: ")
        llm.call(Resume())
        assert answers(llm) == expected[0]


def test_shared_handles_are_sent_as_json(new):
    with trainer(new, "share") as process:
        assert process.stdout is not None
        told = json.loads(process.stdout.readline())
    assert told[0] == "shared" and isinstance(told[1], str) and len(told[2]) == len(told[3]) > 10
    assert told[1] == str(torch.cuda.get_device_properties(0).uuid)
