"""Putting a worker together: from model files and a config to an executor, and what it turned out to hold."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from headgate.config import EngineConfig
from headgate.device.executor import Executor
from headgate.device.kv_blocks import block_memory, fingerprint
from headgate.device.memory import GIB, current, free_bytes
from headgate.device.rows import Rows
from headgate.device.runner import ModelRunner
from headgate.device.sampling.draw import draw, fastest_draw
from headgate.device.sampling.grammar import Grammars, read_vocabulary
from headgate.device.tensor_parallel.executors import KvSizes, RankExecutor
from headgate.device.tensor_parallel.followers import Followers, FollowerStart
from headgate.device.tensor_parallel.team import Parallelism, WantedWeights, gather_crew, join_crew
from headgate.device.weights.loading import Loadable, load_weights
from headgate.device.weights.supply import ModelResources, Open, Origin, open_source, origin_of
from headgate.errors import BrokenCheckpoint, ModelError, OutOfMemory, RequestError
from headgate.layers.backend import KV, Fp8
from headgate.model_store.gguf import hub_config, read_gguf
from headgate.models import Config, ModelSpec, Network, build_model, read_spec, refuse_uneven, spec_of
from headgate.protocol.command import FileSource
from headgate.text.tokenizer import load_tokenizer
from headgate.transfer.transport import BlockMemory

if TYPE_CHECKING:
    from headgate.device.graphs import StepGraphs

# A step of a CPU is long: fewer tokens keep running streams flowing, and there is nothing to hide behind it.
CPU_BATCH_TOKENS, CPU_RUN_AHEAD = 512, 1
GPU_BATCH_TOKENS, GPU_RUN_AHEAD = 8192, 2

LEAST_BITS = 8  # parameters that a byte of a file may hold: one bit for each, fewer than any format takes
USUAL_POSITIONS = 2**18  # whose tables are small beside any weights
ROTARY_TABLES = 4  # of float32 that exist at once while they are computed

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Device:
    executor: Executor
    supply: ModelResources
    followers: Followers | None  # if there are other ranks
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
class Loaded:
    """A model with its weights."""

    model: Network
    origin: Origin
    version: int


def build_device(path: Path, config: EngineConfig, wanted: WantedWeights | None = None) -> Device:
    """A worker for the model in `path`, a folder or a GGUF file, with its weights or the wanted ones loaded."""
    spec = read_model_spec(path)
    refuse_oversized(spec, path, free_bytes(torch.device("cpu")))
    refuse_uneven(spec, config.tensor_parallel)
    with ExitStack() as undo:
        crew = gather_crew(path, config, wanted)
        undo.callback(crew.close)
        with current(crew.device):
            worker = build_first(path, spec, config, wanted, crew)
        undo.pop_all()
    return worker


def build_first(
    path: Path, spec: ModelSpec, config: EngineConfig, wanted: WantedWeights | None, crew: Parallelism
) -> Device:
    """The worker of rank 0, or of the only one."""
    with ThreadPoolExecutor(1) as aside:
        # A second for a large vocabulary, hidden behind the weights.
        grammars = aside.submit(read_grammars, path, spec)
        loaded = load_model(path, spec, config, wanted, crew, progress=True)
    model = loaded.model
    num_blocks, max_context = size_kv(model, crew.least(free_bytes(crew.device)), config)
    on_gpu = crew.device.type == "cuda"
    max_batch_tokens = config.max_batch_tokens or (GPU_BATCH_TOKENS if on_gpu else CPU_BATCH_TOKENS)
    rooms = KvSizes(num_blocks, max_context, max_batch_tokens)
    runner = build_runner(loaded, config, rooms, crew, grammars.result())
    executor = crew.executor(runner, rooms)
    return Device(
        executor=executor,
        supply=ModelResources(executor, loaded.origin, crew.open),
        followers=crew.followers,
        blocks=block_memory(runner.kv, model.backend, fingerprint(weight_files(path))),
        version=loaded.version,
        spec=spec,
        device=str(crew.device),
        backend=model.backend.name,
        dtype=str(model.backend.dtype).removeprefix("torch."),
        num_blocks=num_blocks,
        max_context=max_context,
        max_batch_tokens=max_batch_tokens,
        run_ahead=config.run_ahead or (GPU_RUN_AHEAD if on_gpu else CPU_RUN_AHEAD),
        takes_grammars=grammars.result() is not None,
    )


def build_follower(start: FollowerStart, hear_rooms: Callable[[], KvSizes]) -> RankExecutor:
    """The executor of a rank above 0, built side by side with rank 0's worker; `hear_rooms` waits for its word."""
    path, config = Path(start.model), start.config
    wanted = None if start.weights is None else WantedWeights(start.weights, start.version)
    crew = join_crew(start)
    loaded = load_model(path, read_model_spec(path), config, wanted, crew)
    crew.least(free_bytes(crew.device))
    rooms = hear_rooms()
    return crew.executor(build_runner(loaded, config, rooms, crew), rooms)


