"""Executors of the ranks of one engine: rank 0 forwards every order to the followers, and all ranks carry it out.

Rank 0's device thread sends orders in the order in which it carries them out itself, so every rank does the same
things in the same order. A step needs no reply, because its collectives synchronise the ranks. An operation that can
fail on one rank alone (reading weights, allocating memory) ends with a vote: either all ranks have done it, or none
counts as having done it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from types import TracebackType

import msgspec
import torch

from headgate.device.executor import LocalExecutor
from headgate.device.runner import ModelRunner
from headgate.device.tensor_parallel.ranks import RankGroup
from headgate.device.weights.resources import open_files
from headgate.device.weights.source import TensorInfo, WeightSource
from headgate.errors import OutOfMemory, RequestError, SourceLost
from headgate.layers.formats import Weight
from headgate.protocol.command import BroadcastSource, FileSource, Sleep, Source, Tag, Wake
from headgate.protocol.plan import StepPlan, StepResult


class RunStep(msgspec.Struct, frozen=True, array_like=True, tag="step"):
    plan: StepPlan


class KvSizes(msgspec.Struct, frozen=True, array_like=True, tag="sizes"):
    """The sizes that every rank allocates; the first order."""

    num_blocks: int
    max_context: int
    max_batch_tokens: int


# FileSource: read the weights from there. Wake: wake the KV cache only.
Order = KvSizes | RunStep | FileSource | Sleep | Wake
SendOrder = Callable[[Order], None]
KV_CACHE: tuple[Tag, ...] = ("kv_cache",)


def discard_order(order: Order) -> None:
    pass


class RankExecutor(LocalExecutor):
    """The executor of one rank. `send_order` sends an order to all followers; a follower's own discards it."""

    def __init__(
        self,
        runner: ModelRunner,
        ranks: RankGroup,
        send_order: SendOrder | None = None,
        on_close: Callable[[], None] = lambda: None,
    ) -> None:
        self._ranks = ranks
        self._send_order = send_order or discard_order
        self._on_close = on_close
        super().__init__(runner)

    def close(self, timeout_s: float = 10.0) -> None:
        super().close(timeout_s)
        self._on_close()

    def checksums(self) -> Future[dict[str, str]]:
        raise RequestError("this engine has several ranks and cannot compute checksums of its weights")

    def carry_out(self, order: Order) -> None:
        """Carry out an order from rank 0. Raises what it raises on rank 0."""
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
                raise AssertionError("sizes are sent once, before the executor exists")

    def _run(self, plan: StepPlan) -> StepResult:
        if self._obstacle() is None:
            self._send_order(RunStep(plan))
        return super()._run(plan)

    def _load(self, source: WeightSource) -> None:
        assert isinstance(source, AgreedWeights), "each rank reads weights itself"
        self._send_order(source.files)
        try:
            super()._load(source)
        except BaseException as error:
            source.refuse(error)
            raise

    def _sleep(self, tags: Collection[Tag]) -> None:
        self._send_order(Sleep(tuple(tags)))
        super()._sleep(tags)
        self._ranks.poll()  # all ranks have released their memory before sleep returns

    def _wake_kv(self) -> None:
        self._send_order(Wake(KV_CACHE))
        objection = ""
        try:
            super()._wake_kv()
        except OutOfMemory as error:
            objection = str(error)
        if objections := self._ranks.poll(objection):
            super()._sleep(KV_CACHE)
            raise OutOfMemory(describe_objections(objections))


class AgreedWeights:
    """A `WeightSource`: files that every rank reads itself.

    No rank writes before all have verified that the weights fit, and no rank uses its weights before all have theirs.
    Every rank votes twice, or once if any rank objects in the first vote.
    """

    def __init__(self, files: FileSource, ranks: RankGroup) -> None:
        self.files = files
        self._ranks = ranks
        self._source: WeightSource | None = None
        self._opened = ExitStack()
        self._vote_due = True  # other ranks are waiting for our vote

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
        """Vote against, if the other ranks are waiting for our vote."""
        if self._vote_due:
            self._vote_due = False
            self._ranks.poll(str(error) or repr(error))

    def metadata(self) -> Mapping[str, TensorInfo]:
        return self._files().metadata()

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor | Weight]]:
        self._agree()
        yield from self._files()
        self._agree()
        self._vote_due = False

    def _agree(self) -> None:
        self._vote_due = False
        if objections := self._ranks.poll():
            raise SourceLost(describe_objections(objections))
        self._vote_due = True

    def _files(self) -> WeightSource:
        if self._source is None:
            self._source = open_files(Path(self.files.path), self.files.checksum)
            if isinstance(self._source, AbstractContextManager):
                self._opened.enter_context(self._source)
        return self._source


def open_together(source: Source, ranks: RankGroup) -> WeightSource:
    """Open the source of an update, if ranks can read it."""
    if not isinstance(source, FileSource):
        kind = "broadcasts to a group" if isinstance(source, BroadcastSource) else "shares its GPU memory"
        raise RequestError(
            f"this engine has {ranks.size} ranks, and a trainer that {kind} cannot reach them; give them as files "
            f"(path), which may be in shared memory",
            param="source",
        )
    return AgreedWeights(source, ranks)


def describe_objections(objections: Mapping[int, str]) -> str:
    return "; ".join(f"rank {rank}: {objection}" for rank, objection in objections.items())
