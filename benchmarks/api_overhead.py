"""Measures the CPU time of the API process per streamed token, from the engine's message to the bytes on the socket.

    python benchmarks/api_overhead.py [--streams 64] [--tokens 500] [--step-ms 10] [--path /v1/chat/completions]
    python benchmarks/api_overhead.py --port PORT --pid PID ...     the API process of another server that is running

Three processes: a scripted engine that sends one token per stream and step over the real channel, the API as
`headgate serve` runs it, and a client that reads as fast as it can. Only the CPU time of the API is counted, for all
its threads. The cost with `--tokens 1` (admission, template, tokenising, the end) is measured separately and reported
per request.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import queue
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import uvloop

from headgate.api.accounting.ledger import Ledger
from headgate.api.accounting.metrics import ServerMetrics
from headgate.api.app import build_app
from headgate.api.host import ServerContext
from headgate.api.server import HttpServer
from headgate.api.state import Api
from headgate.config import EngineConfig
from headgate.contract.keys import Keys
from headgate.engine.channel import EngineChannel
from headgate.engine.client import connected
from headgate.engine.replicas import Replicas
from headgate.engine.start import EngineStart
from headgate.listening import take_port
from headgate.protocol.message import Abort, EngineInfo, EngineStatus, Message, StepOutputs, Submit
from headgate.protocol.output import Ended, Outputs, Timings
from headgate.text.template import load_template
from headgate.text.tokenizer import load_tokenizer

INFO = EngineInfo(8192, 260, (256,), 4096, 32, 4096, "none", "scripted", "none")


# -- the engine ------------------------------------------------------------------


class ScriptedEngine:
    """Sends one letter per stream and step until each stream has its tokens."""

    def __init__(self, address: str, step_s: float) -> None:
        self._inbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._left: dict[int, int] = {}
        self._step_s = step_s
        status = EngineStatus(0.0, False)
        self._channel = EngineChannel(address, INFO, post=self._inbox.put, status=lambda: (0.0, status))

    def run(self) -> None:
        self._channel.start()
        while True:
            while not self._inbox.empty() or not self._left:
                self._take(self._inbox.get())
            time.sleep(self._step_s)
            self._step()

    def _take(self, message: Message) -> None:
        match message:
            case Submit(requests):
                self._left |= {request.id: request.sampling.max_tokens or 1 for request in requests}
            case Abort(ids, _):
                for id in ids:
                    self._left.pop(id, None)

    def _step(self) -> None:
        ids = list(self._left)
        outputs = Outputs(ids=ids, tokens=[64 + id % 26 for id in ids])
        for id in ids:
            self._left[id] -= 1
            if not self._left[id]:
                del self._left[id]
                outputs.ended.append(Ended(id, "length", "max_tokens", 16, 0, 1, Timings(0, 0, 0, 0)))
        self._channel.send(0, StepOutputs(outputs))


def write_model(folder: str) -> None:
    from headgate.testing.tiny import tiny_model  # numpy starts threads, which would count as the API's

    tiny_model(folder)


# -- the client ------------------------------------------------------------------


async def read_streams(port: int, path: str, streams: int, tokens: int, model: str) -> int:
    """Request `streams` answers at once, read them completely, and count their events."""
    body = json.dumps(request_body(path, tokens) | {"model": model}).encode()
    fields = {"Host": "x", "Content-Type": "application/json", "Connection": "close", "Content-Length": len(body)}
    lines = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
    head = f"POST {path} HTTP/1.1\r\n{lines}\r\n".encode()

    async def read() -> int:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(head + body)
        answer = await reader.read(-1)
        writer.close()
        assert answer.startswith(b"HTTP/1.1 200"), answer[:500]
        return answer.count(b"data: ")

    return sum(await asyncio.gather(*(read() for _ in range(streams))))


def request_body(path: str, tokens: int) -> dict[str, Any]:
    common = {"stream": True, "temperature": 0} | ({} if path.endswith("responses") else {"ignore_eos": True})
    if path.endswith("chat/completions"):
        return common | {"messages": [{"role": "user", "content": "Say something."}], "max_tokens": tokens}
    if path.endswith("responses"):
        return common | {"input": "Say something.", "max_output_tokens": tokens}
    return common | {"prompt": "Say something.", "max_tokens": tokens}


# -- the API ---------------------------------------------------------------------


@asynccontextmanager
async def serving(address: str, model: Path) -> AsyncIterator[int]:
    """Runs the API in front of the engine at `address`; yields its port."""
    async with connected(address, 0, 30) as client:
        engines = Replicas(EngineStart("", "", EngineConfig()), 1, 0, model)
        engines.replicas[0].client, engines._info = client, client.info
        metrics = ServerMetrics()
        ledger = Ledger(metrics, limit=100_000)
        api = Api(
            engines=engines,
            ledger=ledger,
            model_name="scripted",
            created=0,
            tokenizer=load_tokenizer(model),
            template=load_template(model),
        )
        host = ServerContext("0", "scripted", engines.replicas, ledger)
        listener = take_port("127.0.0.1", 0)
        up = asyncio.Event()
        app = build_app(api, host, Keys(), 1 << 20)
        server = HttpServer(app, listener, up.set, begin=app.begin)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(server.serve())
            await up.wait()
            yield listener.getsockname()[1]
            server.stop_accepting()


async def measured(port: int, options: argparse.Namespace, tokens: int) -> dict[str, float]:
    """The cost of the API process while `tokens` tokens of every stream are read."""
    before, began_s = cpu_times_s(options.pid), time.perf_counter()
    process = await me("client", port, options.path, options.streams, tokens, options.model)
    output, _ = await process.communicate()
    after, wall_s = cpu_times_s(options.pid), time.perf_counter() - began_s
    user_s, system_s = after[0] - before[0], after[1] - before[1]
    return {"cpu_s": user_s + system_s, "user_s": user_s, "wall_s": wall_s, "events": json.loads(output)}


def cpu_times_s(pid: int) -> tuple[float, float]:
    """User and system time of all threads of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    ticks = os.sysconf("SC_CLK_TCK")
    return int(fields[11]) / ticks, int(fields[12]) / ticks


