"""A refused request leaves nothing behind, without the collector's help: a prompt may have megabytes (63, 64)."""

from __future__ import annotations

import asyncio
import gc
import weakref
from pathlib import Path
from typing import Any

import pytest

from headgate.testing.tiny import tiny_model
from tests.api.scripted import Client, ScriptedEngines, scripted_app


def never(request: Any) -> Any:
    raise AssertionError("nothing is generated here")


def test_64_the_body_of_a_refused_request_is_freed_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    app = scripted_app(tiny_model(tmp_path), ScriptedEngines(never))
    seen: list[weakref.ref[Any]] = []

    class Known(list[int]):
        """Token ids that can be watched."""

    def make(ids: Any) -> Any:
        known = Known(ids)
        seen.append(weakref.ref(known))
        return known

    monkeypatch.setattr("headgate.api.completions.prompts_of", lambda ids: [make(ids)])
    gc.disable()
    try:
        client = Client(app, "/v1/completions", {"prompt": [5] * 600})
        asyncio.run(client.call())
        assert client.status == 400 and b"at least 600 tokens" in client.body
        assert [known() for known in seen] == [None]
    finally:
        gc.enable()
