"""Builds a `Device` from model files and a config: the executor, and the sizes that were chosen for it."""

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
from headgate.device.routed import RoutedReader, new_record, routed_shape
from headgate.device.rows import Rows
from headgate.device.runner import ModelRunner
from headgate.device.sampling.draw import draw, fastest_draw
from headgate.device.sampling.grammar import Grammars, read_vocabulary
from headgate.device.tensor_parallel.executors import KvSizes, RankExecutor
from headgate.device.tensor_parallel.followers import Followers, FollowerStart
from headgate.device.tensor_parallel.parallelism import Parallelism, UpdatedWeights, join_ranks, start_ranks
from headgate.device.weights.gguf import keep_as_stored
from headgate.device.weights.loading import Loadable, load_weights
from headgate.device.weights.resources import ModelResources, Open, Origin, open_source, origin_of
from headgate.device.weights.source import WeightSource
from headgate.device.weights.wires import WeightWires
from headgate.errors import BrokenCheckpoint, ModelError, OutOfMemory, RequestError, UnsupportedModel
from headgate.layers.backend import KV, Fp8
from headgate.model_store.gguf import hub_config, read_gguf
from headgate.models import Config, ModelSpec, Network, build_model, read_spec, refuse_uneven, spec_of
from headgate.protocol.command import FileSource, Source, StagedSource
from headgate.protocol.groups import LayerGroups
from headgate.protocol.plan import RoutedShape
from headgate.text.tokenizer import load_tokenizer
from headgate.transfer.transport import BlockMemory

if TYPE_CHECKING:
    from headgate.device.graphs import StepGraphs

# A CPU step is long. Smaller batches keep running streams flowing, and there is no host work to hide behind a step.
CPU_BATCH_TOKENS, CPU_RUN_AHEAD = 512, 1
GPU_BATCH_TOKENS, GPU_RUN_AHEAD = 8192, 2

LEAST_BITS = 8  # upper bound on the parameters in one byte of a file: one bit each, fewer bits than any format uses
USUAL_POSITIONS = 2**18  # rotary tables up to this length are small compared with any weights
ROTARY_TABLES = 4  # float32 tables that exist at the same time while they are computed

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Device:
    executor: Executor
    resources: ModelResources
    wires: WeightWires | None  # None if there are several ranks
    followers: Followers | None  # None if this is the only rank
    blocks: BlockMemory
    version: int  # version of the weights
    spec: ModelSpec
    device: str
    backend: str
    dtype: str
    num_blocks: int
    windows: tuple[int | None, ...]  # of the groups of layers that share KV blocks
    max_context: int
    max_batch_tokens: int
    run_ahead: int
    takes_grammars: bool
    routed: RoutedShape | None  # None: it does not keep the experts of tokens


@dataclass(frozen=True, slots=True)
class Loaded:
    model: Network
    origin: Origin
    version: int


def build_device(path: Path, config: EngineConfig, updated: UpdatedWeights | None = None) -> Device:
    """Build the device for the model in `path`, a folder or a GGUF file. Loads the model's own weights, or `updated`."""
    spec = read_model_spec(path)
    refuse_oversized(spec, path, free_bytes(torch.device("cpu")))
    refuse_uneven(spec, config.tensor_parallel)
    if config.routed_experts and routed_shape(spec) is None:
        raise UnsupportedModel("the model has no experts; leave --routed-experts out")
    with ExitStack() as undo:
        parallelism = start_ranks(path, config, updated)
        undo.callback(parallelism.close)
        with current(parallelism.device):
            device = build_rank_zero(path, spec, config, updated, parallelism)
        undo.pop_all()
    return device


