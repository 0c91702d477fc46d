"""Compares the placement of conversations by this router and others, over HTTP with mock workers.

    python benchmarks/router/peers_placement.py --sglang-router PATH --vllm-router PATH [--seeds 3]

Each of 64 conversations has about ten turns and one of eight long system prompts, chosen evenly or by a Zipf
distribution; it waits for each answer, pauses, and sends the next turn. Reports the share of later turns that go to
the worker of the previous turn, and the requests of the busiest worker over the mean, as means over all seeds, in
JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import msgspec
import uvloop
from cost import WORKERS, add_peers, given
from load import SYSTEM_PROMPTS, chat, closing, connect, words
from processes import Peer, Running, mock_workers, running, until_ready

CONVERSATIONS = 64
SYSTEM_CHARACTERS = 8000
START_S, THINK_S = 2.0, 0.1
ANSWER_MS = 60

Pick = Callable[[random.Random], int]
WEIGHTS = [1 / (rank + 1) for rank in range(SYSTEM_PROMPTS)]
PICKS: dict[str, Pick] = {
    "uniform": lambda rng: rng.randrange(SYSTEM_PROMPTS),
    "zipf": lambda rng: rng.choices(range(SYSTEM_PROMPTS), WEIGHTS)[0],
}


async def converse(port: int, system: str, name: str, rng: random.Random) -> list[str]:
    """The workers of one conversation, turn by turn."""
    messages, met = [{"role": "system", "content": system}], []
    await asyncio.sleep(rng.random() * START_S)
    with closing(await connect(port, 1)) as (connection,):
        for turn in range(rng.randint(8, 12)):
            messages.append({"role": "user", "content": f"{name}, turn {turn}: {words(rng, 300)}"})
            answer = msgspec.json.decode(await connection.ask(chat(messages, seed=ANSWER_MS)))
            met.append(answer["system_fingerprint"])
            messages.append(answer["choices"][0]["message"])
            await asyncio.sleep(rng.expovariate(1 / THINK_S))
    return met


async def place(router: Running, pick: Pick, seed: int) -> dict[str, float]:
    await until_ready(router)
    rng = random.Random(seed)
    systems = [f"{seed}-{number} {words(rng, SYSTEM_CHARACTERS)}" for number in range(SYSTEM_PROMPTS)]
    conversations = await asyncio.gather(
        *(
            converse(router.port, systems[pick(rng)], f"{seed}-{number}", random.Random(f"{seed}-{number}"))
            for number in range(CONVERSATIONS)
        )
    )
    turns = [(before, now) for met in conversations for before, now in pairwise(met)]
    requests = Counter(worker for met in conversations for worker in met)
    return {
        "at_home": sum(before == now for before, now in turns) / len(turns),
        "largest_over_mean": max(requests.values()) * WORKERS / requests.total(),
    }


async def measure(peers: list[Peer], seeds: int) -> dict[str, dict[str, Any]]:
    figures: dict[str, dict[str, Any]] = {peer.name: {} for peer in peers}
    with mock_workers(WORKERS, None) as urls:
        for shape, pick in PICKS.items():
            for peer in peers:
                rounds = []
                for seed in range(seeds):
                    with running(peer, urls[peer.workers], None) as router:
                        rounds.append(await place(router, pick, seed))
                figures[peer.name][shape] = {
                    name: round(statistics.mean(one[name] for one in rounds), 3) for name in rounds[0]
                }
                print(f"{peer.name}, {shape}: {figures[peer.name][shape]}", file=sys.stderr, flush=True)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_peers(parser)
    parser.add_argument("--seeds", type=int, default=3, help="default: %(default)s")
    options = parser.parse_args()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        figures = runner.run(measure(given(options), options.seeds))
    print(json.dumps({"seeds": options.seeds, "conversations": CONVERSATIONS, "placement": figures}, indent=1))


if __name__ == "__main__":
    main()
