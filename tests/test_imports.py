"""Which package may import which, where libraries may appear, and that no imports form a cycle."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path
from urllib.request import urlopen

import pytest

PACKAGE = Path(__file__).parents[1] / "src/headgate"

# package -> the packages of Headgate that it may import
MAY_IMPORT = {
    "protocol": {"protocol", "contract"},
    "core": {"core", "protocol", "errors", "shares"},
    "layers": {"layers", "errors", "compiling"},
    "models": {"models", "layers", "errors"},
    "device": {
        "device",
        "models",
        "layers",
        "transfer",
        "contract",
        "protocol",
        "errors",
        "config",
        "logs",
        "model_store",
        "collector",
        "scratch",
        "pickled",
    },
    "transfer": {"transfer", "protocol", "errors"},
    "engine": {
        "engine",
        "core",
        "device",
        "transfer",
        "protocol",
        "errors",
        "config",
        "logs",
        "collector",
        "scratch",
        "turns",
        "reconcile",
    },
    "text": {"text", "contract", "protocol", "errors", "model_store"},
    "model_store": {"model_store", "errors"},
    "dashboard": {"dashboard", "errors"},
    "contract": {"contract", "dashboard", "protocol", "errors", "pickled"},
    "edge": {"edge", "contract", "dashboard", "protocol", "errors", "shares", "config", "tls"},
    "api": {
        "api",
        "contract",
        "edge",
        "dashboard",
        "engine",
        "text",
        "protocol",
        "errors",
        "config",
        "httpclient",
        "listening",
        "collector",
        "shares",
        "turns",
        "pickled",
        "tls",
    },
    "bench": {"bench", "errors", "config", "httpclient", "tls"},
    "router": {
        "router",
        "contract",
        "edge",
        "dashboard",
        "protocol",
        "errors",
        "config",
        "listening",
        "collector",
        "allocator",
        "compiling",
        "reconcile",
        "tls",
    },
    "cluster": {"cluster", "errors"},
    "integrations": {"integrations", "client", "cluster", "weights", "protocol", "errors"},
}

# module -> what it may import in addition
EXCEPTIONS = {
    # Grammars are defined on bytes, so matching tokens requires the bytes of each token.
    "device/build.py": {"text"},
    # Fakes are part of the product: crashes are replayed on one.
    "engine/replay.py": {"testing"},
}

# library -> the only packages (or modules) that may import it
ONLY_IN = {
    "torch": {"device", "layers", "models", "transfer", "testing", "integrations", "weights.py", "doctor.py"},
    "zmq": {"engine/channel.py", "transfer"},
    "nixl": {"transfer/staging.py"},
    "ray": {"cluster/ray.py", "integrations/verl.py"},
    "starlette": {"api", "edge", "router"},
    "asyncio": {
        "api",
        "edge",
        "dashboard/feed.py",
        "router",
        "engine/client.py",
        "engine/child.py",
        "engine/moving_stream.py",
        "engine/replicas.py",
        "cli",
        "bench",
        "client.py",
        "httpclient.py",
        "cluster",
        "integrations/verl.py",
        "integrations/verl_server.py",
        "listening.py",
        "turns.py",
        "testing/chaos",
        "testing/sim",
    },
}

STDLIB_ONLY = {"core", "protocol"}
ALLOWED_THIRD_PARTY = {"protocol": {"msgspec"}, "core": set()}
CLOCKS = {"time", "datetime", "asyncio", "threading", "socket"}


def modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            # `from headgate import x` imports the module headgate.x.
            yield from (
                (f"{node.module}.{alias.name}" for alias in node.names)
                if node.module == "headgate"
                else [node.module]
            )


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_one_way(path):
    relative = path.relative_to(PACKAGE)
    package = relative.parts[0]
    for name in imports(path):
        top, _, rest = name.partition(".")
        if top == "headgate" and rest and package in MAY_IMPORT:
            allowed = MAY_IMPORT[package] | EXCEPTIONS.get(str(relative), set())
            assert rest.split(".")[0] in allowed, f"{relative} imports {name}"
        if top in ONLY_IN:
            allowed = ONLY_IN[top]
            places = {package, str(relative), str(relative.parent)}
            assert places & allowed, f"{relative} imports {name}"
        if package in STDLIB_ONLY and top != "headgate":
            known = top in sys.stdlib_module_names or top in ALLOWED_THIRD_PARTY[package]
            assert known and top not in CLOCKS, f"{relative} imports {name}"


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")


def imported_modules(path: Path, known: set[str]) -> Iterator[str]:
    """Modules of this project that `path` imports anywhere, also for type checking or inside functions."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom) and node.module in known:
            yield from (
                name if (name := f"{node.module}.{alias.name}") in known else node.module for alias in node.names
            )


