"""Weights over the network: a trainer (rank 0) broadcasts, engines receive. Both sides of the exchange are here.

Every part of it is a collective of all ranks:

1. the trainer broadcasts a header, JSON: which tensors will come, in their order, and how large a bucket is
2. everyone tells everyone whether it takes them; one objection ends the exchange for all, with its reason
3. the trainer broadcasts the tensors as raw bytes, packed in buckets that both sides work out from the header
4. everyone tells everyone that it has them all

A group of our own is made for each exchange, beside any default group there may be. All waits end at one deadline, and a
rank that dies is noticed at once, by its connections. Nothing is pickled.

Words (header, verdicts) always travel through the host. Buckets may travel by NCCL instead, from device memory to device
memory; a rank that dies in the middle of one is then noticed at the deadline.
"""

from __future__ import annotations

import json
import math
import os
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from types import TracebackType
from typing import Any

import torch
import torch.distributed

from headgate.device.memory import finish_copies
from headgate.device.weights.loading import TensorInfo, type_name
from headgate.errors import BrokenCheckpoint, SourceLost
from headgate.protocol.command import Backend, BroadcastSource

dist: Any = torch.distributed  # whose stubs leave out half of it

FORMAT = 1
BUCKET = 64 * 2**20  # bytes; a larger tensor has a bucket of its own
ALIGN = 16  # bytes; any dtype can be viewed at such an offset
VERDICT = 1024  # bytes of UTF-8; none is consent
LEAVE_S = 5.0  # how long the trainer waits for engines to hear of the end
MARGIN = 256 * 2**20  # bytes that staging leaves free
LOOK_S = 0.0005  # how often a bucket that travels by NCCL is looked after
CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Bucket:
    size: int
    starts: dict[str, int]  # by tensor


