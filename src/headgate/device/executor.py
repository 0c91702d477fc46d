"""Executors run plans on the device. `LocalExecutor` uses one thread of this process.

`launch` never blocks, and results land in launch order. When a step fails, every later step fails too: the rows and
KV are in an unknown state, and a wrong token is worse than none.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue
from typing import Protocol, TypeVar

from headgate.device.memory import current
from headgate.device.runner import Launched, ModelRunner
from headgate.device.sleeping_memory import Sleeper
from headgate.device.weights.checksums import checksums
from headgate.device.weights.loading import load_weights
from headgate.device.weights.source import WeightSource
from headgate.errors import EngineDead, HalfWritten
from headgate.protocol.command import TAGS, Tag
from headgate.protocol.plan import StepPlan, StepResult

log = logging.getLogger(__name__)

T = TypeVar("T")


class Executor(Protocol):
    def launch(self, plan: StepPlan) -> Future[StepResult]:
        """Run `plan` on the device after all plans launched before it. Never blocks."""

    def load_weights(self, source: WeightSource) -> Future[None]:
        """Replace the weights after all plans launched before, and wake the weights if they are asleep.

        A checkpoint that does not fit changes nothing. A source that fails after the first write raises HalfWritten,
        and every step fails until another load succeeds.
        """

    @property
    def asleep(self) -> tuple[Tag, ...]:
        """The tags whose memory has been released. No step can run while there are any."""

    def sleep(self, tags: Collection[Tag]) -> Future[None]:
        """Release the memory of `tags`; its content is lost."""

    def wake_kv(self) -> Future[None]:
        """Allocate the memory of the KV cache again, zeroed. Raises OutOfMemory if there is too little."""

    def checksums(self) -> Future[dict[str, str]]:
        """The SHA-256 of the weights by checkpoint name, after all plans launched before."""

    def close(self) -> None:
        """Finish the running step, fail the waiting ones, and release the device."""


class LocalExecutor:
    """Runs everything on one thread, the only one that uses the runner."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._failed_step: BaseException | None = None  # no step runs after this
        self._failed_load: BaseException | None = None  # no step runs until another load succeeds
        self._asleep: dict[Tag, Sleeper] = {}
        self._closed = False
        self._thread = threading.Thread(target=self._serve, name="headgate-device", daemon=True)
        self._thread.start()

    def launch(self, plan: StepPlan) -> Future[StepResult]:
        return self._submit(lambda: self._run(plan))

    def load_weights(self, source: WeightSource) -> Future[None]:
        return self._submit(lambda: self._load(source))

    @property
    def asleep(self) -> tuple[Tag, ...]:
        return tuple(tag for tag in TAGS if tag in self._asleep)

    def sleep(self, tags: Collection[Tag]) -> Future[None]:
        return self._submit(lambda: self._sleep(tags))

    def wake_kv(self) -> Future[None]:
        return self._submit(self._wake_kv)

    def checksums(self) -> Future[dict[str, str]]:
        return self._submit(lambda: checksums(self._runner.model))

    def close(self, timeout_s: float = 10.0) -> None:
        self._closed = True
        self._jobs.put(None)
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            log.warning("the device thread is still in a step after %g s; abandoning it", timeout_s)

    def _submit(self, work: Callable[[], T]) -> Future[T]:
        future: Future[T] = Future()
        # A step cannot be cancelled, because the next one depends on its rows. This makes cancel() return False.
        future.set_running_or_notify_cancel()
        if self._closed:
            self._settle(future, work)
        else:
            self._jobs.put(lambda: self._settle(future, work))
        return future

    def _serve(self) -> None:
        with current(self._runner.rows.tokens.device):  # a new thread uses the first GPU by default
            while job := self._jobs.get():
                job()
                del job  # releases what the job references before a long wait for the next

    def _settle(self, future: Future[T], work: Callable[[], T]) -> None:
        try:
            if self._closed:
                raise EngineDead("the executor is closed")
            result = work()
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(result)

    def _run(self, plan: StepPlan) -> StepResult:
        return self._guard(plan.step, self._obstacle(), lambda: self._runner.run(plan))

    def _guard(self, step: int, failure: BaseException | None, work: Callable[[], T]) -> T:
        """Run a part of a step, unless something before it has failed."""
        if failure is not None:
            raise EngineDead(f"step {step} cannot run after {failure!r}") from failure
        try:
            return work()
        except BaseException as error:
            self._failed_step = error
            raise

    def _obstacle(self) -> BaseException | None:
        """The reason why no step can run, or None."""
        asleep = EngineDead(f"{' and '.join(self.asleep)} went to sleep") if self._asleep else None
        return self._failed_step or self._failed_load or asleep

    def _load(self, source: WeightSource) -> None:
        sleeper = self._asleep.get("weights", Sleeper(()))
        try:
            load_weights(self._runner.model, source, before_write=sleeper.take_again)
        except HalfWritten as error:
            self._failed_load = error
            self._asleep.pop("weights", None)
            raise
        except BaseException:
            sleeper.give_back()
            raise
        self._failed_load = None
        self._asleep.pop("weights", None)

    def _sleep(self, tags: Collection[Tag]) -> None:
        runner = self._runner
        runner.forget_graphs()
        for tag in set(tags) - self._asleep.keys():
            weights = (parameter.tensor for _, parameter in runner.model.parameters())
            caches = [cache for layer in runner.kv for cache in layer]
            if runner.routed is not None:
                caches.append(runner.routed.record.ids)
            self._asleep[tag] = Sleeper(weights if tag == "weights" else caches)
            self._asleep[tag].give_back()

    def _wake_kv(self) -> None:
        if sleeper := self._asleep.get("kv_cache"):
            sleeper.take_again()
            del self._asleep["kv_cache"]


class PipelinedExecutor(LocalExecutor):
    """For a device that runs asynchronously: one thread launches steps, another waits for them to land.

    The next step is therefore on the device before the current one has landed. The second thread settles every
    launched step, in launch order, whether it succeeded or failed.
    """

    def __init__(self, runner: ModelRunner) -> None:
        self._failed_landing: BaseException | None = None  # no step lands after this
        self._landing: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._lander = threading.Thread(target=self._land, name="headgate-landing", daemon=True)
        self._lander.start()
        super().__init__(runner)

    def launch(self, plan: StepPlan) -> Future[StepResult]:
        future: Future[StepResult] = Future()
        future.set_running_or_notify_cancel()
        if self._closed:
            future.set_exception(EngineDead("the executor is closed"))
        else:
            self._jobs.put(lambda: self._begin(plan, future))
        return future

    def close(self, timeout_s: float = 10.0) -> None:
        super().close(timeout_s)
        self._lander.join(timeout_s)

    def _serve(self) -> None:
        super()._serve()
        self._landing.put(None)

    def _begin(self, plan: StepPlan, future: Future[StepResult]) -> None:
        try:
            if self._closed:
                raise EngineDead("the executor is closed")
            launched = self._guard(plan.step, self._obstacle(), lambda: self._runner.launch(plan))
        except BaseException as error:
            self._landing.put(partial(future.set_exception, error))
        else:
            self._landing.put(partial(self._finish, launched, future))

    def _land(self) -> None:
        while job := self._landing.get():
            job()

    def _finish(self, launched: Launched, future: Future[StepResult]) -> None:
        try:
            # Ignores later launch failures: those steps come later in launch order.
            result = self._guard(launched.step, self._failed_landing, launched.result)
        except BaseException as error:
            self._failed_landing = error
            future.set_exception(error)
        else:
            future.set_result(result)
