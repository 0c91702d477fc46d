"""CPU kernels: a C++ extension compiled on first use, and its typed Python interface.

`build.load_kernels` returns `Kernels`, or `NotCompiled` with the reason; callers then fall back to torch. All
operations are batch-invariant: the bits of a row depend on that row's inputs only.
"""

from headgate.compiling import NotCompiled
from headgate.layers.cpu.build import load_kernels
from headgate.layers.cpu.kernels import Kernels

__all__ = ["Kernels", "NotCompiled", "load_kernels"]