def build_rank_zero(
    path: Path, spec: ModelSpec, config: EngineConfig, updated: UpdatedWeights | None, parallelism: Parallelism
) -> Device:
    """Build the device of rank 0, or of the only rank."""
    with ThreadPoolExecutor(1) as aside:
        # Takes about a second for a large vocabulary, so it runs while the weights load.
        grammars = aside.submit(read_grammars, path, spec)
        loaded = load_model(path, spec, config, updated, parallelism, progress=True)
    model = loaded.model
    if spec.quantisation is not None:
        log.info(
            "the checkpoint is quantised (%s), in %.1f bits per parameter", spec.quantisation, bits_of(path, spec)
        )
    on_gpu = parallelism.device.type == "cuda"
    max_batch_tokens = config.max_batch_tokens or (GPU_BATCH_TOKENS if on_gpu else CPU_BATCH_TOKENS)
    free = parallelism.usable_bytes(free_bytes(parallelism.device))
    num_blocks, max_context = size_kv(model, free, config, max_batch_tokens)
    sizes = KvSizes(num_blocks, max_context, max_batch_tokens)
    runner = build_runner(loaded, config, sizes, parallelism, grammars.result())
    executor = parallelism.executor(runner, sizes)
    wires = open_wires(model, parallelism)
    return Device(
        executor=executor,
        resources=ModelResources(
            executor, loaded.origin, parallelism.open if wires is None else opening(wires, parallelism)
        ),
        wires=wires,
        followers=parallelism.followers,
        blocks=block_memory(
            runner.kv,
            model.backend,
            kv_name(path, model.spec),
            None if runner.routed is None else runner.routed.record,
        ),
        version=loaded.version,
        spec=spec,
        device=str(parallelism.device),
        backend=model.backend.name,
        dtype=str(model.backend.dtype).removeprefix("torch."),
        num_blocks=num_blocks,
        windows=kv_windows(model.spec, config),
        max_context=max_context,
        max_batch_tokens=max_batch_tokens,
        run_ahead=config.run_ahead or (GPU_RUN_AHEAD if on_gpu else CPU_RUN_AHEAD),
        takes_grammars=grammars.result() is not None,
        routed=routed_shape(spec) if config.routed_experts else None,
    )


def open_wires(model: Network, parallelism: Parallelism) -> WeightWires | None:
    if parallelism.ranks.size > 1:
        return None  # a trainer could reach only this rank
    shapes = {name: parameter.shape for name, parameter in model.parameters()}
    return WeightWires(shapes, parallelism.device, quantisation=model.spec.quantisation)


def opening(wires: WeightWires, parallelism: Parallelism) -> Open:
    def open(source: Source) -> WeightSource:
        return wires.open() if isinstance(source, StagedSource) else parallelism.open(source)

    return open


def build_follower(start: FollowerStart, receive_sizes: Callable[[], KvSizes]) -> RankExecutor:
    """Build the executor of a rank above 0, in parallel with rank 0. `receive_sizes` waits for rank 0's sizes."""
    path, config = Path(start.model), start.config
    updated = None if start.weights is None else UpdatedWeights(start.weights, start.version)
    parallelism = join_ranks(start)
    loaded = load_model(path, read_model_spec(path), config, updated, parallelism)
    parallelism.usable_bytes(free_bytes(parallelism.device))
    sizes = receive_sizes()
    return parallelism.executor(build_runner(loaded, config, sizes, parallelism), sizes)


def load_model(
    path: Path,
    spec: ModelSpec,
    config: EngineConfig,
    updated: UpdatedWeights | None,
    parallelism: Parallelism,
    *,
    progress: bool = False,
) -> Loaded:
    model = build_model(
        spec.within(config.max_context),
        device=parallelism.device,
        dtype=spec.dtype if config.dtype == "auto" else getattr(torch, config.dtype),
        backend=config.backend,
        deterministic=config.deterministic,
        fp8=Fp8(weights=config.fp8 in ("weights", "both"), kv=config.fp8 in ("kv", "both")),
        ranks=parallelism.ranks,
    )
    if path.is_file() and config.dtype == "auto":  # any other dtype is that of the weights, too
        keep_as_stored(model, path)
    origin, version = load_first_weights(model, FileSource(str(path)), updated, parallelism.open, progress=progress)
    return Loaded(model, origin, version)


