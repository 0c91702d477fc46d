"""JSON for server-sent events.

JSON allows U+0085, U+2028 and U+2029 inside strings, and some clients (httpx's `iter_lines`) end a line at them, which cuts
an event in two. They are written as escapes, which decode to the same text.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

_encode: Final = msgspec.json.Encoder().encode


def encode(value: Any) -> bytes:
    # Runs for nearly every token: keep it short.
    data = _encode(value)
    return data if data.isascii() else escaped(data)


def escaped(data: bytes) -> bytes:
    """`data` with its line separators as escapes. In JSON they occur only inside strings."""
    if b"\xe2\x80" in data:
        data = data.replace(b"\xe2\x80\xa8", b"\\u2028").replace(b"\xe2\x80\xa9", b"\\u2029")
    return data.replace(b"\xc2\x85", b"\\u0085")
