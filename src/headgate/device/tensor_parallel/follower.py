"""The process of a rank above 0: `python -m headgate.device.tensor_parallel.follower`, with a socket as standard input.

It is told once what to build, and then follows orders. One thread does nothing but read, so the end of rank 0 ends us at
once, whatever we wait for. What goes wrong in a step ends us too: rank 0 sees that, and ends with its engine.
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
    mail = OrderInbox()
    start = msgspec.msgpack.decode(mail.get(), type=FollowerStart)
    logs.set_up(start.log_format, start.log_level, start.name)
    mail.say_running()
    try:
        follow(start, mail)
    except HeadgateError as error:
        print(f"headgate: rank {start.rank}: {error}", file=sys.stderr, flush=True)
    except BaseException:
        traceback.print_exc()
    return CANNOT_FOLLOW


class OrderInbox:
    """What rank 0 sends, read as it comes. Ends the process when rank 0 is gone."""

    def __init__(self) -> None:
        self._socket = socket.socket(fileno=os.dup(0))
        self._letters: SimpleQueue[bytes] = SimpleQueue()
        threading.Thread(target=self._read, name="headgate-orders", daemon=True).start()

    def get(self) -> bytes:
        return self._letters.get()

    def say_running(self) -> None:
        self._socket.sendall(b"!")

    def _read(self) -> None:
        try:
            with self._socket.makefile("rb") as stream:
                while len(header := stream.read(4)) == 4:
                    self._letters.put(stream.read(int.from_bytes(header, "little")))
        finally:
            os._exit(0)


def follow(start: FollowerStart, mail: OrderInbox) -> None:
    """Do as rank 0 does, until it is gone or something breaks."""
    executor = build_follower(start, lambda: msgspec.msgpack.decode(mail.get(), type=KvSizes))
    while True:
        carry_out(executor, msgspec.msgpack.decode(mail.get(), type=Order))


def carry_out(executor: RankExecutor, order: Order) -> None:
    # What all ranks have agreed cannot be done is told by rank 0.
    with suppress(ModelError, OutOfMemory):
        executor.carry_out(order)


if __name__ == "__main__":
    # Nothing that still runs here is worth waiting for.
    os._exit(main())
