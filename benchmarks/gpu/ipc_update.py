"""Weight updates from a trainer's handles on one GPU: `python -m benchmarks.gpu.ipc_update [--shape qwen3-0.6b]`.

A trainer process holds weights of the same shape on the same GPU, and offers them as the trainers of vLLM, SkyRL and
SGLang do: pickled CUDA handles, of each tensor or of buckets. Measured, per update: pause (freeze), reading the handles,
copying the parts beside the weights in service, loading them, and resume. Prints JSON, and exits with 1 if a median is
above `--target-ms`.

`--form` selects one form. The trainer's own packing, and HTTP, are not included.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.checkpoint import SHAPES
from tests.updates.ipc_trainer import FORMS, ipc_trainer

from headgate.api.compat.handles import sglang_part, vllm_part
from headgate.offline import LLM
from headgate.protocol.command import (
    Collected,
    CollectWeights,
    Part,
    Pause,
    Resume,
    StagedSource,
    TensorSpec,
    UpdateWeights,
)
from headgate.testing.tiny import tiny_model

BUCKET = 512 * 2**20  # bytes


def part_in(payload: dict[str, Any]) -> Part:
    if "serialized_named_tensors" in payload:
        return sglang_part(payload["serialized_named_tensors"], "load_format" in payload, "serialized_named_tensors")
    specs = map(TensorSpec, payload["names"], payload["dtype_names"], map(tuple, payload["shapes"]))
    return vllm_part(payload["ipc_handles_pickled"], tuple(specs), "ipc_handles_pickled")


def update(llm: LLM, folder: Path, form: str) -> dict[str, float]:
    """The milliseconds of one update from a new trainer process."""
    took: dict[str, float] = {"read handles": 0.0, "copy parts": 0.0}

    def timed(what: str, began_s: float) -> None:
        took[what] = took.get(what, 0.0) + (time.perf_counter() - began_s) * 1e3

    with ipc_trainer(folder, form, BUCKET) as trainer:
        assert trainer.stdin is not None and trainer.stdout is not None
        line, state = trainer.stdout.readline(), Collected(missing=1)
        began_s = time.perf_counter()
        llm.call(Pause("freeze"))
        timed("pause", began_s)
        while line.startswith("{"):
            payload = json.loads(line)
            began_s = time.perf_counter()
            part = part_in(payload)
            timed("read handles", began_s)
            began_s = time.perf_counter()
            received = llm.call(CollectWeights(part))
            timed("copy parts", began_s)
            assert isinstance(received, Collected)
            state = received
            trainer.stdin.write("\n")
            trainer.stdin.flush()
            line = trainer.stdout.readline()
        if line != "untouched\n" or state.missing or not state.on.startswith("cuda"):
            raise SystemExit(f"{form}: the transfer failed; the trainer said {line!r}, the engine has {state}")
        began_s = time.perf_counter()
        llm.call(UpdateWeights(StagedSource()))
        timed("load", began_s)
        began_s = time.perf_counter()
        llm.call(Resume())
        timed("resume", began_s)
    return took | {"all": sum(took.values())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="qwen3-0.6b", choices=["tiny", *SHAPES])
    parser.add_argument("--form", choices=FORMS, action="append")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--target-ms", type=float, default=50.0)
    options = parser.parse_args()
    config: dict[str, Any] = SHAPES.get(options.shape, {})
    slow = []
    with tempfile.TemporaryDirectory() as folder:
        model = tiny_model(Path(folder), "qwen3", tokenizer=False, dtype="bfloat16", **config)
        with LLM(model, device="cuda", max_context=2048, memory_fraction=0.5) as llm:
            for form in options.form or FORMS:
                runs = [update(llm, model, form) for _ in range(options.repeats + 1)][1:]  # without the first
                result = {step: round(median(run[step] for run in runs), 2) for step in runs[0]}
                print(json.dumps({"form": form, "shape": options.shape, "milliseconds": result}), flush=True)
                slow += [form] if result["all"] > options.target_ms else []
    if slow:
        sys.exit(f"above {options.target_ms} ms: {', '.join(slow)}")


if __name__ == "__main__":
    main()
