"""CPU kernels: a C++ extension compiled on first use, and its typed face.

`build.load_kernels` gives `Kernels`, or `NotCompiled` with the reason; callers fall back to torch on the latter.
The result of every operation is batch-invariant: the bits of a row depend on that row's inputs only.
"""

from headgate.compiling import NotCompiled
from headgate.layers.cpu.build import load_kernels
from headgate.layers.cpu.kernels import Kernels

__all__ = ["Kernels", "NotCompiled", "load_kernels"]
