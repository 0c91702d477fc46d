"""The engine process, started by `Replicas` as a subprocess: the real loop, scheduler and messages, a fake device.

`asyncio.create_subprocess_exec` calls `EngineProcesses.start`, `ClientChannel` is replaced by `SimClientChannel`, and
the turns of the engine loop are callbacks. All other code is the production code.

A token depends on everything that must be correct: the KV that was read, the weights that computed it, and the seed
and position of the random stream.
"""

from __future__ import annotations

import asyncio
import random
import secrets
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, cast

import msgspec

from headgate.core.blocks import BlockPool
from headgate.core.limits import SchedulerLimits
from headgate.core.scheduler import Scheduler
from headgate.engine.channel import EngineChannel, _encoder, _from_engine, _identity
from headgate.engine.evidence import StepRecorder
from headgate.engine.loop import EngineLoop
from headgate.engine.start import EngineStart
from headgate.errors import EngineDead, HalfWritten, SourceLost
from headgate.protocol.command import FileSource, Source
from headgate.protocol.message import CommandAnswer, EngineInfo, FromClient, FromEngine, StepOutputs
from headgate.protocol.plan import StepPlan, StepResult
from headgate.protocol.request import Ticket
from headgate.testing.device import Entry, FakeDevice, expected_entries
from headgate.testing.executor import FakeExecutor
from headgate.testing.sim.kv import SimKv
from headgate.testing.sim.loop import HOST, DelayedPipe, SimLoop, SimProcess
from headgate.testing.sim.vocabulary import EOS, SAMPLED_TOKENS, VOCAB_SIZE

FRAME_S = 0.0001  # delay of a message between a server and its engine
END_S = 0.01  # time from the closing of standard input to the end of the process


# -------------------------------------------------------------------------------------------------------------- device


def choose(kv: list[int], seed: int) -> int:
    """Return the token after those whose KV entries are `kv`."""
    return hash((hash(tuple(kv)), len(kv), seed)) % SAMPLED_TOKENS


def expected(tokens: list[int], version: int, seed: int) -> int:
    """Return the token that a correct engine samples after `tokens`."""
    return choose(expected_entries(tokens, version), seed)


class SimDevice(FakeDevice):
    """Samples from the random stream of each row, after reading all of the row's KV."""

    def __init__(self, num_blocks: int, block_size: int, max_rows: int, version: int) -> None:
        super().__init__(num_blocks, block_size, max_rows, SAMPLED_TOKENS, version)
        self._seeds = [0] * max_rows

    def land(self, lengths: Sequence[int] = ()) -> StepResult:
        for join in self._queue[0].joins:
            self._seeds[join.row] = join.sampling.seed or 0
        return super().land(lengths)

    def _choose(self, row: int, entries: list[Entry]) -> int:
        return choose(entries, self._seeds[row])


@dataclass(frozen=True, slots=True)
class EngineProfile:
    """The speed and the capacity of an engine."""

    step_s: float = 0.004
    start_s: float = 0.1
    load_s: float = 0.05
    blocks: int = 48
    block_size: int = 4
    rows: int = 6
    batch_tokens: int = 64
    context: int = 160
    run_ahead: int = 1
    reschedules: bool = False


class SimExecutor(FakeExecutor):
    """An executor that also loads weights. Steps run one after another and take time.

    The name of a weights file determines the weights.
    """

    def __init__(
        self,
        device: SimDevice,
        profile: EngineProfile,
        host: SimProcess,
        rng: random.Random,
        breaks: Callable[[], float],
    ) -> None:
        super().__init__(device, by_hand=True)
        self._profile = profile
        self._host = host
        self._random = rng
        self._breaks = breaks  # the share of updates that fail
        self.broken_updates = 0
        self.half_written = False  # a failed update left incomplete weights
        self.slowness = 1.0  # factor on the duration of steps
        self._steps = DelayedPipe(host.loop, lambda _: self.land(), host.context)
        self._free_s = 0.0  # when the device has finished all launched steps

    def launch(self, plan: StepPlan) -> Future[StepResult]:
        future = super().launch(plan)
        self.plans.clear()
        now_s = self._host.loop.time()
        self._free_s = max(self._free_s, now_s) + self._profile.step_s * self.slowness * self._random.uniform(
            0.5, 1.5
        )
        self._steps.send(None, self._free_s - now_s)
        return future

    def load_weights(self, source: object, **declared: object) -> Future[None]:
        assert isinstance(source, FileSource)
        loading: Future[None] = Future()
        delay_s = self._profile.load_s * self._random.uniform(0.2, 2.0)
        self._host.loop.call_later(delay_s, self._loaded, loading, source, context=self._host.context)
        return loading

    def _loaded(self, loading: Future[None], source: FileSource) -> None:
        if self._random.random() < self._breaks():
            self.broken_updates += 1
            half_written = self._random.random() < 0.3
            self.half_written |= half_written
            loading.set_exception(HalfWritten("a tensor broke off") if half_written else SourceLost("it is gone"))
            return
        self.device.version = weights_in(source)
        self.asleep = tuple(tag for tag in self.asleep if tag != "weights")
        loading.set_result(None)