def test_no_imports_form_a_cycle():
    known = {module_name(path) for path in modules()}
    graph = {module_name(path): set(imported_modules(path, known)) - {module_name(path)} for path in modules()}
    TopologicalSorter(graph).prepare()  # raises CycleError, which names the cycle


def test_no_class_name_is_used_twice():
    names = Counter(
        node.name
        for path in modules()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef)
    )
    assert not [name for name, times in names.items() if times > 1]


# The table of sampling parameters, which every process loads, and the form of its declarations.
SAMPLING_TABLE = {"headgate.contract.sampling", "headgate.contract.parameter"}


@pytest.mark.parametrize("module", sorted(SAMPLING_TABLE))
def test_the_table_of_sampling_parameters_needs_nothing_but_msgspec(module):
    path = PACKAGE.parent / f"{module.replace('.', '/')}.py"
    others = {name for name in imports(path) if name.split(".")[0] not in sys.stdlib_module_names}
    assert others <= {"msgspec", "msgspec.structs"} | SAMPLING_TABLE


@pytest.mark.parametrize("package", ["protocol", "text", "device"])
def test_below_the_api_only_the_sampling_table_of_the_contract_is_imported(package):
    for path in sorted((PACKAGE / package).rglob("*.py")):
        assert {name for name in imports(path) if name.startswith("headgate.contract")} <= SAMPLING_TABLE


@pytest.mark.parametrize(
    "module",
    [
        "headgate",
        "headgate.core.scheduler",
        "headgate.text.tokenizer",
        "headgate.model_store",
        "headgate.router.server",
    ],
)
def test_importing_it_does_not_import_torch(module):
    script = f"import sys, {module}; assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True, timeout=100)


# Modules that a router must not load: the engine, and libraries that only the engine needs.
NOT_IN_A_ROUTER = {
    *("torch", "transformers", "tokenizers", "llguidance", "jinja2", "zmq", "numpy", "uvicorn"),
    *("headgate.api", "headgate.engine", "headgate.core", "headgate.text", "headgate.device", "headgate.transfer"),
}


def test_a_router_process_loads_no_engine_and_no_tokenizer(tmp_path):
    log = tmp_path / "imports"
    command = [sys.executable, "-X", "importtime", "-m", "headgate.cli", "route", "--port", "0"]
    with (
        log.open("w") as stderr,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True) as router,
    ):
        try:
            url = next(found[0] for line in router.stdout if (found := re.search("http://[0-9.:]+", line)))
            for path in (
                "/openapi.json",
                "/metrics",
                "/dashboard",
                "/v1/requests",
            ):  # nothing is loaded later, either
                with urlopen(url + path, timeout=60) as answer:
                    assert answer.status == 200
        finally:
            router.terminate()
    loaded = set(re.findall(r"^import time:.*\| +(\S+)$", log.read_text(), re.MULTILINE))
    assert "headgate.router.server" in loaded
    assert not {
        name for name in loaded if NOT_IN_A_ROUTER & {name, name.split(".")[0], ".".join(name.split(".")[:2])}
    }
