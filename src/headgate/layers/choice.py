"""Chooses the backend of a model: the configured one, or the fastest one that supports the model."""

from __future__ import annotations

import logging

import torch

from headgate.errors import RequestError
from headgate.layers.backend import NO_FP8, Backend, Fp8, Heads
from headgate.layers.cpu import Kernels, NotCompiled, load_kernels
from headgate.layers.cpu.kernels import LANES, why_unsupported
from headgate.layers.cpu_backend import CpuBackend
from headgate.layers.onednn import avoid_hidden_tiles
from headgate.layers.torch_backend import DeterministicTorchBackend, TorchBackend

FP8_CAPABILITY = (8, 9)
NAMES = ("auto", "torch", "cpu", "triton")

logger = logging.getLogger(__name__)


def choose_backend(
    name: str,
    device: torch.device,
    dtype: torch.dtype,
    heads: Heads,
    *,
    deterministic: bool = False,
    fp8: Fp8 = NO_FP8,
) -> Backend:
    """Return the backend `name`. If it is unavailable, log the reason and return the torch backend."""
    if name not in NAMES:
        raise ValueError(f"backend {name!r} is unknown; choose from {', '.join(NAMES)}")
    if device.type == "cuda" and name in ("auto", "triton"):
        return triton_backend(device, dtype, heads, deterministic, fp8)
    if fp8 != NO_FP8:
        raise RequestError(f"fp8 needs the Triton backend on a GPU, not backend {name} on {device.type}")
    avoid_hidden_tiles()
    if name == "torch":
        return torch_backend(device, dtype, heads, deterministic)
    kernels = cpu_kernels(device, dtype, heads)
    if isinstance(kernels, Kernels):
        return CpuBackend(kernels, dtype, heads)
    log_fallback(kernels, expected=name == "auto")
    return torch_backend(device, dtype, heads, deterministic)


def log_fallback(missing: NotCompiled, *, expected: bool) -> None:
    """Log why torch computes. It is a warning if another backend was configured, or if the operator can do something."""
    if missing.remedy is not None:
        logger.warning(
            "answers will be slow, because torch computes them: %s. To make them fast: %s",
            missing.reason,
            missing.remedy,
        )
    else:
        logger.log(logging.INFO if expected else logging.WARNING, "computing in plain torch: %s", missing.reason)


def torch_backend(device: torch.device, dtype: torch.dtype, heads: Heads, deterministic: bool) -> Backend:
    return (DeterministicTorchBackend if deterministic else TorchBackend)(device, dtype, heads)


def triton_backend(device: torch.device, dtype: torch.dtype, heads: Heads, deterministic: bool, fp8: Fp8) -> Backend:
    if fp8 != NO_FP8 and torch.cuda.get_device_capability(device) < FP8_CAPABILITY:
        raise RequestError(f"fp8 needs a GPU of compute capability 8.9 or more, which {device} is not")
    # Imported here because a machine without a GPU need not have Triton.
    from headgate.layers.triton_backend import DeterministicTritonBackend, TritonBackend

    return (DeterministicTritonBackend if deterministic else TritonBackend)(device, dtype, heads, fp8)


def cpu_kernels(device: torch.device, dtype: torch.dtype, heads: Heads) -> Kernels | NotCompiled:
    if device.type != "cpu":
        return NotCompiled(f"the CPU kernels do not run on {device}")
    reason = why_unsupported(heads.size, LANES, dtype)
    return load_kernels() if reason is None else NotCompiled(reason)


def available_backends() -> list[str]:
    """The backends that this machine supports, the reference first."""
    return ["torch", "cpu"] if isinstance(load_kernels(), Kernels) else ["torch"]
