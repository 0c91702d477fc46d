"""Serves a tiny model and runs third-party clients against it: `run.py FOLDER [EXAMPLES [CLIENT ...]]`.

Each client has an environment of its own in FOLDER, so that each is the newest release. A client of `SMOKE` runs its
script against the server and through the router.

Loopback only; every client has a deadline. Exits with the number of clients that failed.

Schemathesis runs with a tenant's key, for which control calls return 403, and with the admin key, against the server
and a router in front of it. With the admin key it pauses them, puts them to sleep and sends invalid weights and
unreachable workers, many times. Afterwards the same engine process must answer, and no process may have grown.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from headgate.testing.tiny import tiny_model

HERE = Path(__file__).parent
ENV = os.environ | {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}  # otherwise it downloads a file first
START_S = 60
DEADLINE_S = 600


KEY = "tenant-key"
ADMIN_KEY = "admin-key"
# Excluded: a paused server refuses these with 503 or queues them until the resume, which tests nothing about control.
GENERATES = (
    r"(completions|responses|messages.*|tokenize|^/generate/?|/v1/generate|^/chat/|_logprobs/|^/health.*|^/ready)$"
)
# Excluded: these would remove the router's workers or point it elsewhere; they are tested by hand.
FLEET = r"^/v1/(workers|scale).*"
MOST_GROWTH = 300 * 2**20  # bytes, of a server and its engine, or of a router


SCHEMATHESIS = "schemathesis"
# Clients that have a script next to this one, and their packages.
SMOKE = {
    "litellm": "litellm",
    "langchain": "langchain-openai",
    "anthropic": "anthropic",
    "openai": "openai",
    "agents": "openai-agents",
    "pydantic_ai": "pydantic-ai-slim[openai,anthropic]",
    "instructor": "instructor",
}


@dataclass(frozen=True)
class Served:
    url: str
    pid: int

    @property
    def bytes(self) -> int:
        """Memory of the process and its children."""
        children = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()
        return sum(resident(pid) for pid in (str(self.pid), *children))


def resident(pid: str) -> int:
    (line,) = re.findall(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text()) or ["0"]
    return 1024 * int(line)


@contextmanager
def fleet() -> Iterator[tuple[Served, Served]]:
    """A server with a tiny model, and a router in front of it, both behind keys."""
    with tempfile.TemporaryDirectory() as folder:
        keys = Path(folder, "keys")
        keys.write_text(f"tenant:{KEY}\n")
        common = ["--port", "0", "--api-keys", str(keys), "--admin-key", ADMIN_KEY]
        model = str(tiny_model(Path(folder, "model")))
        with started(Path(folder, "server"), "serve", model, "--served-name", "tiny", *common) as server:
            router = ("route", server.url, "--worker-key", ADMIN_KEY, *common)
            with started(Path(folder, "router"), *router) as routed:
                yield server, routed


@contextmanager
def started(log: Path, *arguments: str) -> Iterator[Served]:
    # Into a file: a full pipe that is not read would block the server.
    with log.open("w") as output:
        command = [sys.executable, "-m", "headgate.cli", *arguments]
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
    try:
        yield Served(where(process, log), process.pid)
    finally:
        process.terminate()
        process.wait(60)
        if mistakes := [line for line in log.read_text().splitlines() if "Traceback" in line or " ERROR " in line]:
            raise SystemExit(f"{arguments[0]} has logged what it should not have: {mistakes[:5]}")


def where(process: subprocess.Popen[bytes], log: Path) -> str:
    deadline_s = time.monotonic() + START_S
    while process.poll() is None and time.monotonic() < deadline_s:
        if found := re.search(r"listening +(http://127\.0\.0\.1:\d+)", log.read_text()):
            return found.group(1)
        time.sleep(0.1)
    raise SystemExit(f"the server did not start:\n{log.read_text()}")


def install(environment: Path, package: str) -> None:
    if not environment.exists():
        subprocess.run([sys.executable, "-m", "venv", environment], check=True)
        subprocess.run([environment / "bin/python", "-m", "pip", "install", "-q", package], check=True)


def smoke(folder: Path, name: str, served: Served) -> list[str]:
    return [str(folder / name / "bin/python"), str(HERE / f"smoke_{name}.py"), served.url]


def schemathesis(folder: Path, url: str, examples: str, key: str) -> list[str]:
    checks = "not_a_server_error,status_code_conformance,content_type_conformance"
    program = str(folder / SCHEMATHESIS / "bin/schemathesis")
    return [
        program,
        "run",
        f"{url}/openapi.json",
        "--checks",
        checks,
        "--max-examples",
        examples,
        "--seed",
        "1",
        "--request-timeout",
        "60",
        "--suppress-health-check",
        "too_slow",  # caused by the client itself, on a busy machine
        "--header",
        f"Authorization: Bearer {key}",
        *(("--exclude-path-regex", f"{GENERATES}|{FLEET}") if key == ADMIN_KEY else ()),
    ]


def ask(url: str, method: str, path: str, body: object = None) -> tuple[int, str]:
    headers = {"Authorization": f"Bearer {ADMIN_KEY}", "Content-Type": "application/json"}
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url + path, data, headers, method=method)
    with urllib.request.urlopen(request, timeout=60) as answer:
        return answer.status, answer.read().decode()


def still_works(name: str, served: Served, before: int) -> bool:
    """Whether the process can be resumed after the admin's calls, answers, was not restarted, and has not grown."""
    for path in ("/v1/wakeup", "/v1/resume"):
        with suppress(urllib.error.HTTPError):  # it is already awake or running
            ask(served.url, "POST", path, {})
    body = {"prompt": "Hi", "max_tokens": 4, "ignore_eos": True}
    status, answer = ask(served.url, "POST", "/v1/completions", body)
    page = ask(served.url, "GET", "/metrics")[1]
    restarts = re.findall(r"^headgate:engine_restarts_total{.*} (.*)$", page, re.MULTILINE)
    grown = served.bytes - before
    print(f"the {name} afterwards: {status}, engines started again {restarts} times, {grown / 2**20:.0f} MiB more")
    whole = status == 200 and json.loads(answer)["usage"]["completion_tokens"] == 4
    return whole and set(restarts) <= {"0.0"} and grown < MOST_GROWTH


