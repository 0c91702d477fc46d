"""The `fuzzed` decorator, and the number of inputs per property."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

MANY = 200  # factor of inputs in the slow test
LONGEST_S = 20.0  # most CPU time for one input on a slow machine; unbounded work takes far longer


@dataclass
class Property:
    name: str
    check: Callable[[Any], object]
    inputs: st.SearchStrategy[Any]
    few: int
    tried: int = 0

    def run(self, count: int, **options: Any) -> None:
        def tried(value: Any) -> None:
            self.tried += 1
            with bounded():
                self.check(value)

        odd = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]
        settings(max_examples=count, deadline=None, suppress_health_check=odd, **options)(given(self.inputs)(tried))()


PROPERTIES: list[Property] = []


def fuzzed(inputs: st.SearchStrategy[Any], *, few: int) -> Callable[[Callable[[Any], object]], Callable[..., None]]:
    """Turn a function that must not raise for any input into tests."""

    def declare(check: Callable[[Any], object]) -> Callable[..., None]:
        PROPERTIES.append(tried := Property(check.__name__, check, inputs, few))

        @pytest.mark.parametrize(
            "times", [pytest.param(1, id="few"), pytest.param(MANY, id="many", marks=pytest.mark.slow)]
        )
        def test(times: int) -> None:
            # The same inputs every time: a flaky test would not point to the change that broke it.
            tried.run(few * times, derandomize=times == 1, database=None)

        test.__doc__ = check.__doc__
        return test

    return declare


@contextmanager
def bounded(longest_s: float = LONGEST_S) -> Iterator[None]:
    began_s = time.thread_time()
    yield
    took_s = time.thread_time() - began_s
    assert took_s < longest_s, f"it took {took_s:.1f} s"


# --------------------------------------------------------------------------------------------------------- odd values

odd_numbers = st.one_of(
    st.sampled_from((0, -1, 1, 2**31 - 1, 2**31, 2**32, 2**53, 2**63 - 1, -(2**63), 2**64 - 1, 10**30)),
    st.sampled_from((0.0, -0.0, 1e308, -1e308, 5e-324, 0.5)),
    st.integers(-(2**63), 2**64 - 1),
)
odd_text = st.one_of(
    st.text(max_size=20),
    st.sampled_from(
        ("", "\x00", "\ufeff", "\u202e", "e\u0301" * 50, "😀" * 9, "../../etc/passwd", "%s%n", "{{7*7}}", "a" * 5000)
    ),
)
leaves = st.one_of(st.none(), st.booleans(), odd_numbers, odd_text)
odd_values = st.recursive(
    leaves,
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(odd_text, inner, max_size=4)),
    max_leaves=12,
)


@st.composite
def damaged(draw: Any, valid: bytes) -> bytes:
    """`valid` with some of its bytes changed, removed, duplicated or inserted."""
    data = bytearray(valid)
    for _ in range(draw(st.integers(0, 6))):
        at = draw(st.integers(0, len(data)))
        end = min(len(data), at + draw(st.integers(0, 12)))
        match draw(st.sampled_from(("flip", "cut", "double", "insert", "end", "number"))):
            case "flip" if at < len(data):
                data[at] = draw(st.integers(0, 255))
            case "cut":
                del data[at:end]
            case "double":
                data[at:at] = data[at:end]
            case "insert":
                data[at:at] = draw(st.binary(max_size=8))
            case "end":
                del data[at:]
            case "number":
                data[at:end] = draw(
                    st.sampled_from((b"\xff" * 8, b"\x00" * 8, b"\x7f" + b"\xff" * 7, b"99999999999"))
                )
    return bytes(data)


@st.composite
def replaced(draw: Any, valid: Any) -> Any:
    """A JSON-like value in which some part is replaced."""
    value = valid
    for _ in range(draw(st.integers(1, 3))):
        value = _replace_one(draw, value)
    return value


def _replace_one(draw: Any, value: Any) -> Any:
    match value:
        case dict() if value and draw(st.integers(0, 5)):
            key = draw(st.sampled_from(sorted(value, key=repr)))
            return value | {key: _replace_one(draw, value[key])}
        case list() | tuple() if value and draw(st.integers(0, 5)):
            at = draw(st.integers(0, len(value) - 1))
            return [*value[:at], _replace_one(draw, value[at]), *value[at + 1 :]]
    return draw(odd_values)
