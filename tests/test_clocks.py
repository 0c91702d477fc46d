"""Guarantee 80: nothing depends on the uptime of the machine, and no decision depends on the wall clock.

A monotonic clock starts at boot, so 0.0 does not mean "long ago": on a machine that just booted it is a moment ago.
`tests/just_started.py` runs all tests as on such a machine; the tests here check the source code.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import headgate

SOURCES = Path(headgate.__file__).parent
CLOCKS = {"clock", "_clock", "time", "monotonic", "perf_counter"}
DATES = {"time", "time_ns", "now", "utcnow", "strftime", "localtime", "gmtime"}

# Each allowed use of the wall clock, and what it displays. A use that influences a decision is not allowed.
SHOWN = {
    "api/compat/sglang.py": ["`timestamp` of the loads"],
    "api/accounting/ledger.py": ["`arrived` of the usage record"],
    "api/generate/serve.py": ["`created` of the answer"],
    "api/server.py": ["`created` of the models"],
    "dashboard/feed.py": ["the time axis"],
    "engine/evidence.py": ["`when` of the crash"],
    "router/control/fleet_status.py": ["`timestamp` of the loads"],
    "router/exchange/relay.py": ["`created` of the answer", "the timeline of a request"],
    "router/exchange/timeline.py": ["the part of one worker in it"],
    "text/sandbox.py": ["the date that a chat template asks for"],
    "text/template.py": ["the same"],
}


def modules() -> Iterator[tuple[str, ast.Module]]:
    for path in sorted(SOURCES.rglob("*.py")):
        name = path.relative_to(SOURCES).as_posix()
        if not name.startswith(("testing/", "bench/")):
            yield name, ast.parse(path.read_text())


def test_80_no_initial_time_is_written_as_zero():
    found = [f"{name}:{line}: {what}" for name, tree in modules() for line, what in sorted(zero_moments(tree))]
    assert not found, "0.0 is a moment ago on a machine that was just started; -inf is long ago:\n" + "\n".join(found)


def test_80_the_wall_clock_is_only_displayed():
    found = {name: uses for name, tree in modules() if (uses := sum(map(is_wall_clock, ast.walk(tree))))}
    assert found == {name: len(shown) for name, shown in SHOWN.items()}


def test_a_zero_that_is_compared_with_a_clock_is_found():
    code = """
class A:
    def __init__(self):
        self._sent_s = self.age_s = 0.0
    def due(self, now_s):
        return now_s - self._sent_s > 5 and self.age_s > 3
    def heard(self, worker):
        return self._heard_s.get(worker, 0.0)
"""
    assert {line for line, _ in zero_moments(ast.parse(code))} == {4, 8}


# ---------------------------------------------------------------------------------------------------- reading the code


def zero_moments(tree: ast.Module) -> Iterator[tuple[int, str]]:
    compared = {name for node in ast.walk(tree) for name in beside_a_clock(node)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign | ast.AnnAssign) and is_zero(node.value):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from ((node.lineno, name) for target in targets if (name := name_of(target)) in compared)
        elif isinstance(node, ast.Call) and is_lookup(node):
            yield node.lineno, ast.unparse(node)


def beside_a_clock(node: ast.AST) -> Iterator[str]:
    """Names of the times that this expression compares with, or subtracts from, a clock."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Sub) and is_clock(node.left):
        yield from names_in(node.right)
    elif isinstance(node, ast.Compare) and any(map(is_clock, (node.left, *node.comparators))):
        for side in (node.left, *node.comparators):
            yield from names_in(side)


def is_clock(node: ast.expr) -> bool:
    if isinstance(node, ast.NamedExpr):
        return is_clock(node.value)
    if isinstance(node, ast.Call):
        return name_of(node.func) in CLOCKS
    return name_of(node) == "now_s"


def is_zero(node: ast.expr | None) -> bool:
    return isinstance(node, ast.Constant) and type(node.value) in (int, float) and node.value == 0


def is_lookup(node: ast.Call) -> bool:
    """Whether a call looks like `moments_s.get(key, 0.0)`."""
    if not isinstance(node.func, ast.Attribute) or node.func.attr != "get" or len(node.args) != 2:
        return False
    return name_of(node.func.value).endswith("_s") and is_zero(node.args[1])


def names_in(node: ast.expr) -> Iterator[str]:
    return (name for part in ast.walk(node) if (name := name_of(part)).endswith("_s") and name != "now_s")


def name_of(node: ast.AST) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def is_wall_clock(node: ast.AST) -> bool:
    if not isinstance(node, ast.Attribute) or node.attr not in DATES:
        return False
    return name_of(node.value) in ("time", "datetime")
