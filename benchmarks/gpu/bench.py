"""Compares the engine with vLLM's on one GPU: `python -m benchmarks.gpu.bench [--shape 0.6b] [--fp8 both] [--out
FOLDER]`.

Measures every row of docs/performance.md with the whole engine (scheduler, executor, runner) in this process and
random weights generated on the device. vLLM's figures are those of version 0.25.1 on an H200; the floor is the time
that reading weights and KV takes at the 4.29 TB/s (or computing at the 783 TFLOP/s) measured there.
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

START_S = time.perf_counter()

import torch  # noqa: E402
from benchmarks.checkpoint import config_of  # noqa: E402

import headgate.device.tensor_parallel.parallelism as parallelism  # noqa: E402
from headgate.config import FP8, EngineConfig  # noqa: E402
from headgate.contract.sampling import SamplingParams  # noqa: E402
from headgate.device.weights.source import TensorInfo  # noqa: E402
from headgate.engine.build import Engine, build_engine  # noqa: E402
from headgate.models import Config, ModelSpec, Network, build_model, read_spec, spec_of  # noqa: E402
from headgate.models.spec import Experts  # noqa: E402
from headgate.protocol.command import FileSource  # noqa: E402
from headgate.protocol.message import CommandAnswer, StepOutputs, Submit  # noqa: E402
from headgate.protocol.request import GenerateRequest  # noqa: E402

BANDWIDTH, FLOPS = 4.29e12, 783e12
PROMPT, DECODED = 512, 256
DECODE_BATCHES = (1, 8, 64, 256)
VLLM = {
    "0.6b": {
        "mixed, tokens/s": 23130,
        "decode 1, ms": 1.96,
        "decode 8, ms": 2.19,
        "decode 64, ms": 3.06,
        "decode 256, ms": 7.41,
        "prefill 256 x 512, s": 0.299,
        "start to ready, s": 64,
    },
    "8b": {
        "mixed, tokens/s": 9000,
        "decode 1, ms": 5.21,
        "decode 8, ms": 5.64,
        "decode 64, ms": 7.21,
        "decode 256, ms": 15.61,
        "prefill 256 x 512, s": 3.06,
        "start to ready, s": 70,
    },
    "30b-a3b": {
        "mixed, tokens/s": 5790,
        "decode 1, ms": 4.15,
        "decode 8, ms": 8.90,
        "decode 64, ms": 18.5,
        "decode 256, ms": 24.0,
        "prefill 256 x 512, s": 1.77,
        "start to ready, s": 150,
    },
}
NAMES = {
    "0.6b": "qwen3-0.6b",
    "8b": "qwen3-8b",
    "30b-a3b": "qwen3_moe-30b-a3b",
    "gpt-oss-20b": "gpt_oss-20b",
}


@dataclass(frozen=True, slots=True)
class Row:
    shape: str
    work: str
    ours: float
    vllm: float | None
    floor: float | None
    runs: list[float]  # all measurements


class RandomWeights:
    """Random weights of `spec`, generated one tensor at a time on the device."""

    def __init__(self, spec: ModelSpec) -> None:
        self._shapes = {name: p.shape for name, p in build_model(spec, device="meta", backend="torch").parameters()}

    def metadata(self) -> Mapping[str, TensorInfo]:
        return {name: TensorInfo(torch.bfloat16, shape) for name, shape in self._shapes.items()}

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, shape in self._shapes.items():
            noise = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
            yield name, 1 + 0.1 * noise if name.endswith("norm.weight") else noise / shape[-1] ** 0.5


def open_random(source: FileSource, device: torch.device) -> RandomWeights:
    return RandomWeights(read_spec(Path(source.path)))


class Clients:
    """Sends requests to an engine, runs its loop until all are answered, and records the times of the outputs."""

    engine: Engine

    def __init__(self) -> None:
        self.next_id = 1
        self.first_s: dict[int, float] = {}
        self.ended_s: dict[int, float] = {}
        self.tokens = 0

    def run(self, prompts: list[list[int]], params: list[SamplingParams]) -> float:
        """Seconds until all requests are answered."""
        self.first_s, self.ended_s, self.tokens = {}, {}, 0
        ids = range(self.next_id, self.next_id + len(prompts))
        self.next_id += len(prompts)
        # Salted, so that KV of earlier runs is not reused: vLLM was measured without a prefix cache.
        requests = [
            GenerateRequest(id, tuple(prompt), each, salt=str(ids.start))
            for id, prompt, each in zip(ids, prompts, params, strict=True)
        ]
        torch.cuda.synchronize()
        start = time.perf_counter()
        self.engine.loop.post(Submit(requests))
        while len(self.ended_s) < len(prompts):
            self.engine.loop.turn()
        return time.perf_counter() - start

    def hear(self, client: int, message: StepOutputs | CommandAnswer) -> None:
        assert isinstance(message, StepOutputs)
        outputs = message.outputs
        now = time.perf_counter()
        self.tokens += len(outputs.tokens)
        if len(self.first_s) < self.next_id:
            for id in outputs.ids:
                self.first_s.setdefault(id, now)
        for ended in outputs.ended:
            assert ended.finish_reason == "length", ended
            self.ended_s[ended.id] = now
        assert not outputs.refused, outputs.refused


def random_prompts(rng: random.Random, lengths: list[int]) -> list[list[int]]:
    return [[rng.randint(0, 10_000) for _ in range(length)] for length in lengths]


def params(max_tokens: int, seed: int, temperature: float = 0.6) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=seed, ignore_eos=True)


def mixed(clients: Clients) -> float:
    """Output tokens per second of the mixed workload."""
    rng = random.Random(0)
    prompts = [[rng.randint(0, 10_000) for _ in range(rng.randint(100, 1024))] for _ in range(256)]
    asked = [params(rng.randint(100, 1024), i) for i in range(256)]
    elapsed = clients.run(prompts, asked)
    assert clients.tokens == sum(each.max_tokens or 0 for each in asked) == 133_966
    return clients.tokens / elapsed


def decode(clients: Clients, batch: int, rng: random.Random) -> float:
    """Milliseconds per step, from the time when all have their first token until all have their last."""
    clients.run(random_prompts(rng, [PROMPT] * batch), [params(DECODED, i) for i in range(batch)])
    first, last = max(clients.first_s.values()), max(clients.ended_s.values())
    done = DECODED - 1
    return (last - first) / done * 1000


def prefill(clients: Clients, rng: random.Random) -> float:
    return clients.run(random_prompts(rng, [PROMPT] * 256), [params(1, i) for i in range(256)])


def floors(model: Network) -> dict[str, float]:
    spec = model.spec
    per_token = model.kv_bytes_per_block(32) / 32
    sizes = {
        name: 2 * torch.Size(p.shape).numel()
        for name, p in model.parameters()
        if "embed_tokens" not in name or spec.tied
    }
    experts = sum(size for name, size in sizes.items() if ".experts." in name)
    matrices, chosen = sum(sizes.values()) - experts, chosen_share(spec)
    head = 2 * spec.vocab * spec.hidden
    found = {
        f"decode {batch}, ms": (
            (matrices + experts * (1 - (1 - chosen) ** batch) + batch * (PROMPT + DECODED / 2) * per_token)
            / BANDWIDTH
            * 1000
        )
        for batch in DECODE_BATCHES
    }
    attention = 2 * len(spec.layers) * spec.heads * spec.head_dim * PROMPT
    work = matrices + experts * chosen - head + attention
    return found | {"prefill 256 x 512, s": 256 * PROMPT * work / FLOPS}


def chosen_share(spec: ModelSpec) -> float:
    """The share of a layer's experts that one token uses."""
    mlp = spec.layers[0].mlp
    return mlp.routing.top / mlp.count if isinstance(mlp, Experts) else 1.0


