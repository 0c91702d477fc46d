"""An executor that uses the fake device, and a manual clock."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from concurrent.futures import Future

from headgate.protocol.command import Tag
from headgate.protocol.plan import StepPlan, StepResult
from headgate.testing.device import FakeDevice


class ManualClock:
    def __init__(self, now_s: float = 0.0) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s


class FakeExecutor:
    """An executor that also loads weights. Runs a plan on a `FakeDevice` at once or, with `by_hand`, at `land`."""

    def __init__(self, device: FakeDevice, *, by_hand: bool = False) -> None:
        self.device = device
        self.by_hand = by_hand
        self.plans: list[StepPlan] = []
        self.asleep: tuple[Tag, ...] = ()
        self._futures: deque[Future[StepResult]] = deque()

    def launch(self, plan: StepPlan) -> Future[StepResult]:
        future: Future[StepResult] = Future()
        assert not self.asleep, "a step was launched while memory was asleep"
        self.plans.append(plan)
        self.device.launch(plan)
        self._futures.append(future)
        if not self.by_hand:
            self.land()
        return future

    def land(self) -> None:
        """Complete the oldest launched step."""
        self._futures.popleft().set_result(self.device.land())

    def fail(self, error: Exception) -> None:
        """Fail the oldest launched step."""
        self._futures.popleft().set_exception(error)

    def load_weights(self, source: object, **declared: object) -> Future[None]:
        self.device.version += 1
        return self.wake_weights()

    def sleep(self, tags: Collection[Tag]) -> Future[None]:
        if "kv_cache" in tags:
            self.device.forget()
        self.asleep = tuple({*self.asleep, *tags})
        return done()

    def wake_weights(self) -> Future[None]:
        self.asleep = tuple(tag for tag in self.asleep if tag != "weights")
        return done()

    def wake_kv(self) -> Future[None]:
        self.asleep = tuple(tag for tag in self.asleep if tag != "kv_cache")
        return done()

    def checksums(self) -> Future[dict[str, str]]:
        future: Future[dict[str, str]] = Future()
        future.set_result({"weights": str(self.device.version)})
        return future

    def close(self) -> None:
        while self._futures:
            self.land()


def done() -> Future[None]:
    future: Future[None] = Future()
    future.set_result(None)
    return future
