"""Checks of servers behind vLLM's router, which re-serialises every request with vLLM's own fields."""

from __future__ import annotations

import sys

from tests.frameworks.clients.behind_router import CHECKS, routing
from tests.frameworks.clients.checks import given, run_checks

if __name__ == "__main__":
    with routing("vllm_router.launch_router", given()) as url:
        status = run_checks("vllm-router", CHECKS, url, given())
    sys.exit(status)