def weights_in(source: Source) -> int:
    """Return the version of the weights in a file: 7 for `weights-7.safetensors`."""
    assert isinstance(source, FileSource)
    return int(Path(source.path).stem.rpartition("-")[2])


# ---------------------------------------------------------------------------------------------------------------- loop


class SimEngineLoop(EngineLoop):
    """An engine loop that never sleeps; `LoopDriver` calls each turn when there is work to do."""

    on_post: Callable[[], None] | None = None

    def post(self, message: Any) -> None:
        super().post(message)
        self._poke()

    def wake(self) -> None:
        super().wake()
        self._poke()

    def _poke(self) -> None:
        if self.on_post is not None:
            self.on_post()

    def _sleep_s(self) -> float:
        return 0.0

    def pause_s(self) -> float:
        """Time until the next turn if no message arrives."""
        return super()._sleep_s()


class LoopDriver:
    """Calls the turns of an engine loop as callbacks of its process, until the process ends."""

    def __init__(self, host: SimProcess, engine: SimEngineLoop, on_crash: Callable[[Exception], None]) -> None:
        self._host = host
        self._engine = engine
        self._on_crash = on_crash
        self._next: asyncio.TimerHandle | None = None
        self.stalled = False  # the loop's thread makes no progress; the other threads of the process do
        engine.on_post = self.poke
        self.poke()

    def poke(self) -> None:
        self._at(0.0)

    def resume(self) -> None:
        self.stalled = False
        self.poke()

    def _at(self, delay_s: float) -> None:
        when_s = self._host.loop.time() + delay_s
        if self._next is not None:
            if self._next.when() <= when_s:
                return
            self._next.cancel()
        self._next = self._host.loop.call_at(when_s, self._turn, context=self._host.context)

    def _turn(self) -> None:
        self._next = None
        if not self._host.alive or self._engine.closed or self.stalled:
            return
        try:
            self._engine.turn()
        except Exception as error:
            self._on_crash(error)
        else:
            self._at(self._engine.pause_s())


# ------------------------------------------------------------------------------------------------------------- channel


class MessageBus:
    """Finds engines by address. Messages to an engine that does not listen yet are kept, as in ZeroMQ."""

    def __init__(self, loop: SimLoop) -> None:
        self.loop = loop
        self.engines: dict[str, SimEngineChannel] = {}
        self.clients: dict[tuple[str, bytes], SimClientChannel] = {}
        self.early: dict[str, list[tuple[bytes, bytes]]] = {}

    def send(self, address: str, identity: bytes, frame: bytes) -> None:
        engine = self.engines.get(address)
        if engine is None:
            self.early.setdefault(address, []).append((identity, frame))
        else:
            engine.pipe.send((identity, frame), FRAME_S)


class SimEngineChannel(EngineChannel):
    """The engine's end of the channel, without threads or sockets. Frames are handled by the real code."""

    def __init__(self, bus: MessageBus, address: str, info: EngineInfo, engine: EngineLoop, host: SimProcess) -> None:
        self._info, self._post, self._status = info, engine.post, engine.quiet
        self._bus, self._address, self._host = bus, address, host
        self.pipe = DelayedPipe(bus.loop, self._on_frame, host.context)
        bus.engines[address] = self
        host.on_end.append(self._unbind)
        for early in bus.early.pop(address, ()):
            self.pipe.send(early, FRAME_S)

    def _unbind(self) -> None:
        if self._bus.engines.get(self._address) is self:
            del self._bus.engines[self._address]

    def _on_frame(self, sent: tuple[bytes, bytes]) -> None:
        if self._host.alive:
            self._receive(*sent)

    def send(self, client: int, message: StepOutputs | CommandAnswer) -> None:
        self._answer(_identity(client), message)

    def _answer(self, identity: bytes, message: FromEngine) -> None:
        client = self._bus.clients.get((self._address, identity))
        if client is not None and self._host.alive:
            client.pipe.send(_encoder.encode(message), FRAME_S)


