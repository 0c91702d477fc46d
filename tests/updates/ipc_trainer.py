"""A trainer process that offers its GPU memory as the trainers of vLLM, SkyRL and SGLang do.

Handles are torch's own (`reduce_tensor`, `ForkingPickler`), in the payloads of vLLM 0.33, SkyRL 0.3 and SGLang 0.5. Run as
a script with a folder of weights and a form, it prints one JSON payload per part, and waits for a line after each.
"""

from __future__ import annotations

import base64
import dataclasses
import io
import json
import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import torch
from torch.multiprocessing import reductions

from tests.updates.vllm_trainer import stand_in

FORMS = ("vllm", "vllm_packed", "skyrl", "sglang", "sglang_bucket")
BUCKETS = "sglang.srt.weight_sync.tensor_bucket"
PATCH = "sglang.srt.utils.patch_torch"
BUFFER = 150_000  # bytes; several chunks of a tiny model


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

Tensors = dict[str, torch.Tensor]


def encoded(value: Any) -> str:
    named = {"_rebuild_cuda_tensor_modified": _rebuild_cuda_tensor_modified}
    buffer = io.BytesIO()
    with stand_in(BUCKETS, FlattenedTensorMetadata=FlattenedTensorMetadata), stand_in(PATCH, **named):
        ForkingPickler(buffer).dump(value)
    return base64.b64encode(buffer.getvalue()).decode()


def announced(tensors: Tensors) -> dict[str, Any]:
    dtypes = [str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()]
    shapes = [list(tensor.shape) for tensor in tensors.values()]
    return {"names": list(tensors), "dtype_names": dtypes, "shapes": shapes}


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def payloads(form: str, tensors: Tensors, gpu: str, most: int = BUFFER) -> Iterator[dict[str, Any]]:
    """One payload per part. A part's memory may be changed when the next one is requested."""
    if form == "vllm":
        handles = [{gpu: reductions.reduce_tensor(tensor)[1]} for tensor in tensors.values()]
        yield announced(tensors) | {"ipc_handles_pickled": base64.b64encode(pickle.dumps(handles)).decode()}
    elif form == "vllm_packed":
        buffer = torch.empty(most, dtype=torch.uint8, device="cuda")
        once = reductions.reduce_tensor(buffer)[1]  # one export for all chunks
        for chunk in chunks(tensors, most):
            packed = torch.cat([as_bytes(tensor) for tensor in chunk.values()])
            buffer[: len(packed)].copy_(packed)
            torch.cuda.synchronize()
            pickled = base64.b64encode(pickle.dumps({gpu: once})).decode()
            sizes = [tensor.nbytes for tensor in chunk.values()]
            yield announced(chunk) | {"ipc_handles_pickled": pickled, "tensor_sizes": sizes}
    elif form == "skyrl":
        for chunk in chunks(tensors, most):
            packed = torch.cat([tensor.reshape(-1) for tensor in chunk.values()])
            torch.cuda.synchronize()
            pickled = base64.b64encode(pickle.dumps({gpu: reductions.reduce_tensor(packed)})).decode()
            sizes = [tensor.numel() for tensor in chunk.values()]
            yield announced(chunk) | {"ipc_handles_pickled": pickled, "sizes": sizes}
    elif form == "sglang":
        yield {"serialized_named_tensors": [encoded(list(tensors.items()))]}
    else:
        patch_reductions(gpu)
        for chunk in chunks(tensors, most):
            yield {"serialized_named_tensors": [encoded(flattened(chunk))], "load_format": "flattened_bucket"}


def chunks(tensors: Tensors, most: int) -> Iterator[Tensors]:
    chunk: Tensors = {}
    for name, tensor in tensors.items():
        if chunk and sum(each.nbytes for each in chunk.values()) + tensor.nbytes > most:
            yield chunk
            chunk = {}
        chunk[name] = tensor
    yield chunk


def flattened(tensors: Tensors) -> dict[str, Any]:
    entries, start = [], 0
    for name, tensor in tensors.items():
        entries.append(
            FlattenedTensorMetadata(name, tensor.shape, tensor.dtype, start, start + tensor.nbytes, tensor.nbytes)
        )
        start += tensor.nbytes
    flat = torch.cat([as_bytes(tensor) for tensor in tensors.values()])
    torch.cuda.synchronize()
    return {"flattened_tensor": flat, "metadata": entries}


def patch_reductions(gpu: str) -> None:
    """As SGLang does: the UUID of the GPU instead of its number."""
    reduce_tensor = reductions.reduce_tensor

    def reduced(tensor: torch.Tensor) -> Any:
        arguments = list(reduce_tensor(tensor)[1])
        arguments[6] = gpu
        return _rebuild_cuda_tensor_modified, tuple(arguments)

    ForkingPickler.register(torch.Tensor, reduced)


@contextmanager
def ipc_trainer(folder: Path, form: str, most: int = BUFFER) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.updates.ipc_trainer", str(folder), form, str(most)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def main(folder: str, form: str, most: int) -> None:
    from headgate.device.weights.loading import SafetensorsFolder

    tensors = {name: tensor.to("cuda") for name, tensor in SafetensorsFolder(folder)}
    sums = {name: tensor.double().sum().item() for name, tensor in tensors.items()}
    for payload in payloads(form, tensors, str(torch.cuda.get_device_properties(0).uuid), most):
        print(json.dumps(payload), flush=True)
        sys.stdin.readline()
    assert sums == {name: tensor.double().sum().item() for name, tensor in tensors.items()}
    print("untouched", flush=True)
    sys.stdin.readline()
    tensors.clear()
    torch.cuda.ipc_collect()
    torch.cuda.empty_cache()
    print(torch.cuda.memory_allocated(), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