def pack_buckets(tensors: Mapping[str, TensorInfo], most: int) -> list[Bucket]:
    """Which tensors travel together, and where in the bucket each begins."""
    buckets = [Bucket(0, {})]
    for name, info in tensors.items():
        start = -(-buckets[-1].size // ALIGN) * ALIGN
        if buckets[-1].starts and start + size_of(info) > most:
            buckets.append(Bucket(0, {}))
            start = 0
        buckets[-1] = Bucket(start + size_of(info), buckets[-1].starts | {name: start})
    return [bucket for bucket in buckets if bucket.starts]


def size_of(info: TensorInfo) -> int:
    return math.prod(info.shape) * info.dtype.itemsize


# -- the header ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class BroadcastHeader:
    tensors: dict[str, TensorInfo]
    bucket_bytes: int

    @property
    def buckets(self) -> list[Bucket]:
        return pack_buckets(self.tensors, self.bucket_bytes)


def encode_header(header: BroadcastHeader) -> bytes:
    tensors = header.tensors
    entries = [{"name": name, "dtype": type_name(i.dtype), "shape": list(i.shape)} for name, i in tensors.items()]
    return json.dumps({"headgate": FORMAT, "bucket_bytes": header.bucket_bytes, "tensors": entries}).encode()


def decode_header(data: bytes) -> BroadcastHeader:
    try:
        content = json.loads(data)
        if content["headgate"] != FORMAT:
            raise ValueError(f"format {content['headgate']}")
        return BroadcastHeader(
            dict(decode_entry(entry) for entry in content["tensors"]), int(content["bucket_bytes"])
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise BrokenCheckpoint(f"the trainer's header is not one that we know: {error!r}") from error


def decode_entry(entry: dict[str, Any]) -> tuple[str, TensorInfo]:
    dtype, shape = getattr(torch, entry["dtype"]), tuple(entry["shape"])
    if not isinstance(dtype, torch.dtype) or not all(isinstance(n, int) and n >= 0 for n in shape):
        raise ValueError(f"tensor {entry['name']} of {entry['dtype']} {entry['shape']}")
    return entry["name"], TensorInfo(dtype, shape)


# -- the group -------------------------------------------------------------------------


class BroadcastGroup:
    """All ranks of one exchange, from joining to leaving. Raises SourceLost when one is gone or time is up."""

    def __init__(
        self,
        address: tuple[str, int],
        world_size: int,
        rank: int,
        timeout_s: float,
        *,
        backend: Backend = "gloo",
        device: torch.device = CPU,
    ) -> None:
        self.rank, self.world_size = rank, world_size
        self.device = device if backend == "nccl" else CPU  # of buckets
        self._nccl: Any = None
        self._deadline_s = time.monotonic() + timeout_s
        with lost("the group could not be joined"):
            self._store = dist.TCPStore(*address, None, rank == 0, self._left(), wait_for_workers=False)
            named = dist.PrefixStore("headgate", self._store)
            self._group = dist.ProcessGroupGloo(named, rank, world_size, self._options(address))
        try:
            self._agree_on(backend)
            if backend == "nccl":
                with lost("the NCCL group could not be joined"):
                    self._nccl = nccl_group(dist.PrefixStore("nccl", self._store), rank, world_size, timeout_s)
        except BaseException:
            self.leave()
            raise

    def _agree_on(self, backend: Backend) -> None:
        """Before anything else, or those who can would wait for the one who cannot."""
        with lost("another rank of the group is gone"):
            if self.rank == 0:
                self._store.set("backend", backend)
            trainers = self._store.get("backend").decode()
        objection = ""
        if trainers != backend:
            objection = f"the trainer sends by {trainers}, and this engine was told {backend}"
        elif backend == "nccl" and not takes_nccl(self.device):
            objection = f"nccl needs a GPU, and {self.device} is none"
        if objections := self.poll(objection):
            reasons = "; ".join(f"rank {rank}: {reason}" for rank, reason in objections.items())
            raise BrokenCheckpoint(f"the group cannot be: {reasons}")

    def broadcast(self, data: torch.Tensor) -> None:
        """From rank 0 into the `data` of all others."""
        if not data.numel():
            return
        options = dist.BroadcastOptions()
        options.rootRank, options.timeout = 0, self._left()
        with lost("the broadcast broke off"):
            self._group.broadcast([data], options).wait()

    def broadcast_bucket(self, data: torch.Tensor) -> None:
        """The same for the bytes of tensors, which lie on `device`."""
        if self._nccl is None or not data.numel():
            return self.broadcast(data)
        options = dist.BroadcastOptions()
        options.rootRank = 0
        with lost("the broadcast broke off"):
            work = self._nccl.broadcast([data], options)
            self._await(work)
        return None

    def _await(self, work: Any) -> None:
        """By looking: NCCL's own way to end a wait in time is to end the process."""
        while not work.is_completed():
            self._left()
            time.sleep(LOOK_S)
        work.wait()  # which does not wait, but raises what went wrong
        finish_copies(self.device)

    def broadcast_bytes(self, data: bytes = b"") -> bytes:
        """What rank 0 gives, whose length the others do not know."""
        length = torch.tensor([len(data)])
        self.broadcast(length)
        buffer = torch.zeros(int(length), dtype=torch.uint8)
        if self.rank == 0:
            buffer = as_bytes(data)
        self.broadcast(buffer)
        return buffer.numpy().tobytes()

    def poll(self, objection: str = "") -> dict[int, str]:
        """Tell all what we object to, if anything, and hear their objections, by rank."""
        mine = as_bytes(objection.encode()[:VERDICT].ljust(VERDICT, b"\0"))
        heard = [torch.empty_like(mine) for _ in range(self.world_size)]
        options = dist.distributed_c10d.AllgatherOptions()
        options.timeout = self._left()
        with lost("another rank of the group is gone"):
            self._group.allgather([heard], [mine], options).wait()
        told = (each.numpy().tobytes().rstrip(b"\0").decode(errors="replace") for each in heard)
        return {rank: objection for rank, objection in enumerate(told) if objection}

    def leave(self, *, last: bool = False) -> None:
        """Go. The trainer keeps the meeting place, so when all is well it goes last."""
        with suppress(Exception):
            if last:
                self._store.wait([f"left/{rank}" for rank in range(1, self.world_size)], timedelta(seconds=LEAVE_S))
            elif self.rank:
                self._store.set(f"left/{self.rank}", "")
        if self._nccl is not None:
            with suppress(Exception):
                self._nccl.abort()
        self.__dict__.clear()  # closes the connections, whoever still looks at us

    def _left(self) -> timedelta:
        left_s = self._deadline_s - time.monotonic()
        if left_s <= 0:
            raise SourceLost("the time for this exchange is up")
        return timedelta(seconds=max(left_s, 0.001))

    def _options(self, address: tuple[str, int]) -> Any:
        options = dist.ProcessGroupGloo._Options()
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=own_address(address))]
        options._timeout = self._left()
        return options


def takes_nccl(device: torch.device) -> bool:
    return device.type == "cuda"


def nccl_group(store: Any, rank: int, world_size: int, timeout_s: float) -> Any:
    # Its watchdog would end the process when a broadcast fails or takes too long; we look after that ourselves.
    os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=2 * timeout_s + 600)
    return dist.ProcessGroupNCCL(store, rank, world_size, options)


