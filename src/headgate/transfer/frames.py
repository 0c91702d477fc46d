"""The frames of a transfer connection: a header of 32 bytes and a body. Also the encoding of blocks.

The fetching engine (D) sends ATTACH, FETCH, BEAT and DONE; the engine that has the KV (P) sends TAKEN, BLOCKS, END
and DROP.

    D  ATTACH ─────────────► P      names the lease, the engine's generation, the weights version and the layout
       ◄───────────── TAKEN         a: how long the lease lasts without a frame from D, in milliseconds
       BEAT ... FETCH ─────►        a: blocks to skip, b: blocks to send
       ◄──── BLOCKS, BLOCKS ...     a: first block, b: how many; sent as they are filled
       ◄─────────────── END         all blocks were still leased after the last byte had been read
       DONE ───────────────►        then both sides close the connection

P may send DROP with a reason at any time. The body of BLOCKS is the first part of each block, then the second part of
each, and so on, followed by a checksum. P sums the data while it sends, and D while it receives, so neither waits for
the other. The checksum is a digest of the sums of each part of each block: it detects damaged, truncated or misplaced
data at the speed of memory. It does not protect against deliberate changes.

If block data travels by NIXL (`nixl.py`) or within one GPU (`same_gpu.py`), P sends AGENT after TAKEN, and READY with
a checksum instead of BLOCKS; D replies TOOK.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum
from hashlib import blake2b

import msgspec
import numpy as np

from headgate.transfer.transport import Portion

PROTOCOL = 3
NIXL_PROTOCOL = 4  # the same protocol, but block data may bypass the connection
MAGIC = b"HGKV"
_HEADER = struct.Struct("<4sBxxxIIQ8s")
HEADER_BYTES = _HEADER.size
CHECKSUM_BYTES = 8
MOST_BODY_BYTES = 1024  # limit for every frame except BLOCKS and AGENT
MOST_AGENT_BYTES = 2**18
MOST_PIECES = 64


class FrameKind(IntEnum):
    ATTACH = 1
    FETCH = 2
    BEAT = 3
    DONE = 4
    TAKEN = 5
    BLOCKS = 6
    END = 7
    DROP = 8
    AGENT = 9
    READY = 10
    TOOK = 11
    OPENED = 12


class BadFrame(Exception):
    """The peer violated the protocol; the connection is closed."""


@dataclass(frozen=True, slots=True)
class FrameHeader:
    kind: FrameKind
    a: int = 0
    b: int = 0
    length: int = 0
    checksum: bytes = b""

    def encode(self) -> bytes:
        return _HEADER.pack(MAGIC, self.kind, self.a, self.b, self.length, self.checksum)


def decode_header(data: bytes | bytearray) -> FrameHeader:
    magic, kind, a, b, length, checksum = _HEADER.unpack(data)
    if magic != MAGIC or kind not in FrameKind._value2member_map_:
        raise BadFrame("not a frame")
    if kind != FrameKind.BLOCKS and length > (MOST_AGENT_BYTES if kind == FrameKind.AGENT else MOST_BODY_BYTES):
        raise BadFrame(f"a body of {length} bytes is too long")
    return FrameHeader(FrameKind(kind), a, b, length, checksum)


class Attach(msgspec.Struct, frozen=True, array_like=True):
    protocol: int
    lease: int
    generation: int
    version: int
    layout: str
    gpu_id: str = ""  # D's GPU, if KV may be copied within its memory


class Checksum:
    """A checksum of blocks. It does not depend on how the blocks are divided into portions."""

    def __init__(self) -> None:
        self._digest = blake2b(digest_size=CHECKSUM_BYTES)

    def add(self, portion: Portion) -> None:
        for run in portion:
            self._digest.update(np.add.reduce(run, axis=1))

    def digest(self) -> bytes:
        return self._digest.digest()


def pieces(portion: Portion) -> list[memoryview]:
    """Return the bytes of a portion, in transmission order."""
    return [run.data.cast("B") for run in portion]


class Cursor:
    """A list of buffers that are sent or filled incrementally."""

    __slots__ = ("_buffers", "_next")

    def __init__(self, buffers: Iterable[memoryview] = ()) -> None:
        self._buffers = list(buffers)
        self._next = 0

    def __bool__(self) -> bool:
        return self._next < len(self._buffers)

    def add(self, buffers: Iterable[memoryview]) -> None:
        del self._buffers[: self._next]
        self._next = 0
        self._buffers += buffers

    def front(self) -> list[memoryview]:
        return self._buffers[self._next : self._next + MOST_PIECES]

    def advance(self, count: int) -> None:
        while count and count >= len(self._buffers[self._next]):
            count -= len(self._buffers[self._next])
            self._next += 1
        if count:
            self._buffers[self._next] = self._buffers[self._next][count:]


def encode(header: FrameHeader, body: bytes = b"") -> list[memoryview]:
    return [memoryview(header.encode()), *([memoryview(body)] if body else [])]
