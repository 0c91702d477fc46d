"""The trace that a request belongs to, as the client names it (W3C Trace Context). Routers forward these headers unchanged.

An invalid header is ignored, as that specification demands: the request then begins its own trace.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

PARENT, STATE = "traceparent", "tracestate"  # headers
LONGEST_STATE = 512  # bytes; a longer one is dropped, because usage records keep it
_PARENT = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")
_LATER = re.compile(r"(?!00)" + _PARENT.pattern + r"-[!-~]{1,128}")  # later versions may append fields


class TraceContext(NamedTuple):
    parent: str = ""
    state: str = ""

    @property
    def trace_id(self) -> str:
        return self.parent[3:35]


def trace_context(parents: Sequence[str], states: Sequence[str]) -> TraceContext:
    """The context in the values of the two headers; empty if there is no valid one."""
    if len(parents) != 1:
        return TraceContext()
    parent, state = parents[0].strip(), ",".join(states)
    if not (_PARENT.fullmatch(parent) or _LATER.fullmatch(parent)):
        return TraceContext()
    return TraceContext(parent, state if len(state) <= LONGEST_STATE else "")
