"""The table in docs/lifecycle.md: every guarantee has a test, and every test that it names exists."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
GUARANTEES = range(1, 81)

ROW = re.compile(r"^\| (\d+) \| .* \| (.*) \|$", re.MULTILINE)
TEST = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")


def rows() -> dict[int, list[tuple[str, str]]]:
    text = (ROOT / "docs/lifecycle.md").read_text()
    return {int(number): TEST.findall(tests) for number, tests in ROW.findall(text)}


@cache
def functions_in(path: str) -> set[str]:
    tree = ast.parse((ROOT / path).read_text())
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


def test_every_guarantee_has_a_row():
    assert list(rows()) == list(GUARANTEES)


@pytest.mark.parametrize(("number", "tests"), rows().items())
def test_the_tests_of_a_guarantee_exist(number: int, tests: list[tuple[str, str]]):
    assert tests, f"guarantee {number} has no test"
    for path, name in tests:
        assert name.startswith("test_") and name in functions_in(path), f"{path} has no {name}"