async def me(*arguments: object) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable, __file__, *map(str, arguments), stdout=asyncio.subprocess.PIPE
    )


async def benchmark(options: argparse.Namespace) -> dict[str, Any]:
    short, long = await (measure_running(options, options.port) if options.port else measure_ours(options))
    tokens = options.streams * (options.tokens - 1)
    return {
        "path": options.path,
        "streams": options.streams,
        "tokens_per_stream": options.tokens,
        "us_per_token": round((long["cpu_s"] - short["cpu_s"]) / tokens * 1e6, 2),
        "of_which_user_us": round((long["user_s"] - short["user_s"]) / tokens * 1e6, 2),
        "us_per_request": round(short["cpu_s"] / options.streams * 1e6, 1),
        "events_per_token": round(long["events"] / (options.streams * options.tokens), 3),
        "tokens_per_s": round(tokens / long["wall_s"]),
    }


async def measure_running(options: argparse.Namespace, port: int) -> tuple[dict[str, float], dict[str, float]]:
    """The cost with one token per stream, and with all tokens."""
    await measured(port, options, 20)  # warm-up
    return await measured(port, options, 1), await measured(port, options, options.tokens)


async def measure_ours(options: argparse.Namespace) -> tuple[dict[str, float], dict[str, float]]:
    with tempfile.TemporaryDirectory() as folder:
        model, address = Path(folder) / "model", f"ipc://{folder}/engine.sock"
        await (await me("model", model)).wait()
        engine = await me("engine", address, options.step_ms / 1000)
        try:
            async with serving(address, model) as port:
                return await measure_running(options, port)
        finally:
            engine.kill()
            await engine.wait()


def main() -> None:
    match sys.argv[1:]:
        case ["model", folder]:
            return write_model(folder)
        case ["engine", address, step_s]:
            return ScriptedEngine(address, float(step_s)).run()
        case ["client", port, path, streams, tokens, model]:
            return print(uvloop.run(read_streams(int(port), path, int(streams), int(tokens), model)))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=500)
    parser.add_argument("--step-ms", type=float, default=10)
    parser.add_argument("--path", default="/v1/chat/completions")
    parser.add_argument("--port", type=int, help="of a server that is running")
    parser.add_argument("--pid", type=int, default=os.getpid(), help="of its API process")
    parser.add_argument("--model", default="scripted", help="what that server calls its model")
    return print(json.dumps(uvloop.run(benchmark(parser.parse_args())), indent=2))


if __name__ == "__main__":
    main()
