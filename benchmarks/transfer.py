"""How fast KV moves between two engines, next to a plain copy through the same kind of socket.

    python benchmarks/transfer.py [--transport tcp|nixl] [--json FILE]

Two processes on this machine, each with a KV cache of its own. The plain copy sends one large buffer and receives it into
another, and checks nothing; a transfer gathers blocks from all over the cache, checks every byte and scatters them again.
NIXL takes the fastest way that UCX finds; UCX_TLS=tcp in the environment leaves it nothing but sockets.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import socket
import time
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch

from headgate.config import KV_TRANSPORTS, EngineConfig
from headgate.engine.build import open_transport
from headgate.protocol.plan import Fetch
from headgate.protocol.request import Ticket
from headgate.transfer.tcp import BUFFER_BYTES
from headgate.transfer.transport import Fetched, Transport
from headgate.worker.blocks import HostBlocks

ROUNDS = 15
GIB = 2**30
# layers, bytes of one block's keys in one layer: bfloat16, 32 tokens per block
MODELS = {"135M (30 layers, 3 heads of 64)": (30, 12288), "8B (32 layers, 8 heads of 128)": (32, 65536)}
TOTAL_BYTES = 256 * 2**20


def cache(layers: int, part_bytes: int, blocks: int) -> HostBlocks:
    tensors = [torch.randint(255, (blocks, part_bytes), dtype=torch.uint8) for _ in range(2 * layers)]
    return HostBlocks(tensors, "bench")


def transport(kind: str, memory: HostBlocks) -> Transport:
    config = EngineConfig(kv_transport=kind, lease_s=30, kv_wait_s=30)
    return open_transport(config, memory)


def order(blocks: int, scattered: bool, seed: int) -> tuple[int, ...]:
    ids = list(range(blocks))
    if scattered:
        random.Random(seed).shuffle(ids)
    return tuple(ids)


def serve(pipe: Connection, kind: str, layers: int, part_bytes: int, blocks: int, scattered: bool) -> None:
    torch.set_num_threads(1)
    server = transport(kind, cache(layers, part_bytes, blocks))
    server.start(lambda _: None)
    for lease in range(1, ROUNDS + 1):
        server.offer(lease, 1, 0, order(blocks, scattered, 1))
        server.fill(lease, blocks)
    pipe.send(server.address)
    pipe.recv()
    server.close()


def transfer_seconds(kind: str, layers: int, part_bytes: int, blocks: int, scattered: bool) -> list[float]:
    context = multiprocessing.get_context("spawn")  # what NIXL has opened does not survive a fork
    ours, theirs = context.Pipe()
    process = context.Process(target=serve, args=(theirs, kind, layers, part_bytes, blocks, scattered), daemon=True)
    process.start()
    address = ours.recv()
    client, events = transport(kind, cache(layers, part_bytes, blocks)), SimpleQueue[Any]()
    client.start(events.put)
    seconds = []
    for lease in range(1, ROUNDS + 1):
        ticket = Ticket(address, lease, 1, blocks * 32, 0, b"")
        began_s = time.perf_counter()
        client.attach(lease, ticket)
        client.fetch(Fetch(lease, ticket, 0, order(blocks, scattered, 2)))
        assert events.get(timeout=60) == Fetched(lease, ok=True)
        seconds.append(time.perf_counter() - began_s)
    ours.send(None)
    client.close()
    process.join(30)
    return seconds


def receive_plain(pipe: Connection) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        pipe.send(server.getsockname())
        sock, _ = server.accept()
        room = memoryview(bytearray(TOTAL_BYTES))
        for _ in range(ROUNDS):
            done = 0
            while done < TOTAL_BYTES:
                done += sock.recv_into(room[done:])
            sock.send(b".")
        sock.close()


def plain_seconds() -> list[float]:
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.Process(target=receive_plain, args=(theirs,))
    process.start()
    data = memoryview(torch.randint(255, (TOTAL_BYTES,), dtype=torch.uint8).numpy())
    seconds = []
    with socket.create_connection(ours.recv()) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)
        for _ in range(ROUNDS):
            began_s = time.perf_counter()
            sock.sendall(data)
            sock.recv(1)
            seconds.append(time.perf_counter() - began_s)
    process.join(30)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--transport", choices=KV_TRANSPORTS, default="tcp")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    # The best of many rounds: what else runs on the machine only ever makes it slower.
    plain = TOTAL_BYTES / min(plain_seconds()) / GIB
    results: dict[str, Any] = {"transport": options.transport, "plain_gib_s": round(plain, 2), "transfers": []}
    print(f"{'plain copy':58s} {plain:6.2f} GiB/s")
    for name, (layers, part_bytes) in MODELS.items():
        for scattered in (False, True):
            blocks = TOTAL_BYTES // (2 * layers * part_bytes)
            size = blocks * 2 * layers * part_bytes
            seconds = transfer_seconds(options.transport, layers, part_bytes, blocks, scattered)
            speed = size / min(seconds) / GIB
            where = "scattered" if scattered else "neighbouring"
            print(f"{name + ', ' + where + ' blocks':58s} {speed:6.2f} GiB/s  {speed / plain:5.0%}")
            results["transfers"].append(
                {"model": name, "blocks": where, "gib_s": round(speed, 2), "of_plain": round(speed / plain, 3)}
            )
    if options.json:
        options.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
