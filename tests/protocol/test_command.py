from __future__ import annotations

import msgspec
import pytest

from headgate.protocol.command import (
    BroadcastSource,
    ChecksumWeights,
    CollectWeights,
    Command,
    DiscardWeights,
    FileSource,
    GroupPart,
    JoinGroup,
    LeaveGroup,
    SharedMemorySource,
    SharedOnGpus,
    SharedStorage,
    SharedTensor,
    Sleep,
    StagedSource,
    TensorSpec,
    UpdateWeights,
    Wake,
)


@pytest.mark.parametrize(
    "command",
    [
        UpdateWeights(FileSource("/models/a", {"model.safetensors": "00"}), version=3),
        UpdateWeights(BroadcastSource("tcp://trainer:29500", world_size=3, rank=2), recompute=False),
        UpdateWeights(BroadcastSource("tcp://trainer:29500", world_size=2, backend="nccl")),
        UpdateWeights(
            SharedMemorySource(
                "GPU-1",
                (SharedStorage(0, b"\xff\0handle", 128, 0, b"counter", 8, b"event", True),),
                (SharedTensor("norm", "bfloat16", (64,), 0, 0),),
            )
        ),
        UpdateWeights(StagedSource(), version=3, base=2, checksum={"norm": "00"}),
        JoinGroup("slime-pp_0", "trainer", 29500, world_size=3, rank=1, backend="gloo"),
        JoinGroup("vllm", "", 0, 3, 1, rendezvous="vllm", nccl_id=bytes(128)),
        CollectWeights(SharedOnGpus((SharedMemorySource("GPU-1", (), ()), SharedMemorySource("GPU-2", (), ())))),
        LeaveGroup("slime-pp_0"),
        CollectWeights(GroupPart("slime-pp_0", (TensorSpec("norm", "bfloat16", (64,)),), packed_bytes=1), anew=True),
        DiscardWeights("the trainer is gone"),
        Sleep(("weights",)),
        Wake(),
        ChecksumWeights(),
    ],
    ids=lambda command: type(command).__name__,
)
def test_a_command_survives_the_wire(command):
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(command), type=Command) == command


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"init_method": "env://"}, "must be tcp://HOST:PORT"),
        ({"init_method": "tcp://host"}, "must be tcp://HOST:PORT"),
        ({"init_method": "tcp://host:port"}, "must be tcp://HOST:PORT"),
        ({"rank": 0}, "0 is the trainer"),
        ({"rank": 2}, "rank 2 is not one of an engine in a group of 2"),
        ({"timeout_s": 0}, "timeout_s must be above 0"),
    ],
)
def test_an_invalid_group_is_refused(fields, reason):
    with pytest.raises(ValueError, match=reason):
        BroadcastSource(**{"init_method": "tcp://host:1", "world_size": 2} | fields)


def test_a_group_has_the_address_of_its_trainer():
    assert BroadcastSource("tcp://10.0.0.1:29500", 2).address == ("10.0.0.1", 29500)
    assert BroadcastSource("tcp://[::1]:29500", 2).address == ("::1", 29500)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"rank": 0}, "rank 0 is not an engine's rank in a group of 2; 0 is the trainer"),
        ({"rank": 2}, "rank 2 is not an engine's rank in a group of 2"),
        ({"timeout_s": 0}, "timeout must be above 0"),
        ({"rendezvous": "vllm", "nccl_id": b"abc"}, "an NCCL id has 128 bytes, not 3"),
    ],
)
def test_a_trainers_group_that_no_engine_can_join_is_refused(fields, reason):
    with pytest.raises(ValueError, match=reason):
        JoinGroup(**{"name": "g", "host": "trainer", "port": 1, "world_size": 2, "rank": 1} | fields)
