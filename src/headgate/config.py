"""How an engine is set up: frozen, validated once, passed down explicitly.

None means "find out": from the checkpoint, the machine or the memory that is free. This module imports nothing of ours
but the errors.
"""

from __future__ import annotations

from dataclasses import dataclass

from headgate.errors import RequestError

DTYPES = ("auto", "float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    device: str = "auto"  # auto, cpu, cuda, cuda:1 ...
    dtype: str = "auto"  # the checkpoint's
    backend: str = "auto"  # auto, torch (the reference), cpu (compiled kernels)
    deterministic: bool = False  # the bits of an answer never depend on what else runs
    max_context: int | None = None  # tokens of prompt and answer together
    max_running: int = 256  # sequences that run at once
    max_batch_tokens: int | None = None  # tokens computed in one step
    kv_blocks: int | None = None
    block_size: int = 32  # tokens per KV block
    memory_fraction: float = 0.5  # of the memory that the weights leave free, for KV
    run_ahead: int | None = None  # steps on the device at once

    def __post_init__(self) -> None:
        _check(self.dtype in DTYPES, f"dtype must be one of {', '.join(DTYPES)}, not {self.dtype!r}")
        _check(self.block_size in (16, 32, 64), "block_size must be 16, 32 or 64")
        _check(0 < self.memory_fraction <= 1, "memory_fraction must be above 0 and at most 1")
        for name in ("max_context", "max_running", "max_batch_tokens", "kv_blocks", "run_ahead"):
            value = getattr(self, name)
            _check(value is None or value >= 1, f"{name} must be at least 1")


def _check(ok: bool, message: str) -> None:
    if not ok:
        raise RequestError(message)
