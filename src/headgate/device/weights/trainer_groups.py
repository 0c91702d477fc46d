"""Process groups that an engine joins on a trainer's behalf and stays in for many updates.

A group is one that `torch.distributed` builds under a name, as SGLang's trainers do, or one that vLLM's trainers form from
an NCCL id in a store. There is one broadcast per tensor, or one of several tensors in a row. The trainer is rank 0.

Each group has its own thread, so a trainer that is gone never stops the step loop. Every wait ends at a deadline. A
group in which an operation failed is not used again: the trainer must set up another one.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from datetime import timedelta
from queue import SimpleQueue
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed

from headgate.device.memory import current, finish_copies
from headgate.device.weights.broadcast import POLL_S, lost, nccl_group, own_address, takes_nccl
from headgate.device.weights.nccl import NcclBroadcasts
from headgate.device.weights.source import TensorInfo
from headgate.device.weights.staging import CPU, Tensors, info_of
from headgate.errors import BrokenCheckpoint, SourceLost
from headgate.pickled import Call, Name, NotPlain, read_pickle
from headgate.protocol.command import NCCL_ID_BYTES, GroupPart, JoinGroup, Rendezvous, TensorSpec

dist: Any = torch.distributed  # its type stubs are incomplete

T = TypeVar("T")
log = logging.getLogger(__name__)


class DaemonWorker:
    """A thread that runs one call after another. It does not keep the process alive."""

    def __init__(self, name: str, device: torch.device = CPU) -> None:
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._device = device
        threading.Thread(target=self._serve, name=name, daemon=True).start()

    def submit(self, work: Callable[[], T]) -> Future[T]:
        future: Future[T] = Future()
        future.set_running_or_notify_cancel()
        self._calls.put(lambda: _settle(future, work))
        return future

    def close(self) -> None:
        """End the thread after its current call."""
        self._calls.put(None)

    def _serve(self) -> None:
        with current(self._device):
            while call := self._calls.get():
                call()
                del call


def _settle(future: Future[T], work: Callable[[], T]) -> None:
    try:
        result = work()
    except BaseException as error:
        future.set_exception(error)
    else:
        future.set_result(result)


class Broadcasts(Protocol):
    """The part of a group that moves bytes. `device`: where its buffers are."""

    device: torch.device

    def receive(self, buffer: torch.Tensor, left_s: Callable[[], float]) -> None:
        """Fill `buffer` with rank 0's. `left_s` returns the remaining time, and raises when there is none."""

    def close(self) -> None:
        """Leave the group. Any thread may call it; an operation in progress fails."""


class TorchBroadcasts:
    """A process group of torch, by gloo through host memory or by NCCL."""

    def __init__(self, store: Any, join: JoinGroup, device: torch.device) -> None:
        self.device = device if join.backend == "nccl" else CPU
        if join.backend == "nccl":
            self._group = nccl_group(store, join.rank, join.world_size, join.timeout_s)
        else:
            self._group = dist.ProcessGroupGloo(store, join.rank, join.world_size, gloo_options(join))

    def receive(self, buffer: torch.Tensor, left_s: Callable[[], float]) -> None:
        options = dist.BroadcastOptions()
        options.rootRank, options.timeout = 0, timedelta(seconds=left_s())
        self._await(self._group.broadcast([buffer], options), left_s)

    def warm_up(self, left_s: Callable[[], float]) -> None:
        """The sum of one number, with which every rank of vLLM's communicators begins."""
        options = dist.AllreduceOptions()
        options.timeout = timedelta(seconds=left_s())
        self._await(self._group.allreduce([torch.zeros(1, device=self.device)], options), left_s)

    def _await(self, work: Any, left_s: Callable[[], float]) -> None:
        if self.device.type == "cuda":
            await_work(work, left_s)
            finish_copies(self.device)
        else:
            work.wait()

    def close(self) -> None:
        with suppress(Exception):
            self._group.abort()


