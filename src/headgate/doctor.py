"""Checks whether this machine can serve models, and what limits it.

Each check is a function that takes the subject of the check and returns findings: *ok*, *note* (costs speed or a
feature) or *problem* (no model can be served). The checks download and build nothing and leave no files. A missing
library is a finding, so torch and modules that need it are imported only inside the checks that use them.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import resource
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from headgate.errors import HeadgateError
from headgate.listening import take_port

Verdict = Literal["ok", "note", "problem"]
VersionOf = Callable[[str], str | None]

GIB = 2**30
LEAST_MEMORY = GIB  # enough for torch in two processes and the smallest model
LEAST_DISK = GIB
LEAST_FILES = 4096
WEIGHTS_SHARE = 0.8  # share of free memory for weights; the rest is for KV and temporary buffers
BYTES_PER_PARAMETER = 2  # bfloat16

# The purpose of each optional extra.
EXTRAS = {
    "bench": "plots of benchmarks",
    "gpu": "kernels for NVIDIA GPUs",
    "nixl": "KV transfer by NIXL",
    "otel": "traces",
    "ray": "engines placed by Ray",
}

# CPU flags that each kernel set needs, best first, as in `layers/cpu/bind.cpp`.
_AVX512 = ("avx512f", "avx512bw", "avx512dq", "avx512vl")
KERNEL_SETS = {
    "AMX": (*_AVX512, "avx512_bf16", "amx_tile", "amx_bf16"),
    "AVX512-BF16": (*_AVX512, "avx512_bf16"),
    "AVX-512": _AVX512,
    "AVX2": ("avx2", "fma"),
}


@dataclass(frozen=True, slots=True)
class Finding:
    subject: str
    verdict: Verdict
    found: str
    meaning: str

    def __str__(self) -> str:
        return f"{self.verdict:<8} {self.subject:<12} {self.found}: {self.meaning}"


@dataclass(frozen=True, slots=True)
class PlannedServer:
    """The address and the model cache of the server that is to run on this machine."""

    host: str
    port: int
    model_cache: Path


def examine(wanted: PlannedServer) -> list[Finding]:
    return [
        python(sys.version_info[:3]),
        *libraries(_requirements(), version_of),
        *_with_torch(),
        *limits(wanted),
        *options(_requirements(), version_of),
    ]


def can_serve(findings: Sequence[Finding]) -> bool:
    return all(finding.verdict != "problem" for finding in findings)


# ------------------------------------------------------------------------------------------------------- libraries


def python(version: tuple[int, ...]) -> Finding:
    text = f"{'.'.join(map(str, version))} on {platform.machine()} {sys.platform}"
    if version < (3, 11):
        return Finding("python", "problem", text, "3.11 or later is needed")
    if sys.platform != "linux":
        return Finding("python", "note", text, "only Linux is tested")
    return Finding("python", "ok", text, "supported")


@dataclass(frozen=True, slots=True)
class Requirement:
    name: str
    at_least: str
    extra: str | None

    @classmethod
    def of(cls, line: str) -> Requirement:
        """Parse a line of package metadata: `name>=1.2; extra == "x"`."""
        specifier, _, marker = line.partition(";")
        extra = re.search(r"extra == ['\"](\w+)['\"]", marker)
        name = re.match(r"[\w.-]+", specifier.strip())
        least = re.search(r">=\s*([\d.]+)", specifier)
        assert name is not None, line
        return cls(name[0], least[1] if least else "0", extra[1] if extra else None)

    def met_by(self, version: str) -> bool:
        return _numbers(version) >= _numbers(self.at_least)


def _numbers(version: str) -> tuple[int, ...]:
    """Return the numbers of a version: 2, 13 and 0 for `2.13.0+cpu`."""
    return tuple(int(part) for part in re.match(r"\d+(\.\d+)*", version)[0].split("."))  # type: ignore[index]


def _requirements() -> list[Requirement]:
    """Return the requirements of the installed package; empty if Headgate runs from a source tree."""
    try:
        lines = importlib.metadata.requires("headgate") or ()
    except importlib.metadata.PackageNotFoundError:
        lines = ()
    return [Requirement.of(line) for line in lines]


def version_of(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def libraries(requirements: Sequence[Requirement], version: VersionOf) -> Iterator[Finding]:
    """Check required libraries: yield one finding for all, or one for each that is missing or too old."""
    needed = [each for each in requirements if each.extra is None]
    if not needed:
        yield Finding(
            "libraries", "note", "headgate is not installed", "cannot check its requirements; use pip install"
        )
        return
    have = {each.name: version(each.name) for each in needed}
    wrong = list(filter(None, (_wrong(each, have[each.name]) for each in needed)))
    if wrong:
        yield from wrong
    else:
        text = ", ".join(f"{name} {version}" for name, version in have.items())
        yield Finding("libraries", "ok", text, "all installed")


def _wrong(requirement: Requirement, version: str | None) -> Finding | None:
    if version is None:
        return Finding(requirement.name, "problem", "not installed", "pip install headgate")
    if not requirement.met_by(version):
        wanted = f"{requirement.at_least} or later is needed"
        return Finding(requirement.name, "problem", version, wanted)
    return None


def options(requirements: Sequence[Requirement], version: VersionOf) -> Iterator[Finding]:
    for extra, purpose in EXTRAS.items():
        have = {each.name: version(each.name) for each in requirements if each.extra == extra}
        missing = [name for name, found in have.items() if found is None]
        if missing:
            advice = f"no {purpose}; pip install 'headgate[{extra}]'"
            yield Finding(f"extra {extra}", "note", f"{', '.join(missing)} not installed", advice)
        elif have:
            yield Finding(
                f"extra {extra}", "ok", ", ".join(f"{name} {found}" for name, found in have.items()), purpose
            )


# --------------------------------------------------------------------------------------------------------- hardware


def _with_torch() -> Iterator[Finding]:
    try:
        import torch
    except (ImportError, OSError) as error:
        yield Finding("torch", "problem", f"cannot be imported ({error})", "nothing can be computed without it")
        return
    from headgate.device.memory import free_in_cgroup, free_on_machine
    from headgate.layers.cpu import build
    from headgate.router.data_path import fast_path

    flags = build.cpu_flags()
    yield cpu(flags, build.why_not_here(flags), torch.get_num_threads())
    compiler = shutil.which("g++")
    failure = None if compiler is None else build.known_failure(compiler)
    yield kernels(build.why_not_here(flags), build.found_library(), compiler, failure)
    yield routing(fast_path.found_library(), shutil.which("cc"))
    yield from gpus(torch.cuda, version_of("triton")) if torch.cuda.is_available() else no_gpu(torch.__version__)
    yield memory("memory", min(free_on_machine(), free_in_cgroup()))


def cpu(flags: frozenset[str], unsupported: str | None, threads: int) -> Finding:
    text = f"{platform.machine()}, {threads} threads"
    best = next((name for name, needed in KERNEL_SETS.items() if flags.issuperset(needed)), None)
    if unsupported is not None or best is None:
        reason = unsupported or "no kernels for this CPU"
        return Finding("cpu", "note", text, f"{reason}; torch kernels are used instead, several times slower")
    if best in ("AVX-512", "AVX2"):
        return Finding("cpu", "ok", f"{text}, {best}", "compiled kernels; bfloat16 is computed in float32 here")
    return Finding("cpu", "ok", f"{text}, {best}", "compiled kernels, with bfloat16 in hardware")


def kernels(unsupported: str | None, library: Path, compiler: str | None, failure: str | None = None) -> Finding:
    if unsupported is not None:
        return Finding("kernels", "note", "none for this CPU", "torch kernels are used instead")
    if library.exists():
        return Finding("kernels", "ok", f"built, in {library.parent}", "servers use them")
    if failure is not None:
        return Finding("kernels", "note", f"{compiler} cannot compile them ({failure})", "torch kernels are slower")
    if compiler is not None:
        return Finding(
            "kernels", "ok", f"not built yet, {compiler} found", "the first start takes half a minute more"
        )
    return Finding("kernels", "note", "not built, no C++ compiler", "install g++; torch kernels are slower")


def routing(library: Path, compiler: str | None) -> Finding:
    if library.exists():
        return Finding("routing", "ok", f"compiled, in {library.parent}", "routers use it")
    if compiler is not None:
        return Finding(
            "routing", "ok", f"not compiled yet, {compiler} found", "the first router compiles it, in a second"
        )
    return Finding(
        "routing", "note", "not compiled, no C compiler", "install gcc; without it routers take twice the CPU time"
    )


def gpus(cuda: Any, triton: str | None) -> Iterator[Finding]:
    """Check the GPUs; `cuda` is the module `torch.cuda`."""
    for index in range(cuda.device_count()):
        free, total = cuda.mem_get_info(index)
        text = f"{cuda.get_device_name(index)}, {free / GIB:.1f} of {total / GIB:.1f} GiB free"
        if triton is None:
            yield Finding(
                f"gpu {index}", "problem", text, "needs Triton: pip install 'headgate[gpu]'; or --device cpu"
            )
        else:
            yield Finding(f"gpu {index}", "ok", text, fits(free))


def no_gpu(torch_version: str) -> Iterator[Finding]:
    yield Finding("gpu", "note", f"torch {torch_version} finds none", "models are computed by the CPU")


def memory(subject: str, free: int) -> Finding:
    text = f"{free / GIB:.1f} GiB free"
    if free < LEAST_MEMORY:
        return Finding(subject, "problem", text, f"a server needs {LEAST_MEMORY / GIB:g} GiB or more")
    return Finding(subject, "ok", text, fits(free))


def fits(free: int) -> str:
    billions = free * WEIGHTS_SHARE / BYTES_PER_PARAMETER / 1e9
    return f"room for a model of about {billions:.2g} billion parameters in bfloat16, and its KV"


# ----------------------------------------------------------------------------------------------------------- limits


def limits(wanted: PlannedServer) -> Iterator[Finding]:
    yield cache_folder(wanted.model_cache)
    yield port(wanted.host, wanted.port)
    yield open_files(*resource.getrlimit(resource.RLIMIT_NOFILE))


def cache_folder(folder: Path) -> Finding:
    """Check the folder that models are downloaded to. A model that is served by its path does not need it."""
    there = next(parent for parent in (folder, *folder.parents) if parent.exists())
    if not (there.is_dir() and os.access(there, os.W_OK | os.X_OK)):
        return Finding(
            "cache", "note", f"{folder} cannot be written", "serve a model by its path, or set XDG_CACHE_HOME"
        )
    free = shutil.disk_usage(there).free
    text = f"{folder}, {free / GIB:.1f} GiB free"
    if free < LEAST_DISK:
        return Finding("cache", "note", text, "little space for models; set XDG_CACHE_HOME to a larger disk")
    return Finding("cache", "ok", text, "models and kernels are kept there")


def port(host: str, number: int) -> Finding:
    try:
        with take_port(host, number):
            return Finding("port", "ok", f"{number} on {host} is free", "a server can listen there")
    except HeadgateError as error:
        return Finding("port", "note", f"{number} on {host} is not available", str(error))


def open_files(soft: int, hard: int) -> Finding:
    text = f"{'unlimited' if soft == resource.RLIM_INFINITY else soft} at once"
    if soft == resource.RLIM_INFINITY or soft >= LEAST_FILES:
        return Finding("open files", "ok", text, "each connection takes one")
    return Finding("open files", "note", text, f"each connection takes one; `ulimit -n {LEAST_FILES}` allows more")
