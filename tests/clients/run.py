"""Serves a tiny model and lets other people's clients loose on it: `run.py CLIENTS_PYTHON [EXAMPLES]`.

Loopback only; every client has a deadline. Exits with the number of clients that failed.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from headgate.testing.tiny import tiny_model

HERE = Path(__file__).parent
ENV = os.environ | {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}  # or it asks the internet first
START_S = 60
DEADLINE_S = 600


KEY = "tenant-key"


@contextmanager
def served() -> Iterator[str]:
    """A tiny model behind keys: the clients are a tenant, whom control calls answer with 403."""
    with tempfile.TemporaryDirectory() as folder:
        keys, log = Path(folder, "keys"), Path(folder, "log")
        keys.write_text(f"tenant:{KEY}\n")
        command = [sys.executable, "-m", "headgate.cli", "serve", str(tiny_model(Path(folder, "model")))]
        command += ["--port", "0", "--served-name", "tiny", "--api-keys", str(keys), "--admin-key", "admin-key"]
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


def schemathesis(python: str, url: str, examples: str) -> list[str]:
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
        f"Authorization: Bearer {KEY}",
    ]


def main(python: str, examples: str = "30") -> int:
    with served() as url:
        runs = {
            "litellm": [python, str(HERE / "smoke_litellm.py"), url],
            "langchain": [python, str(HERE / "smoke_langchain.py"), url],
            "schemathesis": schemathesis(python, url, examples),
        }
        failed = [
            name for name, command in runs.items() if subprocess.run(command, timeout=DEADLINE_S, env=ENV).returncode
        ]
    print(f"{len(runs) - len(failed)} passed, {len(failed)} failed" + "".join(f": {name}" for name in failed))
    return len(failed)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
