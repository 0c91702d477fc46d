"""Measures KV transfer between two engines, compared with a plain copy through the same kind of socket.

    python benchmarks/transfer.py [--device cpu|cuda] [--transport auto|tcp|nixl] [--rounds N] [--json FILE]

Two processes on this machine, each with its own KV cache. The plain copy sends one large buffer into another and
checks nothing; a transfer gathers blocks from all over the cache, checks every byte and scatters them again. Both
alternate, and each transfer is compared with the copies before and after it, so that both run under the same
conditions. Wall-clock time is what a client waits for; CPU time, of both sides together, is what the engines lose.
NIXL uses the fastest transport that UCX finds; UCX_TLS=tcp in the environment restricts it to sockets. With `--device
cuda` both caches are on one GPU: `auto` copies within it, `tcp` goes through pinned memory; the plain copy is the
same.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue
from statistics import median
from typing import Any

import torch

from headgate.config import KV_TRANSPORTS, EngineConfig
from headgate.device.kv_blocks import DeviceBlocks, HostBlocks
from headgate.engine.build import open_transport
from headgate.protocol.plan import Fetch
from headgate.protocol.request import Ticket
from headgate.transfer.tcp import BUFFER_BYTES
from headgate.transfer.transport import BlockMemory, Fetched, Transport

GIB = 2**30
# Layers, and bytes of the keys of one block in one layer: bfloat16, 32 tokens per block
MODELS = {"135M (30 layers, 3 heads of 64)": (30, 12288), "8B (32 layers, 8 heads of 128)": (32, 65536)}
TOTAL_BYTES = 256 * 2**20
WAIT_S = 60.0


@dataclass(frozen=True)
class Shape:
    layers: int
    part_bytes: int
    scattered: bool
    device: str = "cpu"

    @property
    def blocks(self) -> int:
        return TOTAL_BYTES // (2 * self.layers * self.part_bytes)

    @property
    def bytes(self) -> int:
        return self.blocks * 2 * self.layers * self.part_bytes

    def cache(self) -> BlockMemory:
        size = (self.blocks, self.part_bytes)
        tensors = [torch.randint(255, size, dtype=torch.uint8, device=self.device) for _ in range(2 * self.layers)]
        return HostBlocks(tensors, "bench") if self.device == "cpu" else DeviceBlocks(tensors, "bench")

    def order(self, seed: int) -> tuple[int, ...]:
        ids = list(range(self.blocks))
        if self.scattered:
            random.Random(seed).shuffle(ids)
        return tuple(ids)


@dataclass(frozen=True)
class Took:
    """The time of a round, per byte."""

    wall_s: float
    cpu_s: float  # of both processes


def transport(kind: str, memory: BlockMemory) -> Transport:
    return open_transport(EngineConfig(kv_transport=kind, lease_s=WAIT_S, kv_wait_s=WAIT_S), memory)


def other_process(pipe: Connection, kind: str, shape: Shape, rounds: int) -> None:
    """The exporting process: has KV for each round, sends a plain buffer on request, and reports its CPU time."""
    torch.set_num_threads(1)
    server, data = transport(kind, shape.cache()), torch.randint(255, (TOTAL_BYTES,), dtype=torch.uint8).numpy()
    server.start(lambda _: None)
    for lease in range(rounds + 1):
        server.offer(lease, 1, 0, shape.order(1))
        server.fill(lease, shape.blocks)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        pipe.send((server.address, listener.getsockname()))
        sock, _ = listener.accept()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)
    with sock:
        while (command := pipe.recv()) != "end":
            if command == "plain":
                sock.sendall(data)
            pipe.send(time.process_time())
    server.close()


class Pair:
    """This process fetches from the other one."""

    def __init__(self, kind: str, shape: Shape, rounds: int) -> None:
        context = multiprocessing.get_context("spawn")  # NIXL does not survive a fork
        self._shape, self._rounds = shape, rounds
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=other_process, args=(theirs, kind, shape, rounds), daemon=True)
        self._process.start()
        self._address, plain = self._pipe.recv()
        self._sock = socket.create_connection(plain)
        self._room = memoryview(bytearray(TOTAL_BYTES))
        self._events = SimpleQueue[Any]()
        self._client = transport(kind, shape.cache())
        self._client.start(self._events.put)

    def measure(self) -> list[tuple[Took, Took]]:
        """For each round the time of a transfer, and of a plain copy at about the same time."""
        self._fetch(0)  # warm-up
        plain = [self._timed(TOTAL_BYTES, self._copy)]
        moved = []
        for lease in range(1, self._rounds + 1):
            moved.append(self._timed(self._shape.bytes, lambda lease=lease: self._fetch(lease)))
            plain.append(self._timed(TOTAL_BYTES, self._copy))
        means = [Took((a.wall_s + b.wall_s) / 2, (a.cpu_s + b.cpu_s) / 2) for a, b in pairwise(plain)]
        return list(zip(moved, means, strict=True))

    def _timed(self, size: int, work: Callable[[], None]) -> Took:
        before_s, began_s = self._cpu_s(), time.perf_counter()
        work()
        wall_s = time.perf_counter() - began_s
        return Took(wall_s / size, (self._cpu_s() - before_s) / size)

    def _cpu_s(self) -> float:
        self._pipe.send("time")
        return time.process_time() + float(self._pipe.recv())

    def _fetch(self, lease: int) -> None:
        ticket = Ticket(self._address, lease, 1, self._shape.blocks * 32, 0, b"")
        self._client.attach(lease, ticket)
        self._client.fetch(Fetch(lease, ticket, 0, self._shape.order(2)))
        assert self._events.get(timeout=WAIT_S) == Fetched(lease, ok=True)

    def _copy(self) -> None:
        self._pipe.send("plain")
        done = 0
        while done < TOTAL_BYTES:
            done += self._sock.recv_into(self._room[done:])
        self._pipe.recv()

    def close(self) -> None:
        self._pipe.send("end")
        self._client.close()
        self._sock.close()
        self._process.join(WAIT_S)


def row(name: str, kind: str, shape: Shape, rounds: int) -> dict[str, Any]:
    pair = Pair(kind, shape, rounds)
    try:
        took = pair.measure()
    finally:
        pair.close()
    where = "scattered" if shape.scattered else "neighbouring"
    return {
        "model": name,
        "blocks": where,
        "gib_s": round(1 / median(moved.wall_s for moved, _ in took) / GIB, 2),
        "plain_gib_s": round(1 / median(plain.wall_s for _, plain in took) / GIB, 2),
        "of_plain": round(median(plain.wall_s / moved.wall_s for moved, plain in took), 3),
        "of_plain_cpu": round(median(plain.cpu_s / moved.cpu_s for moved, plain in took), 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--transport", choices=KV_TRANSPORTS, default="auto")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    results: dict[str, Any] = {"device": options.device, "transport": options.transport, "transfers": []}
    print(
        f"{'medians of ' + str(options.rounds) + ' rounds':54s}    GiB/s    plain   of plain   of its processor time"
    )
    for name, (layers, part_bytes) in MODELS.items():
        for scattered in (False, True):
            shape = Shape(layers, part_bytes, scattered, options.device)
            told = row(name, options.transport, shape, options.rounds)
            results["transfers"].append(told)
            print(
                f"{name + ', ' + told['blocks'] + ' blocks':54s} {told['gib_s']:8.2f} {told['plain_gib_s']:8.2f} "
                f"{told['of_plain']:10.0%} {told['of_plain_cpu']:24.0%}",
                flush=True,
            )
    if options.json:
        options.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
