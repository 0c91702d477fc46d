"""Measures how a hostile tenant affects a well-behaved one on the same server.

    python benchmarks/hostile.py [--router] [--seconds 30] [--first] [--json FILE]

The polite tenant streams short completions at a steady rate: first undisturbed, then while the other tenant opens 20
sockets that request 64 answers each and read nothing, sends 5 prompts of 30 MB a second, and sends 5,000 requests at
once. The benchmark measures the time to the first and to the last token, and the memory of the server and its engine.
Promised are answers to all polite requests, each time's p99 within twice its undisturbed value plus 50 ms, and memory
within 500 MB of idle; the exit code is 1 if that was not kept.
With --router, both tenants call a router in front of the server (`headgate up --mixed 1`), and its memory counts too.
The model is tiny, so that its computation does not hide the cost of the server. Clients are separate processes that
share the machine's cores with the server. On a shared machine, --first (as root) gives the benchmark's processes
priority.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import socket
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

from disagg import go_first, process

from headgate.httpclient import HttpAddress, call
from headgate.testing.tiny import tiny_model

CONTEXT = 8192
TOKENS = 8  # of a polite answer
STALLED, CHOICES, SMALL_BUFFER = 20, 64, 4096
GIANT_BYTES, GIANTS_PER_S = 30 * 10**6, 5
BURST = 5000
WAYS = ["stalled", "giants", "burst"]
KEYS = {"polite": "polite-key", "hostile": "hostile-key"}
FACTOR, EXTRA_S, MEMORY_MB = 2, 0.05, 500  # the promised limits
PATIENCE_S = 60.0


@dataclass
class Latencies:
    """Latencies and errors of the polite tenant."""

    first_s: list[float] = field(default_factory=list)
    whole_s: list[float] = field(default_factory=list)
    statuses: Counter[str] = field(default_factory=Counter)

    def summary(self) -> dict[str, Any]:
        times = {"first_token_ms": self.first_s, "whole_ms": self.whole_s}
        figures = {name: {f"p{p}": _percentile_ms(values, p) for p in (50, 99)} for name, values in times.items()}
        return {"requests": sum(self.statuses.values()), "answers": dict(self.statuses), **figures}


def _percentile_ms(values: list[float], percent: int) -> float | None:
    ranked = sorted(values)
    return round(1000 * ranked[min(len(ranked) - 1, len(ranked) * percent // 100)], 2) if ranked else None


async def ask(url: str, felt: Latencies) -> None:
    body = {"prompt": "a short prompt", "max_tokens": TOKENS, "ignore_eos": True, "stream": True}
    began_s, first_s = perf_counter(), 0.0
    try:
        async with asyncio.timeout(PATIENCE_S):
            async with call(HttpAddress.of(url), "POST", "/v1/completions", _json(body), KEYS["polite"]) as answer:
                async for line in answer.lines():
                    first_s = first_s or (perf_counter() - began_s if line.startswith(b"data:") else 0.0)
    except (OSError, TimeoutError, asyncio.IncompleteReadError) as error:
        felt.statuses[type(error).__name__] += 1
        return
    felt.statuses[str(answer.status)] += 1
    if answer.status == 200:
        felt.first_s.append(first_s)
        felt.whole_s.append(perf_counter() - began_s)


async def be_polite(url: str, seconds: float, per_s: float) -> Latencies:
    """An open loop: a request does not wait for the previous answer."""
    felt, began_s = Latencies(), perf_counter()
    async with asyncio.TaskGroup() as tasks:
        for i in range(int(seconds * per_s)):
            await asyncio.sleep(max(0.0, began_s + i / per_s - perf_counter()))
            tasks.create_task(ask(url, felt))
    return felt


# ------------------------------------------------------------------------------------------------- the hostile tenant


def _json(body: dict[str, Any]) -> bytes:
    return json.dumps(body).encode()


def _request(body: bytes) -> bytes:
    head = f"POST /v1/completions HTTP/1.1\r\nHost: h\r\nAuthorization: Bearer {KEYS['hostile']}\r\n"
    return head.encode() + b"Content-Length: %d\r\n\r\n" % len(body) + body


def stall(address: HttpAddress) -> socket.socket:
    """A connection that requests long answers and reads nothing."""
    stalled = socket.socket()
    stalled.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SMALL_BUFFER)
    stalled.connect((address.host, address.port))
    body = {"prompt": "a", "n": CHOICES, "logprobs": 20, "stream": True, "max_tokens": 4000, "ignore_eos": True}
    stalled.sendall(_request(_json(body)))
    return stalled


async def send_giants(url: str, met: Counter[str]) -> None:
    body = _json({"prompt": "word " * (GIANT_BYTES // 5)})
    async with asyncio.TaskGroup() as tasks:
        while True:
            tasks.create_task(_send(url, body, "giant", met))
            await asyncio.sleep(1 / GIANTS_PER_S)


async def _send(url: str, body: bytes, what: str, met: Counter[str]) -> None:
    try:
        async with asyncio.timeout(PATIENCE_S):
            async with call(HttpAddress.of(url), "POST", "/v1/completions", body, KEYS["hostile"]) as answer:
                met[f"{what} {answer.status}"] += 1
                await answer.body()
    except (OSError, TimeoutError, asyncio.IncompleteReadError) as error:
        met[f"{what} {type(error).__name__}"] += 1


async def be_hostile(url: str, seconds: float, ways: list[str]) -> Counter[str]:
    met: Counter[str] = Counter()
    stalled = [stall(HttpAddress.of(url)) for _ in range(STALLED * ("stalled" in ways))]
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds), asyncio.TaskGroup() as tasks:
            if "giants" in ways:
                tasks.create_task(send_giants(url, met))
            await asyncio.sleep(seconds / 3)
            body = _json({"prompt": "a burst", "max_tokens": 64, "ignore_eos": True})
            for _ in range(BURST * ("burst" in ways)):
                tasks.create_task(_send(url, body, "burst", met))
            await asyncio.sleep(seconds)
    for connection in stalled:
        met[f"stalled {_status(connection)}"] += 1
        connection.close()
    return met


def _status(connection: socket.socket) -> str:
    """The status of an answer that was not read."""
    connection.setblocking(False)
    try:
        return connection.recv(12).decode().rpartition(" ")[2] or "without an answer"
    except OSError as error:
        return type(error).__name__


@asynccontextmanager
async def hostile(url: str, seconds: float, ways: list[str]) -> AsyncIterator[dict[str, int]]:
    """Runs the hostile tenant in a separate process; its counts are available at the end."""
    met: dict[str, int] = {}
    command = (sys.executable, __file__, "--hostile", url, "--seconds", str(seconds), "--ways", *ways)
    child = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    try:
        yield met
        output, _ = await child.communicate()
        met |= json.loads(output)
    finally:
        if child.returncode is None:
            child.kill()
            await child.wait()


# ------------------------------------------------------------------------------------------------------------- memory


def memory_mb(pids: list[int]) -> float:
    total = 0
    for pid in pids:
        with suppress(OSError):
            total += int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return total / 1e6


def children_of(pid: int) -> list[int]:
    with suppress(OSError):
        found = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
        return found + [grandchild for child in found for grandchild in children_of(child)]
    return []


async def watch_memory(pids: list[int], seen: list[float]) -> None:
    while True:
        seen.append(memory_mb(pids))
        await asyncio.sleep(0.1)


# ---------------------------------------------------------------------------------------------------------- the run


async def measure(url: str, seconds: float, per_s: float, ways: list[str]) -> dict[str, Any]:
    pids = children_of(os.getpid())
    await be_polite(url, 5, per_s)  # warm-up
    idle_mb, seen = memory_mb(pids), [0.0]
    undisturbed = await be_polite(url, seconds, per_s)
    watching = asyncio.create_task(watch_memory(pids, seen))
    async with hostile(url, seconds + 2, ways) as met:
        await asyncio.sleep(1)  # until it has started
        disturbed = await be_polite(url, seconds, per_s)
    watching.cancel()
    memory = {"idle": round(idle_mb), "peak": round(max(seen)), "allowed": round(idle_mb + MEMORY_MB)}
    result = judge(undisturbed, disturbed)
    return result | {"memory_mb": memory, "hostile": met, "kept": is_kept(result, memory)}


def judge(undisturbed: Latencies, disturbed: Latencies) -> dict[str, Any]:
    before, after = undisturbed.summary(), disturbed.summary()
    allowed = {
        name: round(FACTOR * before[name]["p99"] + 1000 * EXTRA_S, 2) for name in ("first_token_ms", "whole_ms")
    }
    return {"undisturbed": before, "disturbed": after, "allowed_p99": allowed}


def is_kept(result: dict[str, Any], memory: dict[str, int]) -> dict[str, bool]:
    """Whether each promised limit was kept."""
    after, allowed = result["disturbed"], result["allowed_p99"]
    kept = {f"{name}_p99": (after[name]["p99"] or PATIENCE_S * 1000) <= limit for name, limit in allowed.items()}
    return {**kept, "answers": set(after["answers"]) == {"200"}, "memory": memory["peak"] <= memory["allowed"]}


@contextmanager
def served(rows: int, *, routed: bool) -> Iterator[str]:
    with tempfile.TemporaryDirectory() as folder:
        model = tiny_model(Path(folder) / "tiny", max_position_embeddings=CONTEXT)
        keys = Path(folder) / "keys"
        keys.write_text("".join(f"{name}:{key}\n" for name, key in KEYS.items()))
        limits = ("--kv-blocks", 8192, "--max-running", rows)
        command = ("up", model, "--mixed", 1) if routed else ("serve", model)
        with process(*command, "--device", "cpu", "--api-keys", keys, *limits) as url:
            yield url


def machine() -> dict[str, Any]:
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return {
        "commit": commit.stdout.strip(),
        "cores": os.cpu_count(),
        "load_before": [round(value, 1) for value in os.getloadavg()],
        "python": platform.python_version(),
        "model": f"tiny random llama, {CONTEXT} tokens of context, float32, cpu, queue of 1024",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=30.0, help="of each part")
    parser.add_argument("--rate", type=float, default=10.0, help="polite requests a second")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS, help="in which the other tenant is hostile")
    parser.add_argument(
        "--max-running", type=int, default=64, help="rows of the engine: a CPU's step grows with them"
    )
    parser.add_argument("--router", action="store_true", help="measure a server behind a router")
    parser.add_argument("--first", action="store_true", help="take the cores before the processes of others")
    parser.add_argument("--json", type=Path, help="where to write the result too")
    parser.add_argument("--hostile", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.hostile:
        print(json.dumps(asyncio.run(be_hostile(options.hostile, options.seconds, options.ways))))
        return
    settings = {
        "seconds": options.seconds,
        "polite_per_s": options.rate,
        "polite_tokens": TOKENS,
        "ways": options.ways,
        "max_running": options.max_running,
        "router": options.router,
        "first": options.first,
    }
    before = machine()
    with served(options.max_running, routed=options.router) as url:
        if options.first:
            go_first()
        result = {**before, **settings, **asyncio.run(measure(url, options.seconds, options.rate, options.ways))}
    text = json.dumps(result, indent=1)
    print(text)
    if options.json:
        options.json.write_text(text + "\n")
    if not all(result["kept"].values()):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
