"""Every promise of the threat model names tests, and these tests exist."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from headgate import cli
from headgate.contract.keys import is_loopback

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/threat-model.md").read_text("utf-8")
NAMED = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", PAGE)


@cache
def functions_of(path: str) -> set[str]:
    tree = ast.parse((ROOT / path).read_text("utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


@pytest.mark.parametrize("path", sorted({path for path, _ in NAMED}))
def test_the_tests_of_a_promise_exist(path: str):
    assert {name for named, name in NAMED if named == path} <= functions_of(path)


def test_every_promise_has_a_test():
    rows = [
        row
        for table in re.findall(r"^\| guarantee .*\n\|[-|]+\n((?:\|.*\n)+)", PAGE, re.MULTILINE)
        for row in table.splitlines()
    ]
    assert len(rows) > 25
    assert [row for row in rows if not re.search(r"`tests/[\w/]+\.py::\w+`", row)] == []


@pytest.mark.parametrize("command", ["serve", "route", "up"])
def test_by_default_only_this_machine_can_connect(command: str):
    assert is_loopback(cli.parser().parse_args([command]).host)
