"""Launches kernels with little work on the host, and before the previous kernel has ended.

`launch` caches compiled kernels by the traits of their arguments, because a lookup through Triton takes the host
longer than most kernels take the device. This cost limits steps that are not captured in a graph. Compiling takes a
large part of a second per kernel, so an engine compiles all kernels in parallel when it starts.

A kernel launched with `**overlap(tensor)` calls `wait_for_previous(PDL)` once in every program. Before that call it
may read anything that the previous kernel does not write, mainly weights. All kernels before the previous one are
complete, because each kernel lets its successor start only after its own wait. After the call there are no
restrictions. Only Hopper and later devices support this; others run kernels one after another.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Hashable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

MOST_COMPILERS = 16

_compiled: dict[Hashable, tuple[Any, tuple[Any, ...]]] = {}
Awaited = tuple[Any, tuple[Any, ...], dict[str, Any]]  # a kernel, its arguments and settings


class Mode(threading.local):
    """The mode of the current thread: while one thread collects kernels to compile, another may launch kernels."""

    awaited: dict[Hashable, Awaited] | None = None  # see `compiled_at_once`


_mode = Mode()


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **settings: Any) -> None:
    """Run `kernel[grid](*arguments, **settings)`; `settings` are all constants of the kernel, and launch options."""
    if not arguments[0].is_cuda:  # a CPU tensor: Triton's interpreter runs the kernel
        kernel[grid](*arguments, **settings)
        return
    key = (id(kernel), tuple(settings.values()), tuple(map(trait, arguments)), arguments[0].device)
    if found := _compiled.get(key):
        compiled, constants = found
        if _mode.awaited is None:
            compiled[(*grid, 1, 1)[:3]](*arguments, *constants)
    elif _mode.awaited is not None:
        _mode.awaited[key] = kernel, arguments, settings
    else:
        _compiled[key] = kernel[grid](*arguments, **settings), constants_of(kernel, arguments, settings)


def constants_of(kernel: Any, arguments: tuple[Any, ...], settings: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(settings[name] for name in kernel.arg_names[len(arguments) :])


@contextmanager
def compiled_at_once() -> Iterator[None]:
    """Do not run kernels launched inside this context, but compile them in parallel when it ends."""
    awaited: dict[Hashable, Awaited] = {}
    _mode.awaited = awaited
    try:
        yield
    finally:
        _mode.awaited = None
    with ThreadPoolExecutor(min(MOST_COMPILERS, os.cpu_count() or 1)) as threads:
        for key, compiled in zip(awaited, threads.map(compile_one, awaited.values()), strict=True):
            kernel, arguments, settings = awaited[key]
            _compiled[key] = compiled, constants_of(kernel, arguments, settings)


def compile_one(awaited: Awaited) -> Any:
    kernel, arguments, settings = awaited
    with torch.cuda.device(arguments[0].device):
        compiled = kernel.warmup(*arguments, grid=(1,), **settings)
        compiled.run  # noqa: B018 - loads the kernel, which is impossible during a capture
    return compiled


def trait(argument: Any) -> Hashable:
    """The properties for which Triton may compile different code: type, alignment, being 1 or a multiple of 16."""
    if isinstance(argument, torch.Tensor):
        return argument.dtype, argument.data_ptr() % 16 == 0
    if isinstance(argument, TensorDescriptor):
        return argument.base.dtype, *argument.block_shape
    if isinstance(argument, int):
        return argument == 1, argument % 16 == 0, argument >= 2**31
    return None


def overlap(tensor: torch.Tensor) -> dict[str, bool]:
    """Return launch settings that let a kernel overlap with the previous one, if the device of `tensor` can."""
    return OVERLAPPING if tensor.is_cuda and can_overlap(tensor.device) else ALONE


OVERLAPPING, ALONE = {"PDL": True, "launch_pdl": True}, {"PDL": False}


@lru_cache
def can_overlap(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= (9, 0)


@triton.jit
def wait_for_previous(PDL: tl.constexpr):
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