def main(environments: str, examples: str = "30", *only: str) -> int:
    folder, packages = Path(environments).absolute(), {**SMOKE, SCHEMATHESIS: SCHEMATHESIS}
    for name in only or packages:
        install(folder / name, packages[name])
    with fleet() as (server, router):
        runs = {
            **{name: smoke(folder, name, server) for name in SMOKE},
            **{f"{name} through the router": smoke(folder, name, router) for name in SMOKE},
            "schemathesis": schemathesis(folder, server.url, examples, KEY),
            "schemathesis through the router": schemathesis(folder, router.url, examples, KEY),
            "schemathesis as the admin": schemathesis(folder, server.url, examples, ADMIN_KEY),
            "schemathesis through the router as the admin": schemathesis(folder, router.url, examples, ADMIN_KEY),
        }
        before = {name: each.bytes for name, each in (("server", server), ("router", router))}
        results = {name: passes(command) for name, command in runs.items() if not only or name.split()[0] in only}
        results["the server afterwards"] = still_works("server", server, before["server"])
        results["the router afterwards"] = still_works("router", router, before["router"])
    failed = [name for name, passed in results.items() if not passed]
    print(f"{len(results) - len(failed)} passed, {len(failed)} failed" + "".join(f": {name}" for name in failed))
    return len(failed)


def passes(command: list[str]) -> bool:
    return subprocess.run(command, timeout=DEADLINE_S, env=ENV).returncode == 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
