"""What the ranks of one engine do together: rank 0's executor passes on what it is asked, and the others follow.

Orders are given from rank 0's device thread, in the order in which it carries them out itself, so every rank does the same
things in the same order. A step needs no answer: its collectives are one. What may fail on one rank alone (reading weights,
taking memory again) ends with everyone's word; then it has been done by all ranks, or counts as done by none.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from types import TracebackType

import msgspec
import torch

from headgate.device.executor import LocalExecutor
from headgate.device.runner import ModelRunner
from headgate.device.tensor_parallel.ranks import RankGroup
from headgate.device.weights.loading import TensorInfo, WeightSource
from headgate.device.weights.supply import open_files
from headgate.errors import OutOfMemory, RequestError, SourceLost
from headgate.protocol.command import BroadcastSource, FileSource, Sleep, Source, Tag, Wake
from headgate.protocol.plan import StepPlan, StepResult


class RunStep(msgspec.Struct, frozen=True, array_like=True, tag="step"):
    plan: StepPlan


class KvSizes(msgspec.Struct, frozen=True, array_like=True, tag="rooms"):
    """How much every rank has room for; the first order of all."""

    num_blocks: int
    max_context: int
    max_batch_tokens: int


# Files: read the weights from there. Wake: of the KV cache alone.
Order = KvSizes | RunStep | FileSource | Sleep | Wake
Tell = Callable[[Order], None]
KV_CACHE: tuple[Tag, ...] = ("kv_cache",)


def to_nobody(order: Order) -> None:
    pass


class RankExecutor(LocalExecutor):
    """The executor of one rank. `tell` gives an order to all followers, who themselves have nobody to tell."""

    def __init__(
        self,
        runner: ModelRunner,
        ranks: RankGroup,
        tell: Tell | None = None,
        on_close: Callable[[], None] = lambda: None,
    ) -> None:
        self._ranks = ranks
        self._tell = tell or to_nobody
        self._on_close = on_close
        super().__init__(runner)

    def close(self, timeout_s: float = 10.0) -> None:
        super().close(timeout_s)
        self._on_close()

    def carry_out(self, order: Order) -> None:
        """Do as rank 0 has been asked; what could not be done is raised here as there."""
        match order:
            case RunStep(plan):
                self.launch(plan).result()
            case FileSource():
                self.load_weights(AgreedWeights(order, self._ranks)).result()
            case Sleep(tags):
                self.sleep(tags).result()
            case Wake():
                self.wake_kv().result()
            case KvSizes():
                raise AssertionError("rooms are given once, before there is an executor")

    def _run(self, plan: StepPlan) -> StepResult:
        if self._obstacle() is None:
            self._tell(RunStep(plan))
        return super()._run(plan)

    def _load(self, source: WeightSource) -> None:
        assert isinstance(source, AgreedWeights), "ranks read weights by themselves"
        self._tell(source.files)
        try:
            super()._load(source)
        except BaseException as error:
            source.refuse(error)
            raise

    def _sleep(self, tags: Collection[Tag]) -> None:
        self._tell(Sleep(tuple(tags)))
        super()._sleep(tags)
        self._ranks.poll()  # whoever hears that we sleep finds the memory of all

    def _wake_kv(self) -> None:
        self._tell(Wake(KV_CACHE))
        objection = ""
        try:
            super()._wake_kv()
        except OutOfMemory as error:
            objection = str(error)
        if objections := self._ranks.poll(objection):
            super()._sleep(KV_CACHE)
            raise OutOfMemory(told(objections))


class AgreedWeights:
    """A `WeightSource`: files that every rank reads by itself.

    Nobody writes before all have found that they fit, and nobody believes its weights before all have theirs. Every rank
    says its word twice, or once, if that is an objection of anyone.
    """

    def __init__(self, files: FileSource, ranks: RankGroup) -> None:
        self.files = files
        self._ranks = ranks
        self._source: WeightSource | None = None
        self._opened = ExitStack()
        self._owes = True  # the others wait for our word

    def __repr__(self) -> str:
        return f"<AgreedWeights {self.files.path}, rank {self._ranks.rank} of {self._ranks.size}>"

    def __enter__(self) -> AgreedWeights:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self._opened.close()
        if error is not None:
            self.refuse(error)

    def refuse(self, error: BaseException) -> None:
        """Tell those who wait for our word that it went wrong here, if they do."""
        if self._owes:
            self._owes = False
            self._ranks.poll(str(error) or repr(error))

    def metadata(self) -> Mapping[str, TensorInfo]:
        return self._files().metadata()

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        self._agree()
        yield from self._files()
        self._agree()
        self._owes = False

    def _agree(self) -> None:
        self._owes = False
        if objections := self._ranks.poll():
            raise SourceLost(told(objections))
        self._owes = True

    def _files(self) -> WeightSource:
        if self._source is None:
            self._source = open_files(Path(self.files.path), self.files.checksum)
            if isinstance(self._source, AbstractContextManager):
                self._opened.enter_context(self._source)
        return self._source


def open_together(source: Source, ranks: RankGroup) -> WeightSource:
    """What an update names, if ranks can read it."""
    if not isinstance(source, FileSource):
        kind = "broadcasts to a group" if isinstance(source, BroadcastSource) else "shares its GPU memory"
        raise RequestError(
            f"this engine has {ranks.size} ranks, and a trainer that {kind} cannot reach them; give the weights as files "
            f"(path), which may lie in shared memory",
            param="source",
        )
    return AgreedWeights(source, ranks)


def told(objections: Mapping[int, str]) -> str:
    return "; ".join(f"rank {rank}: {objection}" for rank, objection in objections.items())
