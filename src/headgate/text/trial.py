"""Compiles a grammar in a separate process with limited time and memory: `python -m headgate.text.trial < GRAMMAR`.

The library that compiles grammars bounds its own work, except if several patterns must match one text: each
additional pattern can then double time and memory. This cannot be stopped from within the process, so such a grammar
is compiled in a separate one.
"""

from __future__ import annotations

import resource
import subprocess
import sys

from headgate.text.grammar_check import complaint_about

CPU_S = 2
MEMORY_BYTES = 2**30
WAIT_S = 60.0  # generous, for overloaded machines; CPU time is limited separately

TOO_MUCH = "it takes too long to compile; let fewer patterns apply to the same text"


def tried(grammar: str) -> str:
    """Compile `grammar` in a separate process; returns its error, "" if there is none."""
    command = [sys.executable, "-m", "headgate.text.trial"]
    try:
        done = subprocess.run(command, input=grammar.encode(), capture_output=True, timeout=WAIT_S, check=False)
    except subprocess.TimeoutExpired:
        return TOO_MUCH
    return done.stdout.decode() if done.returncode == 0 else TOO_MUCH


def main() -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    sys.stdout.write(complaint_about(sys.stdin.read()))


if __name__ == "__main__":
    main()