def own_address(peer: tuple[str, int]) -> str:
    """The address under which `peer` sees us. Sends nothing."""
    family = socket.getaddrinfo(*peer, type=socket.SOCK_DGRAM)[0][0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(peer)
        return str(probe.getsockname()[0])


def as_bytes(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


@contextmanager
def lost(what: str) -> Iterator[None]:
    """What torch says of a broken connection, as SourceLost."""
    try:
        yield
    except (RuntimeError, OSError) as error:
        reason = str(error).partition(" This is typically")[0].rpartition("] ")[2] or str(error)
        raise SourceLost(f"{what}: {reason}") from error


# -- the engine's side -----------------------------------------------------------------


class BroadcastWeights:
    """A `WeightSource`. Tensors are given out when all have arrived, if memory allows; otherwise as they arrive."""

    def __init__(
        self, group: BroadcastSource, room: Callable[[torch.device], int], device: torch.device = CPU
    ) -> None:
        """`room` says how many bytes could be allocated now; `device` is the model's."""
        self._group = group
        self._room = room
        self._device = device
        self._circle: BroadcastGroup | None = None
        self._header: BroadcastHeader | None = None
        self._accepted = False

    def __repr__(self) -> str:
        return f"<GroupWeights {self._group.init_method}, rank {self._group.rank} of {self._group.world_size}>"

    def __enter__(self) -> BroadcastWeights:
        group = self._group
        self._circle = BroadcastGroup(
            *(group.address, group.world_size, group.rank, group.timeout_s),
            backend=group.backend,
            device=self._device,
        )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        circle, self._circle = self._joined, None
        if not self._accepted:
            # The trainer waits for our verdict, and learns from it what it should have sent.
            with suppress(SourceLost):
                circle.poll(str(error) or repr(error))
        circle.leave()

    @property
    def _joined(self) -> BroadcastGroup:
        assert self._circle is not None, "tensors come only while the source is entered"
        return self._circle

    def metadata(self) -> Mapping[str, TensorInfo]:
        return self._heard.tensors

    @property
    def _heard(self) -> BroadcastHeader:
        if self._header is None:
            self._header = decode_header(self._joined.broadcast_bytes())
        return self._header

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        self._accepted = True
        self._agree()
        buckets = self._heard.buckets
        incoming = self._receive(buckets)
        if sum(bucket.size for bucket in buckets) * 1.05 + MARGIN <= self._room(self._joined.device):
            staged = deque(incoming)
            self._agree()
            while staged:
                yield staged.popleft()
        else:
            yield from incoming
            self._agree()

    def _receive(self, buckets: list[Bucket]) -> Iterator[tuple[str, torch.Tensor]]:
        for bucket in buckets:
            data = torch.empty(bucket.size, dtype=torch.uint8, device=self._joined.device)
            self._joined.broadcast_bucket(data)
            for name, start in bucket.starts.items():
                info = self._heard.tensors[name]
                yield name, data[start : start + size_of(info)].view(info.dtype).view(info.shape)

    def _agree(self) -> None:
        for rank, objection in self._joined.poll().items():
            raise SourceLost(f"rank {rank} refuses: {objection}")


# -- the trainer's side ----------------------------------------------------------------


def offer(circle: BroadcastGroup, tensors: Mapping[str, torch.Tensor], bucket_bytes: int = BUCKET) -> dict[int, str]:
    """Send `tensors` to all engines; says who objects, by rank. Without objections all have all of them."""
    infos = {name: TensorInfo(tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    header = BroadcastHeader(infos, bucket_bytes)
    circle.broadcast_bytes(encode_header(header))
    if objections := circle.poll():
        return objections
    room = min(bucket_bytes, sum(map(size_of, infos.values())) + ALIGN * len(infos))
    scratch = torch.empty(room, dtype=torch.uint8, device=circle.device)
    for bucket in header.buckets:
        circle.broadcast_bucket(fill_bucket(bucket, tensors, scratch))
    return circle.poll()


def fill_bucket(bucket: Bucket, tensors: Mapping[str, torch.Tensor], scratch: torch.Tensor) -> torch.Tensor:
    """The bytes of `bucket`: those of its only tensor where they lie, or of several in `scratch`."""
    if len(bucket.starts) == 1:
        return raw(tensors[next(iter(bucket.starts))], scratch.device)
    data = scratch[: bucket.size]
    for name, start in bucket.starts.items():
        part = raw(tensors[name], scratch.device)
        data[start : start + len(part)] = part
    return data


def raw(tensor: torch.Tensor, device: torch.device = CPU) -> torch.Tensor:
    """The bytes of `tensor` on `device`, without a copy if it lies there in one piece."""
    return tensor.detach().to(device).contiguous().reshape(-1).view(torch.uint8)
