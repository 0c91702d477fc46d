"""Adds the compiled libraries to a wheel if HEADGATE_PREBUILD is set (`make wheel`); otherwise they compile on first use.

With the libraries, the wheel is for one version of Python on one platform, and its tag says so.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.build_py import build_py

PREBUILD = "HEADGATE_PREBUILD" in os.environ


class BuildLibraries(build_py):
    def run(self) -> None:
        super().run()
        if PREBUILD:
            sys.path.insert(0, str(Path(__file__).parent / "src"))
            from headgate.prebuild import copy_libraries

            copy_libraries(Path(self.build_lib, "headgate", "libraries"))


class PlatformDistribution(Distribution):
    def has_ext_modules(self) -> bool:
        return PREBUILD


setup(cmdclass={"build_py": BuildLibraries}, distclass=PlatformDistribution)
