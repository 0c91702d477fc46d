"""Who carries plans to the device: in one process a thread, elsewhere whatever keeps the same promises.

`launch` never blocks and results land in launch order. The first step that fails takes all later ones with it: its
rows and KV are in an unknown state, and a wrong token is worse than none.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Protocol, TypeVar

from headgate.errors import EngineDead, HalfWritten
from headgate.protocol.plan import StepPlan, StepResult
from headgate.worker.runner import Launched, ModelRunner
from headgate.worker.weights import WeightSource, load_weights, verify

log = logging.getLogger(__name__)

T = TypeVar("T")


class Executor(Protocol):
    def launch(self, plan: StepPlan) -> Future[StepResult]:
        """Have the device run `plan` after all plans launched before. Never blocks."""

    def load_weights(self, source: WeightSource) -> Future[None]:
        """Replace the weights after all plans launched before.

        A checkpoint that does not fit changes nothing. One that breaks off after the first write raises HalfWritten,
        and every step fails until another load succeeds.
        """

    def close(self) -> None:
        """Finish the step that runs, fail those that wait, and let go of the device."""


class LocalExecutor:
    """One thread of this process, which alone touches the runner."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._failed_step: BaseException | None = None  # nothing runs after it
        self._failed_load: BaseException | None = None  # nothing runs until another load succeeds
        self._closed = False
        self._thread = threading.Thread(target=self._serve, name="headgate-device", daemon=True)
        self._thread.start()

    def launch(self, plan: StepPlan) -> Future[StepResult]:
        return self._submit(lambda: self._run(plan))

    def load_weights(self, source: WeightSource) -> Future[None]:
        return self._submit(lambda: self._load(source))

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
        while job := self._jobs.get():
            job()

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
        return self._guard(plan.step, self._failed_step or self._failed_load, lambda: self._runner.run(plan))

    def _guard(self, step: int, failure: BaseException | None, work: Callable[[], T]) -> T:
        """Do a part of a step, unless something before it has failed."""
        if failure is not None:
            raise EngineDead(f"step {step} cannot run after {failure!r}") from failure
        try:
            return work()
        except BaseException as error:
            self._failed_step = error
            raise

    def _load(self, source: WeightSource) -> None:
        model = self._runner.model
        # Refused here, the model is untouched and goes on; what fails later leaves it half written.
        verify(dict(model.parameters()), source.metadata())
        try:
            load_weights(model, source)
        except BaseException as error:
            self._failed_load = error
            raise HalfWritten(str(error)) from error
        self._failed_load = None


class PipelinedExecutor(LocalExecutor):
    """For a device that works by itself: one thread gives it steps, another waits for them to land.

    So the next step is on the device before this one has landed. What was begun is settled by the second thread, in
    launch order, however it ends.
    """

    def __init__(self, runner: ModelRunner) -> None:
        self._landing: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._lander = threading.Thread(target=self._land, name="headgate-landing", daemon=True)
        self._lander.start()
        super().__init__(runner)

    def launch(self, plan: StepPlan) -> Future[StepResult]:
        begun: Future[Launched] = self._submit(lambda: self._begin(plan))
        future: Future[StepResult] = Future()
        future.set_running_or_notify_cancel()
        begun.add_done_callback(lambda _: self._hand_over(begun, future))
        return future

    def close(self, timeout_s: float = 10.0) -> None:
        super().close(timeout_s)
        self._landing.put(None)
        self._lander.join(timeout_s)

    def _begin(self, plan: StepPlan) -> Launched:
        return self._guard(plan.step, self._failed_step or self._failed_load, lambda: self._runner.launch(plan))

    def _hand_over(self, begun: Future[Launched], future: Future[StepResult]) -> None:
        if self._lander.is_alive():
            self._landing.put(lambda: self._finish(begun, future))
        else:  # closed: nothing can land any more
            self._finish(begun, future)

    def _land(self) -> None:
        while job := self._landing.get():
            job()

    def _finish(self, begun: Future[Launched], future: Future[StepResult]) -> None:
        try:
            launched = begun.result()
            result = self._guard(launched.step, self._failed_step, launched.result)
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(result)
