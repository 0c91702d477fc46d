"""CUDA handles in the pickles of vLLM, SkyRL and SGLang are read into plain parts. Numbers cite docs/lifecycle.md."""

from __future__ import annotations

import base64
import dataclasses
import pickle
import random
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import rebuild_cuda_tensor

from headgate.api.compat.handles import sglang_part, vllm_part
from headgate.errors import RequestError
from headgate.protocol.command import SharedMemorySource, SharedOnGpus, SharedStorage, SharedTensor, TensorSpec
from tests.updates.vllm_trainer import stand_in

GPU = "GPU-7b3f"
SPECS = (TensorSpec("a", "bfloat16", (2, 3)), TensorSpec("b", "float32", (4,)))
BUCKETS = "sglang.srt.weight_sync.tensor_bucket"
PATCH = "sglang.srt.utils.patch_torch"


@dataclasses.dataclass
class FlattenedTensorMetadata:
    name: str
    shape: torch.Size
    dtype: torch.dtype
    start_idx: int
    end_idx: int
    numel: int


FlattenedTensorMetadata.__module__ = BUCKETS


def _rebuild_cuda_tensor_modified(*arguments: Any) -> None:
    raise AssertionError("nothing in a pickle is called")


_rebuild_cuda_tensor_modified.__module__ = PATCH


class Shared:
    """Pickled as torch pickles a tensor on a GPU."""

    def __init__(self, function: Any, arguments: tuple[Any, ...]) -> None:
        self.function, self.arguments = function, arguments

    def __reduce__(self) -> tuple[Any, ...]:
        return self.function, self.arguments


def arguments(tensor: torch.Tensor, device: int | str = 0, storage: int = 7) -> tuple[Any, ...]:
    """What `torch.multiprocessing.reductions.reduce_tensor` returns for `tensor` on a GPU."""
    place = (type(tensor), tensor.size(), tensor.stride(), tensor.storage_offset())
    handle = (bytes([storage]) * 66, tensor.untyped_storage().nbytes(), 512, False)
    counter = (b"/torch_1_2_3", storage, bytes([9]) * 64, True)
    return (*place, torch.storage.TypedStorage, tensor.dtype, device, *handle, *counter)


def storage(size: int, index: int = 7) -> SharedStorage:
    return SharedStorage(0, bytes([index]) * 66, size, 512, b"/torch_1_2_3", index, bytes([9]) * 64, True)


def encoded(value: Any, protocol: int | None = None) -> str:
    named = {"_rebuild_cuda_tensor_modified": _rebuild_cuda_tensor_modified}
    with stand_in(BUCKETS, FlattenedTensorMetadata=FlattenedTensorMetadata), stand_in(PATCH, **named):
        return base64.b64encode(pickle.dumps(value, protocol)).decode()


A, B = torch.zeros(2, 3, dtype=torch.bfloat16), torch.zeros(4)
PACKED = torch.zeros(28, dtype=torch.uint8)
IN_PACKED = (SharedTensor("a", "bfloat16", (2, 3), 0, 0), SharedTensor("b", "float32", (4,), 0, 12))


@pytest.mark.parametrize("protocol", [4, 5])
def test_vllms_handles_of_each_tensor(protocol: int):
    handles = [{GPU: arguments(A, storage=1)}, {GPU: arguments(B[1:], storage=2)}]
    specs = (SPECS[0], TensorSpec("b", "float32", (3,)))
    found = vllm_part(encoded(handles, protocol), specs, "p")
    tensors = SharedTensor("a", "bfloat16", (2, 3), 0, 0), SharedTensor("b", "float32", (3,), 1, 4)
    assert found == SharedMemorySource(GPU, (storage(12, 1), storage(16, 2)), tensors)


@pytest.mark.parametrize("function", [False, True], ids=["vllm", "skyrl"])
def test_one_buffer_of_all_tensors(function: bool):
    each = (rebuild_cuda_tensor, arguments(PACKED)) if function else arguments(PACKED)
    assert vllm_part(encoded({GPU: each}), SPECS, "p") == SharedMemorySource(GPU, (storage(28),), IN_PACKED)


def test_handles_of_several_gpus_are_all_kept_for_their_engines():
    found = vllm_part(encoded({GPU: arguments(PACKED), "other": arguments(PACKED, 1, 8)}), SPECS, "p")
    assert isinstance(found, SharedOnGpus) and [each.gpu for each in found.sources] == [GPU, "other"]
    assert all(each.tensors == IN_PACKED for each in found.sources)


@pytest.mark.parametrize(("function", "device"), [(rebuild_cuda_tensor, 0), (_rebuild_cuda_tensor_modified, GPU)])
def test_sglangs_named_tensors(function: Any, device: int | str):
    value = [("a", Shared(function, arguments(A, device, 1))), ("b", Shared(function, arguments(B, device, 2)))]
    found = sglang_part([encoded(value)], False, "p")
    tensors = SharedTensor("a", "bfloat16", (2, 3), 0, 0), SharedTensor("b", "float32", (4,), 1, 0)
    assert found == SharedMemorySource(device or "", (storage(12, 1), storage(16, 2)), tensors)