class SimClientChannel:
    """The client's end of the channel; replaces `headgate.engine.channel.ClientChannel`."""

    def __init__(self, address: str, client: int) -> None:
        loop = cast(SimLoop, asyncio.get_running_loop())
        host = HOST.get()
        assert host is not None
        processes = cast(EngineProcesses, loop.processes)
        self._bus, self._address, self._identity, self._host = processes.bus, address, _identity(client), host
        self._frames: deque[bytes] = deque()
        self._arrived = asyncio.Event()
        self._closed = False
        self.pipe = DelayedPipe(loop, self._arrive, host.context)
        self._bus.clients[address, self._identity] = self

    def _arrive(self, frame: bytes) -> None:
        self._frames.append(frame)
        self._arrived.set()

    def send(self, message: FromClient) -> None:
        if self._closed:  # the next engine at this address would take it for a message of its own client
            raise EngineDead("nothing can be sent to it: the channel is closed")
        if self._host.alive:
            self._bus.send(self._address, self._identity, _encoder.encode(message))

    async def receive(self) -> FromEngine:
        while not self._frames:
            self._arrived.clear()
            await self._arrived.wait()
        return _from_engine.decode(self._frames.popleft())

    def close(self) -> None:
        self._closed = True
        if self._bus.clients.get((self._address, self._identity)) is self:
            del self._bus.clients[self._address, self._identity]
        self._bus.early.pop(self._address, None)


# ----------------------------------------------------------------------------------------------------------- processes


class EngineProcess(asyncio.SubprocessTransport):
    """An engine process, with the interface of an `asyncio` subprocess."""

    def __init__(self, processes: EngineProcesses, pid: int, start: EngineStart, parent: SimProcess) -> None:
        super().__init__()
        self._processes = processes
        self._pid = pid
        self._start = start
        self._waiters: list[asyncio.Future[int]] = []
        self.code: int | None = None
        self.loop: SimEngineLoop | None = None  # None until the engine has started
        self.driver: LoopDriver | None = None
        self.executor: SimExecutor | None = None
        self.kv: SimKv | None = None  # None until the engine has started, and if KV transfer is off
        self.host = SimProcess(processes.loop, f"{parent.name}/{start.name.replace(' ', '')}", parent)
        self.host.on_end.append(lambda: self.end(-9))
        self.host.on_end.append(lambda: processes.loop.network.host_ended(self.host))
        delay_s = processes.profile.start_s * processes.random.uniform(0.5, 2.0)
        processes.loop.call_later(delay_s, self._start_loop, context=self.host.context)

    def _start_loop(self) -> None:
        if self.code is not None:
            return
        start, profile, rng = self._start, self._processes.profile, self._processes.random
        content = 0 if start.weights is None else weights_in(start.weights)
        device = SimDevice(profile.blocks, profile.block_size, profile.rows, content)
        executor = SimExecutor(device, profile, self.host, rng, lambda: self._processes.update_breaks)
        config = start.config
        if config.kv_listen is not None:
            self.kv = SimKv(
                device, config, self.host, lambda stage, ticket: self._processes.reached(self, stage, ticket)
            )
        limits = SchedulerLimits(
            profile.context,
            profile.rows,
            profile.batch_tokens,
            VOCAB_SIZE,
            (EOS,),
            exports=self.kv is not None,
            takes_grammars=False,
            lease_s=config.lease_s,
            export_wait_s=config.export_wait_s,
            reschedules=profile.reschedules,
            engine=self.kv.address if self.kv is not None else "",
            generation=secrets.randbits(63),
        )
        scheduler = Scheduler(
            BlockPool(profile.blocks, profile.block_size),
            limits,
            version=start.version,
            draw_lease_id=lambda: secrets.randbits(63),
        )
        channel: SimEngineChannel
        self.loop = SimEngineLoop(
            scheduler,
            executor,
            lambda client, message: channel.send(client, message),
            resources=executor,
            transport=self.kv,
            recorder=StepRecorder(self._processes.crash_folder),
            run_ahead=profile.run_ahead,
            clock=self.host.loop.time,
        )
        info = EngineInfo(
            scheduler.max_context,
            VOCAB_SIZE,
            (EOS,),
            profile.blocks,
            profile.block_size,
            profile.rows,
            "none",
            "simulated",
            "none",
        )
        channel = SimEngineChannel(self._processes.bus, start.address, info, self.loop, self.host)
        self._processes.note(self.host, f"started with weights {content}")
        self.executor = executor
        self.driver = LoopDriver(self.host, self.loop, self._crashed)

    def _crashed(self, error: Exception) -> None:
        self._processes.on_crash(self.host, error)
        self.end(1)

    def end(self, code: int) -> None:
        if self.code is not None:
            return
        self.code = code
        self._processes.note(self.host, f"ended with exit code {code}")
        self.host.kill()
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(code)

    # -- asyncio.SubprocessTransport -----------------------------------------------------

    def get_pid(self) -> int:
        return self._pid

    def get_returncode(self) -> int | None:
        return self.code

    def get_pipe_transport(self, fd: int) -> asyncio.BaseTransport | None:
        return SimStdin(self) if fd == 0 else None

    def kill(self) -> None:
        self.end(-9)

    def close(self) -> None:
        """Close standard input: the process then ends as soon as it runs."""
        self._processes.loop.call_later(END_S, self.end, 0, context=self.host.context)

    async def _wait(self) -> int:
        if self.code is None:
            self._waiters.append(self._processes.loop.create_future())
            return await self._waiters[-1]
        return self.code