def build_runner(
    loaded: Loaded, config: EngineConfig, sizes: KvSizes, parallelism: Parallelism, grammars: Grammars | None = None
) -> ModelRunner:
    model, spec = loaded.model, loaded.model.spec
    rows = Rows(
        max_rows=config.max_running,
        max_context=sizes.max_context,
        block_size=config.block_size,
        groups=len(spec.kv_layout.windows),
        vocab_size=spec.vocab,
        eos_ids=spec.eos_ids,
        device=parallelism.device,
    )
    kv = model.allocate_kv(sizes.num_blocks, config.block_size)
    # All ranks route all tokens, so one keeps the result. Graphs are captured with it.
    routed = keep_routed(model, rows, sizes) if config.routed_experts and parallelism.ranks.rank == 0 else None
    # A graph draws tokens itself; with several ranks, rank 0 draws for all.
    captured = config.graphs and parallelism.ranks.size == 1 and model.backend.name.startswith("triton")
    return ModelRunner(
        model,
        kv,
        rows,
        max_tokens=sizes.max_batch_tokens,
        draw=parallelism.draw_with(draw if config.backend == "torch" else fastest_draw(parallelism.device)),
        grammars=grammars,
        graphs=capture_graphs(model, kv, rows, sizes.max_batch_tokens, config.prompt_graphs) if captured else None,
        routed=routed,
    )


def keep_routed(model: Network, rows: Rows, sizes: KvSizes) -> RoutedReader:
    shape = routed_shape(model.spec)
    assert shape is not None
    record = new_record(shape, sizes.num_blocks, rows.block_size, rows.tokens.device)
    model.record_experts(record)
    return RoutedReader(record, rows)


def capture_graphs(model: Network, kv: list[KV], rows: Rows, max_tokens: int, prompts: bool) -> StepGraphs:
    # Imported here because a machine without a GPU need not have Triton.
    from headgate.device.graphs import StepGraphs

    graphs = StepGraphs(model, kv, rows, max_tokens=max_tokens, prompts=prompts)
    graphs.capture_usual()
    return graphs


def read_model_spec(path: Path) -> ModelSpec:
    return spec_of(Config(str(path), hub_config(read_gguf(path)))) if path.is_file() else read_spec(path)


def refuse_oversized(spec: ModelSpec, path: Path, free: int) -> None:
    """Refuse a config that claims a size that the weight files or free memory cannot support."""
    held = sum(file.stat().st_size for file in weight_files(path)) * LEAST_BITS
    if held and spec.num_parameters > held:
        raise BrokenCheckpoint(
            f"{path} describes {spec.num_parameters} parameters (num_hidden_layers {len(spec.layers)}, hidden_size "
            f"{spec.hidden}, intermediate_size {spec.intermediate}, num_attention_heads {spec.heads}, "
            f"head_dim {spec.head_dim}, vocab_size {spec.vocab}), and its weights have room for at most {held}"
        )
    tables = ROTARY_TABLES * 4 * sum(rope.dimensions(spec.head_dim) for rope in spec.ropes) * spec.max_positions
    if tables > free and spec.max_positions > USUAL_POSITIONS:
        raise OutOfMemory(
            f"max_position_embeddings is {spec.max_positions}: its rotary tables need {tables / GIB:.2f} GiB, and "
            f"{free / GIB:.2f} GiB are free"
        )


def bits_of(path: Path, spec: ModelSpec) -> float:
    """The bits of the weight files per parameter."""
    return 8 * sum(file.stat().st_size for file in weight_files(path)) / spec.num_parameters


