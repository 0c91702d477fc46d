"""For trainers: three ways to send weights to engines.

On the same host, through shared memory, without a disk or a second copy:

    with publish(model.state_dict(), version=7) as files:
        llm.call(UpdateWeights(files, version=7))

From another host, over a process group that the trainer opens as rank 0, while each engine runs
`UpdateWeights(BroadcastSource(address, world_size, rank))`:

    send_weights(model.state_dict(), "tcp://10.0.0.1:29500", world_size=1 + engines)

With `backend="nccl"` on both sides the bytes go from GPU to GPU; every rank needs a GPU of its own.

On the same GPU, by handles of the trainer's memory; the engine copies the tensors once, into its own memory:

    with share(model.state_dict()) as shared:
        llm.call(UpdateWeights(shared))

Names and shapes are those of the checkpoint that the engines started from. Each way can send changed tensors only:

    with publish(changed(before, model.state_dict())) as files:
        llm.call(UpdateWeights(files, version=8, base=7))
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from headgate import scratch
from headgate.device.weights import ipc
from headgate.device.weights.broadcast import BUCKET, BroadcastGroup, offer, raw
from headgate.device.weights.declared import digest
from headgate.device.weights.loading import DTYPES, OpenFile
from headgate.errors import RequestError
from headgate.protocol.command import Backend, BroadcastSource, FileSource, SharedMemorySource

SHARED_MEMORY = Path("/dev/shm")  # `scratch.folder` creates a private folder there  # nosec B108


@contextmanager
def publish(
    tensors: Mapping[str, torch.Tensor],
    folder: str | Path | None = None,
    *,
    version: int | None = None,
    checksum: bool = False,
) -> Iterator[FileSource]:
    """Write `tensors` to a file that engines on this host can load; it is removed when the context exits.

    The file is in shared memory unless `folder` is given. With `checksum`, engines verify every byte.
    """
    parent = folder or (SHARED_MEMORY if SHARED_MEMORY.is_dir() else None)
    with scratch.folder("weights-", parent) as own:
        path = own / ("weights.safetensors" if version is None else f"weights-{version}.safetensors")
        write_safetensors(path, tensors)
        yield FileSource(str(path), {path.name: OpenFile(path).sha256()} if checksum else None)


def changed(before: Mapping[str, torch.Tensor], after: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors of `after` whose bits differ from those of `before`; for an update with a `base`."""
    return {name: tensor for name, tensor in after.items() if name not in before or differ(before[name], tensor)}


def differ(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Compares bytes, because NaN differs from itself and -0 equals 0."""
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return True
    first, second = (each.detach().contiguous().reshape(-1).view(torch.uint8) for each in (one, other))
    return not torch.equal(first.to(second.device), second)


def checksums(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """SHA-256 in hex by tensor name, which engines verify before they write (`verify_checksum`)."""
    return {name: digest(tensor) for name, tensor in tensors.items()}


def write_safetensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    names = {dtype: name for name, dtype in DTYPES.items()}
    header: dict[str, Any] = {}
    end = 0
    for name, tensor in tensors.items():
        start, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": names[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb", buffering=0) as file:
        write_all(file.fileno(), memoryview(len(text).to_bytes(8, "little") + text))
        for tensor in tensors.values():
            write_all(file.fileno(), raw(tensor).numpy().data)


def write_all(descriptor: int, data: memoryview) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


@contextmanager
def share(tensors: Mapping[str, torch.Tensor]) -> Iterator[SharedMemorySource]:
    """Yield handles of `tensors`, which are all on one GPU, for an engine on that GPU.

    Do not modify the tensors inside the context.
    """
    try:
        yield ipc.shared(tensors)
    except ValueError as error:
        raise RequestError(str(error), code="bad_weights") from error


def send_weights(
    tensors: Mapping[str, torch.Tensor],
    init_method: str,
    world_size: int,
    *,
    timeout_s: float = 300.0,
    bucket_bytes: int = BUCKET,
    backend: Backend = "gloo",
) -> None:
    """Broadcast `tensors` to the engines of a group of `world_size`, in which the caller is rank 0.

    Returns when all engines have received all tensors. Raises RequestError with the reason if an engine refuses, and
    SourceLost if an engine is gone or the timeout passes. In both cases no engine is left waiting, and engines keep
    their old weights if they can.
    """
    # Constructing the source validates the arguments as the engines do.
    source = BroadcastSource(init_method, world_size, rank=1, timeout_s=timeout_s)
    device = next((tensor.device for tensor in tensors.values()), torch.device("cpu"))
    group = BroadcastGroup(source.address, world_size, 0, timeout_s, backend=backend, device=device)
    try:
        objections = offer(group, tensors, bucket_bytes)
        group.leave(last=True)
    except BaseException:
        group.leave()
        raise
    if objections:
        reasons = "; ".join(f"rank {rank}: {reason}" for rank, reason in objections.items())
        raise RequestError(f"the weights are refused: {reasons}", code="bad_weights")
