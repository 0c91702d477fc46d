"""Measures the cost of choosing a worker: CPU time by prompt and fleet size, and memory by live conversations.

python benchmarks/router/choice.py [--conversations 100000]
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import resource
import time
from collections.abc import Callable
from functools import partial

from headgate.router.data_path.request_info import RequestInfo, read_request_info
from headgate.router.fleet.policy import POLICIES
from headgate.router.fleet.prefix_index import PrefixIndex
from headgate.router.fleet.worker import Worker

CHAT = "/v1/chat/completions"
SIZES = (200, 2_000, 16_000, 100_000)
FLEETS = (4, 16, 1000)


def fleet(count: int) -> tuple[Worker, ...]:
    return tuple(Worker(f"http://worker-{number}") for number in range(count))


def cost_us(act: Callable[[], object], times: int) -> float:
    """The best of several rounds, because other load on the machine can only add time."""
    rounds = []
    for _ in range(15):
        start = time.process_time_ns()
        for _ in range(times):
            act()
        rounds.append((time.process_time_ns() - start) / times / 1e3)
    return round(min(rounds), 2)


def body(size: int, rng: random.Random) -> bytes:
    """A conversation with messages of about 500 characters."""
    messages: list[dict[str, str]] = []
    while (room := size - len(json.dumps(messages)) - 50) > 0:
        role = "user" if len(messages) % 2 == 0 else "assistant"
        content = "".join(rng.choices("abcdefgh {}", k=min(500, room)))
        messages.append({"role": role, "content": content})
    return json.dumps({"model": "m", "messages": messages, "stream": True}).encode()


def by_prompt(size: int) -> dict[str, float]:
    data, times = body(size, random.Random(0)), max(200, 4_000_000 // max(size, 2000))
    ask = read_request_info(CHAT, data)
    index, workers = PrefixIndex(), fleet(4)
    path = index.path(ask.root, ask.prompt, chat=ask.chat)
    index.insert(path, workers[0]).end(1.0)
    fresh = iter(range(10**9))

    def known() -> None:
        path = index.path(ask.root, ask.prompt, chat=ask.chat)
        index.match(path)
        index.insert(path, workers[0])

    def unknown() -> None:
        path = index.path(next(fresh), ask.prompt, chat=ask.chat)
        index.match(path)
        index.insert(path, workers[0])

    return {
        "bytes": len(data),
        "read_us": cost_us(lambda: read_request_info(CHAT, data), times),
        "path_match_insert_known_us": cost_us(known, times),
        "path_match_insert_new_us": cost_us(unknown, times),
    }


def by_fleet(policy_name: str) -> dict[str, float]:
    """The cost for a new request, and for one whose conversation is cached on a worker."""
    costs = {}
    ask, rng = RequestInfo("m", True, None, b"somebody", 1, 0, b"x" * 5000, False, 1250, False), random.Random(0)
    for count in FLEETS:
        policy, workers, index = POLICIES[policy_name](), fleet(count), PrefixIndex()
        path = index.path(ask.root, ask.prompt, chat=False)
        new = index.match(path)
        for worker in workers[:4]:
            index.insert(path, worker).end(1.0)
        known = index.match(path)
        for name, match in (("new", new), ("known", known)):
            choose = partial(policy.choose, workers, ask, match, rng)
            costs[f"{count}_{name}_us"] = cost_us(choose, 2000)
    return costs


def memory_mb(conversations: int, turns: int = 8) -> dict[str, float]:
    """Memory of a default index: conversations of 1,000 bytes per turn, and a hundred 4,000-byte system prompts."""
    index, workers, rng = PrefixIndex(), fleet(8), random.Random(0)
    systems = [b'[{"role": "system", "content": "' + rng.randbytes(2000).hex().encode() + b'"}' for _ in range(100)]
    filler = b"water " * 150
    gc.collect()
    before, found = resident_mb(), 0
    for turn in range(1, turns + 1):
        for number in range(conversations):
            own = b', {"role": "user", "content": "%d %s"}' % (number, filler)
            path = index.path(1, systems[number % 100] + own * turn, chat=True)
            found += turn == turns and index.match(path).last_workers == [workers[number % 8]]
            index.insert(path, workers[number % 8]).end(float(turn))
    return {
        "conversations": conversations,
        "turns": turns,
        "found_in_the_last_turn": found,
        "nodes": len(index),
        "resident_mb": round(resident_mb() - before, 1),
        "bytes_per_node": round((resident_mb() - before) * 2**20 / len(index)),
    }


def longest_insert_ms(max_nodes: int = 1_000_000) -> float:
    """The longest insert into a full index, when its generations change."""
    index, (worker,), longest = PrefixIndex(max_nodes), fleet(1), 0
    for number in range(max_nodes // 4):
        path = index.path(number, b"x" * 5000, chat=False)
        start = time.process_time_ns()
        index.insert(path, worker)
        longest = max(longest, time.process_time_ns() - start)
    return round(longest / 1e6, 2)


def resident_mb() -> float:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize() / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--conversations", type=int, default=100_000, help="of the memory run; 0 leaves it out")
    conversations = parser.parse_args().conversations
    result: dict[str, object] = {}
    if conversations:
        result["memory"] = memory_mb(conversations)
    result["prompts"] = {size: by_prompt(size) for size in SIZES}
    result["policies"] = {name: by_fleet(name) for name in POLICIES}
    result["longest_insert_ms"] = longest_insert_ms()
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
