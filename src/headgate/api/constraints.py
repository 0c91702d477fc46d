"""What a request body demands of the shape of its answer, as a grammar for the engine.

`response_format` and `tool_choice` end here in one string, `SamplingParams.grammar`, or none. Anything that cannot be
enforced is refused now, before admission, with the name of the field.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from headgate.text.tools import ToolFormat


def constraint_for(
    *,
    response_format: Mapping[str, Any] | None = None,
    tools: Sequence[Mapping[str, Any]] | None = None,
    tool_choice: str | Mapping[str, Any] | None = None,
    parallel_tool_calls: bool = True,
    format: ToolFormat = ToolFormat.HERMES,
) -> str | None:
    """The grammar of the answer for `SamplingParams.grammar`, or None where anything may be said.

    The arguments are the fields of a chat body as plain JSON values. Raises a RequestError that names the field. May take
    tens of milliseconds for a large schema: call it where it does not block the event loop.
    """
    raise NotImplementedError