def load_model(
    path: Path,
    spec: ModelSpec,
    config: EngineConfig,
    wanted: WantedWeights | None,
    crew: Parallelism,
    *,
    progress: bool = False,
) -> Loaded:
    model = build_model(
        spec,
        device=crew.device,
        dtype=spec.dtype if config.dtype == "auto" else getattr(torch, config.dtype),
        backend=config.backend,
        deterministic=config.deterministic,
        fp8=Fp8(weights=config.fp8 in ("weights", "both"), kv=config.fp8 in ("kv", "both")),
        ranks=crew.ranks,
    )
    origin, version = load_first_weights(model, FileSource(str(path)), wanted, crew.open, progress=progress)
    return Loaded(model, origin, version)


def build_runner(
    loaded: Loaded, config: EngineConfig, rooms: KvSizes, crew: Parallelism, grammars: Grammars | None = None
) -> ModelRunner:
    model, spec = loaded.model, loaded.model.spec
    rows = Rows(
        max_rows=config.max_running,
        max_context=rooms.max_context,
        block_size=config.block_size,
        vocab_size=spec.vocab,
        eos_ids=spec.eos_ids,
        device=crew.device,
    )
    kv = model.allocate_kv(rooms.num_blocks, config.block_size)
    # A graph draws by itself; among ranks, the first one draws for all.
    captured = config.graphs and crew.ranks.size == 1 and model.backend.name.startswith("triton")
    return ModelRunner(
        model,
        kv,
        rows,
        max_tokens=rooms.max_batch_tokens,
        draw=crew.draw_with(draw if config.backend == "torch" else fastest_draw(crew.device)),
        grammars=grammars,
        graphs=capture_graphs(model, kv, rows, rooms.max_batch_tokens, config.prompt_graphs) if captured else None,
    )


def capture_graphs(model: Network, kv: list[KV], rows: Rows, max_tokens: int, prompts: bool) -> StepGraphs:
    # Only here: a machine without a GPU need not have Triton.
    from headgate.device.graphs import StepGraphs

    graphs = StepGraphs(model, kv, rows, max_tokens=max_tokens, prompts=prompts)
    graphs.capture_usual()
    return graphs


def read_model_spec(path: Path) -> ModelSpec:
    return spec_of(Config(str(path), hub_config(read_gguf(path)))) if path.is_file() else read_spec(path)


def refuse_oversized(spec: ModelSpec, path: Path, free: int) -> None:
    """A config may claim any size; nothing is allocated for a claim that the files or the memory do not bear out."""
    held = sum(file.stat().st_size for file in weight_files(path)) * LEAST_BITS
    if held and spec.num_parameters > held:
        raise BrokenCheckpoint(
            f"{path} describes {spec.num_parameters} parameters (num_hidden_layers {len(spec.layers)}, hidden_size "
            f"{spec.hidden}, intermediate_size {spec.intermediate}, num_attention_heads {spec.heads}, "
            f"head_dim {spec.head_dim}, vocab_size {spec.vocab}), and its weights have room for at most {held}"
        )
    tables = ROTARY_TABLES * 4 * spec.head_dim * spec.max_positions
    if tables > free and spec.max_positions > USUAL_POSITIONS:
        raise OutOfMemory(
            f"max_position_embeddings is {spec.max_positions}: its rotary tables need {tables / GIB:.2f} GiB, and "
            f"{free / GIB:.2f} GiB are free"
        )


def weight_files(path: Path) -> list[Path]:
    return [path] if path.is_file() else list(path.glob("*.safetensors"))


def load_first_weights(
    model: Loadable,
    checkpoint: FileSource,
    wanted: WantedWeights | None,
    open: Open = open_source,
    *,
    progress: bool = False,
) -> tuple[Origin, int]:
    """Where the weights came from and their version: the wanted ones if they can be had, or the checkpoint's own."""
    if wanted is not None:
        try:
            origin = origin_of(wanted.files)
            load_weights(model, open(wanted.files))
            return origin, wanted.version
        except ModelError as error:
            log.warning("weights of version %d cannot be had again, starting without: %s", wanted.version, error)
    origin = origin_of(checkpoint)
    load_weights(model, open(checkpoint), progress=progress)
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


def size_kv(model: Network, free: int, config: EngineConfig) -> tuple[int, int]:
    """How many blocks to allocate where `free` bytes are, and the longest context that fits in them."""
    most = model.spec.max_positions
    wanted = config.max_context or most
    if wanted > most:
        raise RequestError(f"max_context is {wanted}; this model takes at most {most} tokens")
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
    rows_fit = usable // (4 * config.max_running)  # the ids of all rows, four bytes each
    return num_blocks, wanted if config.max_context else min(wanted, fits, max(rows_fit, config.block_size))
