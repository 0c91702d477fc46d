"""Simulates the placement of conversations with the router's own index and policies, without a network.

Each conversation begins with one of a few long system prompts, waits for every answer, pauses, and sends the next
turn. A simulated worker caches everything, and takes a fixed time per output token and per uncached prompt token.
Reports, as the mean of all seeds and the worst of them: later turns that go to the worker of the previous turn;
prompt tokens that the worker had cached; requests of the busiest worker over the mean.

python benchmarks/router/placement.py [--policy cache_aware --policy ...] [--seeds 20]
"""

from __future__ import annotations

import argparse
import heapq
import json
import random
import statistics
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from headgate.router.data_path.request_info import RequestInfo, read_request_info
from headgate.router.fleet.policy import POLICIES
from headgate.router.fleet.prefix_index import PrefixIndex
from headgate.router.fleet.worker import Worker

PREFILL_S, DECODE_S = 1 / 8000, 1 / 50  # per token
WORDS = ["the", "a", "of", "and", "water", "gate", "river", "hold", "open", "close", "level", "flow", "valve", "pump"]


@dataclass(frozen=True)
class Scenario:
    start_s: float  # conversations begin within this time
    think_s: float  # mean pause between an answer and the next question


SCENARIOS = {
    "over 30 s": Scenario(30, 2),
    "all at once": Scenario(0, 2),
    "one by one": Scenario(100_000, 2),
    "slow readers": Scenario(30, 60),
}


@dataclass(eq=False)
class Conversation:
    name: str
    messages: list[dict[str, str]]
    turns_left: int
    worker: Worker | None = None  # of the last turn


@dataclass
class Tally:
    turns: int = 0
    at_home: int = 0
    tokens: int = 0
    hit_tokens: int = 0
    requests: Counter[Worker] = field(default_factory=Counter)

    def figures(self, workers: int) -> dict[str, float]:
        return {
            "at_home": self.at_home / self.turns,
            "cached_tokens": self.hit_tokens / self.tokens,
            "busiest_over_mean": max(self.requests.values()) * workers / self.requests.total(),
        }


class Cache:
    """The cache of a worker: prefixes of prompts in steps of 64 bytes."""

    def __init__(self) -> None:
        self._seen: set[int] = set()

    def use(self, prompt: bytes) -> int:
        """Compute a prompt; returns how many of its bytes were cached."""
        hit, key, known = 0, 0, True
        for end in range(64, len(prompt) + 1, 64):
            key = hash((key, prompt[end - 64 : end]))
            known = known and key in self._seen
            hit = end if known else hit
            self._seen.add(key)
        return hit


class Simulation:
    def __init__(self, policy: str, scenario: Scenario, *, workers: int, seed: int) -> None:
        self.tally = Tally()
        self._rng = random.Random(seed)
        self._scenario = scenario
        self._workers = tuple(Worker(f"http://worker-{number}") for number in range(workers))
        self._caches = {worker: Cache() for worker in self._workers}
        self._policy, self._index = POLICIES[policy](), PrefixIndex()
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._now_s, self._number = 0.0, 0

    def run(self, conversations: int, system_prompts: int, weights: list[float]) -> Tally:
        systems = [self._text(3000, 9000) for _ in range(system_prompts)]
        for number, system in enumerate(self._rng.choices(systems, weights, k=conversations)):
            opening = [{"role": "system", "content": system}]
            conversation = Conversation(f"conversation-{number}", opening, self._rng.randrange(5, 16))
            self._after(self._rng.uniform(0, self._scenario.start_s), self._asker(conversation))
        while self._events:
            self._now_s, _, act = heapq.heappop(self._events)
            act()
        assert not any(worker.load or worker.pending_tokens for worker in self._workers)
        return self.tally

    def _after(self, delay_s: float, act: Callable[[], None]) -> None:
        self._number += 1
        heapq.heappush(self._events, (self._now_s + delay_s, self._number, act))

    def _asker(self, conversation: Conversation) -> Callable[[], None]:
        return lambda: self._ask(conversation)

    def _ask(self, conversation: Conversation) -> None:
        conversation.messages.append({"role": "user", "content": self._text(20, 400)})
        body = json.dumps({"model": "m", "messages": conversation.messages}).encode()
        ask = read_request_info("/v1/chat/completions", body, session=conversation.name)
        path = self._index.path(ask.root, ask.prompt, chat=ask.chat)
        worker = self._policy.choose(self._workers, ask, self._index.match(path), self._rng)
        visit = self._index.insert(path, worker)
        hit_tokens = self._count(conversation, ask, worker)
        worker.in_flight += 1
        worker.running += 1
        worker.pending_tokens += ask.tokens

        def first_token() -> None:
            worker.pending_tokens -= ask.tokens

        def end() -> None:
            worker.in_flight -= 1
            worker.running -= 1
            visit.end(self._now_s)
            conversation.messages.append({"role": "assistant", "content": self._text(100, 1200)})
            conversation.turns_left -= 1
            if conversation.turns_left:
                self._after(self._rng.expovariate(1 / self._scenario.think_s), self._asker(conversation))

        prefill_s = (ask.tokens - hit_tokens) * PREFILL_S
        self._after(prefill_s, first_token)
        self._after(prefill_s + self._rng.randrange(25, 300) * DECODE_S, end)

    def _count(self, conversation: Conversation, ask: RequestInfo, worker: Worker) -> int:
        tally, hit_tokens = self.tally, self._caches[worker].use(ask.prompt) // 4
        if conversation.worker is not None:
            tally.turns += 1
            tally.at_home += worker is conversation.worker
        conversation.worker = worker
        tally.requests[worker] += 1
        tally.tokens += ask.tokens
        tally.hit_tokens += hit_tokens
        return hit_tokens

    def _text(self, least: int, most: int) -> str:
        return " ".join(self._rng.choices(WORDS, k=self._rng.randrange(least, most) // 5))


def measure(policy: str, scenario: Scenario, popularity: str, seeds: int, arguments: argparse.Namespace) -> object:
    prompts, workers = arguments.system_prompts, arguments.workers
    weights = [1.0 if popularity == "uniform" else 1 / rank for rank in range(1, prompts + 1)]
    runs = [
        Simulation(policy, scenario, workers=workers, seed=seed)
        .run(arguments.conversations, prompts, weights)
        .figures(workers)
        for seed in range(seeds)
    ]
    worst = {"at_home": min, "cached_tokens": min, "busiest_over_mean": max}
    return {
        name: {
            "mean": round(statistics.mean(run[name] for run in runs), 3),
            "worst": round(judge(run[name] for run in runs), 3),
        }
        for name, judge in worst.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--policy", action="append", choices=list(POLICIES), help="may be repeated")
    parser.add_argument("--scenario", action="append", choices=list(SCENARIOS), help="may be repeated")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--conversations", type=int, default=64)
    parser.add_argument("--system-prompts", type=int, default=8)
    parser.add_argument("--seeds", type=int, default=10)
    arguments = parser.parse_args()
    result = {
        policy: {
            scenario: {
                popularity: measure(policy, SCENARIOS[scenario], popularity, arguments.seeds, arguments)
                for popularity in ("uniform", "zipf")
            }
            for scenario in arguments.scenario or SCENARIOS
        }
        for policy in arguments.policy or ("cache_aware", "session", "least_requests", "round_robin")
    }
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
