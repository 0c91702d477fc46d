"""Communication between the ranks of one engine: collectives within a step, and votes outside steps.

Messages and host tensors use gloo, GPU tensors use NCCL. Every wait has a deadline, and a rank that exits is detected
at once by its connections; both raise `RankLost`, after which nothing can be computed. On GPUs, NCCL ends a process
whose collective does not finish in time. Nothing is pickled.

Ranks find each other through a file in a folder that only their owner can open, and listen on the loopback address
only.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed

from headgate.device.sampling.draw import Draw, Knobs
from headgate.device.weights.broadcast import VERDICT, as_bytes
from headgate.errors import RankLost

dist: Any = torch.distributed  # its type stubs are incomplete

CONNECT_S = 120.0  # for all ranks to connect, once they are running
AGREE_S = 1800.0  # for all ranks to vote on a long operation: large checkpoints on slow disks
HOST = "127.0.0.1"


class RankGroup:
    """All ranks of an engine. Every rank must call the same methods in the same order."""

    def __init__(
        self, store: Path, rank: int, size: int, device: torch.device, *, step_s: float, deterministic: bool = False
    ) -> None:
        """Returns when all ranks have connected. `step_s` is how long a rank waits for another within a step."""
        self.rank, self.size = rank, size
        self._step_s = timedelta(seconds=step_s)
        self._reduces = device.type == "cuda" and not deterministic
        with lost_ranks():
            rendezvous = dist.FileStore(str(store), size)
            rendezvous.set_timeout(timedelta(seconds=CONNECT_S))
            self._host_group = gloo_group(dist.PrefixStore("host", rendezvous), rank, size)
            self._device_group = self._host_group
            if device.type == "cuda":
                torch.cuda.set_device(device.index or 0)
                self._device_group = nccl_group(dist.PrefixStore("nccl", rendezvous), rank, size, self._step_s)
        self._gathered(torch.zeros(1, device=device))  # NCCL connects on first use

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        if self._reduces:
            with lost_ranks():
                self._device_group.allreduce([x], dist.AllreduceOptions()).wait()
            return x
        # Summed in rank order: the bits of a row then depend on no other row, and are the same on every rank.
        total, *others = self._gathered(x)
        for other in others:
            total += other
        return total

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat(self._gathered(x), dim=-1)

    def share_choice(self, draw: Draw) -> Draw:
        """`draw` on rank 0 only. The other ranks receive its tokens, so all ranks have the same."""
        options = dist.BroadcastOptions()
        options.rootRank, options.timeout = 0, self._step_s

        def drawn(logits: torch.Tensor, knobs: Knobs) -> torch.Tensor:
            tokens = draw(logits, knobs) if self.rank == 0 else logits.new_empty(len(logits), dtype=torch.int64)
            with lost_ranks():
                self._device_group.broadcast([tokens], options).wait()
            return tokens

        return drawn

    def least(self, value: int) -> int:
        """The smallest `value` of all ranks, which may call this at very different times."""
        mine = torch.tensor([value])
        received = [torch.empty_like(mine) for _ in range(self.size)]
        with lost_ranks():
            self._host_group.allgather([received], [mine], within(timedelta(seconds=AGREE_S))).wait()
        return min(map(int, received))

    def poll(self, objection: str = "") -> dict[int, str]:
        """Send our objection, if any, to all ranks. Returns all objections by rank."""
        mine = as_bytes(objection.encode()[:VERDICT].ljust(VERDICT, b"\0"))
        received = [torch.empty_like(mine) for _ in range(self.size)]
        with lost_ranks():
            self._host_group.allgather([received], [mine], within(timedelta(seconds=AGREE_S))).wait()
        texts = (each.numpy().tobytes().rstrip(b"\0").decode(errors="replace") for each in received)
        return {rank: objection for rank, objection in enumerate(texts) if objection}

    def _gathered(self, x: torch.Tensor) -> list[torch.Tensor]:
        received = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(self.size)]
        with lost_ranks():
            self._device_group.allgather([received], [x.contiguous()], within(self._step_s)).wait()
        return received


def within(time: timedelta) -> Any:
    options = dist.distributed_c10d.AllgatherOptions()
    options.timeout = time
    return options


def gloo_group(store: Any, rank: int, size: int) -> Any:
    options = dist.ProcessGroupGloo._Options()
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=HOST)]
    options._timeout = timedelta(seconds=CONNECT_S)
    return dist.ProcessGroupGloo(store, rank, size, options)


def nccl_group(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return dist.ProcessGroupNCCL(store, rank, size, options)


@contextmanager
def lost_ranks() -> Iterator[None]:
    """Raise RankLost for torch's errors about broken or silent connections."""
    try:
        yield
    except RuntimeError as error:
        reason = str(error).partition(" This is typically")[0].rpartition("] ")[2] or str(error)
        raise RankLost(f"another rank of this engine is gone or does not respond: {reason}") from error
