"""The installed package: the wheel contains everything, and its command runs from it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest
import torch

from headgate import __version__, compiling
from headgate.layers.cpu import build
from headgate.layers.cpu.build import supported_isas
from headgate.router.data_path import fast_path

ROOT = Path(__file__).parents[1]
BUILT_FROM = ("pyproject.toml", "setup.py", "README.md", "LICENSE", "src")
PREBUILD = {"HEADGATE_PREBUILD": "1"} if supported_isas() else {}
LOADED = """
from headgate.layers.cpu import build, load_kernels
from headgate.router.data_path import fast_path
print(len(list(build.SOURCES.glob("*.cpp"))), load_kernels().isa, type(fast_path.compiled()).__name__)
print(build.found_library(), fast_path.found_library())
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """Built from a copy, so that files left by an earlier build are not included; libraries come from the cache."""
    source = tmp_path_factory.mktemp("source")
    for name in BUILT_FROM:
        if (ROOT / name).is_dir():
            leave_out = shutil.ignore_patterns("__pycache__", "*.egg-info")
            shutil.copytree(ROOT / name, source / name, ignore=leave_out)
        else:
            shutil.copy(ROOT / name, source / name)
    target = tmp_path_factory.mktemp("dist")
    pip = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation"]
    run([*pip, "--wheel-dir", target, source], env=os.environ | PREBUILD)
    (built,) = target.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory) -> Path:
    """The programs of an environment with the wheel; other packages come from this environment by path only."""
    environment = tmp_path_factory.mktemp("installed")
    venv.create(environment, with_pip=True)
    run([environment / "bin/python", "-I", "-m", "pip", "install", "-q", "--no-deps", "--no-index", wheel])
    site = run(
        [environment / "bin/python", "-I", "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    ).strip()
    Path(site, "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return environment / "bin"


def run(command: list[object], **options: object) -> str:
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=100, **options)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_wheel_has_every_source_and_its_version(wheel):
    assert wheel.name.startswith(f"headgate-{__version__}-")
    held = set(zipfile.ZipFile(wheel).namelist())
    sources = [path for path in (ROOT / "src/headgate").rglob("*.*") if "__pycache__" not in path.parts]
    wanted = {str(path.relative_to(ROOT / "src")) for path in sources if path.is_file()}
    assert {"headgate/py.typed", "headgate/layers/cpu/bind.cpp"} <= wanted
    assert wanted - held == set()


def test_the_command_runs_from_the_installed_wheel(installed, tmp_path):
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    here = {"cwd": tmp_path, "env": clean}
    where = run([installed / "python", "-c", "import headgate; print(headgate.__file__)"], **here)
    assert where.startswith(str(installed.parent))
    assert run([installed / "headgate", "--version"], **here) == f"headgate {__version__}\n"
    assert "can serve" in run([installed / "headgate", "doctor", "--port", "0"], **here)


@pytest.mark.skipif(not PREBUILD, reason="there are no kernels for this machine")
def test_the_libraries_of_the_wheel_are_used_without_a_compiler_or_a_cache(wheel, installed, tmp_path):
    assert wheel.name.endswith("-linux_x86_64.whl")
    alone = {"PATH": str(installed), "XDG_CACHE_HOME": str(tmp_path)}
    sources, isa, path, *libraries = run([installed / "python", "-c", LOADED], cwd=tmp_path, env=alone).split()
    assert int(sources) >= 2 and isa == supported_isas()[0] and path == "FastPath"
    assert all(Path(library).parents[2].name == "headgate" for library in libraries)
    assert list(tmp_path.iterdir()) == []


def test_a_library_that_does_not_fit_is_reported_and_not_loaded(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(compiling, "PREBUILT", tmp_path)
    assert compiling.load_prebuilt("module", tmp_path / "other/module.so") is None
    assert capsys.readouterr().err.count("module.so is not used: it was built for other versions") == 1
    (tmp_path / "module.so").write_bytes(b"not a library")
    assert compiling.load_prebuilt("module", tmp_path / "module.so") is None
    assert "module.so is not used: " in capsys.readouterr().err
    monkeypatch.setattr(compiling, "PREBUILT", tmp_path / "none")
    assert compiling.load_prebuilt("module", tmp_path / "module.so") is None
    assert capsys.readouterr().err == ""


def test_a_prebuilt_library_is_for_one_python_and_one_commit_of_torch(tmp_path, monkeypatch):
    kernels, routing = build.prebuilt_in(tmp_path), fast_path.prebuilt_in(tmp_path)
    monkeypatch.setattr(torch.version, "git_version", "another")
    assert (build.prebuilt_in(tmp_path) != kernels, fast_path.prebuilt_in(tmp_path) != routing) == (True, False)
    monkeypatch.undo()
    for module in (build, fast_path):
        monkeypatch.setattr(module, "PYTHON_ABI", "cpython-399-x86_64-linux-gnu")
    assert (build.prebuilt_in(tmp_path) != kernels, fast_path.prebuilt_in(tmp_path) != routing) == (True, True)


def test_a_tagged_commit_has_the_version_of_its_tag():
    done = subprocess.run(["git", "tag", "--points-at", "HEAD"], cwd=ROOT, capture_output=True, text=True, timeout=60)
    tags = [tag for tag in done.stdout.split() if tag.startswith("v")]
    assert all(tag == f"v{__version__}" for tag in tags)