def kv_name(path: Path, spec: ModelSpec) -> str:
    """Name what a KV block contains: of which checkpoint, of which layers, and how positions are encoded."""
    windows = spec.kv_layout.windows
    grouped = f", windows {windows}" if windows != (None,) else ""
    return fingerprint(weight_files(path)) + grouped + (", long angles" if spec.has_long_angles else "")


def weight_files(path: Path) -> list[Path]:
    return [path] if path.is_file() else list(path.glob("*.safetensors"))


def load_first_weights(
    model: Loadable,
    checkpoint: FileSource,
    updated: UpdatedWeights | None,
    open: Open = open_source,
    *,
    progress: bool = False,
) -> tuple[Origin, int]:
    """Load `updated` if possible, otherwise the checkpoint. Returns the origin and the version of the weights."""
    if updated is not None:
        try:
            origin = origin_of(updated.files)
            load_weights(model, open(updated.files))
            return origin, updated.version
        except ModelError as error:
            log.warning("weights of version %d cannot be loaded; using the checkpoint: %s", updated.version, error)
    origin = origin_of(checkpoint)
    load_weights(model, open(checkpoint), progress=progress)
    return origin, 0


def read_grammars(path: Path, spec: ModelSpec) -> Grammars | None:
    """The grammar matchers, or None if no tokenizer defines the bytes of each token."""
    try:
        tokenizer = load_tokenizer(path)
    except ModelError as error:
        log.warning("grammars are not supported for this model: %s", error)
        return None
    if tokenizer is None:
        return None
    vocabulary = read_vocabulary(tokenizer.backend.to_str(), vocab_size=spec.vocab, eos_ids=spec.eos_ids)
    return None if vocabulary is None else Grammars(vocabulary)


def kv_windows(spec: ModelSpec, config: EngineConfig) -> tuple[int | None, ...]:
    """The windows of the groups of layers, which decide when blocks are given back."""
    first, *others = spec.kv_layout.windows
    # The experts of tokens are kept by the blocks of the first group, also of tokens that its window has passed.
    return (None if config.routed_experts else first, *others)


def size_kv(model: Network, free: int, config: EngineConfig, max_batch_tokens: int) -> tuple[int, int]:
    """Return how many blocks to allocate when `free` bytes are available, and the longest context that fits in them."""
    most = model.spec.max_positions
    wanted = config.max_context or most
    if wanted > most:
        raise RequestError(f"max_context is {wanted}; this model takes at most {most} tokens")
    usable = int(free * config.memory_fraction)
    groups = LayerGroups(config.block_size, kv_windows(model.spec, config))
    block_bytes = model.kv_bytes_per_block(config.block_size)
    if config.routed_experts and (shape := routed_shape(model.spec)):
        block_bytes += shape.token_bytes * config.block_size
    enough = groups.stripes_for(wanted) * len(groups) * config.max_running
    num_blocks = (config.kv_blocks or 0) * len(groups) or min(usable // block_bytes, enough)
    if num_blocks * block_bytes > free:
        raise OutOfMemory(
            f"{num_blocks} KV blocks need {num_blocks * block_bytes / GIB:.2f} GiB, and {free / GIB:.2f} GiB are free; "
            f"lower kv_blocks"
        )
    fits = groups.longest_context(num_blocks, max_batch_tokens, wanted)
    # A default context is reduced to what fits; a configured one is guaranteed or refused.
    if fits < (wanted if config.max_context else config.block_size):
        need = groups.most_blocks(groups.stripes_for(wanted), max_batch_tokens) * block_bytes
        raise OutOfMemory(
            f"a context of {wanted} tokens needs {need / GIB:.2f} GiB of KV cache, and there is room for {fits} tokens "
            f"({num_blocks * block_bytes / GIB:.2f} GiB); lower max_context, or raise kv_blocks or memory_fraction"
        )
    context_of_rows = usable // (4 * config.max_running)  # each row stores four bytes per token of context
    return num_blocks, wanted if config.max_context else min(wanted, fits, max(context_of_rows, config.block_size))