def measure(shape: str, repeats: int, began_s: float, only: str, how: dict[str, Any]) -> list[Row]:
    with tempfile.TemporaryDirectory() as folder:
        config = config_of(NAMES[shape])
        Path(folder, "config.json").write_text(json.dumps(config))
        clients = Clients()
        settings = EngineConfig(device="cuda", max_context=2304, memory_fraction=0.9, kv_listen=None, **how)
        engine = clients.engine = build_engine(Path(folder), settings, clients.hear)
    ready_s, peer = time.perf_counter() - began_s, VLLM.get(shape, {})
    rng = random.Random(1)
    works: dict[str, Any] = {f"decode {b}, ms": lambda b=b: decode(clients, b, rng) for b in DECODE_BATCHES}
    works["prefill 256 x 512, s"] = lambda: prefill(clients, rng)
    works["mixed, tokens/s"] = lambda: mixed(clients)
    floor = floors(
        build_model(spec_of(Config("bench", config)), device="meta", dtype=torch.bfloat16, backend="torch")
    )
    decode(clients, 8, rng)  # warm-up: kernels are compiled at the first step of their kind
    rows = [Row(shape, "start to ready, s", ready_s, peer.get("start to ready, s"), None, [ready_s])]
    for work, run in ((work, run) for work, run in works.items() if only in work):
        runs = [run() for _ in range(repeats)]
        rows.append(Row(shape, work, median(runs), peer.get(work), floor.get(work), runs))
        print(line(rows[-1]), flush=True)
    engine.close()
    return rows


def line(row: Row) -> str:
    floor = "" if row.floor is None else f"{row.floor:10.3f}"
    if row.vllm is None:
        return f"{row.shape:5} {row.work:22} {row.ours:12.3f} {'':12} {'':8} {floor}"
    better = row.vllm / row.ours if not row.work.endswith("tokens/s") else row.ours / row.vllm
    return f"{row.shape:5} {row.work:22} {row.ours:12.3f} {row.vllm:12.3f} {better:6.2f} x {floor}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=[*NAMES], action="append")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", default="", metavar="TEXT", help="rows whose name contains this, such as mixed")
    parser.add_argument("--deterministic", action="store_true")
    parser.add_argument("--fp8", choices=FP8, default="none")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO)
    parallelism.open_source = open_random  # type: ignore[assignment]
    how = {"deterministic": arguments.deterministic, "fp8": arguments.fp8}
    kind = ("-deterministic" if how["deterministic"] else "") + (f"-fp8-{how['fp8']}" if how["fp8"] != "none" else "")
    rows: list[Row] = []
    began_s = START_S
    for shape in arguments.shape or VLLM:
        rows += measure(shape, arguments.repeats, began_s, arguments.only, how)
        torch.cuda.empty_cache()
        began_s = time.perf_counter()
    print(f"{'shape':5} {'work':22} {'ours':>12} {'vLLM':>12} {'':8} {'floor':>10}")
    print("\n".join(map(line, rows)))
    if arguments.out:
        save(rows, arguments.out, kind)


def save(rows: list[Row], folder: Path, kind: str) -> None:
    name = torch.cuda.get_device_name().removeprefix("NVIDIA ").lower().replace(" ", "-")
    result = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "rows": [asdict(row) for row in rows],
    }
    path = (
        folder / f"{name}-{time.strftime('%Y-%m-%d')}-{'-'.join(dict.fromkeys(row.shape for row in rows))}{kind}.json"
    )
    path.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
