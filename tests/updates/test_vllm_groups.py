"""vLLM's group wire: a trainer that sends its NCCL id in a store, and a model in packed buffers."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from headgate.device.weights.loading import SafetensorsFolder, type_name
from headgate.device.weights.wires import WeightWires
from headgate.errors import BrokenCheckpoint, SourceLost
from headgate.protocol.command import GroupPart, JoinGroup, TensorSpec
from headgate.testing.tiny import tiny_model
from tests.ports import own_port
from tests.updates.vllm_trainer import order, trainer_process

CPU = torch.device("cpu")
LIMIT_S = 60


@pytest.fixture(scope="module")
def new(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("new"), seed=1)


@pytest.fixture(scope="module")
def tensors(new: Path) -> dict[str, torch.Tensor]:
    return dict(SafetensorsFolder(new))


@contextmanager
def joined(folder: Path, tensors: dict[str, torch.Tensor]) -> Iterator[tuple[WeightWires, subprocess.Popen[str]]]:
    port = own_port()
    wires = WeightWires({name: tuple(tensor.shape) for name, tensor in tensors.items()}, CPU)
    with trainer_process(folder, port, 2) as process:
        try:
            wires.join(JoinGroup("vllm", "127.0.0.1", port, 2, 1, "gloo", LIMIT_S, "vllm")).result(LIMIT_S)
            assert process.stdout is not None and process.stdout.readline() == "joined\n"
            yield wires, process
        finally:
            wires.close()


def part_of(tensors: dict[str, torch.Tensor], names: list[str], packed_bytes: int | None) -> GroupPart:
    specs = (TensorSpec(name, type_name(tensors[name].dtype), tuple(tensors[name].shape)) for name in names)
    return GroupPart("vllm", tuple(specs), packed_bytes)


def received(wires: WeightWires, part: GroupPart) -> Any:
    arriving: Future[Any] = wires.receive(part, anew=False, timeout_s=LIMIT_S)
    return arriving.result(LIMIT_S)


@pytest.mark.parametrize("packed_bytes", [None, 1, 20_000, 2**30])
def test_an_engine_joins_by_the_pickled_id_and_receives_the_same_bits(new, tensors, packed_bytes):
    with joined(new, tensors) as (wires, trainer):
        for _ in range(2):
            order(trainer, *(["each"] if packed_bytes is None else ["packed", packed_bytes]), *tensors)
            arrived = dict(received(wires, part_of(tensors, list(tensors), packed_bytes)))
            assert arrived.keys() == tensors.keys()
            assert all(torch.equal(arrived[name], tensor) for name, tensor in tensors.items())


def test_a_trainer_that_is_gone_breaks_the_group(new, tensors):
    with joined(new, tensors) as (wires, trainer):
        trainer.kill()
        with pytest.raises(SourceLost, match="the group vllm broke off"):
            received(wires, part_of(tensors, list(tensors), 2**30))


def test_54_a_store_with_another_pickle_is_refused(tensors):
    port = own_port()
    store = torch.distributed.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    store.set("broadcast_from/0/0", b"\x80\x04\x8c\x05posix\x8c\x06system\x93\x8c\x04true\x85R.")
    wires = WeightWires({name: tuple(tensor.shape) for name, tensor in tensors.items()}, CPU)
    try:
        joining = wires.join(JoinGroup("vllm", "127.0.0.1", port, 2, 1, "gloo", LIMIT_S, "vllm"))
        with pytest.raises(BrokenCheckpoint, match=r"names posix\.system, which is not allowed"):
            joining.result(LIMIT_S)
    finally:
        wires.close()


@pytest.mark.parametrize("nccl_id", [None, b"\0" * 128])
def test_nccl_needs_a_gpu_and_is_refused_before_the_trainer_counts_this_rank(tensors, nccl_id):
    wires = WeightWires({}, CPU)
    with pytest.raises(BrokenCheckpoint, match="nccl needs a GPU"):
        wires.join(JoinGroup("vllm", "127.0.0.1", 1, 2, 1, "nccl", LIMIT_S, "vllm", nccl_id)).result(LIMIT_S)


def test_an_id_of_another_length_is_refused():
    with pytest.raises(ValueError, match="an NCCL id has 128 bytes, not 3"):
        JoinGroup("vllm", "", 0, 2, 1, "nccl", LIMIT_S, "vllm", b"abc")
