"""The router's C code and the CPU kernels under AddressSanitizer and UndefinedBehaviorSanitizer: `make sanitize`.

Both are compiled with the sanitizers into a separate cache, `build/sanitize`, and run by the tests that compare them
with their Python and torch equivalents on damaged, truncated and unusual input. The first finding ends the run.
"""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial
from pathlib import Path

from hypothesis import settings

from headgate.compiling import build_once
from headgate.layers.cpu import build
from headgate.router.data_path import fast_path

CACHE = Path(__file__).parents[1] / "build" / "sanitize"
# Not `vptr`: it needs type information that torch hides. Frame pointers and -g make the reports readable.
SANITIZERS = ("-fsanitize=address,undefined,float-cast-overflow", "-fno-sanitize=vptr", "-fno-sanitize-recover=all")
READABLE = ("-g1", "-fno-omit-frame-pointer")
OPTIONS = {
    # No leak check: Python and torch do not free everything at exit, and our code allocates through them.
    "ASAN_OPTIONS": "detect_leaks=0:abort_on_error=1:strict_string_checks=1",
    "UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1:abort_on_error=1",
    "PYTHONMALLOC": "malloc",  # one allocation per object, so that reads beyond it are detected
}
# The first one looks up symbols of the last one when it starts.
LIBRARIES = (
    "libasan.so",
    "libubsan.so",
    "libstdc++.so",
)
EXAMPLES = 300
ROUTER = ("tests/router/test_fast_path.py",)
KERNELS = tuple(
    f"tests/layers/test_cpu_{name}.py" for name in ("attention", "blocks", "linear", "sample", "thread_team")
)


def use_sanitizers() -> None:
    """Compile both with the sanitizers in this process from now on."""
    fast_path.FLAGS = (*fast_path.FLAGS, "-O1", *READABLE, *SANITIZERS)  # type: ignore[misc]
    # The code is the same at -O1, which takes a fourth of the time to compile.
    build.COMMON_FLAGS = (*build.COMMON_FLAGS, "-O1", *READABLE, *SANITIZERS)
    link_flags = build._link_flags
    build._link_flags = lambda: [*link_flags(), *SANITIZERS]  # type: ignore[assignment]


def pytest_configure() -> None:
    """Hook of pytest, which runs with this module as a plugin in a process that has the sanitizers loaded."""
    use_sanitizers()
    settings.register_profile("sanitize", max_examples=EXAMPLES, deadline=None, derandomize=True)
    settings.load_profile("sanitize")


def compile_both() -> None:
    """Compile in this process, where no sanitizer slows the compiler down."""
    os.environ["XDG_CACHE_HOME"] = str(CACHE)
    use_sanitizers()
    router, kernels = fast_path.library_in(fast_path.default_cache()), build.library_in(build.default_cache())
    for missing in (build_once(router, partial(fast_path._build, "cc")), build._build("g++", kernels)):
        if not isinstance(missing, Path | None):
            raise SystemExit(missing.reason)


def environment() -> dict[str, str]:
    found = [subprocess.check_output(["g++", f"-print-file-name={name}"], text=True).strip() for name in LIBRARIES]
    return {**os.environ, **OPTIONS, "LD_PRELOAD": " ".join(found), "XDG_CACHE_HOME": str(CACHE)}


def main(arguments: list[str]) -> int:
    compile_both()
    tests = arguments or [*ROUTER, *KERNELS]
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-x",
        "-s",
        "-p",
        "tests.sanitize",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:faulthandler",
        *tests,
    ]
    return subprocess.call(command, env=environment())


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
