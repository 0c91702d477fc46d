"""Rank 0's side of its followers, the processes of ranks 1 and up: started, given orders, watched, ended.

Each follower has one end of a socket as its standard input, and ends when the other closes, however we end. It sends one
byte when it runs; all that comes after is the end of it. A follower that ends when it should not takes the others with it,
for they would only wait for it, and is told to whoever watches.
"""

from __future__ import annotations

import logging
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress

import msgspec

from headgate.config import EngineConfig
from headgate.device.tensor_parallel.executors import Order
from headgate.errors import RankLost
from headgate.logs import LogFormat
from headgate.protocol.command import FileSource

log = logging.getLogger(__name__)

START_S = 300.0  # for a follower to run: it imports torch, perhaps from a slow disk
ORDER_S = 60.0  # for a follower to take an order in; it always reads
END_S = 5.0  # for a follower to end by itself

Lost = Callable[[RankLost], None]


class FollowerStart(msgspec.Struct, frozen=True):
    """What rank 0 tells a follower it starts, before all orders."""

    model: str  # a folder or a GGUF file
    config: EngineConfig
    rank: int
    store: str  # where ranks meet
    step_s: float  # how long a rank waits for another in the middle of a step
    threads: int  # on a CPU
    weights: FileSource | None = None  # instead of the model's own
    version: int = 0  # of `weights`
    log_format: LogFormat = "text"
    log_level: str = "INFO"
    name: str = "rank"


class Follower:
    """One process and our end of its socket."""

    def __init__(self, start: FollowerStart) -> None:
        self.rank = start.rank
        self.runs: Future[None] = Future()
        ours, theirs = socket.socketpair()
        self._socket = ours
        # By the kernel: a timeout of Python's would make the socket non-blocking for whoever reads from it, too.
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(ORDER_S), 0))
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "headgate.device.tensor_parallel.follower"],
                stdin=theirs.fileno(),
                start_new_session=True,  # a Ctrl-C in the terminal is for us alone
            )

    def send(self, data: bytes) -> None:
        try:
            self._socket.sendall(len(data).to_bytes(4, "little") + data)
        except OSError as error:
            raise RankLost(f"rank {self.rank} takes no orders: {error}") from error

    def watch(self) -> str:
        """Returns when the process has ended, with its last words."""
        with suppress(OSError):
            if self._socket.recv(1):
                self.runs.set_result(None)
                self._socket.recv(1)
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(END_S)
        return obituary(self.rank, self.process)

    def kill(self) -> None:
        self.process.kill()

    def dismiss(self) -> None:
        """Ask it to end."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def await_end(self) -> None:
        """See it gone, by force if need be."""
        try:
            self.process.wait(END_S)
        except subprocess.TimeoutExpired:
            log.warning("rank %d (pid %d) did not end in %g s; killing it", self.rank, self.process.pid, END_S)
            self.kill()
            self.process.wait()
        self._socket.close()


class Followers:
    """Whoever starts them closes them."""

    def __init__(self, starts: list[FollowerStart]) -> None:
        self._lock = threading.Lock()
        self._closing = False
        self._lost: RankLost | None = None
        self._on_lost: Lost | None = None
        self._all: list[Follower] = []
        try:
            for start in starts:
                self._all.append(follower := Follower(start))
                self._watch(follower)
                with suppress(RankLost):  # whoever waits for it is told why
                    follower.send(msgspec.msgpack.encode(start))
        except BaseException:
            self.close()
            raise

    @property
    def pids(self) -> list[int]:
        return [follower.process.pid for follower in self._all]

    def await_all(self) -> None:
        """Wait until all of them run."""
        for follower in self._all:
            try:
                follower.runs.result(START_S)
            except TimeoutError:
                raise RankLost(f"rank {follower.rank} does not run after {START_S:g} s") from None

    def tell(self, order: Order) -> None:
        data = msgspec.msgpack.encode(order)
        for follower in self._all:
            follower.send(data)

    def watch(self, on_lost: Lost) -> None:
        """Have `on_lost` called, from another thread, when a follower ends that was not asked to."""
        with self._lock:
            self._on_lost = on_lost
            lost = self._lost
        if lost is not None:
            on_lost(lost)

    def close(self) -> None:
        with self._lock:
            self._closing = True
        for follower in self._all:
            follower.dismiss()
        for follower in self._all:
            follower.await_end()

    def _watch(self, follower: Follower) -> None:
        name = f"headgate-rank-{follower.rank}"
        threading.Thread(target=self._await_loss, args=(follower,), name=name, daemon=True).start()

    def _await_loss(self, follower: Follower) -> None:
        error = RankLost(follower.watch())
        if not follower.runs.done():
            follower.runs.set_exception(error)
        with self._lock:
            if self._closing or self._lost is not None:
                return
            self._lost, on_lost = error, self._on_lost
        log.error("%s; its engine cannot go on", error)
        for other in self._all:
            other.kill()
        if on_lost is not None:
            on_lost(error)


def obituary(rank: int, process: subprocess.Popen[bytes]) -> str:
    code = process.poll()
    if code is None:
        return f"rank {rank} (pid {process.pid}) has hung up"
    if code < 0:
        return f"rank {rank} (pid {process.pid}) was killed by signal {-code}"
    return f"rank {rank} (pid {process.pid}) ended with exit code {code}"
