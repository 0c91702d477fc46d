"""The ranks of one engine as a group: what they tell each other in the middle of a step, and what they agree on outside.

Words and tensors on the host travel by gloo, tensors on GPUs by NCCL. Every wait has a deadline, and a rank that dies is
noticed at once, by its connections; both are `RankLost`, after which nothing can be computed any more. On GPUs, NCCL ends a
process whose collective does not end in time. Nothing is pickled.

Ranks meet through a file in a folder that only their owner can open, and listen on the loopback address alone.
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

dist: Any = torch.distributed  # whose stubs leave out half of it

MEET_S = 120.0  # for all ranks to connect, once they run
AGREE_S = 1800.0  # for all to say whether they have done what takes long: large checkpoints on slow disks
HOST = "127.0.0.1"


class RankGroup:
    """All ranks of an engine, each of which calls the same methods in the same order."""

    def __init__(
        self, store: Path, rank: int, size: int, device: torch.device, *, step_s: float, deterministic: bool = False
    ) -> None:
        """Returns when all have come. `step_s` is how long one waits for another in the middle of a step."""
        self.rank, self.size = rank, size
        self._step_s = timedelta(seconds=step_s)
        self._reduces = device.type == "cuda" and not deterministic
        with lost_ranks():
            meeting = dist.FileStore(str(store), size)
            meeting.set_timeout(timedelta(seconds=MEET_S))
            self._host = gloo_group(dist.PrefixStore("host", meeting), rank, size)
            self._near = self._host
            if device.type == "cuda":
                torch.cuda.set_device(device.index or 0)
                self._near = nccl_group(dist.PrefixStore("nccl", meeting), rank, size, self._step_s)
        self._gathered(torch.zeros(1, device=device))  # NCCL connects only now

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        if self._reduces:
            with lost_ranks():
                self._near.allreduce([x], dist.AllreduceOptions()).wait()
            return x
        # In the order of ranks: the bits of a row then depend on no other row, and are the same everywhere.
        total, *others = self._gathered(x)
        for other in others:
            total += other
        return total

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat(self._gathered(x), dim=-1)

    def share_choice(self, draw: Draw) -> Draw:
        """`draw`, of rank 0 alone: the others take its tokens for theirs, and no rank ever thinks of another answer."""
        options = dist.BroadcastOptions()
        options.rootRank, options.timeout = 0, self._step_s

        def drawn(logits: torch.Tensor, knobs: Knobs) -> torch.Tensor:
            tokens = draw(logits, knobs) if self.rank == 0 else logits.new_empty(len(logits), dtype=torch.int64)
            with lost_ranks():
                self._near.broadcast([tokens], options).wait()
            return tokens

        return drawn

    def least(self, value: int) -> int:
        """The smallest `value` of all ranks; they may come to it at very different times."""
        mine = torch.tensor([value])
        heard = [torch.empty_like(mine) for _ in range(self.size)]
        with lost_ranks():
            self._host.allgather([heard], [mine], within(timedelta(seconds=AGREE_S))).wait()
        return min(map(int, heard))

    def poll(self, objection: str = "") -> dict[int, str]:
        """Tell all what we object to, if anything, and hear their objections, by rank."""
        mine = as_bytes(objection.encode()[:VERDICT].ljust(VERDICT, b"\0"))
        heard = [torch.empty_like(mine) for _ in range(self.size)]
        with lost_ranks():
            self._host.allgather([heard], [mine], within(timedelta(seconds=AGREE_S))).wait()
        told = (each.numpy().tobytes().rstrip(b"\0").decode(errors="replace") for each in heard)
        return {rank: objection for rank, objection in enumerate(told) if objection}

    def _gathered(self, x: torch.Tensor) -> list[torch.Tensor]:
        heard = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(self.size)]
        with lost_ranks():
            self._near.allgather([heard], [x.contiguous()], within(self._step_s)).wait()
        return heard


def within(time: timedelta) -> Any:
    options = dist.distributed_c10d.AllgatherOptions()
    options.timeout = time
    return options


def gloo_group(store: Any, rank: int, size: int) -> Any:
    options = dist.ProcessGroupGloo._Options()
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=HOST)]
    options._timeout = timedelta(seconds=MEET_S)
    return dist.ProcessGroupGloo(store, rank, size, options)


def nccl_group(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return dist.ProcessGroupNCCL(store, rank, size, options)


@contextmanager
def lost_ranks() -> Iterator[None]:
    """What torch says of a broken or silent connection, as RankLost."""
    try:
        yield
    except RuntimeError as error:
        reason = str(error).partition(" This is typically")[0].rpartition("] ")[2] or str(error)
        raise RankLost(f"another rank of this engine is gone, or late: {reason}") from error
