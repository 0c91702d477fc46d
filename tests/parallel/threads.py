"""Ranks as threads of this process. Everything else is real: gloo, orders as bytes, a model per rank."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TypeVar

import msgspec

from headgate.device.tensor_parallel.executors import Order
from headgate.device.tensor_parallel.follower import follow
from headgate.device.tensor_parallel.followers import FollowerStart
from headgate.device.tensor_parallel.ranks import RankGroup
from headgate.device.weights.broadcast import CPU
from headgate.errors import RankLost
from headgate.layers.choice import available_backends

BACKENDS = available_backends()
LONG_S = 60.0

T = TypeVar("T")


class ExitRequested(Exception):
    pass


class ThreadInbox:
    def __init__(self) -> None:
        self.messages: SimpleQueue[bytes | None] = SimpleQueue()

    def get(self) -> bytes:
        if (message := self.messages.get()) is None:
            raise ExitRequested
        return message


class ThreadFollowers:
    """Replaces `Followers`: the other ranks are threads."""

    def __init__(self, starts: list[FollowerStart]) -> None:
        self.inboxes = [ThreadInbox() for _ in starts]
        self.ends: list[BaseException] = []  # errors of followers, other than requested exits
        self.orders: list[Order] = []
        # Encoded and decoded, as over a socket.
        received = [msgspec.msgpack.decode(msgspec.msgpack.encode(start), type=FollowerStart) for start in starts]
        self.threads = [
            threading.Thread(target=self._follow, args=pair, daemon=True)
            for pair in zip(received, self.inboxes, strict=True)
        ]
        for thread in self.threads:
            thread.start()

    def _follow(self, start: FollowerStart, inbox: Any) -> None:
        try:
            follow(start, inbox)
        except ExitRequested:
            pass
        except BaseException as error:
            self.ends.append(error)

    def await_all(self) -> None:
        pass

    def send(self, order: Order) -> None:
        self.orders.append(order)
        for inbox in self.inboxes:
            inbox.messages.put(msgspec.msgpack.encode(order))

    def watch(self, on_lost: Callable[[RankLost], None]) -> None:
        pass

    def close(self) -> None:
        for inbox in self.inboxes:
            inbox.messages.put(None)
        for thread in self.threads:
            thread.join(LONG_S)
            assert not thread.is_alive()
        assert self.ends == []


def run_ranks(folder: Path, size: int, work: Callable[[RankGroup], T], step_s: float = LONG_S) -> list[T | Exception]:
    """The result or exception of `work` on each rank of a group."""
    results: list[T | Exception] = [AssertionError("still running")] * size

    def run(rank: int) -> None:
        try:
            results[rank] = work(RankGroup(folder / "store", rank, size, CPU, step_s=step_s))
        except Exception as error:
            results[rank] = error

    running = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join(LONG_S)
    return results
