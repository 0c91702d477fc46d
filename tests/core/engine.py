"""A scheduler with its fake device, driven one step at a time."""

from __future__ import annotations

from headgate.contract.sampling import SamplingParams
from headgate.core.blocks import BlockPool
from headgate.core.limits import SchedulerLimits
from headgate.core.scheduler import Scheduler
from headgate.protocol.output import Ended, Outputs
from headgate.protocol.plan import StepPlan
from headgate.protocol.request import GenerateRequest
from headgate.testing.device import FakeDevice, expected_token

BLOCK_SIZE = 4
VOCAB_SIZE = 1000


class Engine:
    def __init__(
        self,
        *,
        blocks: int = 32,
        max_context: int = 100,
        running: int = 8,
        budget: int = 64,
        windows: tuple[int | None, ...] = (None,),
        **limits: object,
    ):
        self.limits = SchedulerLimits(max_context, running, budget, VOCAB_SIZE, **limits)  # type: ignore[arg-type]
        self.windows = windows
        self.pool = BlockPool(blocks, BLOCK_SIZE, windows)
        self.scheduler = Scheduler(self.pool, self.limits)
        self.device = FakeDevice(blocks, BLOCK_SIZE, running, VOCAB_SIZE, windows=windows)
        self.tokens: dict[int, list[int]] = {}
        self.ended: dict[int, Ended] = {}
        self.outputs_taken: list[Outputs] = []

    def add(self, id: int, prompt: int | list[int] = 4, max_tokens: int | None = 4, **fields: object) -> None:
        """Add a request; a number as prompt means that many tokens, unique to the request."""
        tokens = [(id * 31 + i) % VOCAB_SIZE for i in range(prompt)] if isinstance(prompt, int) else prompt
        sampling = fields.pop("sampling", None) or SamplingParams(max_tokens=max_tokens)
        self.scheduler.add(GenerateRequest(id, tuple(tokens), sampling, **fields))  # type: ignore[arg-type]
        self.collect()

    def launch(self) -> StepPlan | None:
        plan = self.scheduler.schedule()
        if plan is not None and plan.rows:
            self.device.launch(plan)
        self.scheduler.check()
        return plan

    def land(self, *lengths: int) -> None:
        """Commit the oldest launched step. `lengths` has the number of tokens per slice that samples; default 1."""
        self.scheduler.commit(self.device.land(lengths))
        self.scheduler.check()
        self.collect()

    def step(self, *lengths: int) -> StepPlan | None:
        plan = self.launch()
        if plan is not None and plan.rows:
            self.land(*lengths)
        return plan

    def run(self) -> None:
        while self.step():
            pass

    def collect(self) -> None:
        outputs = self.scheduler.take_outputs()
        self.outputs_taken.append(outputs)
        for id, token in zip(outputs.ids, outputs.tokens, strict=True):
            self.tokens.setdefault(id, []).append(token)
        for ended in outputs.ended:
            assert ended.id not in self.ended
            self.ended[ended.id] = ended

    def answer(self, prompt: list[int], count: int) -> list[int]:
        """Return the answer of a correct engine to `prompt` under the current weights."""
        tokens = list(prompt)
        for _ in range(count):
            tokens.append(expected_token(tokens, self.scheduler.version, VOCAB_SIZE, self.windows))
        return tokens[len(prompt) :]


def prompt_of(id: int, count: int = 4) -> list[int]:
    return [(id * 31 + i) % VOCAB_SIZE for i in range(count)]
