"""Serves a tiny model and lets other people's clients loose on it: `run.py CLIENTS_PYTHON [EXAMPLES]`.

Loopback only; every client has a deadline. Exits with the number of clients that failed.

Schemathesis comes twice: as a tenant, whom control calls answer with 403, and as the admin, who may call them. As the admin
it pauses the server, puts it to sleep and gives it weights that are none, again and again; then the same engine answers.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from headgate.testing.tiny import tiny_model

HERE = Path(__file__).parent
ENV = os.environ | {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}  # or it asks the internet first
START_S = 60
DEADLINE_S = 600


KEY = "tenant-key"
ADMIN_KEY = "admin-key"
# What a paused server refuses with 503, or has wait for the resume: nothing to learn about control from that.
GENERATES = r"(completions|responses|^/generate|/v1/generate|^/health.*|^/ready)$"


@contextmanager
def served() -> Iterator[str]:
    """A tiny model behind keys."""
    with tempfile.TemporaryDirectory() as folder:
        keys, log = Path(folder, "keys"), Path(folder, "log")
        keys.write_text(f"tenant:{KEY}\n")
        command = [sys.executable, "-m", "headgate.cli", "serve", str(tiny_model(Path(folder, "model")))]
        command += ["--port", "0", "--served-name", "tiny", "--api-keys", str(keys), "--admin-key", ADMIN_KEY]
        # Into a file: a pipe that nobody reads would fill up and stop the server.
        with log.open("w") as output:
            process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        try:
            yield where(process, log)
        finally:
            process.terminate()
            process.wait(60)


def where(process: subprocess.Popen[bytes], log: Path) -> str:
    deadline_s = time.monotonic() + START_S
    while process.poll() is None and time.monotonic() < deadline_s:
        if found := re.search(r"listening +(http://127\.0\.0\.1:\d+)", log.read_text()):
            return found.group(1)
        time.sleep(0.1)
    raise SystemExit(f"the server did not start:\n{log.read_text()}")


def schemathesis(python: str, url: str, examples: str, key: str) -> list[str]:
    checks = "not_a_server_error,status_code_conformance,content_type_conformance"
    program = str(Path(python).with_name("schemathesis"))
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
        "--header",
        f"Authorization: Bearer {key}",
        *(("--exclude-path-regex", GENERATES) if key == ADMIN_KEY else ()),
    ]


def ask(url: str, method: str, path: str, body: object = None) -> tuple[int, str]:
    headers = {"Authorization": f"Bearer {ADMIN_KEY}", "Content-Type": "application/json"}
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url + path, data, headers, method=method)
    with urllib.request.urlopen(request, timeout=60) as answer:
        return answer.status, answer.read().decode()


def goes_on(url: str) -> bool:
    """Whether the engine that the admin's calls were for is awake again, answers, and was never started anew."""
    for path in ("/v1/wakeup", "/v1/resume"):
        ask(url, "POST", path, {})
    status, answer = ask(url, "POST", "/v1/completions", {"prompt": "Hi", "max_tokens": 4, "ignore_eos": True})
    restarts = re.findall(r"^headgate:engine_restarts_total{.*} (.*)$", ask(url, "GET", "/metrics")[1], re.MULTILINE)
    print(f"after the admin's calls: {status}, engines started again {restarts} times")
    return status == 200 and json.loads(answer)["usage"]["completion_tokens"] == 4 and restarts == ["0.0"]


def main(python: str, examples: str = "30") -> int:
    with served() as url:
        runs = {
            "litellm": [python, str(HERE / "smoke_litellm.py"), url],
            "langchain": [python, str(HERE / "smoke_langchain.py"), url],
            "schemathesis": schemathesis(python, url, examples, KEY),
            "schemathesis as the admin": schemathesis(python, url, examples, ADMIN_KEY),
        }
        failed = [
            name for name, command in runs.items() if subprocess.run(command, timeout=DEADLINE_S, env=ENV).returncode
        ]
        if not goes_on(url):
            failed.append("the server afterwards")
    print(f"{len(runs) + 1 - len(failed)} passed, {len(failed)} failed" + "".join(f": {name}" for name in failed))
    return len(failed)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