def refuse_without_gpu(device: torch.device) -> None:
    if not takes_nccl(device):
        raise BrokenCheckpoint(f"nccl needs a GPU, and {device} is not one; use the backend gloo")


def gloo_options(join: JoinGroup) -> Any:
    options = dist.ProcessGroupGloo._Options()
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=own_address((join.host, join.port)))]
    options._timeout = timedelta(seconds=join.timeout_s)
    return options


def await_work(work: Any, left_s: Callable[[], float]) -> None:
    """Polls, because NCCL enforces a timeout by ending the process."""
    while not work.is_completed():
        left_s()
        time.sleep(POLL_S)
    work.wait()


def join_torch(join: JoinGroup, device: torch.device) -> Broadcasts:
    """Join as `torch.distributed` does for a group of this name: these prefixes are where the ranks find each other."""
    if join.backend == "nccl":
        refuse_without_gpu(device)  # before the trainer counts this rank as present
    named = dist.PrefixStore(f"{join.name}/", dist.PrefixStore(join.name, open_store(join)))
    return TorchBroadcasts(dist.PrefixStore("cuda/" if join.backend == "nccl" else "cpu/", named), join, device)


# Where a StatelessProcessGroup has the first object that rank 0 broadcasts: the NCCL id, a pickled ctypes structure.
VLLM_KEY = "broadcast_from/0/0"
UNPICKLE = "_ctypes._unpickle"
VLLM_ID = "vllm.distributed.device_communicators.pynccl_wrapper.ncclUniqueId"


def join_vllm(join: JoinGroup, device: torch.device) -> Broadcasts:
    """Join as a rank of vLLM's StatelessProcessGroup and PyNcclCommunicator do."""
    due_s = time.monotonic() + join.timeout_s
    if join.backend == "nccl" or join.nccl_id is not None:
        refuse_without_gpu(device)
    if join.nccl_id is not None:
        return NcclBroadcasts(join.nccl_id, join.rank, join.world_size, device, lambda: remaining_s(due_s))
    store = open_store(join)
    unique_id = id_in(bytes(store.get(VLLM_KEY)))
    if join.backend == "nccl":
        return NcclBroadcasts(unique_id, join.rank, join.world_size, device, lambda: remaining_s(due_s))
    group = TorchBroadcasts(dist.PrefixStore(unique_id.hex(), store), join, device)
    group.warm_up(lambda: remaining_s(due_s))
    return group


def id_in(pickled: bytes) -> bytes:
    """The NCCL id in a pickle, which is read and not loaded."""
    try:
        match read_pickle(pickled, (UNPICKLE, VLLM_ID), longest=4096):
            case Call(
                function="_ctypes._unpickle", arguments=(Name(text=kind), (dict(), bytes(data))), state=None
            ) if kind == VLLM_ID and len(data) == NCCL_ID_BYTES:
                return data
    except NotPlain as error:
        raise BrokenCheckpoint(f"the trainer's store has no NCCL id: {error}") from error
    raise BrokenCheckpoint("the trainer's store has another value where its NCCL id should be")


JOIN: dict[Rendezvous, Callable[[JoinGroup, torch.device], Broadcasts]] = {"torch": join_torch, "vllm": join_vllm}


def open_store(join: JoinGroup) -> Any:
    """The trainer's store. Waits until all ranks have connected to it."""
    return dist.TCPStore(join.host, join.port, join.world_size, False, timedelta(seconds=join.timeout_s))


