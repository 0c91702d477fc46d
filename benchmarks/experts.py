"""Compares the decoding speed of a mixture of experts on a CPU with other engines, and prints JSON.

    python benchmarks/experts.py [FOLDER] [--peer transformers=PYTHON] [--peer llama_cpp=PYTHON] [--rounds 5]

The mixture is random, in bfloat16: 8 experts of 0.1 billion parameters, 2 per token (Mixtral's architecture). Every
engine runs in a process of its own with the same number of threads and takes its turn in each round. The time of a
step is the difference between a long and a short answer, so that prompts are not part of it; the figures are medians.
With `--threads 1` the CPU time of the engines is measured, which other processes on a shared machine hardly affect.

A step must read the weights that it uses: attention, the output matrix, and the experts that at least one of its
tokens chose. Its floor is the time to read them at the read bandwidth of the machine, which is measured between the
turns. Headgate's engine counts the experts.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from benchmarks.checkpoint import SHAPES, checkpoint
from benchmarks.offline import Engine, Work, cpu_name, start

from headgate.device.weights.loading import SafetensorsFolder
from headgate.layers.cpu import Kernels, load_kernels

SHAPE = "mixtral-8x0.1b"
HEADGATE = "headgate_experts"
PROMPT, SHORT, LONG = 32, 4, 36
READ_BYTES = 1 << 29
BATCHES = (1, 8)


def measure(engines: list[Engine], rounds: int, threads: int, probe: Callable[[], None]) -> list[dict[str, Any]]:
    clock, kind = (time.process_time, "cpu_seconds") if threads == 1 else (time.perf_counter, "seconds")
    taken = []
    for number in range(rounds):
        rng = random.Random(number)
        for batch in BATCHES:
            prompts = [rng.choices(range(1000), k=PROMPT) for _ in range(batch)]
            for engine in engines:
                entry = {"batch": batch, "engine": engine.name} | measure_step(engine, prompts, kind)
                taken.append(entry | {"read_gb_per_s": READ_BYTES / timed(probe, clock) / 1e9})
                print(f"round {number}: {taken[-1]}", file=sys.stderr)
    return taken


def measure_step(engine: Engine, prompts: list[list[int]], kind: str) -> dict[str, Any]:
    """Milliseconds per decoding step."""
    short, long = (engine.run(Work(prompts, count)) for count in (SHORT, LONG))
    found = {"step_ms": 1e3 * (long[kind] - short[kind]) / (LONG - SHORT)}
    return found | {key: value for key, value in long.items() if key == "experts_per_layer"}


def timed(work: Callable[[], None], clock: Callable[[], float]) -> float:
    start = clock()
    work()
    return clock() - start


def read_bytes(experts_per_layer: float) -> float:
    """The bytes of the weights that a step reads."""
    shape = SHAPES[SHAPE]
    hidden, head = shape["hidden_size"], shape["head_dim"]
    attention = 2 * (shape["num_attention_heads"] + shape["num_key_value_heads"]) * head * hidden
    experts = experts_per_layer * 3 * shape["intermediate_size"] * hidden
    layers = shape["num_hidden_layers"] * (attention + experts + shape["num_local_experts"] * hidden)
    return 2 * (layers + shape["vocab_size"] * hidden)


def report(taken: list[dict[str, Any]]) -> dict[str, Any]:
    return {f"batch {batch}": report_batch([each for each in taken if each["batch"] == batch]) for batch in BATCHES}


def report_batch(taken: list[dict[str, Any]]) -> dict[str, Any]:
    names = dict.fromkeys(entry["engine"] for entry in taken)
    step = {name: statistics.median(e["step_ms"] for e in taken if e["engine"] == name) for name in names}
    bandwidth = statistics.median(entry["read_gb_per_s"] for entry in taken)
    used = statistics.median(entry["experts_per_layer"] for entry in taken if "experts_per_layer" in entry)
    floor = 1e3 * read_bytes(used) / bandwidth / 1e9
    return {
        "step_ms": step,
        "times_headgate": {name: each / step[HEADGATE] for name, each in step.items() if name != HEADGATE},
        "experts_per_layer": used,
        "read_mb": read_bytes(used) / 1e6,
        "read_gb_per_s": bandwidth,
        "fraction_of_read_bandwidth": {name: floor / each for name, each in step.items()},
    }


def write_gguf(folder: Path) -> None:
    """The same checkpoint for llama.cpp, in bfloat16 and float32 where llama.cpp demands it."""
    import gguf

    path, shape = folder / "model.gguf", SHAPES[SHAPE]
    if path.exists():
        return
    tensors = dict(SafetensorsFolder(folder))
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(shape["max_position_embeddings"])
    writer.add_embedding_length(shape["hidden_size"])
    writer.add_block_count(shape["num_hidden_layers"])
    writer.add_feed_forward_length(shape["intermediate_size"])
    writer.add_head_count(shape["num_attention_heads"])
    writer.add_head_count_kv(shape["num_key_value_heads"])
    writer.add_rope_dimension_count(shape["head_dim"])
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_expert_count(shape["num_local_experts"])
    writer.add_expert_used_count(shape["num_experts_per_tok"])
    words = [f"<{i}>" for i in range(shape["vocab_size"])]
    writer.add_tokenizer_model("llama")
    writer.add_token_list(words)
    writer.add_token_scores([0.0] * len(words))
    writer.add_token_types([gguf.TokenType.NORMAL] * len(words))

    def add(name: str, values: np.ndarray) -> None:
        """`values` are the upper halves of float32."""
        if values.ndim == 1 or "ffn_gate_inp" in name:
            writer.add_tensor(name, (values.astype(np.uint32) << 16).view(np.float32))
        else:
            writer.add_tensor(name, values.view(np.uint8), raw_dtype=gguf.GGMLQuantizationType.BF16)

    def taken(name: str) -> np.ndarray:
        return tensors[name].view(torch.uint16).numpy()

    add("token_embd.weight", taken("model.embed_tokens.weight"))
    add("output_norm.weight", taken("model.norm.weight"))
    parts = {
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "attn_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm",
        "ffn_gate_inp": "block_sparse_moe.gate",
    }
    for layer in range(shape["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        for ours, theirs in parts.items():
            add(f"blk.{layer}.{ours}.weight", taken(f"{prefix}.{theirs}.weight"))
        for ours, theirs in (("gate", "w1"), ("up", "w3"), ("down", "w2")):
            experts = f"{prefix}.block_sparse_moe.experts"
            each = [taken(f"{experts}.{i}.{theirs}.weight") for i in range(shape["num_local_experts"])]
            add(f"blk.{layer}.ffn_{ours}_exps.weight", np.stack(each))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", default=Path("/tmp") / SHAPE)
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=PYTHON")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args()
    folder = checkpoint(SHAPE, options.folder)
    peers = [tuple(peer.split("=", 1)) for peer in options.peer]
    if any(name == "llama_cpp" for name, _ in peers):
        write_gguf(folder)
    named = [(HEADGATE, sys.executable), *peers]
    torch.set_num_threads(options.threads)
    kernels = load_kernels()
    assert isinstance(kernels, Kernels), kernels.reason
    engines = [start(name, python, folder, options.threads, "bfloat16") for name, python in named]
    taken = measure(engines, options.rounds, options.threads, kernels.probe_read(READ_BYTES))
    result = report(taken) | {
        "engines": {engine.name: engine.info for engine in engines},
        "cpu": cpu_name(),
        "threads": options.threads,
        "rounds": taken,
    }
    print(json.dumps(result, indent=2))
    for engine in engines:
        os.killpg(engine.process.pid, signal.SIGKILL)


if __name__ == "__main__":
    main()
