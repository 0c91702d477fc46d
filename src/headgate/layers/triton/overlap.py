"""Kernels that start before the one before them has ended, on devices that can (Hopper and later).

A kernel launched with `**overlap(tensor)` calls `wait_for_previous(PDL)` once in every program. Before that call it may
read what the kernel just before it does not write, weights above all; everything before *that* kernel is complete,
because each kernel lets its successor start only after its own wait. After the call all is as usual.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl


def overlap(tensor: torch.Tensor) -> dict[str, bool]:
    """How to launch a kernel on the device of `tensor`."""
    if tensor.is_cuda and can_overlap(tensor.device):
        return {"PDL": True, "launch_pdl": True}
    return {"PDL": False}


@lru_cache
def can_overlap(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= (9, 0)


@triton.jit
def wait_for_previous(PDL: tl.constexpr):
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