class JoinedGroup:
    """A group and its thread. Owned by `WeightWires`."""

    def __init__(self, join: JoinGroup, device: torch.device) -> None:
        self.name = join.name
        self._join_command = join
        self._device = device
        self._broadcasts: Broadcasts | None = None
        self._failure = ""
        self._closed = False
        self._worker = DaemonWorker("headgate-group", device)

    def __repr__(self) -> str:
        return f"<JoinedGroup {self.name}, rank {self._join_command.rank} of {self._join_command.world_size}>"

    def join(self) -> Future[None]:
        return self._worker.submit(self._join)

    def receive(
        self, part: GroupPart, keep: Callable[[TensorSpec, torch.Tensor], torch.Tensor | None], timeout_s: float
    ) -> Future[Tensors]:
        """Receive `part`. `keep` returns what is kept of each tensor, or None."""
        due_s = time.monotonic() + timeout_s
        return self._worker.submit(lambda: self._receive(part, keep, due_s))

    def close(self) -> None:
        """Leave the group. An operation that blocks its thread fails, or is abandoned with the thread."""
        self._closed = True
        broadcasts, self._broadcasts = self._broadcasts, None
        if broadcasts is not None:
            threading.Thread(target=broadcasts.close, name="headgate-leave", daemon=True).start()
        self._worker.close()

    def _join(self) -> None:
        with lost(f"the group {self.name} could not be joined"):
            broadcasts = JOIN[self._join_command.rendezvous](self._join_command, self._device)
        if self._closed:
            broadcasts.close()
            raise SourceLost(f"the group {self.name} was left while it was joined")
        self._broadcasts = broadcasts
        log.info("joined %r", self)

    def _receive(
        self,
        part: GroupPart,
        keep: Callable[[TensorSpec, torch.Tensor], torch.Tensor | None],
        due_s: float,
    ) -> Tensors:
        broadcasts = self._broadcasts
        if broadcasts is None or self._failure:
            raise SourceLost(f"the group {self.name} is lost ({self._failure or 'it was left'}); set it up again")
        try:
            with lost(f"the group {self.name} broke off"):
                return [kept for specs in buffers(part) for kept in self._fill(broadcasts, part, specs, keep, due_s)]
        except SourceLost as error:
            self._failure = str(error)
            broadcasts.close()
            raise

    def _fill(
        self,
        broadcasts: Broadcasts,
        part: GroupPart,
        specs: Sequence[TensorSpec],
        keep: Callable[[TensorSpec, torch.Tensor], torch.Tensor | None],
        due_s: float,
    ) -> Iterator[tuple[str, torch.Tensor]]:
        data = torch.empty(sum(map(size_of, specs)), dtype=torch.uint8, device=broadcasts.device)
        broadcasts.receive(
            data if part.packed_bytes is not None else typed(data, specs[0]), lambda: remaining_s(due_s)
        )
        for spec, tensor in zip(specs, unpacked(data, specs), strict=True):
            if (kept := keep(spec, tensor)) is not None:
                yield spec.name, kept


def remaining_s(due_s: float) -> float:
    left_s = due_s - time.monotonic()
    if left_s <= 0:
        raise SourceLost("the trainer has not sent the tensors in time")
    return max(left_s, 0.001)


def size_of(spec: TensorSpec) -> int:
    info = info_of(spec)
    return math.prod(info.shape) * info.dtype.itemsize


def buffers(part: GroupPart) -> Iterator[Sequence[TensorSpec]]:
    """The tensors of each broadcast."""
    if part.packed_bytes is None:
        yield from ([spec] for spec in part.tensors)
        return
    specs: list[TensorSpec] = []
    for spec in part.tensors:
        specs.append(spec)
        if sum(map(size_of, specs)) > part.packed_bytes:
            yield specs
            specs = []
    if specs:
        yield specs


def typed(data: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    """The buffer of one tensor with the tensor's own type: backends compare types, and not only sizes."""
    info = info_of(spec)
    return data.view(info.dtype).view(info.shape)


def unpacked(data: torch.Tensor, specs: Sequence[TensorSpec]) -> Iterator[torch.Tensor]:
    start = 0
    for spec in specs:
        end = start + size_of(spec)
        yield reshaped(data[start:end], info_of(spec))
        start = end


def reshaped(data: torch.Tensor, info: TensorInfo) -> torch.Tensor:
    aligned = data if data.storage_offset() % info.dtype.itemsize == 0 else data.clone()
    return aligned.view(info.dtype).view(info.shape)