class SimStdin(asyncio.WriteTransport):
    def __init__(self, process: EngineProcess) -> None:
        super().__init__()
        self._process = process

    def close(self) -> None:
        self._process.close()

    def is_closing(self) -> bool:
        return self._process.code is not None


class EngineProcesses:
    """All engine processes of a run, in the role of the operating system."""

    def __init__(
        self,
        loop: SimLoop,
        rng: random.Random,
        profile: EngineProfile,
        *,
        note: Callable[[SimProcess, str], None],
        on_crash: Callable[[SimProcess, Exception], None],
        crash_folder: Path,
        update_breaks: float = 0.0,
    ) -> None:
        self.loop = loop
        self.random = rng
        self.profile = profile
        self.note = note
        self.on_crash = on_crash
        self.crash_folder = crash_folder
        self.update_breaks = update_breaks
        self.bus = MessageBus(loop)
        self.engines: list[EngineProcess] = []
        self.watchers: list[
            Callable[[EngineProcess, str, Ticket | None], None]
        ] = []  # called at each stage of a transfer
        self._pids = count(1)

    def start(
        self, protocol: asyncio.SubprocessProtocol, arguments: tuple[str, ...]
    ) -> tuple[asyncio.SubprocessTransport, asyncio.SubprocessProtocol]:
        parent = HOST.get()
        assert parent is not None
        start = msgspec.json.decode(arguments[-1], type=EngineStart)
        process = EngineProcess(self, next(self._pids), start, parent)
        self.engines.append(process)
        protocol.connection_made(process)
        return process, protocol

    def reached(self, engine: EngineProcess, stage: str, ticket: Ticket | None) -> None:
        for watch in list(self.watchers):
            watch(engine, stage, ticket)

    def serving(self, ticket: Ticket) -> EngineProcess | None:
        """Return the engine that now listens at the address of a ticket."""
        found = [engine for engine in self.living if engine.kv is not None and engine.kv.address == ticket.engine]
        return found[0] if found else None

    @property
    def broken_updates(self) -> int:
        return sum(engine.executor.broken_updates for engine in self.engines if engine.executor is not None)

    @property
    def quarantined(self) -> set[str]:
        """Return the servers with an engine that was ever quarantined."""
        hosts = (
            engine.host for engine in self.engines if engine.executor is not None and engine.executor.half_written
        )
        return {host.name.partition("/")[0] for host in hosts}

    @property
    def living(self) -> list[EngineProcess]:
        return [engine for engine in self.engines if engine.code is None]
