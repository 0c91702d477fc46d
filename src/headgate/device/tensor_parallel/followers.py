"""Rank 0's handle on its followers, the processes of ranks 1 and up: starts, commands, watches and ends them.

Each follower has one end of a socket as its standard input, and ends when the other end closes, however rank 0 ends.
It sends one byte when it is running; the next event on the socket is its end. A follower that ends unexpectedly ends
the others, which could only wait for it, and is reported to the `on_lost` callback.
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

START_S = 300.0  # until a follower runs: it imports torch, perhaps from a slow disk
ORDER_S = 60.0  # until a follower has received an order; it always reads
END_S = 5.0  # until a follower exits after a request

Lost = Callable[[RankLost], None]


class FollowerStart(msgspec.Struct, frozen=True):
    """The first message to a follower, before all orders."""

    model: str  # a folder or a GGUF file
    config: EngineConfig
    rank: int
    store: str  # file through which ranks connect
    step_s: float  # how long a rank waits for another within a step
    threads: int  # number of CPU threads
    weights: FileSource | None = None  # instead of the model's own weights
    version: int = 0  # version of `weights`
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
        # A kernel timeout: a Python timeout would make the socket non-blocking for the reading thread, too.
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(ORDER_S), 0))
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "headgate.device.tensor_parallel.follower"],
                stdin=theirs.fileno(),
                start_new_session=True,  # Ctrl-C in the terminal is for the parent only
            )

    def send(self, data: bytes) -> None:
        try:
            self._socket.sendall(len(data).to_bytes(4, "little") + data)
        except OSError as error:
            raise RankLost(f"rank {self.rank} does not accept orders: {error}") from error

    def watch(self) -> str:
        """Wait until the process has ended. Returns a description of how it ended."""
        with suppress(OSError):
            if self._socket.recv(1):
                self.runs.set_result(None)
                self._socket.recv(1)
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(END_S)
        return describe_exit(self.rank, self.process)

    def kill(self) -> None:
        self.process.kill()

    def request_exit(self) -> None:
        """Ask the process to exit."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def await_exit(self) -> None:
        """Wait until the process has exited; kill it if necessary."""
        try:
            self.process.wait(END_S)
        except subprocess.TimeoutExpired:
            log.warning("rank %d (pid %d) did not end in %g s; killing it", self.rank, self.process.pid, END_S)
            self.kill()
            self.process.wait()
        self._socket.close()


class Followers:
    """All followers of this engine. The owner must call `close`."""

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
                with suppress(RankLost):  # reported by `await_all`
                    follower.send(msgspec.msgpack.encode(start))
        except BaseException:
            self.close()
            raise

    @property
    def pids(self) -> list[int]:
        return [follower.process.pid for follower in self._all]

    def await_all(self) -> None:
        """Wait until all followers are running."""
        for follower in self._all:
            try:
                follower.runs.result(START_S)
            except TimeoutError:
                raise RankLost(f"rank {follower.rank} is not running after {START_S:g} s") from None

    def send(self, order: Order) -> None:
        data = msgspec.msgpack.encode(order)
        for follower in self._all:
            follower.send(data)

    def watch(self, on_lost: Lost) -> None:
        """Call `on_lost`, from another thread, when a follower ends without being asked to."""
        with self._lock:
            self._on_lost = on_lost
            lost = self._lost
        if lost is not None:
            on_lost(lost)

    def close(self) -> None:
        with self._lock:
            self._closing = True
        for follower in self._all:
            follower.request_exit()
        for follower in self._all:
            follower.await_exit()

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
        log.error("%s; its engine cannot continue", error)
        for other in self._all:
            other.kill()
        if on_lost is not None:
            on_lost(error)


def describe_exit(rank: int, process: subprocess.Popen[bytes]) -> str:
    code = process.poll()
    if code is None:
        return f"rank {rank} (pid {process.pid}) has closed its connection"
    if code < 0:
        return f"rank {rank} (pid {process.pid}) was killed by signal {-code}"
    return f"rank {rank} (pid {process.pid}) ended with exit code {code}"
