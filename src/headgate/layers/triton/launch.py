"""How kernels are launched: with little work for the host, and before the kernel ahead of them has ended.

`launch` remembers what Triton compiled for arguments of the same traits; asking Triton each time costs the host more
than most kernels cost the device. Where nothing is captured in a graph, that is what a step waits for.

A kernel launched with `**overlap(tensor)` calls `wait_for_previous(PDL)` once in every program. Before that call it may
read what the kernel just before it does not write, weights above all; everything before *that* kernel is complete,
because each kernel lets its successor start only after its own wait. After the call all is as usual. Only Hopper and
later devices can; others launch one after another.
"""

from __future__ import annotations

from collections.abc import Hashable
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl

_compiled: dict[Hashable, tuple[Any, tuple[Any, ...]]] = {}


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **settings: Any) -> None:
    """`kernel[grid](*arguments, **settings)`, where `settings` are all constants of the kernel, and options."""
    if not arguments[0].is_cuda:  # interpreted
        kernel[grid](*arguments, **settings)
        return
    key = (id(kernel), tuple(settings.values()), tuple(map(trait, arguments)), arguments[0].device)
    if found := _compiled.get(key):
        compiled, constants = found
        compiled[(*grid, 1, 1)[:3]](*arguments, *constants)
    else:
        names = kernel.arg_names[len(arguments) :]
        _compiled[key] = kernel[grid](*arguments, **settings), tuple(settings[name] for name in names)


def trait(argument: Any) -> Hashable:
    """What Triton may compile differently for: types, alignment, and numbers that are 1 or multiples of 16."""
    if isinstance(argument, torch.Tensor):
        return argument.dtype, argument.data_ptr() % 16 == 0
    if isinstance(argument, int):
        return argument == 1, argument % 16 == 0, argument >= 2**31
    return None


def overlap(tensor: torch.Tensor) -> dict[str, bool]:
    """How to launch a kernel on the device of `tensor`."""
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
