"""Processes of the routers under test: how each is started, when it is ready, and its CPU time and memory."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from load import connect, short_requests

READY_S = 60.0
STOP_S = 5.0
HERE = Path(__file__).parent

NGINX = """
worker_processes 1;
daemon off;
pid {folder}/nginx.pid;
error_log {folder}/error.log;
events {{ worker_connections 8192; }}
http {{
    access_log off;
    client_body_temp_path {folder}; proxy_temp_path {folder};
    fastcgi_temp_path {folder}; uwsgi_temp_path {folder}; scgi_temp_path {folder};
    keepalive_requests 1000000;
    upstream workers {{ {servers} keepalive 1024; keepalive_requests 1000000; }}
    server {{
        listen 127.0.0.1:{port} backlog=4096;
        client_max_body_size 32m;
        client_body_buffer_size 1m;
        location / {{
            proxy_pass http://workers;
            proxy_http_version 1.1;
            proxy_set_header Connection "";
            proxy_buffering off;
        }}
    }}
}}
"""


@dataclass(frozen=True)
class Peer:
    name: str
    executable: str
    kind: str  # headgate, sglang-router, vllm-router or nginx

    @property
    def workers(self) -> str:
        """The kind of mock workers that it routes to."""
        return "headgate" if self.kind == "headgate" else "plain"

    def command(self, port: int, urls: list[str], folder: Path) -> list[str]:
        match self.kind:
            case "headgate":
                return [self.executable, "route", *urls, "--port", str(port), "--log-level", "warning"]
            case "sglang-router" | "vllm-router":
                launch = ["launch"] if self.kind == "sglang-router" else []
                return [
                    *(self.executable, *launch, "--worker-urls", *urls, "--policy", "cache_aware"),
                    *("--host", "127.0.0.1", "--port", str(port), "--log-level", "error"),
                    *("--prometheus-host", "127.0.0.1", "--prometheus-port", str(free_port())),
                ]
            case _:
                servers = " ".join(f"server {url.removeprefix('http://')};" for url in urls)
                config = folder / "nginx.conf"
                config.write_text(NGINX.format(folder=folder, port=port, servers=servers))
                return [self.executable, "-c", str(config)]


@dataclass(frozen=True)
class Running:
    port: int
    pid: int

    @property
    def alive(self) -> bool:
        return Path(f"/proc/{self.pid}/stat").read_text().rpartition(") ")[2][0] != "Z"

    def cpu_ns(self) -> int:
        """CPU time of all threads of the process and its children, according to the kernel."""
        return sum(_thread_ns(path) for pid in _family(self.pid) for path in Path(f"/proc/{pid}/task").iterdir())

    def rss_mb(self) -> float:
        return sum(_rss_kb(pid) for pid in _family(self.pid)) / 1024


def _thread_ns(task: Path) -> int:
    with suppress(OSError):
        return int((task / "schedstat").read_text().split()[0])
    return 0


def _rss_kb(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1])
    return 0


def _family(pid: int) -> list[int]:
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [pid, *(member for child in children for member in _family(int(child)))]


@contextmanager
def mock_workers(count: int, core: int | None) -> Iterator[dict[str, list[str]]]:
    command = [sys.executable, str(HERE / "mock.py"), "--headgate", str(count), "--plain", str(count)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, preexec_fn=_pin(core)) as process:
        assert process.stdin is not None and process.stdout is not None
        try:
            yield json.loads(process.stdout.readline())
        finally:
            process.stdin.close()
            _end(process)


@contextmanager
def running(peer: Peer, urls: list[str], core: int | None) -> Iterator[Running]:
    """Runs a router on a core of its own, and waits until it answers."""
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="router-") as folder:
        log = Path(folder) / "log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                peer.command(port, urls, Path(folder)),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                preexec_fn=_pin(core),
            )
        try:
            yield Running(port, process.pid)
        except Exception:
            sys.stderr.write(log.read_text(errors="replace")[:2000])
            raise
        finally:
            process.terminate()
            _end(process)


def _pin(core: int | None):  # type: ignore[no-untyped-def]
    return None if core is None else lambda: os.sched_setaffinity(0, {core})


def _end(process: subprocess.Popen[bytes]) -> None:
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(STOP_S)


async def until_ready(router: Running) -> None:
    """Wait until it has answered several requests in a row."""
    good, deadline_s = 0, time.monotonic() + READY_S
    while good < 8:
        if not router.alive:
            raise RuntimeError("the router has ended")
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"the router at port {router.port} has not become ready within {READY_S:g} s")
        try:
            (connection,) = await connect(router.port, 1)
            await connection.ask(short_requests(1, good)[0])
            connection.close()
            good += 1
        except Exception:
            good = 0
            await asyncio.sleep(0.2)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])
