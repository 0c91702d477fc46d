"""Who carries plans to the device: in one process a thread, elsewhere whatever keeps the same promises.

`launch` never blocks and results land in launch order. The first step that fails takes all later ones with it: its
rows and KV are in an unknown state, and a wrong token is worse than none.
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
from headgate.device.weights.loading import WeightSource, load_weights
from headgate.errors import EngineDead, HalfWritten
from headgate.protocol.command import TAGS, Tag
from headgate.protocol.plan import StepPlan, StepResult

log = logging.getLogger(__name__)

T = TypeVar("T")


class Executor(Protocol):
    def launch(self, plan: StepPlan) -> Future[StepResult]:
        """Have the device run `plan` after all plans launched before. Never blocks."""

    def load_weights(self, source: WeightSource) -> Future[None]:
        """Replace the weights after all plans launched before, and wake them if they sleep.

        A checkpoint that does not fit changes nothing. One that breaks off after the first write raises HalfWritten,
        and every step fails until another load succeeds.
        """

    @property
    def asleep(self) -> tuple[Tag, ...]:
        """What has given its memory back. No step can run meanwhile."""

    def sleep(self, tags: Collection[Tag]) -> Future[None]:
        """Give memory back, and lose what was in it."""

    def wake_kv(self) -> Future[None]:
        """Take the memory of the KV cache again, all zero; OutOfMemory if it cannot be had."""

    def close(self) -> None:
        """Finish the step that runs, fail those that wait, and let go of the device."""


class LocalExecutor:
    """One thread of this process, which alone touches the runner."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._failed_step: BaseException | None = None  # nothing runs after it
        self._failed_load: BaseException | None = None  # nothing runs until another load succeeds
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

    def close(self, timeout_s: float = 10.0) -> None:
        self._closed = True
        self._jobs.put(None)
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            log.warning("the device thread is still in a step after %g s; leaving it behind", timeout_s)

    def _submit(self, work: Callable[[], T]) -> Future[T]:
        future: Future[T] = Future()
        # A step cannot be taken back, for the next one builds on its rows. This makes cancel() answer False.
        future.set_running_or_notify_cancel()
        if self._closed:
            self._settle(future, work)
        else:
            self._jobs.put(lambda: self._settle(future, work))
        return future

    def _serve(self) -> None:
        with current(self._runner.rows.tokens.device):  # a thread begins with the first GPU
            while job := self._jobs.get():
                job()
                del job  # and what it holds, before a long wait for the next

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
        """Do a part of a step, unless something before it has failed."""
        if failure is not None:
            raise EngineDead(f"step {step} cannot run after {failure!r}") from failure
        try:
            return work()
        except BaseException as error:
            self._failed_step = error
            raise

    def _obstacle(self) -> BaseException | None:
        """Why no step can run."""
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
            homes = (parameter.home for _, parameter in runner.model.parameters())
            caches = (cache for layer in runner.kv for cache in layer)
            self._asleep[tag] = Sleeper(homes if tag == "weights" else caches)
            self._asleep[tag].give_back()

    def _wake_kv(self) -> None:
        if sleeper := self._asleep.get("kv_cache"):
            sleeper.take_again()
            del self._asleep["kv_cache"]


class PipelinedExecutor(LocalExecutor):
    """For a device that works by itself: one thread gives it steps, another waits for them to land.

    So the next step is on the device before this one has landed. What was begun is settled by the second thread, in
    launch order, however it ends.
    """

    def __init__(self, runner: ModelRunner) -> None:
        self._failed_landing: BaseException | None = None  # nothing lands after it
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
            # Not what has failed to launch since: that comes later in launch order.
            result = self._guard(launched.step, self._failed_landing, launched.result)
        except BaseException as error:
            self._failed_landing = error
            future.set_exception(error)
        else:
            future.set_result(result)
