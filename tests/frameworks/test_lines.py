"""Streams as read by clients that split them into lines with httpx.

httpx also ends lines at characters, such as U+2028, at which the standard for server-sent events does not.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from headgate.contract.event_json import encode
from tests.frameworks.conftest import Target

TEXT = "a\u2028b\u2029c\u0085d 文"
CALLS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": TEXT, "echo": True, "max_tokens": 1}),
    ("/v1/completions", {"prompt": TEXT, "echo": True, "max_tokens": 1, "logprobs": 0}),
]


async def lines_of(url: str, path: str, body: dict[str, Any]) -> list[str]:
    async with (
        httpx.AsyncClient(base_url=url, timeout=100) as http,
        http.stream("POST", path, json=body | {"stream": True}) as response,
    ):
        return [line async for line in response.aiter_lines()]


@pytest.mark.parametrize(("path", "body"), CALLS)
def test_no_event_is_cut_in_two(target: Target, path: str, body: dict[str, Any]):
    lines = [line for line in asyncio.run(lines_of(target.url, path, body)) if line and not line.startswith(":")]
    assert all(line.startswith("data: ") for line in lines), lines
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks).startswith(TEXT)


@pytest.mark.parametrize("text", [TEXT, "plain", "é€ ¥", "\u2027\u202a\u0084\u0086"])
def test_escapes_decode_to_the_same_text(text: str):
    data = encode({"text": text})
    assert json.loads(data) == {"text": text} and len(data.decode().splitlines()) == 1
