"""Compiles C and C++ extensions on first use with the system's compiler, and caches them.

A wheel made by `make wheel` has the libraries already, each in a folder whose name is a hash of everything that it must
fit: its sources, its flags, Python and torch. A library in such a folder is loaded instead of compiling it.

Rules: a library appears in its folder complete or not at all, because it is built elsewhere and then renamed. A file
lock keeps two processes from building the same library at once. A failure is returned as a value, `NotCompiled`,
because there is always a fallback. `KnownFailure` keeps a slow compilation from failing again at every start.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.machinery
import importlib.util
import os
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PREBUILT = Path(__file__).with_name("libraries")  # of a wheel; a source tree has none
PYTHON_ABI = sysconfig.get_config_var("SOABI")


@dataclass(frozen=True, slots=True)
class NotCompiled:
    """The reason why a library could not be compiled, and what the operator can do about it, if anything."""

    reason: str
    remedy: str | None = None


def default_cache() -> Path:
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "headgate"


def fingerprint(sources: Iterable[Path], *settings: object) -> str:
    digest = hashlib.sha256()
    for path in sorted(sources):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    digest.update(repr(settings).encode())
    return digest.hexdigest()[:20]


def build_once(library: Path, build: Callable[[Path, Path], str | None]) -> NotCompiled | None:
    """Call `build` to make the library in a temporary folder, unless it exists or another process builds it."""
    if library.exists():
        return None
    library.parent.mkdir(parents=True, exist_ok=True)
    with _locked(library.parent / "lock"):
        if library.exists():
            return None
        with tempfile.TemporaryDirectory(dir=library.parent) as scratch:
            built = Path(scratch) / library.name
            failure = build(Path(scratch), built)
            if failure is not None:
                return NotCompiled(failure)
            built.replace(library)
    return None


@dataclass(frozen=True, slots=True)
class KnownFailure:
    """A file that records why `compiler` rejected the sources of the library in `folder`.

    The name of the folder is a hash of the other inputs. A record of another compiler, also of another version of it,
    is ignored.
    """

    folder: Path
    compiler: str

    @property
    def file(self) -> Path:
        return self.folder / "failure"

    def read(self) -> str | None:
        try:
            compiler, _, why = self.file.read_text().partition("\n")
        except OSError:
            return None
        return why if compiler == self._compiler() else None

    def write(self, why: str) -> None:
        """Record a failure, unless it may pass: a fatal error (a missing header, a full disk), a crash, a timeout."""
        if ": error: " in why:
            self.file.write_text(f"{self._compiler()}\n{why}")

    def _compiler(self) -> str:
        path = Path(self.compiler).resolve()
        status = path.stat()
        return f"{path} {status.st_size} {status.st_mtime_ns}"


def load_prebuilt(name: str, library: Path) -> Any | None:
    """Load a library of the wheel; None, with a line on stderr, if the wheel's libraries do not fit this machine."""
    if not PREBUILT.is_dir():
        return None
    reason = "it was built for other versions of Python or torch"
    if library.exists():
        try:
            return import_library(name, library)
        except ImportError as error:  # an older C library, for example
            reason = str(error)
    print(f"headgate: the wheel's {library.name} is not used: {reason}", file=sys.stderr, flush=True)
    return None


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def compile_with(command: list[str], *, timeout_s: float) -> str | None:
    """Run a compiler; returns the error, or None if it succeeded."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=timeout_s)
    except subprocess.TimeoutExpired:
        return f"it took more than {timeout_s:g} s"
    if done.returncode == 0:
        return None
    lines = done.stderr.splitlines() or [f"exit status {done.returncode}"]
    return next((line for line in lines if "error: " in line), lines[-1]).strip()


def import_library(name: str, library: Path) -> Any:
    loader = importlib.machinery.ExtensionFileLoader(name, str(library))
    spec = importlib.util.spec_from_file_location(name, library, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module
