"""Compiles the C++ kernels on first use and loads them, unless the wheel has them.

Each combination of sources, flags, torch version and Python version has its own folder, named by a hash (see
`headgate.compiling`). If the kernels are unavailable, the torch backend is used.
"""

from __future__ import annotations

import functools
import os
import platform
import shutil
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from headgate import compiling
from headgate.compiling import (
    PREBUILT,
    PYTHON_ABI,
    KnownFailure,
    NotCompiled,
    build_once,
    compile_with,
    import_library,
    load_prebuilt,
)
from headgate.layers.cpu.kernels import Kernels

MODULE = "_headgate_cpu_kernels"
FILE = f"{MODULE}.so"
SOURCES = Path(__file__).parent
COMPILE_S = 600.0
NEEDED_CPU_FLAGS = ("avx2", "fma", "f16c")

# `-ffp-contract=off`: if the compiler fused a multiplication and an addition in one instantiation of a template but
# not in another, the bits of a row would depend on adjacent rows.
COMMON_FLAGS = ("-std=c++20", "-O3", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off", "-fno-math-errno", "-w")
AVX512_FLAGS = ("-mavx2", "-mfma", "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl")
ISA_FLAGS = {
    "avx2": ("-mavx2", "-mfma", "-mf16c"),
    "avx512": AVX512_FLAGS,
    "avx512bf16": (*AVX512_FLAGS, "-mavx512bf16"),
}


@dataclass(frozen=True, slots=True)
class _Unit:
    """One object file: its source and its flags."""

    name: str
    source: str
    flags: tuple[str, ...]


def load_kernels(
    isa: str | None = None, *, compiler: str = "g++", cache: Path | None = None
) -> Kernels | NotCompiled:
    """Return the kernels for `isa`, by default the best that this CPU supports. Compile them if necessary."""
    module = _load_module(compiler, cache or default_cache())
    if isinstance(module, NotCompiled):
        return module
    supported: list[str] = module.supported_isas()
    if isa is not None and isa not in supported:
        return NotCompiled(f"this CPU does not run {isa}; it runs {', '.join(supported)}")
    return Kernels(module, isa)


def supported_isas() -> tuple[str, ...]:
    """The instruction sets that `load_kernels` accepts on this machine, best first; empty without kernels."""
    module = _load_module("g++", default_cache())
    return () if isinstance(module, NotCompiled) else tuple(module.supported_isas())


def default_cache() -> Path:
    return compiling.default_cache() / "kernels"


@functools.lru_cache
def _load_module(compiler: str, cache: Path) -> Any:
    """Return the extension module, or `NotCompiled`. Cached, because a module can be loaded only once."""
    reason = why_not_here(cpu_flags())
    if reason is not None:
        return NotCompiled(reason)
    prebuilt = load_prebuilt(MODULE, prebuilt_in(PREBUILT))
    if prebuilt is not None:
        return prebuilt
    library = library_in(cache)
    try:
        if not library.exists():
            built = _build(compiler, library)
            if isinstance(built, NotCompiled):
                return built
        return import_library(MODULE, library)
    except (OSError, ImportError) as error:
        return NotCompiled(f"cannot build or load {library}: {error}", "set XDG_CACHE_HOME to a writable folder")


def library_in(cache: Path) -> Path:
    """The path of the library for these sources and this torch, whether or not it is built."""
    return cache / _fingerprint() / FILE


def prebuilt_in(folder: Path) -> Path:
    """The path of the library in a wheel's folder, whether or not it is there.

    The kernels use torch's C++ interface, which may change with every commit of torch. Builds of one commit for other
    devices have the same one.
    """
    return folder / _fingerprint_for(torch.version.git_version, torch.compiled_with_cxx11_abi(), PYTHON_ABI) / FILE


def found_library() -> Path:
    """The path of the library that is loaded, whether or not it is built."""
    prebuilt = prebuilt_in(PREBUILT)
    return prebuilt if prebuilt.exists() else library_in(default_cache())


def why_not_here(flags: frozenset[str]) -> str | None:
    if sys.platform != "linux" or platform.machine() not in ("x86_64", "AMD64"):
        return f"the CPU kernels are for x86-64 Linux, not {platform.machine()} {sys.platform}"
    missing = [flag for flag in NEEDED_CPU_FLAGS if flag not in flags]
    return f"this CPU lacks {' and '.join(missing)}" if missing else None


def cpu_flags() -> frozenset[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    return frozenset(next((line for line in lines if line.startswith("flags")), "").split())


def _fingerprint() -> str:
    return _fingerprint_for(torch.__version__, sys.implementation.cache_tag, Path(torch.__file__).parent)


def _fingerprint_for(*platform: object) -> str:
    sources = [*SOURCES.glob("*.h"), *SOURCES.glob("*.cpp")]
    return compiling.fingerprint(sources, COMMON_FLAGS, ISA_FLAGS, *platform)


def _build(compiler: str, library: Path) -> Path | NotCompiled:
    """Compile to `library`, unless another process has just done so."""
    found = shutil.which(compiler)
    if found is None:
        return NotCompiled(f"no C++ compiler: {compiler} not found", "install g++ 10 or later and restart")
    known = KnownFailure(library.parent, found)

    def build(scratch: Path, built: Path) -> str | None:
        before = known.read()
        if before is not None:
            return before
        print("headgate: compiling CPU kernels, once (about 30 s) ...", file=sys.stderr, flush=True)
        why = _compile_and_link(found, scratch, built)
        if why is not None:
            known.write(why)
        return why

    failed = build_once(library, build)
    if failed is None:
        return library
    return NotCompiled(f"compiling the CPU kernels failed: {failed.reason}", _remedy(known))


def _remedy(known: KnownFailure) -> str:
    another = "use g++ 10 or later, or another release of torch"
    if known.read() is None:
        return f"if the reason is not a full disk or a missing header, {another}"
    return f"{another}; to try again with the same versions, remove {known.file}"


def known_failure(compiler: str) -> str | None:
    """Return why `compiler`, a path, is known to reject these sources; None if it is not."""
    return KnownFailure(library_in(default_cache()).parent, compiler).read()


def _units() -> list[_Unit]:
    torch_root = Path(torch.__file__).parent
    includes = (
        torch_root / "include",
        torch_root / "include/torch/csrc/api/include",
        sysconfig.get_paths()["include"],
    )
    binding = (*(f"-isystem{path}" for path in includes), "-O1", "-fopenmp", f"-DHEADGATE_MODULE={MODULE}")
    kernels = [_Unit(isa, "kernels.cpp", (*flags, f"-DHEADGATE_ISA={isa}")) for isa, flags in ISA_FLAGS.items()]
    return [_Unit("bind", "bind.cpp", binding), *kernels]


def _compile_and_link(compiler: str, scratch: Path, library: Path) -> str | None:
    """Compile all units into `scratch` and link them to `library`. Returns the error, if any."""

    def compile_unit(unit: _Unit) -> str | None:
        target = scratch / f"{unit.name}.o"
        source = SOURCES / unit.source
        return _run([compiler, *COMMON_FLAGS, *unit.flags, "-c", str(source), "-o", str(target)])

    units = _units()
    with ThreadPoolExecutor(max_workers=min(len(units), os.cpu_count() or 1)) as pool:
        for failure in pool.map(compile_unit, units):
            if failure is not None:
                return failure
    objects = [str(scratch / f"{unit.name}.o") for unit in units]
    return _run([compiler, "-shared", *objects, *_link_flags(), "-o", str(library)])


def _link_flags() -> list[str]:
    libraries = Path(torch.__file__).parent / "lib"
    # Link torch's own OpenMP runtime, whose file name varies: another runtime would add a second thread pool.
    openmp = [str(path) for path in libraries.glob("libgomp*.so*")] or ["-fopenmp"]
    return [f"-L{libraries}", "-ltorch_python", "-ltorch_cpu", "-ltorch", "-lc10", *openmp]


def _run(command: list[str]) -> str | None:
    return compile_with(command, timeout_s=COMPILE_S)
