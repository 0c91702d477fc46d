"""Free memory of a device, a machine or a container; selecting the current device; waiting for copies."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch

GIB = 2**30


def free_bytes(device: torch.device) -> int:
    """The bytes that this process can still allocate on `device`."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return min(free_on_machine(), free_in_cgroup())


def current(device: torch.device) -> AbstractContextManager[object]:
    """Make `device` current for this thread. Kernels and graphs run there, wherever their tensors are."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def finish_copies(device: torch.device) -> None:
    """Wait until all work submitted to `device` is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def free_on_machine(meminfo: Path = Path("/proc/meminfo")) -> int:
    lines = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
    return int(lines["MemAvailable"].split()[0]) * 1024


def free_in_cgroup(folder: Path = Path("/sys/fs/cgroup")) -> int:
    """The bytes left within a container's limit; 2**63 without a limit or without cgroup v2.

    Inactive page cache counts as free, because the kernel drops it when needed.
    """
    try:
        limit = int((folder / "memory.max").read_text())
        used = int((folder / "memory.current").read_text())
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):  # no cgroup v2, or the limit is "max"
        return 2**63
    return max(0, limit - used + int(stat["inactive_file"]))
