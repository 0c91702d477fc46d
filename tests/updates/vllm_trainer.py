"""A trainer process as vLLM's trainer side is, with gloo in the place of NCCL.

Its store, the key and pickle of the NCCL id, the sum over one number after joining, and the buffers of packed
transfers are those of vLLM 0.33. If it runs as a script, it reads orders from standard input.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import socket
import subprocess
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

WRAPPER = "vllm.distributed.device_communicators.pynccl_wrapper"


class ncclUniqueId(ctypes.Structure):  # noqa: N801 - the name is part of the pickle
    _fields_ = [("internal", ctypes.c_byte * 128)]


ncclUniqueId.__module__ = WRAPPER


@contextmanager
def stand_in(module: str, **names: Any) -> Iterator[None]:
    """Create a module that is not installed, so that pickled objects refer to its name."""
    parts = module.split(".")
    made = {".".join(parts[: i + 1]): types.ModuleType(part) for i, part in enumerate(parts)}
    vars(made[module]).update(names)
    before = {name: sys.modules.get(name) for name in made}
    sys.modules |= made
    try:
        yield
    finally:
        for name, present in before.items():
            del sys.modules[name]
            if present is not None:
                sys.modules[name] = present


def pickled_id(unique_id: bytes) -> bytes:
    """The id as `StatelessProcessGroup.broadcast_obj` stores it."""
    with stand_in(WRAPPER, ncclUniqueId=ncclUniqueId):
        return pickle.dumps(ncclUniqueId.from_buffer_copy(unique_id))


@contextmanager
def trainer_process(folder: Path, port: int, world_size: int) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, __file__, str(folder), str(port), str(world_size)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate(timeout=60)


def order(process: subprocess.Popen[str], *words: object) -> None:
    """`each NAME...` or `packed BYTES NAME...`."""
    assert process.stdin is not None
    print(*words, file=process.stdin, flush=True)


def main(folder: str, port: int, world_size: int) -> None:
    import torch
    import torch.distributed

    from headgate.device.weights.loading import SafetensorsFolder

    dist: Any = torch.distributed
    listening = socket.socket()
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listening.bind(("127.0.0.1", port))
    listening.listen()
    store = dist.TCPStore(
        "127.0.0.1",
        port,
        world_size=world_size,
        is_master=True,
        timeout=timedelta(seconds=300),
        use_libuv=False,
        master_listen_fd=listening.detach(),
    )
    unique_id = os.urandom(128)
    store.set("broadcast_from/0/0", pickled_id(unique_id))
    options = dist.ProcessGroupGloo._Options()
    options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    options._timeout = timedelta(seconds=300)
    group = dist.ProcessGroupGloo(dist.PrefixStore(unique_id.hex(), store), 0, world_size, options)
    group.allreduce([torch.zeros(1)]).wait()
    print("joined", flush=True)
    tensors = dict(SafetensorsFolder(folder))

    def broadcast(tensor: torch.Tensor) -> None:
        options = dist.BroadcastOptions()
        options.rootRank = 0
        group.broadcast([tensor], options).wait()

    for line in sys.stdin:
        kind, *names = line.split()
        if kind == "each":
            for name in names:
                broadcast(tensors[name])
        else:
            most, buffer = int(names.pop(0)), []
            for name in names:
                buffer.append(tensors[name].contiguous().view(-1).view(torch.uint8))
                if sum(map(len, buffer)) > most:
                    broadcast(torch.cat(buffer))
                    buffer = []
            if buffer:
                broadcast(torch.cat(buffer))
        print("sent", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
