"""How many processes compute a model: one, or several ranks. `Parallelism` is what `build.py` needs to know of it."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from headgate import logs, scratch
from headgate.config import EngineConfig
from headgate.device.executor import Executor, LocalExecutor, PipelinedExecutor
from headgate.device.runner import ModelRunner
from headgate.device.sampling.draw import Draw
from headgate.device.tensor_parallel.executors import KvSizes, RankExecutor, open_together
from headgate.device.tensor_parallel.followers import Followers, FollowerStart
from headgate.device.tensor_parallel.ranks import RankGroup
from headgate.device.weights.resources import open_source
from headgate.device.weights.source import WeightSource
from headgate.errors import RequestError
from headgate.layers.ranks import ALONE, Ranks
from headgate.protocol.command import FileSource, Source

STEP_S = 60.0  # how long a rank waits for another within a step


@dataclass(frozen=True, slots=True)
class UpdatedWeights:
    """The weights of the last update. A restarted engine loads them instead of the model's own."""

    files: FileSource
    version: int


class Parallelism(Protocol):
    device: torch.device  # of this process

    @property
    def ranks(self) -> Ranks: ...

    @property
    def followers(self) -> Followers | None: ...

    def open(self, source: Source) -> WeightSource:
        """Open `source` in a way that every rank can read."""

    def usable_bytes(self, free: int) -> int:
        """The bytes that each rank may use, if this process has `free` bytes."""

    def draw_with(self, draw: Draw) -> Draw:
        """A draw function that gives all ranks the same token."""

    def executor(self, runner: ModelRunner, sizes: KvSizes) -> Executor:
        """Create the executor. It owns this object from now on, and closes it when it is closed."""

    def close(self) -> None:
        """End the other ranks and undo what their start changed in this process."""


class SingleRank:
    ranks: Ranks = ALONE
    followers: Followers | None = None

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def open(self, source: Source) -> WeightSource:
        return open_source(source, self.device)

    def usable_bytes(self, free: int) -> int:
        return free

    def draw_with(self, draw: Draw) -> Draw:
        return draw

    def executor(self, runner: ModelRunner, sizes: KvSizes) -> Executor:
        return PipelinedExecutor(runner) if self.device.type == "cuda" else LocalExecutor(runner)

    def close(self) -> None:
        pass


class RankTeam:
    """One rank and its group. Rank 0 has followers; `undo` is run by `close`."""

    def __init__(
        self,
        device: torch.device,
        ranks: RankGroup,
        followers: Followers | None = None,
        undo: ExitStack | None = None,
    ) -> None:
        self.device = device
        self.ranks = ranks
        self.followers = followers
        self._undo = undo or ExitStack()

    def open(self, source: Source) -> WeightSource:
        return open_together(source, self.ranks)

    def usable_bytes(self, free: int) -> int:
        # Ranks on a CPU share one memory; each GPU has its own.
        return self.ranks.least(free) // (self.ranks.size if self.device.type == "cpu" else 1)

    def draw_with(self, draw: Draw) -> Draw:
        return self.ranks.share_choice(draw)

    def executor(self, runner: ModelRunner, sizes: KvSizes) -> RankExecutor:
        if self.followers is None:
            return RankExecutor(runner, self.ranks)
        self.followers.send(sizes)
        return RankExecutor(runner, self.ranks, self.followers.send, self._undo.close)

    def close(self) -> None:
        self._undo.close()


def choose_device(name: str, rank: int = 0) -> torch.device:
    """The device of one rank. Ranks use consecutive GPUs."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if not name.startswith("cuda"):
        return torch.device(name)
    if not torch.cuda.is_available():
        raise RequestError(f"device is {name}, and torch finds no CUDA GPU on this machine; try cpu")
    index = (torch.device(name).index or 0) + rank
    if index >= torch.cuda.device_count():
        raise RequestError(f"rank {rank} would take cuda:{index}, and torch finds {torch.cuda.device_count()} GPUs")
    return torch.device(name) if rank == 0 else torch.device("cuda", index)


def start_ranks(model: Path, config: EngineConfig, updated: UpdatedWeights | None) -> Parallelism:
    device, size = choose_device(config.device), config.tensor_parallel
    if size == 1:
        return SingleRank(device)
    choose_device(config.device, size - 1)
    with ExitStack() as undo:
        threads = share_threads(size, undo)
        with scratch.folder("ranks-") as folder:
            store = folder / "store"
            starts = [follower_start(model, config, updated, rank, store, threads) for rank in range(1, size)]
            followers = Followers(starts)
            undo.callback(followers.close)
            followers.await_all()
            ranks = RankGroup(store, 0, size, device, step_s=STEP_S, deterministic=config.deterministic)
        return RankTeam(device, ranks, followers, undo.pop_all())


def share_threads(ranks: int, undo: ExitStack) -> int:
    """Divide the threads of this process among `ranks`; more threads would only wait for each other."""
    before = torch.get_num_threads()
    undo.callback(torch.set_num_threads, before)
    torch.set_num_threads(max(1, before // ranks))
    return torch.get_num_threads()


def follower_start(
    model: Path, config: EngineConfig, updated: UpdatedWeights | None, rank: int, store: Path, threads: int
) -> FollowerStart:
    settings = logs.own_voice()
    return FollowerStart(
        model=str(model),
        config=config,
        rank=rank,
        store=str(store),
        step_s=STEP_S,
        threads=threads,
        weights=None if updated is None else updated.files,
        version=0 if updated is None else updated.version,
        log_format=settings.format,
        log_level=settings.level,
        name=f"{settings.who}, rank {rank}",
    )


def join_ranks(start: FollowerStart) -> RankTeam:
    """The follower's counterpart of `start_ranks`."""
    torch.set_num_threads(start.threads)
    config = start.config
    device = choose_device(config.device, start.rank)
    ranks = RankGroup(
        Path(start.store),
        start.rank,
        config.tensor_parallel,
        device,
        step_s=start.step_s,
        deterministic=config.deterministic,
    )
    return RankTeam(device, ranks)
