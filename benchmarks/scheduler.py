"""Measures the scheduler: CPU time of `schedule()` and `commit()` by running sequences, and memory over many steps.

python benchmarks/scheduler.py [--steps 1000000]
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import statistics
import time

from headgate.contract.sampling import SamplingParams
from headgate.core.blocks import BlockPool
from headgate.core.limits import SchedulerLimits
from headgate.core.scheduler import Scheduler
from headgate.protocol.plan import StepResult
from headgate.protocol.request import GenerateRequest

BLOCK_SIZE = 32


def scheduler(running: int) -> Scheduler:
    limits = SchedulerLimits(
        max_context=2048, max_running=running, max_batch_tokens=8192, vocab_size=50_000, eos_token_ids=(2,)
    )
    return Scheduler(BlockPool(running * 64, BLOCK_SIZE), limits)


def step(decider: Scheduler) -> None:
    plan = decider.schedule()
    assert plan is not None
    decider.commit(StepResult(plan.step, [5] * sum(plan.samples)))
    decider.take_outputs()


def cost_ms(running: int, steps: int = 500) -> dict[str, float]:
    decider = scheduler(running)
    for i in range(running):
        decider.add(GenerateRequest(i, tuple(range(100 + i % 7)), SamplingParams(max_tokens=1900)))
    while decider.waiting:
        step(decider)
    planning, committing = [], []
    for _ in range(steps):
        start = time.process_time()
        plan = decider.schedule()
        middle = time.process_time()
        assert plan is not None and len(plan.rows) == running
        result = StepResult(plan.step, [5] * running)
        before = time.process_time()
        decider.commit(result)
        decider.take_outputs()
        committing.append(time.process_time() - before)
        planning.append(middle - start)
    both = [a + b for a, b in zip(planning, committing, strict=True)]
    return {
        "schedule_ms": 1e3 * statistics.median(planning),
        "commit_ms": 1e3 * statistics.median(committing),
        "both_ms": 1e3 * statistics.median(both),
        "both_p99_ms": 1e3 * statistics.quantiles(both, n=100)[98],
    }


def memory_mb(steps: int, samples: int = 10) -> list[float]:
    """Resident memory over many requests with distinct prompts, some of them aborted."""
    rng = random.Random(0)
    decider, next_id, readings = scheduler(8), 0, []
    for number in range(steps):
        decider.tick(number * 0.01)
        while len(decider.sequences) < 12:
            prompt = tuple(rng.choices(range(50_000), k=rng.randrange(1, 100)))
            sampling = SamplingParams(max_tokens=rng.randrange(1, 100))
            decider.add(GenerateRequest(next_id, prompt, sampling, timeout_s=rng.choice([None, 1.0, 1000.0])))
            next_id += 1
        if rng.random() < 0.01:
            decider.abort([rng.choice(list(decider.sequences))], "api_abort")
        step(decider)
        if number % (steps // samples) == steps // samples - 1:
            readings.append(resident_mb())
    decider.check()
    return readings


def resident_mb() -> float:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize() / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=1_000_000, help="steps of the memory run; 0 leaves it out")
    steps = parser.parse_args().steps
    result: dict[str, object] = {"running": {n: cost_ms(n) for n in (1, 32, 256, 1024)}}
    if steps:
        result["memory_steps"], result["memory_mb"] = steps, memory_mb(steps)
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
