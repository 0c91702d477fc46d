"""Builds an engine from a model and a config: device, transport, scheduler and step loop."""

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
from headgate.device.build import Device, build_device
from headgate.device.executor import Executor
from headgate.device.tensor_parallel.parallelism import UpdatedWeights
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
        self.loop.control.collecting.close()
        self.transport.close()
        self.executor.close()


def build_engine(
    model: Path,
    config: EngineConfig,
    send: Callable[[int, StepOutputs | CommandAnswer], None],
    updated: UpdatedWeights | None = None,
) -> Engine:
    """Build an engine for `model`, a folder or a GGUF file. The engine sends messages to its clients with `send`.

    It loads the `updated` weights if they can still be read, else the model's own; its version shows which it holds.
    """
    device = build_device(model, config, updated)
    transport = open_transport(config, device.blocks)
    scheduler = Scheduler(
        BlockPool(device.num_blocks, config.block_size, device.windows),
        _scheduler_limits(config, device, transport),
        version=device.version,
        draw_lease_id=lambda: secrets.randbits(63),  # a lease id is a secret: any peer that knows it can fetch the KV
    )
    loop = EngineLoop(
        scheduler,
        device.executor,
        send,
        resources=device.resources,
        wires=device.wires,
        transport=transport,
        recorder=StepRecorder(None if config.crash_folder is None else Path(config.crash_folder)),
        run_ahead=device.run_ahead,
    )
    if device.followers is not None:
        device.followers.watch(loop.fail)
    info = _engine_info(config, device, scheduler)
    return Engine(info, loop, device.executor, transport)


def _scheduler_limits(config: EngineConfig, device: Device, transport: Transport) -> SchedulerLimits:
    return SchedulerLimits(
        max_context=device.max_context,
        max_running=config.max_running,
        max_batch_tokens=device.max_batch_tokens,
        vocab_size=device.spec.vocab,
        eos_token_ids=device.spec.eos_ids,
        takes_grammars=device.takes_grammars,
        keeps_routed_experts=device.routed is not None,
        lease_s=config.lease_s,
        export_wait_s=config.export_wait_s,
        reschedules=config.on_preempt == "reschedule",
        exports=bool(transport.address),
        engine=transport.address,
        generation=secrets.randbits(63),
    )


def _engine_info(config: EngineConfig, device: Device, scheduler: Scheduler) -> EngineInfo:
    return EngineInfo(
        max_context=scheduler.max_context,
        vocab_size=device.spec.vocab,
        eos_token_ids=device.spec.eos_ids,
        num_blocks=device.num_blocks,
        block_size=config.block_size,
        groups=len(device.windows),
        max_running=config.max_running,
        device=device.device,
        backend=device.backend,
        dtype=device.dtype,
        ranks=config.tensor_parallel,
        transfers_kv=scheduler.limits.exports,
        routed=device.routed,
        hidden=device.spec.hidden,
    )


def open_transport(config: EngineConfig, blocks: BlockMemory) -> Transport:
    # With several ranks, this process has only part of the KV and cannot transfer it.
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
