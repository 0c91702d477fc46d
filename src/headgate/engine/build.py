"""Putting an engine together: a model and a config in, a loop that is ready to turn out."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass
from ipaddress import ip_network
from pathlib import Path

from headgate.config import EngineConfig
from headgate.core.blocks import BlockPool
from headgate.core.limits import SchedulerLimits
from headgate.core.scheduler import Scheduler
from headgate.device.build import build_device
from headgate.device.executor import Executor
from headgate.device.tensor_parallel.parallelism import WantedWeights
from headgate.engine.evidence import StepRecorder
from headgate.engine.loop import EngineLoop
from headgate.protocol.message import CommandAnswer, EngineInfo, StepOutputs
from headgate.transfer.same_gpu import SameGpuTransport
from headgate.transfer.tcp import TcpTransport, parse_address
from headgate.transfer.transport import BlockMemory, NoTransport, Transport


@dataclass(frozen=True, slots=True)
class Engine:
    info: EngineInfo
    loop: EngineLoop
    executor: Executor
    transport: Transport

    @property
    def scheduler(self) -> Scheduler:
        return self.loop.scheduler

    def close(self) -> None:
        self.loop.close()
        self.transport.close()
        self.executor.close()


def build_engine(
    model: Path,
    config: EngineConfig,
    send: Callable[[int, StepOutputs | CommandAnswer], None],
    wanted: WantedWeights | None = None,
) -> Engine:
    """An engine for the model in `model`, a folder or a GGUF file; `send` takes what it has to say to a client.

    It holds the `wanted` weights, if there are any and they can still be had; its version tells.
    """
    worker = build_device(model, config, wanted)
    spec = worker.spec
    transport = open_transport(config, worker.blocks)
    limits = SchedulerLimits(
        max_context=worker.max_context,
        max_running=config.max_running,
        max_batch_tokens=worker.max_batch_tokens,
        vocab_size=spec.vocab,
        eos_token_ids=spec.eos_ids,
        takes_grammars=worker.takes_grammars,
        lease_s=config.lease_s,
        export_wait_s=config.export_wait_s,
        reschedules=config.on_preempt == "reschedule",
        exports=bool(transport.address),
        engine=transport.address,
        generation=secrets.randbits(63),
    )
    scheduler = Scheduler(
        BlockPool(worker.num_blocks, config.block_size),
        limits,
        version=worker.version,
        draw_lease_id=lambda: secrets.randbits(63),  # who does not know it cannot fetch
    )
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
        ranks=config.tensor_parallel,
    )
    loop = EngineLoop(
        scheduler,
        worker.executor,
        send,
        resources=worker.resources,
        transport=transport,
        recorder=StepRecorder(None if config.crash_folder is None else Path(config.crash_folder)),
        run_ahead=worker.run_ahead,
    )
    if worker.followers is not None:
        worker.followers.watch(loop.fail)
    return Engine(info, loop, worker.executor, transport)


def open_transport(config: EngineConfig, blocks: BlockMemory) -> Transport:
    # Of a model with several ranks, this process has only a part of the KV.
    if config.kv_listen is None or config.tensor_parallel > 1:
        return NoTransport()
    return _transport_kind(config.kv_transport, blocks)(
        blocks,
        parse_address(config.kv_listen),
        peers=tuple(map(ip_network, config.kv_peers)),
        lease_s=config.lease_s,
        wait_s=config.kv_wait_s,
    )


def _transport_kind(name: str, blocks: BlockMemory) -> type[TcpTransport]:
    if name == "nixl":
        from headgate.transfer.nixl import NixlTransport

        return NixlTransport
    return SameGpuTransport if name == "auto" and blocks.same_gpu is not None else TcpTransport
