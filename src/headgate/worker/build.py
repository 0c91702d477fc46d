"""Putting a worker together: from model files and a config to an executor, and what it turned out to hold."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from headgate.config import EngineConfig
from headgate.errors import ModelError, OutOfMemory, RequestError
from headgate.layers.backend import KV
from headgate.models import Config, DenseModel, ModelSpec, build_model, read_spec, spec_of
from headgate.protocol.command import Files
from headgate.text.tokenizer import load_tokenizer
from headgate.transfer.transport import BlockMemory
from headgate.worker.blocks import block_memory, fingerprint
from headgate.worker.draw import draw, fastest_draw
from headgate.worker.executor import Executor, LocalExecutor, PipelinedExecutor
from headgate.worker.grammar import Grammars, read_vocabulary
from headgate.worker.memory import GIB, free_bytes
from headgate.worker.rows import Rows
from headgate.worker.runner import ModelRunner
from headgate.worker.supply import Origin, Supply, open_files, open_source, origin_of
from headgate.worker.weights import Loadable, WeightSource, load_weights
from headgate.zoo.gguf import hub_config, read_gguf

if TYPE_CHECKING:
    from headgate.worker.graphs import DecodeGraphs

# A step of a CPU is long: fewer tokens keep running streams flowing, and there is nothing to hide behind it.
CPU_BATCH_TOKENS, CPU_RUN_AHEAD = 512, 1
GPU_BATCH_TOKENS, GPU_RUN_AHEAD = 8192, 2

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Worker:
    executor: Executor
    supply: Supply
    blocks: BlockMemory
    version: int  # of the weights
    spec: ModelSpec
    device: str
    backend: str
    dtype: str
    num_blocks: int
    max_context: int
    max_batch_tokens: int
    run_ahead: int
    takes_grammars: bool


@dataclass(frozen=True, slots=True)
class Wanted:
    """Weights that the model is to hold instead of its own."""

    files: Files
    version: int


def build_worker(path: Path, config: EngineConfig, wanted: Wanted | None = None) -> Worker:
    """A worker for the model in `path`, a folder or a GGUF file, with its weights or the wanted ones loaded."""
    device = choose_device(config.device)
    spec, own = open_model(path)
    model = build_model(
        spec,
        device=device,
        dtype=spec.dtype if config.dtype == "auto" else getattr(torch, config.dtype),
        backend=config.backend,
        deterministic=config.deterministic,
    )
    with ThreadPoolExecutor(1) as aside:
        # A second for a large vocabulary, hidden behind the weights.
        grammars = aside.submit(read_grammars, path, spec)
        origin, version = load_first_weights(model, Files(str(path)), own, wanted)
    num_blocks, max_context = size_kv(model, device, config)
    on_gpu = device.type == "cuda"
    max_batch_tokens = config.max_batch_tokens or (GPU_BATCH_TOKENS if on_gpu else CPU_BATCH_TOKENS)
    rows = Rows(
        max_rows=config.max_running,
        max_context=max_context,
        block_size=config.block_size,
        vocab_size=spec.vocab,
        eos_ids=spec.eos_ids,
        device=device,
    )
    kv = model.allocate_kv(num_blocks, config.block_size)
    runner = ModelRunner(
        model,
        kv,
        rows,
        max_tokens=max_batch_tokens,
        draw=draw if config.backend == "torch" else fastest_draw(device),
        grammars=grammars.result(),
        graphs=capture_graphs(model, kv, rows) if config.graphs and model.backend.name.startswith("triton") else None,
    )
    executor = PipelinedExecutor(runner) if on_gpu else LocalExecutor(runner)
    return Worker(
        executor=executor,
        supply=Supply(executor, origin, device),
        blocks=block_memory(kv, model.backend, fingerprint(weight_files(path))),
        version=version,
        spec=spec,
        device=str(device),
        backend=model.backend.name,
        dtype=str(model.backend.dtype).removeprefix("torch."),
        num_blocks=num_blocks,
        max_context=max_context,
        max_batch_tokens=max_batch_tokens,
        run_ahead=config.run_ahead or (GPU_RUN_AHEAD if on_gpu else CPU_RUN_AHEAD),
        takes_grammars=grammars.result() is not None,
    )


def capture_graphs(model: DenseModel, kv: list[KV], rows: Rows) -> DecodeGraphs:
    # Only here: a machine without a GPU need not have Triton.
    from headgate.worker.graphs import DecodeGraphs

    graphs = DecodeGraphs(model, kv, rows)
    graphs.capture_usual()
    return graphs


def choose_device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise RequestError(f"device is {name}, and torch finds no CUDA GPU on this machine; try cpu")
    return torch.device(name)


def open_model(path: Path) -> tuple[ModelSpec, WeightSource]:
    spec = spec_of(Config(str(path), hub_config(read_gguf(path)))) if path.is_file() else read_spec(path)
    return spec, open_files(path)


def weight_files(path: Path) -> list[Path]:
    return [path] if path.is_file() else list(path.glob("*.safetensors"))


def load_first_weights(
    model: Loadable, checkpoint: Files, own: WeightSource, wanted: Wanted | None
) -> tuple[Origin, int]:
    """Where the weights came from and their version: the wanted ones if they can be had, or the checkpoint's own."""
    if wanted is not None:
        try:
            origin = origin_of(wanted.files)
            load_weights(model, open_source(wanted.files))
            return origin, wanted.version
        except ModelError as error:
            log.warning("weights of version %d cannot be had again, starting without: %s", wanted.version, error)
    origin = origin_of(checkpoint)
    load_weights(model, own, progress=True)
    return origin, 0


def read_grammars(path: Path, spec: ModelSpec) -> Grammars | None:
    """What holds answers to a grammar; None without a tokenizer that says which bytes each token stands for."""
    try:
        tokenizer = load_tokenizer(path)
    except ModelError as error:
        log.warning("this model takes no grammars: %s", error)
        return None
    if tokenizer is None:
        return None
    vocabulary = read_vocabulary(tokenizer.backend.to_str(), vocab_size=spec.vocab, eos_ids=spec.eos_ids)
    return None if vocabulary is None else Grammars(vocabulary)


def size_kv(model: DenseModel, device: torch.device, config: EngineConfig) -> tuple[int, int]:
    """How many blocks to allocate, and the longest context that fits in them."""
    most = model.spec.max_positions
    wanted = config.max_context or most
    if wanted > most:
        raise RequestError(f"max_context is {wanted}; this model takes at most {most} tokens")
    free = free_bytes(device)
    usable = int(free * config.memory_fraction)
    block_bytes = model.kv_bytes_per_block(config.block_size)
    enough = -(-wanted // config.block_size) * config.max_running
    num_blocks = config.kv_blocks or min(usable // block_bytes, enough)
    if num_blocks * block_bytes > free:
        raise OutOfMemory(
            f"{num_blocks} KV blocks need {num_blocks * block_bytes / GIB:.2f} GiB, and {free / GIB:.2f} GiB are free; "
            f"lower kv_blocks"
        )
    fits = num_blocks * config.block_size
    # A context that nobody asked for is cut to what fits; one that was asked for is promised or refused.
    if fits < (wanted if config.max_context else config.block_size):
        need = -(-wanted // config.block_size) * block_bytes
        raise OutOfMemory(
            f"a context of {wanted} tokens needs {need / GIB:.2f} GiB of KV cache, and there is room for {fits} tokens "
            f"({num_blocks * block_bytes / GIB:.2f} GiB); lower max_context, or raise kv_blocks or memory_fraction"
        )
    return num_blocks, min(wanted, fits)
