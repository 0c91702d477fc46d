"""Headgate: an LLM serving system whose running requests can be aborted, paused, moved and resumed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from headgate.contract.sampling import SamplingParams

if TYPE_CHECKING:
    from headgate.offline import LLM, Completion

__all__ = ["LLM", "Completion", "SamplingParams"]

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    # Importing torch takes seconds; routers and commands that need no model skip it.
    if name in ("LLM", "Completion"):
        from headgate import offline

        return getattr(offline, name)
    raise AttributeError(f"module 'headgate' has no attribute {name!r}")
