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

from headgate import __version__

ROOT = Path(__file__).parents[1]
BUILT_FROM = ("pyproject.toml", "README.md", "LICENSE", "src")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """Built from a copy, so that files left by an earlier build are not included."""
    source = tmp_path_factory.mktemp("source")
    for name in BUILT_FROM:
        if (ROOT / name).is_dir():
            leave_out = shutil.ignore_patterns("__pycache__", "*.egg-info")
            shutil.copytree(ROOT / name, source / name, ignore=leave_out)
        else:
            shutil.copy(ROOT / name, source / name)
    target = tmp_path_factory.mktemp("dist")
    pip = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation"]
    run([*pip, "--wheel-dir", target, source])
    (built,) = target.glob("*.whl")
    return built


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


def test_the_command_runs_from_the_installed_wheel(wheel, tmp_path):
    environment = tmp_path / "env"
    venv.create(environment, with_pip=True)
    run([environment / "bin/python", "-m", "pip", "install", "-q", "--no-deps", "--no-index", wheel])
    # Dependencies come from this environment by path only, without its editable installs.
    site = run([environment / "bin/python", "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]).strip()
    Path(site, "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    here = {"cwd": tmp_path, "env": clean}
    where = run([environment / "bin/python", "-c", "import headgate; print(headgate.__file__)"], **here)
    assert where.startswith(site)
    assert run([environment / "bin/headgate", "--version"], **here) == f"headgate {__version__}\n"
    assert "can serve" in run([environment / "bin/headgate", "doctor", "--port", "0"], **here)
    sources = "from headgate.layers.cpu.build import SOURCES; print(len(list(SOURCES.glob('*.cpp'))))"
    assert int(run([environment / "bin/python", "-c", sources], **here)) >= 2


def test_a_tagged_commit_has_the_version_of_its_tag():
    done = subprocess.run(["git", "tag", "--points-at", "HEAD"], cwd=ROOT, capture_output=True, text=True, timeout=60)
    tags = [tag for tag in done.stdout.split() if tag.startswith("v")]
    assert all(tag == f"v{__version__}" for tag in tags)
