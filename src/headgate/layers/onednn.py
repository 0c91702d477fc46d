"""Works around virtual machines that hide AMX tile information from oneDNN, torch's CPU matrix library.

Some hypervisors pass on the CPU's AMX flags but answer the query for its tile sizes (CPUID leaf 1Dh) with zeros.
oneDNN trusts both, and the first bf16 product ends the process with SIGILL. Our own kernels do not need this
information.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
from pathlib import Path

LIMIT = "ONEDNN_MAX_CPU_ISA"  # read by oneDNN at its first product
BELOW_AMX = "AVX512_CORE_FP16"
TILE_LEAF = 0x1D
CPUID = bytes.fromhex("53 89f8 89f1 0fa2 5b c3")  # machine code: returns eax of CPUID leaf edi, subleaf esi


def avoid_hidden_tiles() -> None:
    """Forbid AMX to oneDNN if the tile sizes are hidden, unless the user has set a limit. Call before any product."""
    if LIMIT not in os.environ and _announces_amx() and _palettes() == 0:
        os.environ[LIMIT] = BELOW_AMX


def _announces_amx() -> bool:
    try:
        return platform.machine() == "x86_64" and " amx_tile" in Path("/proc/cpuinfo").read_text()
    except OSError:
        return False


def _palettes() -> int | None:
    """The number of tile layouts that the CPU reports; None if it cannot be queried."""
    try:
        with mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC) as code:
            code.write(CPUID)
            start = ctypes.c_char.from_buffer(code)
            try:
                ask = ctypes.CFUNCTYPE(ctypes.c_uint32, ctypes.c_uint32, ctypes.c_uint32)(ctypes.addressof(start))
                return int(ask(TILE_LEAF, 0))
            finally:
                del start  # a reference would keep the mapping open
    except OSError:  # writable and executable memory is forbidden
        return None
