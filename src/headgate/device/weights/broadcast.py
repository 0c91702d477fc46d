"""Weights over the network: a trainer (rank 0) broadcasts, engines receive. Both sides of the exchange are here.

Every part of the exchange is a collective of all ranks:

1. the trainer broadcasts a JSON header: the tensors in the order in which they follow, and the bucket size
2. every rank votes on whether it accepts them; one objection ends the exchange for all, with its reason
3. the trainer broadcasts the tensors as raw bytes, packed in buckets that both sides derive from the header
4. every rank confirms that it has received everything

Each exchange creates its own group, independent of any default group. All waits end at one deadline, and a rank that
exits is detected at once by its connections. Nothing is pickled.

The header and the votes always travel through host memory. Buckets may travel by NCCL instead, from device memory to
device memory; a rank that exits during a bucket is then detected only at the deadline.
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
from headgate.device.weights.source import TensorInfo, type_name
from headgate.errors import BrokenCheckpoint, SourceLost
from headgate.protocol.command import Backend, BroadcastSource

dist: Any = torch.distributed  # its type stubs are incomplete

FORMAT = 1
BUCKET = 64 * 2**20  # bytes; a larger tensor gets its own bucket
ALIGN = 16  # bytes; any dtype can be viewed at such an offset
VERDICT = 1024  # bytes of UTF-8; all zero means consent
LEAVE_S = 5.0  # how long the trainer waits for engines to leave the group
MARGIN = 256 * 2**20  # bytes that staging leaves free
POLL_S = 0.0005  # how often a bucket that travels by NCCL is checked
CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Bucket:
    size: int
    starts: dict[str, int]  # offsets by tensor name


def pack_buckets(tensors: Mapping[str, TensorInfo], most: int) -> list[Bucket]:
    """Assign tensors to buckets, with the offset of each in its bucket."""
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
        raise BrokenCheckpoint(f"the trainer's header has an unknown format: {error!r}") from error


def decode_entry(entry: dict[str, Any]) -> tuple[str, TensorInfo]:
    dtype, shape = getattr(torch, entry["dtype"]), tuple(entry["shape"])
    if not isinstance(dtype, torch.dtype) or not all(isinstance(n, int) and n >= 0 for n in shape):
        raise ValueError(f"tensor {entry['name']} of {entry['dtype']} {entry['shape']}")
    return entry["name"], TensorInfo(dtype, shape)


# -- the group -------------------------------------------------------------------------


class BroadcastGroup:
    """All ranks of one exchange, from joining to leaving. Raises SourceLost when a rank is gone or time is up."""

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
        self.device = device if backend == "nccl" else CPU  # where buckets are
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
        """Must come first: otherwise ranks that support the backend would wait for one that does not."""
        with lost("another rank of the group is gone"):
            if self.rank == 0:
                self._store.set("backend", backend)
            trainers = self._store.get("backend").decode()
        objection = ""
        if trainers != backend:
            objection = f"the trainer sends by {trainers}, and this engine is configured for {backend}"
        elif backend == "nccl" and not takes_nccl(self.device):
            objection = f"nccl needs a GPU, and {self.device} is not one"
        if objections := self.poll(objection):
            reasons = "; ".join(f"rank {rank}: {reason}" for rank, reason in objections.items())
            raise BrokenCheckpoint(f"the group cannot be formed: {reasons}")

    def broadcast(self, data: torch.Tensor) -> None:
        """Broadcast from rank 0 into `data` of all others."""
        if not data.numel():
            return
        options = dist.BroadcastOptions()
        options.rootRank, options.timeout = 0, self._left()
        with lost("the broadcast broke off"):
            self._group.broadcast([data], options).wait()

    def broadcast_bucket(self, data: torch.Tensor) -> None:
        """The same for the bytes of tensors, which are on `device`."""
        if self._nccl is None or not data.numel():
            return self.broadcast(data)
        options = dist.BroadcastOptions()
        options.rootRank = 0
        with lost("the broadcast broke off"):
            work = self._nccl.broadcast([data], options)
            self._await(work)
        return None

    def _await(self, work: Any) -> None:
        """Polls, because NCCL enforces a timeout by ending the process."""
        while not work.is_completed():
            self._left()
            time.sleep(POLL_S)
        work.wait()  # does not wait here; raises the error, if any
        finish_copies(self.device)

    def broadcast_bytes(self, data: bytes = b"") -> bytes:
        """Broadcast rank 0's bytes, whose length the others do not know."""
        length = torch.tensor([len(data)])
        self.broadcast(length)
        buffer = torch.zeros(int(length), dtype=torch.uint8)
        if self.rank == 0:
            buffer = as_bytes(data)
        self.broadcast(buffer)
        return buffer.numpy().tobytes()

    def poll(self, objection: str = "") -> dict[int, str]:
        """Send our objection, if any, to all ranks. Returns all objections by rank."""
        mine = as_bytes(objection.encode()[:VERDICT].ljust(VERDICT, b"\0"))
        received = [torch.empty_like(mine) for _ in range(self.world_size)]
        options = dist.distributed_c10d.AllgatherOptions()
        options.timeout = self._left()
        with lost("another rank of the group is gone"):
            self._group.allgather([received], [mine], options).wait()
        texts = (each.numpy().tobytes().rstrip(b"\0").decode(errors="replace") for each in received)
        return {rank: objection for rank, objection in enumerate(texts) if objection}

    def leave(self, *, last: bool = False) -> None:
        """Leave the group. The trainer hosts the store, so it leaves last when the exchange succeeded."""
        with suppress(Exception):
            if last:
                self._store.wait([f"left/{rank}" for rank in range(1, self.world_size)], timedelta(seconds=LEAVE_S))
            elif self.rank:
                self._store.set(f"left/{self.rank}", "")
        if self._nccl is not None:
            with suppress(Exception):
                self._nccl.abort()
        self.__dict__.clear()  # closes the connections, even if others still reference this object

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
    # NCCL's watchdog would end the process when a broadcast fails or takes too long; `_await` handles both.
    os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=2 * timeout_s + 600)
    return dist.ProcessGroupNCCL(store, rank, world_size, options)


