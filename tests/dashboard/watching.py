"""Helpers for tests of the dashboard: frames as a viewer gets them, and requests to show."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx


def client(url: str, key: str | None = None) -> httpx.Client:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    return httpx.Client(base_url=url, headers=headers, timeout=100, trust_env=False)


@contextmanager
def frames(url: str, key: str | None = None) -> Iterator[Iterator[dict[str, Any]]]:
    with client(url, key) as http, http.stream("GET", "/dashboard/events") as response:
        assert response.status_code == 200, response.read()
        assert response.headers["content-type"].startswith("text/event-stream")
        yield (json.loads(line.removeprefix("data: ")) for line in response.iter_lines() if line.startswith("data: "))


def first_frame(url: str, key: str | None = None) -> dict[str, Any]:
    with frames(url, key) as coming:
        return next(coming)


@contextmanager
def streaming(
    url: str, *ids: str, key: str | None = None, tokens: int = 30_000, prompt: str = "Tell of it"
) -> Iterator[None]:
    """Start long answers with these ids, and yield when all have begun; on exit their clients disconnect."""
    leave = threading.Event()
    begun = [threading.Event() for _ in ids]

    def read(id: str, started: threading.Event) -> None:
        body = {
            "prompt": f"{id}: {prompt}",
            "max_tokens": tokens,
            "ignore_eos": True,
            "stream": True,
            "request_id": id,
        }
        with client(url, key) as http, http.stream("POST", "/v1/completions", json=body) as response:
            for line in response.iter_lines():
                if line.startswith("data: "):
                    started.set()
                if leave.is_set():
                    return

    threads = [threading.Thread(target=read, args=pair) for pair in zip(ids, begun, strict=True)]
    for thread in threads:
        thread.start()
    try:
        assert all(started.wait(60) for started in begun), "a stream has not started"
        yield
    finally:
        leave.set()
        for thread in threads:
            thread.join(60)
