"""Guarantee 54: no pickle on any socket, in any weight body or crash file."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "src/headgate"
MODULES = {"pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve", "joblib", "multiprocessing"}
CALLS = {
    *(
        "send_pyobj",
        "recv_pyobj",
        "broadcast_object_list",
        "all_gather_object",
        "gather_object",
        "scatter_object_list",
    ),
    *("send_object_list", "recv_object_list"),
}


def offences(source: str) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names):
                found += [name.name for name in names if name.name.split(".")[0] in MODULES]
            case ast.ImportFrom(module=str(module)) if module.split(".")[0] in MODULES:
                found.append(module)
            case ast.Attribute(attr=name) if name in CALLS:
                found.append(name)
            case ast.Attribute(value=ast.Name(id="torch"), attr="load" | "save" as name):
                found.append(f"torch.{name}")
            case ast.keyword(arg="allow_pickle", value=ast.Constant(value=True)):
                found.append("allow_pickle")
    return found


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_54_nothing_is_pickled(path: Path):
    assert offences(path.read_text()) == []


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from multiprocessing import Queue",
        "torch.load(f)",
        "s.send_pyobj(x)",
        "f(allow_pickle=True)",
    ],
)
def test_54_the_check_finds_uses_of_pickle(source: str):
    assert offences(source)
