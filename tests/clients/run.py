"""Serves a tiny model and lets other people's clients loose on it: `run.py CLIENTS_PYTHON [EXAMPLES]`.

Loopback only; every client has a deadline. Exits with the number of clients that failed.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from headgate.testing.tiny import tiny_model

HERE = Path(__file__).parent
DEADLINE_S = 600


@contextmanager
def served() -> Iterator[str]:
    with tempfile.TemporaryDirectory() as folder:
        model = tiny_model(folder)
        command = [sys.executable, "-m", "headgate.cli", "serve", str(model), "--port", "0", "--served-name", "tiny"]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        try:
            yield where(process)
        finally:
            process.terminate()
            process.wait(60)


def where(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    for line in process.stdout:
        print(line, end="")
        if found := re.search(r"http://127\.0\.0\.1:\d+", line):
            return found.group()
    raise SystemExit("the server did not start")


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
    ]


def main(python: str, examples: str = "30") -> int:
    with served() as url:
        runs = {
            "litellm": [python, str(HERE / "smoke_litellm.py"), url],
            "langchain": [python, str(HERE / "smoke_langchain.py"), url],
            "schemathesis": schemathesis(python, url, examples),
        }
        failed = [name for name, command in runs.items() if subprocess.run(command, timeout=DEADLINE_S).returncode]
    print(f"{len(runs) - len(failed)} passed, {len(failed)} failed" + "".join(f": {name}" for name in failed))
    return len(failed)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
