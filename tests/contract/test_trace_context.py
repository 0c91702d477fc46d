"""The trace that a client names in its headers."""

from __future__ import annotations

import pytest

from headgate.contract.trace_context import LONGEST_STATE, TraceContext, trace_context

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def test_a_valid_context_is_kept_with_its_state():
    context = trace_context([PARENT], ["vendor=a", "other=b"])
    assert context == TraceContext(PARENT, "vendor=a,other=b")
    assert context.trace_id == "0af7651916cd43dd8448eb211c80319c"


def test_a_later_version_may_have_more_fields():
    assert trace_context(["cc" + PARENT[2:] + "-what"], []).trace_id == "0af7651916cd43dd8448eb211c80319c"


@pytest.mark.parametrize(
    "parents",
    [
        [],
        [""],
        [PARENT, PARENT],
        [PARENT.upper()],
        [PARENT + "-what"],
        ["ff" + PARENT[2:]],
        [PARENT.replace("0af7651916cd43dd8448eb211c80319c", "0" * 32)],
        [PARENT.replace("b7ad6b7169203331", "0" * 16)],
        [PARENT[:-1]],
        [PARENT + "x"],
    ],
)
def test_an_invalid_context_is_ignored_with_its_state(parents):
    assert trace_context(parents, ["vendor=a"]) == TraceContext()


def test_a_state_that_is_too_long_is_dropped():
    assert trace_context([PARENT], ["a=" + "b" * LONGEST_STATE]) == TraceContext(PARENT)
