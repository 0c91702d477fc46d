"""Putting an engine together: model files and a config in, a loop that is ready to turn out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from headgate.config import EngineConfig
from headgate.core.blocks import BlockPool
from headgate.core.scheduler import Limits, Scheduler
from headgate.engine.loop import EngineLoop
from headgate.protocol.output import Outputs
from headgate.worker.build import build_worker
from headgate.worker.executor import Executor
from typing import Any as ModelFiles


@dataclass(frozen=True, slots=True)
class Engine:
    loop: EngineLoop
    executor: Executor

    @property
    def scheduler(self) -> Scheduler:
        return self.loop.scheduler

    def close(self) -> None:
        self.loop.close()
        self.executor.close()


def build_engine(files: ModelFiles, config: EngineConfig, send: Callable[[int, Outputs], None]) -> Engine:
    worker = build_worker(files.path, config)
    limits = Limits(
        max_context=worker.max_context,
        max_running=config.max_running,
        max_batch_tokens=worker.max_batch_tokens,
        vocab_size=worker.spec.vocab,
        eos_token_ids=worker.spec.eos_ids,
    )
    scheduler = Scheduler(BlockPool(worker.num_blocks, config.block_size), limits)
    loop = EngineLoop(scheduler, worker.executor, send, run_ahead=worker.run_ahead)
    return Engine(loop, worker.executor)
