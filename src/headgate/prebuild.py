"""Compiles the libraries for a wheel (`make wheel`, through `setup.py`)."""

from __future__ import annotations

import shutil
from pathlib import Path

from headgate.compiling import NotCompiled
from headgate.errors import HeadgateError
from headgate.layers.cpu import build
from headgate.router.data_path import fast_path


def copy_libraries(folder: Path) -> None:
    """Compile the libraries, unless the cache has them, and copy them to `folder`, where `PREBUILT` is in a wheel."""
    for loaded in (build.load_kernels(), fast_path.compiled()):
        if isinstance(loaded, NotCompiled):
            raise HeadgateError(f"a wheel with libraries needs a compiler: {loaded.reason}")
    for module in (build, fast_path):
        target = module.prebuilt_in(folder)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(module.library_in(module.default_cache()), target)