def bucket(device: str = GPU) -> dict[str, Any]:
    entries = [
        FlattenedTensorMetadata("a", torch.Size((2, 3)), torch.bfloat16, 0, 12, 12),
        FlattenedTensorMetadata("b", torch.Size((4,)), torch.float32, 12, 28, 16),
    ]
    flat = Shared(_rebuild_cuda_tensor_modified, arguments(PACKED, device))
    return {"flattened_tensor": flat, "metadata": entries}


def test_sglangs_flattened_bucket():
    assert sglang_part([encoded(bucket())], True, "p") == SharedMemorySource(GPU, (storage(28),), IN_PACKED)
    two = sglang_part([encoded(bucket()), encoded(bucket("other"))], True, "p")
    assert isinstance(two, SharedOnGpus) and [each.gpu for each in two.sources] == [GPU, "other"]


ran: list[str] = []


class Exploding:
    def __reduce__(self) -> tuple[Any, ...]:
        return ran.append, ("unpickled",)


REFUSED = [
    ([{GPU: arguments(A)}], "there are 1 handles for 2 tensors"),
    ([{GPU: arguments(A)}, {"other": arguments(B)}], "the tensors are on different GPUs"),
    ([{GPU: arguments(B)}, {GPU: arguments(A)}], "tensor a is announced as bfloat16"),
    ([{}, {}], "handles must be a dict with the UUID of each GPU"),
    ({GPU: arguments(PACKED)[:-1]}, "not those of rebuild_cuda_tensor"),
    ({GPU: (*arguments(PACKED)[:7], "text", *arguments(PACKED)[8:])}, "not those of rebuild_cuda_tensor"),
    ({GPU: arguments(A.t())}, "a tensor is not contiguous"),
    ({GPU: (print, arguments(PACKED))}, r"names builtins\.print, which is not allowed"),
    ({GPU: Exploding()}, r"names builtins\.getattr, which is not allowed"),
    (A, r"names torch\._utils\._rebuild_tensor_v2, which is not allowed"),
    ("handles", "neither a list nor a dict"),
]


@pytest.mark.parametrize(("value", "why"), REFUSED, ids=range(len(REFUSED)))
def test_54_everything_else_is_refused_and_nothing_runs(value: Any, why: str):
    with pytest.raises(RequestError, match=why) as refused:
        vllm_part(encoded(value), SPECS, "p")
    assert refused.value.code == "unsupported_transfer" and refused.value.param == "p" and not ran


@pytest.mark.parametrize(
    ("value", "flattened", "why"),
    [
        ([], False, "no list of named tensors"),
        ([("a", 5)], False, "where a tensor on a GPU should be"),
        ([(5, 5)], False, "no list of named tensors"),
        ([("a", A)], False, r"names torch\._utils\._rebuild_tensor_v2"),
        ({"metadata": []}, True, "no flattened bucket"),
        ({"flattened_tensor": 1, "metadata": []}, True, "where a tensor on a GPU should be"),
        (bucket() | {"metadata": [1]}, True, "has other fields"),
        (bucket(), False, "no list of named tensors"),
    ],
)
def test_54_other_values_in_sglangs_call_are_refused(value: Any, flattened: bool, why: str):
    with pytest.raises(RequestError, match=why):
        sglang_part([encoded(value)], flattened, "p")


def test_handles_for_several_gpus_need_their_uuids():
    each = encoded([("a", Shared(rebuild_cuda_tensor, arguments(A)))])
    with pytest.raises(RequestError, match="must have their UUIDs"):
        sglang_part([each, each], False, "p")
    with pytest.raises(RequestError, match="there are no tensors"):
        sglang_part([], False, "p")


@pytest.mark.parametrize("seed", range(10))
def test_54_damaged_handles_never_raise_anything_else(seed: int):
    chance = random.Random(seed)
    values = [[{GPU: arguments(A)}, {GPU: arguments(B)}], {GPU: arguments(PACKED)}, bucket(), {GPU: Exploding()}]
    sound = [base64.b64decode(encoded(value)) for value in values]
    for _ in range(200):
        data = bytearray(chance.choice(sound))
        for _ in range(chance.randrange(1, 6)):
            at = chance.randrange(len(data))
            if chance.random() < 0.5:
                data[at] = chance.randrange(256)
            else:
                del data[at : at + chance.randrange(3)]
        text = base64.b64encode(bytes(data)).decode()
        with suppress(RequestError):
            vllm_part(text, SPECS, "p")
        with suppress(RequestError):
            sglang_part([text], chance.random() < 0.5, "p")
    assert not ran
