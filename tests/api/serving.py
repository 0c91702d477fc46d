"""Real servers for tests: `headgate serve` as a separate process, on a free port."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

START_S = 120.0


@dataclass
class Served:
    """A server process; its log is read as it is written."""

    process: subprocess.Popen[str]
    url: str = ""
    ready: dict[str, Any] = field(default_factory=dict)
    log: list[dict[str, Any]] = field(default_factory=list)

    def client(self, key: str | None = None, **options: Any) -> httpx.Client:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        return httpx.Client(base_url=self.url, headers=headers, timeout=60, trust_env=False, **options)

    def engine_pids(self) -> dict[int, int]:
        """The engine processes of the server, by index."""
        pid = self.process.pid
        pids = {}
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            command = Path(f"/proc/{child}/cmdline").read_text()
            if "engine-" in command:
                pids[int(command.split("engine-")[1].split(".")[0])] = int(child)
        return pids

    def messages(self) -> list[str]:
        return [line["message"] for line in self.log]

    def stop(self, number: int = signal.SIGTERM, timeout_s: float = 60.0) -> int:
        self.process.send_signal(number)
        return self.process.wait(timeout_s)


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "headgate.cli", *map(str, arguments)]


def clean_environment(**extra: str) -> dict[str, str]:
    ours = ("HEADGATE_", "OTEL_")
    return {name: value for name, value in os.environ.items() if not name.startswith(ours)} | extra


@contextmanager
def serving(*arguments: object, **environment: str) -> Iterator[Served]:
    """Start a server and yield it when it is ready; on exit it is killed, unless the test has stopped it."""
    process = subprocess.Popen(
        command("serve", *arguments, "--port", 0, "--log-format", "json", "--log-level", "debug"),
        stderr=subprocess.PIPE,
        text=True,
        env=clean_environment(**environment),
    )
    served = Served(process)
    is_ready = threading.Event()
    reader = threading.Thread(target=_read_log, args=(served, is_ready), daemon=True)
    reader.start()
    try:
        assert is_ready.wait(START_S), f"the server did not become ready: {served.log}"
        assert served.url, f"the server did not start: {served.log}"
        yield served
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            process.send_signal(signal.SIGTERM)
            process.wait(60)
        reader.join(10)
        process.stderr.close()


def _read_log(served: Served, is_ready: threading.Event) -> None:
    for line in served.process.stderr:
        served.log.append(_parse(line))
        if served.log[-1]["message"] == "ready":
            served.ready, served.url = served.log[-1], served.log[-1]["url"]
            is_ready.set()
    is_ready.set()  # it has ended


def _parse(line: str) -> dict[str, Any]:
    try:
        return json.loads(line)
    except ValueError:  # a progress bar, or a traceback that should not be there
        return {"message": line.rstrip(), "level": "raw"}


def wait_until(condition: Callable[[], Any], timeout_s: float = 60.0) -> Any:
    """Poll `condition` until it is true, and return its value; fails at the deadline."""
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not within {timeout_s:g} s"
        time.sleep(0.02)
    return value


def events(response: httpx.Response) -> Iterator[dict[str, Any]]:
    for line in response.iter_lines():
        if line.startswith("data: {"):
            yield json.loads(line.removeprefix("data: "))


def metric_values(page: str) -> dict[str, float]:
    """Return the samples of a metrics page, by name and labels."""
    lines = (line.rpartition(" ") for line in page.splitlines() if line and not line.startswith("#"))
    return {name: float(value) for name, _, value in lines}


@contextmanager
def up(*arguments: object, hurry: bool = False, **environment: str) -> Iterator[Served]:
    """Start `headgate up` and yield it when it is ready; on exit it is stopped, with `hurry` without draining."""
    process = subprocess.Popen(
        command("up", *arguments, "--port", 0, "--log-format", "json"),
        stderr=subprocess.PIPE,
        text=True,
        env=clean_environment(**environment),
    )
    fleet, is_ready = Served(process), threading.Event()
    reader = threading.Thread(target=_read_log, args=(fleet, is_ready), daemon=True)
    reader.start()
    try:
        assert is_ready.wait(START_S) and fleet.url, f"the fleet did not become ready: {fleet.log}"
        yield fleet
    finally:
        for _ in range(2 if hurry else 1):
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
        try:
            process.wait(90)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(10)
        reader.join(10)
        assert process.stderr is not None
        process.stderr.close()
