"""The crash file of an engine: its last plans, the tokens that each returned, and the state of all sequences.

The file is JSON, and `headgate.engine.replay` can run it again on the fake device. It contains the token ids of
requests, so only its owner may read it.
"""

from __future__ import annotations

import logging
import os
import tempfile
import time
import traceback
from collections import deque
from pathlib import Path

import msgspec

from headgate.core.scheduler import Scheduler
from headgate.protocol.command import SequenceStatus, State
from headgate.protocol.plan import StepPlan, StepResult

log = logging.getLogger(__name__)

PLANS = 256  # plans kept
FILES = 16  # crash files kept, so that an engine that crashes repeatedly does not fill the disk


class RecordedStep(msgspec.Struct):
    """A plan, and the tokens that the device returned for it; no tokens if the step never landed."""

    plan: StepPlan
    tokens: list[int] | None = None
    lengths: list[int] = []  # as in `StepResult`


class Evidence(msgspec.Struct, frozen=True):
    error: str
    when: str
    state: State
    scheduler: str  # its repr
    sequences: list[SequenceStatus]
    leaving: list[int]
    num_blocks: int
    block_size: int
    max_rows: int
    vocab_size: int
    steps: list[RecordedStep]  # the last ones, oldest first
    windows: tuple[int | None, ...] = (None,)  # of the groups of layers


class StepRecorder:
    """Keeps the last steps of a step loop."""

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder or Path(tempfile.gettempdir()) / f"headgate-crashes-{os.getuid()}"
        self._steps: deque[RecordedStep] = deque(maxlen=PLANS)
        self._in_flight: deque[RecordedStep] = deque()

    def planned(self, plan: StepPlan) -> None:
        step = RecordedStep(plan)
        self._steps.append(step)
        if plan.rows:  # a plan without rows only fetches, and has no result
            self._in_flight.append(step)

    def landed(self, result: StepResult) -> None:
        step = self._in_flight.popleft()
        step.tokens, step.lengths = result.tokens, result.lengths

    def write(
        self, error: BaseException, scheduler: Scheduler, state: State, sequences: list[SequenceStatus]
    ) -> Path | None:
        """Write the crash file and return its path. If that fails, log the failure and return None."""
        evidence = self._collect(error, scheduler, state, sequences)
        try:
            path = write_private(self.folder, msgspec.json.encode(evidence))
        except OSError as failure:
            log.error("the crash file could not be written to %s: %s", self.folder, failure, exc_info=error)
            return None
        log.critical(
            "the engine ends because of a bug; its last %d plans are in %s", len(evidence.steps), path, exc_info=error
        )
        return path

    def _collect(
        self, error: BaseException, scheduler: Scheduler, state: State, sequences: list[SequenceStatus]
    ) -> Evidence:
        return Evidence(
            error="".join(traceback.format_exception(error)),
            when=time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            state=state,
            scheduler=repr(scheduler),
            sequences=sequences,
            leaving=[seq.id for seq in scheduler.leaving],
            num_blocks=scheduler.pool.num_blocks,
            block_size=scheduler.pool.block_size,
            max_rows=scheduler.limits.max_running,
            vocab_size=scheduler.limits.vocab_size,
            steps=list(self._steps),
            windows=scheduler.pool.groups.windows,
        )


def write_private(folder: Path, content: bytes) -> Path:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    kept = sorted(folder.glob("crash-*.json"), key=_number)
    for old in kept[: 1 - FILES]:
        old.unlink(missing_ok=True)
    path = folder / f"crash-{_number(kept[-1]) + 1 if kept else 1}-{os.getpid()}.json"
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
    return path


def _number(path: Path) -> int:
    """The number in a crash file's name, by which files are ordered: their times come from a clock that may jump."""
    number = path.stem.split("-")[1]
    return int(number) if number.isdecimal() else 0


def read_evidence(path: str | Path) -> Evidence:
    return msgspec.json.decode(Path(path).read_bytes(), type=Evidence)
