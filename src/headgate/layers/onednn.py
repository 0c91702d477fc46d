"""oneDNN, with which torch multiplies matrices on CPUs, on virtual machines that hide the tiles of AMX.

Some hypervisors pass on the CPU's AMX flags and answer the question for the sizes of its tiles (CPUID leaf 1Dh) with zeros.
oneDNN believes both, and the first bf16 product ends the process with SIGILL. Our own kernels need no such answer.
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
CPUID = bytes.fromhex("53 89f8 89f1 0fa2 5b c3")  # eax of leaf edi, subleaf esi


def avoid_hidden_tiles() -> None:
    """Before the first product; a limit that the user has set stays."""
    if LIMIT not in os.environ and _announces_amx() and _palettes() == 0:
        os.environ[LIMIT] = BELOW_AMX


def _announces_amx() -> bool:
    try:
        return platform.machine() == "x86_64" and " amx_tile" in Path("/proc/cpuinfo").read_text()
    except OSError:
        return False


def _palettes() -> int | None:
    """How many layouts of tiles the CPU has; None if that cannot be asked."""
    try:
        with mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC) as code:
            code.write(CPUID)
            start = ctypes.c_char.from_buffer(code)
            try:
                ask = ctypes.CFUNCTYPE(ctypes.c_uint32, ctypes.c_uint32, ctypes.c_uint32)(ctypes.addressof(start))
                return int(ask(TILE_LEAF, 0))
            finally:
                del start  # which would keep the mapping
    except OSError:  # memory that is both written and executed is forbidden
        return None
