"""An executor over the fake device, and a clock that is turned by hand."""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future

from headgate.protocol.plan import StepPlan, StepResult
from headgate.testing.device import FakeDevice


class ManualClock:
    def __init__(self, now_s: float = 0.0) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s


class FakeExecutor:
    """Runs plans on a `FakeDevice`: each at once, or, with `by_hand`, when `land` is called."""

    def __init__(self, device: FakeDevice, *, by_hand: bool = False) -> None:
        self.device = device
        self.by_hand = by_hand
        self.plans: list[StepPlan] = []
        self._futures: deque[Future[StepResult]] = deque()

    def launch(self, plan: StepPlan) -> Future[StepResult]:
        future: Future[StepResult] = Future()
        self.plans.append(plan)
        self.device.launch(plan)
        self._futures.append(future)
        if not self.by_hand:
            self.land()
        return future

    def land(self) -> None:
        """The oldest launched step comes back."""
        self._futures.popleft().set_result(self.device.land())

    def fail(self, error: Exception) -> None:
        """The oldest launched step breaks."""
        self._futures.popleft().set_exception(error)

    def load_weights(self, source: object) -> Future[None]:
        self.device.version += 1
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def close(self) -> None:
        while self._futures:
            self.land()
