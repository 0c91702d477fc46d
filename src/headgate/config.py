"""How an engine and a server are set up: frozen, validated once, passed down explicitly.

None means "find out": from the checkpoint, the machine or the memory that is free. This module imports nothing of ours
but errors and logs.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from headgate.errors import RequestError
from headgate.logs import LogFormat

DEVICE = re.compile(r"auto|cpu|cuda(:\d+)?")
BACKENDS = ("auto", "torch", "cpu", "triton")
DTYPES = ("auto", "float32", "bfloat16", "float16")


def _check(ok: bool, message: str) -> None:
    if not ok:
        raise RequestError(message)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    device: str = "auto"  # auto, cpu, cuda, cuda:1 ...
    dtype: str = "auto"  # the checkpoint's
    backend: str = "auto"  # auto, torch (the reference), cpu (compiled kernels), triton
    deterministic: bool = False  # the bits of an answer never depend on what else runs
    max_context: int | None = None  # tokens of prompt and answer together
    max_running: int = 256  # sequences that run at once
    max_batch_tokens: int | None = None  # tokens computed in one step
    kv_blocks: int | None = None
    block_size: int = 32  # tokens per KV block
    memory_fraction: float = 0.5  # of the memory that the weights leave free, for KV
    run_ahead: int | None = None  # steps on the device at once
    graphs: bool = True  # decode steps as CUDA graphs, where there is CUDA
    crash_folder: str | None = None  # where an engine that dies of a bug leaves its last plans; None: a temporary one

    def __post_init__(self) -> None:
        _check(self.dtype in DTYPES, f"dtype must be one of {', '.join(DTYPES)}, not {self.dtype!r}")
        _check(bool(DEVICE.fullmatch(self.device)), f"device must be auto, cpu, cuda or cuda:N, not {self.device!r}")
        _check(self.backend in BACKENDS, f"backend must be one of {', '.join(BACKENDS)}, not {self.backend!r}")
        _check(self.block_size in (16, 32, 64), "block_size must be 16, 32 or 64")
        _check(0 < self.memory_fraction <= 1, "memory_fraction must be above 0 and at most 1")
        for name in ("max_context", "max_running", "max_batch_tokens", "kv_blocks", "run_ahead"):
            value = getattr(self, name)
            _check(value is None or value >= 1, f"{name} must be at least 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    model: Path  # a folder or a GGUF file
    model_name: str  # what clients call it
    engine: EngineConfig = EngineConfig()
    replicas: int = 1  # engine processes
    host: str = "127.0.0.1"
    max_queue: int = 1024  # choices accepted beyond those that run
    max_body_bytes: int = 32 * 2**20
    drain_timeout_s: float = 30.0
    api_keys: Mapping[str, str] = field(default_factory=dict, repr=False)  # by tenant
    admin_key: str | None = field(default=None, repr=False)
    log_format: LogFormat = "text"
    log_level: str = "INFO"
    otlp_endpoint: str | None = None

    def __post_init__(self) -> None:
        _check(self.replicas >= 1, "replicas must be at least 1")
        _check(self.max_queue >= 0, "max_queue must be at least 0")
        _check(self.drain_timeout_s >= 0, "drain_timeout must be at least 0")

    @property
    def most_choices(self) -> int:
        """In flight at once; one more is refused."""
        return self.engine.max_running * self.replicas + self.max_queue
