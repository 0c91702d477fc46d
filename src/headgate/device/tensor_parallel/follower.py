"""The process of a rank above 0: `python -m headgate.device.tensor_parallel.follower`, with a socket as standard
input.

It receives one message that says what to build, and then orders. One thread only reads, so the end of rank 0 ends
this process immediately, whatever it is waiting for. An error in a step also ends this process; rank 0 detects that
and ends its engine.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import traceback
from contextlib import suppress
from queue import SimpleQueue

import msgspec

from headgate import logs
from headgate.device.build import build_follower
from headgate.device.tensor_parallel.executors import KvSizes, Order, RankExecutor
from headgate.device.tensor_parallel.followers import FollowerStart
from headgate.errors import HeadgateError, ModelError, OutOfMemory

CANNOT_FOLLOW = 3  # exit code


def main() -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    inbox = OrderInbox()
    start = msgspec.msgpack.decode(inbox.get(), type=FollowerStart)
    logs.set_up(start.log_format, start.log_level, start.name)
    inbox.report_running()
    try:
        follow(start, inbox)
    except HeadgateError as error:
        print(f"headgate: rank {start.rank}: {error}", file=sys.stderr, flush=True)
    except BaseException:
        traceback.print_exc()
    return CANNOT_FOLLOW


class OrderInbox:
    """Messages from rank 0, read as they arrive. Ends the process when rank 0 closes the connection."""

    def __init__(self) -> None:
        self._socket = socket.socket(fileno=os.dup(0))
        self._messages: SimpleQueue[bytes] = SimpleQueue()
        threading.Thread(target=self._read, name="headgate-orders", daemon=True).start()

    def get(self) -> bytes:
        return self._messages.get()

    def report_running(self) -> None:
        self._socket.sendall(b"!")

    def _read(self) -> None:
        try:
            with self._socket.makefile("rb") as stream:
                while len(header := stream.read(4)) == 4:
                    self._messages.put(stream.read(int.from_bytes(header, "little")))
        finally:
            os._exit(0)


def follow(start: FollowerStart, inbox: OrderInbox) -> None:
    """Carry out rank 0's orders until rank 0 is gone or an order fails."""
    executor = build_follower(start, lambda: msgspec.msgpack.decode(inbox.get(), type=KvSizes))
    while True:
        carry_out(executor, msgspec.msgpack.decode(inbox.get(), type=Order))


def carry_out(executor: RankExecutor, order: Order) -> None:
    # Failures that all ranks have agreed on are reported by rank 0.
    with suppress(ModelError, OutOfMemory):
        executor.carry_out(order)


if __name__ == "__main__":
    # Do not wait for threads that are still running.
    os._exit(main())
