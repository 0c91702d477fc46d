"""Shared by the checks of all frameworks. Imports only the standard library, because every environment runs it."""

from __future__ import annotations

import json
import re
import socket
import sys
import time
import traceback
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection
from importlib.metadata import version
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

MODEL = "tiny"
TIMEOUT_S = 60.0
FAILED = 1  # exit status


@dataclass(frozen=True)
class Servers:
    """Two Headgate servers with the same model."""

    model: Path
    urls: tuple[str, str]

    @property
    def url(self) -> str:
        return self.urls[0]


def given() -> Servers:
    """Return the servers named on the command line."""
    return Servers(Path(sys.argv[1]), (sys.argv[2], sys.argv[3]))


def run_checks(package: str, checks: Sequence[Callable[..., object]], *arguments: object) -> int:
    """Run every check; returns the exit status. A check is a function whose name says what it checks.

    It raises if the check fails.
    """
    title = f"{package} {version(package)}"
    failed = [check for check in checks if not _passes(title, check, *arguments)]
    return FAILED if failed else 0


def _passes(title: str, check: Callable[..., object], *arguments: object) -> bool:
    name = check.__name__.replace("_", " ")
    try:
        check(*arguments)
    except Exception:
        print(f"{title}: FAILED: {name}\n{traceback.format_exc()}", flush=True)
        return False
    print(f"{title}: ok: {name}", flush=True)
    return True


def ask(url: str, body: object = None, *, method: str | None = None, timeout_s: float = TIMEOUT_S) -> Any:
    """Return the decoded answer to a call; raises with the server's message for an error status."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"}, method=method)
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as answer:
            return json.loads(answer.read() or b"null")
    except urllib.error.HTTPError as error:
        raise AssertionError(f"{url}: {error.code} {error.read().decode()}") from None


def refusal(url: str, body: object) -> str:
    """Return the status and message with which a call is refused."""
    try:
        answer = ask(url, body)
    except AssertionError as refused:
        return str(refused)
    raise AssertionError(f"{url} was not refused: {answer}")


@contextmanager
def stream(url: str, body: dict[str, Any], timeout_s: float = TIMEOUT_S) -> Iterator[Iterator[Any]]:
    """Yield the decoded events of a stream, without `[DONE]`. Leaving the context closes the connection."""
    parts = urlsplit(url)
    connection = HTTPConnection(parts.hostname or "", parts.port, timeout=timeout_s)
    try:
        connection.request(
            "POST", parts.path, json.dumps(body | {"stream": True}), {"Content-Type": "application/json"}
        )
        answer = connection.getresponse()
        assert answer.status == 200, f"{url}: {answer.status} {answer.read().decode()}"
        yield _events(iter(answer.readline, b""))
    finally:
        connection.close()


def _events(lines: Iterator[bytes]) -> Iterator[Any]:
    for line in lines:
        if line.startswith(b"data:") and (data := line[5:].strip()) != b"[DONE]":
            yield json.loads(data)


def in_flight(url: str) -> list[str]:
    """The ids of the requests on a server."""
    return [each["request_id"] for each in ask(f"{url}/v1/requests")["data"]]


def ended(url: str) -> dict[str, int]:
    """How many requests a server has ended, by cause."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=TIMEOUT_S) as answer:
        page = answer.read().decode()
    found = re.findall(r'^headgate:requests_total{cause="(\w+)",.*} ([\d.]+)$', page, re.MULTILINE)
    return {cause: int(float(count)) for cause, count in found}


def wait_until(holds: Callable[[], bool], what: str, timeout_s: float = TIMEOUT_S) -> None:
    until_s = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < until_s, f"not within {timeout_s:g} s: {what}"
        time.sleep(0.02)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
