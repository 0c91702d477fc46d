"""Putting an engine together: a model and a config in, a loop that is ready to turn out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from headgate.config import EngineConfig
from headgate.core.blocks import BlockPool
from headgate.core.scheduler import Limits, Scheduler
from headgate.engine.evidence import Recorder
from headgate.engine.loop import EngineLoop
from headgate.protocol.message import Answer, EngineInfo, Told
from headgate.worker.build import Wanted, build_worker
from headgate.worker.executor import Executor


@dataclass(frozen=True, slots=True)
class Engine:
    info: EngineInfo
    loop: EngineLoop
    executor: Executor

    @property
    def scheduler(self) -> Scheduler:
        return self.loop.scheduler

    def close(self) -> None:
        self.loop.close()
        self.executor.close()


def build_engine(
    model: Path, config: EngineConfig, send: Callable[[int, Told | Answer], None], wanted: Wanted | None = None
) -> Engine:
    """An engine for the model in `model`, a folder or a GGUF file; `send` takes what it has to say to a client.

    It holds the `wanted` weights, if there are any and they can still be had; its version tells.
    """
    worker = build_worker(model, config, wanted)
    spec = worker.spec
    limits = Limits(
        max_context=worker.max_context,
        max_running=config.max_running,
        max_batch_tokens=worker.max_batch_tokens,
        vocab_size=spec.vocab,
        eos_token_ids=spec.eos_ids,
        takes_grammars=worker.takes_grammars,
    )
    scheduler = Scheduler(BlockPool(worker.num_blocks, config.block_size), limits, version=worker.version)
    info = EngineInfo(
        max_context=scheduler.max_context,
        vocab_size=spec.vocab,
        eos_token_ids=spec.eos_ids,
        num_blocks=worker.num_blocks,
        block_size=config.block_size,
        max_running=config.max_running,
        device=worker.device,
        backend=worker.backend,
        dtype=worker.dtype,
    )
    loop = EngineLoop(
        scheduler,
        worker.executor,
        send,
        supply=worker.supply,
        recorder=Recorder(None if config.crash_folder is None else Path(config.crash_folder)),
        run_ahead=worker.run_ahead,
    )
    return Engine(info, loop, worker.executor)
