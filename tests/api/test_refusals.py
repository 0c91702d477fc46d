"""The memory of a refused request is freed without the garbage collector: a prompt may have megabytes.

Guarantees 63 and 64.
"""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from headgate.contract.keys import Keys
from headgate.edge.gate import Gate
from headgate.errors import EngineDead
from headgate.testing.tiny import tiny_model
from tests.api.scripted import Client, ScriptedEngines, scripted_app


def never(request: Any) -> Any:
    raise AssertionError("nothing is generated here")


def test_64_the_body_of_a_refused_request_is_freed_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    app = scripted_app(tiny_model(tmp_path), ScriptedEngines(never))
    seen: list[weakref.ref[Any]] = []

    class Known(list[int]):
        """Token ids whose release can be observed."""

    def make(ids: Any) -> Any:
        known = Known(ids)
        seen.append(weakref.ref(known))
        return known

    monkeypatch.setattr("headgate.api.generate.completions.prompts_of", lambda ids: [make(ids)])
    gc.disable()
    try:
        client = Client(app, "/v1/completions", {"prompt": [5] * 600})
        asyncio.run(client.call())
        assert client.status == 400 and b"at least 600 tokens" in client.body
        assert [known() for known in seen] == [None]
    finally:
        gc.enable()


def test_an_error_shared_with_a_refused_request_does_not_end_a_request_that_continues():
    """A lost engine raises the same error in all its streams; some requests are refused with it, others move."""
    error = EngineDead("the engine was lost")

    async def stream() -> AsyncIterator[str]:
        with suppress(EngineDead):
            raise error
        yield "moved"
        yield "and told"

    async def refuse(scope: Any, receive: Any, send: Any) -> None:
        raise error

    async def main() -> None:
        going_on = stream()
        assert await anext(going_on) == "moved"
        client = Client(Gate(refuse, Keys()), "/v1/completions", {})
        await client.call()
        for _ in range(10):  # iterations of the event loop, in which it would be closed
            await asyncio.sleep(0)
        assert client.status == 503 and await anext(going_on) == "and told"

    asyncio.run(main())