def own_address(peer: tuple[str, int]) -> str:
    """Our address as seen from `peer`. Sends nothing."""
    family = socket.getaddrinfo(*peer, type=socket.SOCK_DGRAM)[0][0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(peer)
        return str(probe.getsockname()[0])


def as_bytes(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


@contextmanager
def lost(what: str) -> Iterator[None]:
    """Raise SourceLost for torch's errors about broken connections."""
    try:
        yield
    except (RuntimeError, OSError) as error:
        reason = str(error).partition(" This is typically")[0].rpartition("] ")[2] or str(error)
        raise SourceLost(f"{what}: {reason}") from error


# -- the engine's side -----------------------------------------------------------------


class BroadcastWeights:
    """A `WeightSource`. Yields tensors after all have arrived if memory allows, otherwise as they arrive."""

    def __init__(
        self, source: BroadcastSource, room: Callable[[torch.device], int], device: torch.device = CPU
    ) -> None:
        """`room` returns the bytes that can be allocated now; `device` is the model's."""
        self._source = source
        self._room = room
        self._device = device
        self._joined_group: BroadcastGroup | None = None
        self._header: BroadcastHeader | None = None
        self._accepted = False

    def __repr__(self) -> str:
        return f"<BroadcastWeights {self._source.init_method}, rank {self._source.rank} of {self._source.world_size}>"

    def __enter__(self) -> BroadcastWeights:
        source = self._source
        self._joined_group = BroadcastGroup(
            *(source.address, source.world_size, source.rank, source.timeout_s),
            backend=source.backend,
            device=self._device,
        )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        group, self._joined_group = self._joined, None
        if not self._accepted:
            # The trainer waits for our vote, which tells it what it should have sent.
            with suppress(SourceLost):
                group.poll(str(error) or repr(error))
        group.leave()

    @property
    def _joined(self) -> BroadcastGroup:
        assert self._joined_group is not None, "tensors can be read only while the source is entered"
        return self._joined_group

    def metadata(self) -> Mapping[str, TensorInfo]:
        return self._received_header.tensors

    @property
    def _received_header(self) -> BroadcastHeader:
        if self._header is None:
            self._header = decode_header(self._joined.broadcast_bytes())
        return self._header

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        self._accepted = True
        self._agree()
        buckets = self._received_header.buckets
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
                info = self._received_header.tensors[name]
                yield name, data[start : start + size_of(info)].view(info.dtype).view(info.shape)

    def _agree(self) -> None:
        for rank, objection in self._joined.poll().items():
            raise SourceLost(f"rank {rank} refuses: {objection}")


# -- the trainer's side ----------------------------------------------------------------


def offer(group: BroadcastGroup, tensors: Mapping[str, torch.Tensor], bucket_bytes: int = BUCKET) -> dict[int, str]:
    """Send `tensors` to all engines. Returns objections by rank; if there are none, all engines have all tensors."""
    infos = {name: TensorInfo(tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    header = BroadcastHeader(infos, bucket_bytes)
    group.broadcast_bytes(encode_header(header))
    if objections := group.poll():
        return objections
    room = min(bucket_bytes, sum(map(size_of, infos.values())) + ALIGN * len(infos))
    scratch = torch.empty(room, dtype=torch.uint8, device=group.device)
    for bucket in header.buckets:
        group.broadcast_bucket(fill_bucket(bucket, tensors, scratch))
    return group.poll()


def fill_bucket(bucket: Bucket, tensors: Mapping[str, torch.Tensor], scratch: torch.Tensor) -> torch.Tensor:
    """The bytes of `bucket`: those of its only tensor in place, or of several tensors packed in `scratch`."""
    if len(bucket.starts) == 1:
        return raw(tensors[next(iter(bucket.starts))], scratch.device)
    data = scratch[: bucket.size]
    for name, start in bucket.starts.items():
        part = raw(tensors[name], scratch.device)
        data[start : start + len(part)] = part
    return data


def raw(tensor: torch.Tensor, device: torch.device = CPU) -> torch.Tensor:
    """The bytes of `tensor` on `device`, without a copy if it is contiguous there."""
    return tensor.detach().to(device).contiguous().reshape(-1).view(torch.uint8)
