"""Virtual time and processes: an event loop that never sleeps, and processes that can be stopped, resumed or killed.

When no callback is ready, the clock jumps to the next timer. Every callback belongs to the process (`HOST`) in whose
context it was scheduled. Callbacks of a stopped process wait until it resumes, as after SIGSTOP.

asyncio iterates over sets of tasks and futures, and their order must not depend on memory addresses. `SimTask` and
`SimFuture` are therefore hashed by a serial number.
"""

from __future__ import annotations

import asyncio
import heapq
from collections import deque
from collections.abc import Callable, Coroutine, Generator
from contextvars import Context, ContextVar, copy_context
from itertools import count
from typing import Any, Protocol, TypeVar

T = TypeVar("T")

TURN_S = 1e-7  # every iteration takes time, so a task that sleeps until a moment finds it in the past
JUMP_S = 1e-4
MOST_TURNS = 200_000  # iterations without a jump of the clock; more mean that some task spins


class ListenerHandle(Protocol):
    def close(self) -> None: ...


class NetworkBackend(Protocol):
    """The part of the network that processes and the event loop use; implemented by `network.SimNetwork`."""

    async def connect(
        self, factory: Callable[[], asyncio.BaseProtocol], address: tuple[str, int]
    ) -> asyncio.Transport: ...

    def listen(self, factory: Callable[[], asyncio.BaseProtocol], address: tuple[str, int]) -> ListenerHandle: ...

    def host_ended(self, host: SimProcess) -> None: ...


class SubprocessBackend(Protocol):
    """Starts subprocesses; implemented by `engine.EngineProcesses`."""

    def start(
        self, protocol: asyncio.SubprocessProtocol, arguments: tuple[str, ...]
    ) -> tuple[asyncio.SubprocessTransport, asyncio.SubprocessProtocol]: ...


class SimulationHung(Exception):
    """The run makes no progress: no timer is left, a task spins, or the deadline has passed."""


class SimProcess:
    """A simulated process: it owns the callbacks that are scheduled in its context, and its child processes."""

    def __init__(self, loop: SimLoop, name: str, parent: SimProcess | None = None) -> None:
        self.loop = loop
        self.name = name
        self.alive = True
        self.stopped = False
        self._stopped_at_s = 0.0  # when it was last stopped
        self._stopped_before_s = 0.0  # total duration of earlier stops
        self.held: deque[asyncio.Handle] = deque()  # callbacks that wait until the process resumes
        self.children: list[SimProcess] = []
        self.on_end: list[Callable[[], None]] = []  # called when the process ends
        self.tasks: dict[asyncio.Task[Any], None] = {}
        self.context = copy_context()
        self.context.run(HOST.set, self)
        if parent is not None:
            parent.children.append(self)

    def __repr__(self) -> str:
        return f"<Host {self.name}{'' if self.alive else ', dead'}{', stopped' if self.stopped else ''}>"

    def spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        return self.loop.create_task(work, context=self.context.copy())

    def stop(self) -> None:
        """Like SIGSTOP; also stops all child processes."""
        for host in self.tree():
            if not host.stopped:
                host.stopped, host._stopped_at_s = True, self.loop.time()

    def resume(self) -> None:
        for host in self.tree():
            host._stopped_before_s, host.stopped = host.stopped_s, False
            self.loop.requeue(host.held)

    @property
    def stopped_s(self) -> float:
        """Total time that the process has been stopped."""
        return self._stopped_before_s + (self.loop.time() - self._stopped_at_s if self.stopped else 0.0)

    def kill(self) -> None:
        """End the process between two callbacks. Later actions of its tasks have no effect outside the process."""
        if not self.alive:
            return
        for child in self.children:
            child.kill()
        self.alive = False
        for end in self.on_end:
            end()
        # The clean-up code of its tasks still runs, but the network drops everything that this process sends.
        for task in list(self.tasks):
            task.cancel()
        self.resume()

    def tree(self) -> Generator[SimProcess, None, None]:
        yield self
        for child in self.children:
            yield from child.tree()


HOST: ContextVar[SimProcess | None] = ContextVar("HOST", default=None)


