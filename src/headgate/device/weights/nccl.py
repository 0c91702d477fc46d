"""NCCL without a process group of torch: a communicator from an id, as vLLM's trainers form it.

Uses the NCCL library that torch has loaded. The communicator does not block, so every wait ends at a deadline; a
communicator that failed is aborted.
"""

from __future__ import annotations

import ctypes
import functools
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

import torch

from headgate.device.memory import current
from headgate.device.weights.broadcast import POLL_S
from headgate.errors import BrokenCheckpoint, SourceLost
from headgate.protocol.command import NCCL_ID_BYTES

cuda: Any = torch.cuda  # its type stubs are incomplete

SUCCESS: Final = 0
IN_PROGRESS: Final = 7
SUM: Final = 0

# The codes of ncclDataType_t.
TYPES: dict[torch.dtype, int] = {
    torch.int8: 0,
    torch.uint8: 1,
    torch.int32: 2,
    torch.int64: 4,
    torch.float16: 6,
    torch.float32: 7,
    torch.float64: 8,
    torch.bfloat16: 9,
}
UINT8 = TYPES[torch.uint8]

Operation = Callable[[ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p], int]  # of a buffer, a group and a stream


class UniqueId(ctypes.Structure):
    _fields_ = [("internal", ctypes.c_byte * NCCL_ID_BYTES)]


class CommunicatorConfig(ctypes.Structure):
    """The configuration as NCCL 2.14 defined it. `version` says so, and later libraries add their defaults."""

    _fields_ = [
        ("size", ctypes.c_size_t),
        ("magic", ctypes.c_uint),
        ("version", ctypes.c_uint),
        ("blocking", ctypes.c_int),
    ]


@functools.cache
def library() -> ctypes.CDLL:
    """The NCCL library. Raises BrokenCheckpoint if there is none."""
    try:
        nccl = ctypes.CDLL("libnccl.so.2")
    except OSError as error:
        raise BrokenCheckpoint(f"the NCCL library of torch cannot be used: {error}") from error
    pointer, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    nccl.ncclGetErrorString.restype = ctypes.c_char_p
    nccl.ncclGetUniqueId.argtypes = [ctypes.POINTER(UniqueId)]
    nccl.ncclCommInitRankConfig.argtypes = [pointer, number, UniqueId, number, pointer]
    nccl.ncclCommGetAsyncError.argtypes = [pointer, pointer]
    nccl.ncclBroadcast.argtypes = [pointer, pointer, size, number, number, pointer, pointer]
    nccl.ncclAllReduce.argtypes = [pointer, pointer, size, number, number, pointer, pointer]
    nccl.ncclCommAbort.argtypes = [pointer]
    return nccl


def new_id() -> bytes:
    """An id for another communicator. Its creator is usually rank 0."""
    unique = UniqueId()
    check(library().ncclGetUniqueId(ctypes.byref(unique)), "an id cannot be made")
    return bytes(unique)


def check(code: int, what: str) -> None:
    if code not in (SUCCESS, IN_PROGRESS):
        raise SourceLost(f"{what}: NCCL reports {library().ncclGetErrorString(code).decode()!r} ({code})")


class NcclBroadcasts:
    """Implements `Broadcasts` with a communicator of `world_size` ranks on `device`. `root` is the trainer's rank."""

    def __init__(
        self,
        unique_id: bytes,
        rank: int,
        world_size: int,
        device: torch.device,
        left_s: Callable[[], float],
        root: int = 0,
    ) -> None:
        self.device = device
        self._nccl = library()
        self._root = root
        self._stream = cuda.Stream(device)
        self._communicator = ctypes.c_void_p()
        self._buffer: torch.Tensor | None = None  # of the current operation; kept until that is over or aborted
        config = CommunicatorConfig(ctypes.sizeof(CommunicatorConfig), 0xCAFEBEEF, 21400, 0)
        name = UniqueId.from_buffer_copy(unique_id)
        try:
            begun = self._nccl.ncclCommInitRankConfig(
                ctypes.byref(self._communicator), world_size, name, rank, ctypes.byref(config)
            )
            self._settle(begun, left_s, "the communicator cannot be made")
            self._warm_up(left_s)
        except BaseException:
            self.close()
            raise

    def receive(self, buffer: torch.Tensor, left_s: Callable[[], float]) -> None:
        """Fill `buffer` with the trainer's; on the trainer, send it."""
        code = TYPES.get(buffer.dtype, UINT8)
        count = buffer.numel() * (1 if buffer.dtype in TYPES else buffer.itemsize)
        root = self._root
        self._run(
            buffer,
            lambda at, group, stream: self._nccl.ncclBroadcast(at, at, count, code, root, group, stream),
            left_s,
        )

    def close(self) -> None:
        """Abort the communicator in a thread of its own, because that may take long."""
        communicator, self._communicator = self._communicator, ctypes.c_void_p()
        if communicator:
            threading.Thread(target=self._abort, args=(communicator,), name="headgate-leave", daemon=True).start()

    def _warm_up(self, left_s: Callable[[], float]) -> None:
        """The sum of one number, with which every rank of vLLM's communicators begins."""
        one = torch.zeros(1, device=self.device)
        code = TYPES[one.dtype]
        self._run(
            one, lambda at, group, stream: self._nccl.ncclAllReduce(at, at, 1, code, SUM, group, stream), left_s
        )

    def _run(self, buffer: torch.Tensor, operation: Operation, left_s: Callable[[], float]) -> None:
        """Run `operation` on the stream of this communicator, and return when the device has done it."""
        self._buffer = buffer
        self._stream.wait_stream(torch.cuda.current_stream(self.device))  # which may still use the buffer's memory
        at, stream = ctypes.c_void_p(buffer.data_ptr()), ctypes.c_void_p(self._stream.cuda_stream)
        self._settle(operation(at, self._communicator, stream), left_s, "the operation cannot be started")
        done = cuda.Event()
        done.record(self._stream)
        while not done.query():
            check(self._state(), "the operation broke off")
            left_s()
            time.sleep(POLL_S)
        self._buffer = None

    def _settle(self, begun: int, left_s: Callable[[], float], what: str) -> None:
        """Wait until an operation that may still be in progress has been started."""
        check(begun, what)
        while begun == IN_PROGRESS:
            left_s()
            time.sleep(POLL_S)
            check(begun := self._state(), what)

    def _state(self) -> int:
        if not self._communicator:
            raise SourceLost("the group was left")
        state = ctypes.c_int()
        check(self._nccl.ncclCommGetAsyncError(self._communicator, ctypes.byref(state)), "the group is broken")
        return state.value

    def _abort(self, communicator: ctypes.c_void_p) -> None:
        with suppress(Exception), current(self.device):
            self._nccl.ncclCommAbort(communicator)
        self._buffer = None