class SimFuture(asyncio.Future[Any]):
    def __init__(self, number: int, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(loop=loop)
        self._number = number

    def __hash__(self) -> int:
        return self._number


class SimTask(asyncio.Task[Any]):
    def __init__(self, number: int, work: Coroutine[Any, Any, Any], **options: Any) -> None:
        self._number = number
        super().__init__(work, **options)

    def __hash__(self) -> int:
        return self._number


class SimLoop(asyncio.BaseEventLoop):
    def __init__(self) -> None:
        super().__init__()
        self._now_s = 0.0
        self._turns = 0  # iterations since the clock last jumped
        self._numbers = count()
        # Each timer has a serial number, so that the order of timers due at the same time is defined.
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self.network: NetworkBackend
        self.processes: SubprocessBackend
        self.deadline_s = float("inf")
        self.skew_s = 0.0  # added to the wall clock, which an operator may set
        self.tasks: dict[asyncio.Task[Any], None] = {}  # tasks that have not ended
        self.set_task_factory(self._make_task)  # type: ignore[arg-type]

    # -- time -----------------------------------------------------------------------

    def time(self) -> float:
        return self._now_s

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        self._check_closed()  # type: ignore[attr-defined]
        handle = asyncio.TimerHandle(when, callback, args, self, context)
        heapq.heappush(self._timers, (when, next(self._numbers), handle))
        return handle

    def _run_once(self) -> None:
        ready: deque[asyncio.Handle] = self._ready  # type: ignore[attr-defined]
        timers = self._timers
        while timers and timers[0][2].cancelled():
            heapq.heappop(timers)
        self._now_s += TURN_S
        if not ready:
            self._advance(timers)
        while timers and timers[0][0] <= self._now_s:
            ready.append(heapq.heappop(timers)[2])
        self._turns += 1
        if self._turns > MOST_TURNS:
            self._turns = 0
            raise SimulationHung(f"the event loop spins at {self._now_s:.3f} s")
        for _ in range(len(ready)):
            handle = ready.popleft()
            if handle.cancelled():
                continue
            host = _context_of(handle).get(HOST)
            if host is not None and host.stopped:
                host.held.append(handle)
            else:
                handle._run()

    def _advance(self, timers: list[tuple[float, int, asyncio.TimerHandle]]) -> None:
        if not timers:
            raise SimulationHung("no callback and no timer is left")
        next_s = timers[0][0]
        if next_s > self.deadline_s:
            raise SimulationHung(f"the run has not ended by {self.deadline_s:.0f} s")
        if next_s > self._now_s + JUMP_S:
            self._turns = 0
        self._now_s = max(self._now_s, next_s)

    def requeue(self, handles: deque[asyncio.Handle]) -> None:
        self._ready.extend(handles)  # type: ignore[attr-defined]
        handles.clear()

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        pass  # cancelled timers at the front are dropped in each iteration, and a run is short

    # -- tasks and futures ------------------------------------------------------------

    def create_future(self) -> asyncio.Future[Any]:
        return SimFuture(next(self._numbers), self)

    def _make_task(
        self, loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, Any], context: Context | None = None
    ) -> asyncio.Task[Any]:
        task = SimTask(next(self._numbers), work, loop=loop, context=context)
        host = HOST.get() if context is None else context.get(HOST)
        self.tasks[task] = None
        task.add_done_callback(self._task_ended)
        if host is not None:
            host.tasks[task] = None
            task.add_done_callback(host.tasks.pop)
            if not host.alive:
                self.call_soon(task.cancel)
        return task

    def _task_ended(self, task: asyncio.Task[Any]) -> None:
        self.tasks.pop(task, None)

    # -- methods that asyncio requires of an event loop -----------------------------------

    def _write_to_self(self) -> None:
        pass  # the loop never sleeps, so it is never woken

    async def create_connection(  # type: ignore[override]
        self, protocol_factory: Callable[[], asyncio.BaseProtocol], host: str, port: int, **options: Any
    ) -> tuple[asyncio.Transport, asyncio.BaseProtocol]:
        transport = await self.network.connect(protocol_factory, (host, port))
        return transport, transport.get_protocol()

    async def create_server(  # type: ignore[override]
        self, protocol_factory: Callable[[], asyncio.BaseProtocol], *, sock: Any, **options: Any
    ) -> ListenerHandle:
        return self.network.listen(protocol_factory, sock.getsockname())

    async def subprocess_exec(  # type: ignore[override]
        self, protocol_factory: Callable[[], asyncio.SubprocessProtocol], *arguments: str, **options: Any
    ) -> tuple[asyncio.SubprocessTransport, asyncio.SubprocessProtocol]:
        return self.processes.start(protocol_factory(), arguments)

    def run_in_executor(  # type: ignore[override]
        self, executor: Any, func: Callable[..., T], *args: Any
    ) -> asyncio.Future[T]:
        """Run `func` immediately, because there is only one thread."""
        future = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:
            future.set_exception(error)
        return future


def _context_of(handle: asyncio.Handle) -> Context:
    context: Context = handle._context  # type: ignore[attr-defined]
    return context


class DelayedPipe:
    """An ordered channel. Each item is delivered some time after it was sent, in the context of the receiver."""

    __slots__ = ("_context", "_deliver", "_last_s", "_loop")

    def __init__(self, loop: SimLoop, deliver: Callable[[Any], None], context: Context) -> None:
        self._loop = loop
        self._deliver = deliver
        self._context = context
        self._last_s = 0.0

    def send(self, item: Any, delay_s: float) -> None:
        # Items of one channel keep their order, even if an item is delayed by less than the one before.
        self._last_s = max(self._loop.time() + delay_s, self._last_s + 1e-7)
        self._loop.call_at(self._last_s, self._deliver, item, context=self._context)
