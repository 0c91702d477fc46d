"""The last client of `trl vllm-serve` (TRL 1.10), which calls paths that end with a slash."""

from __future__ import annotations

import sys

from tests.frameworks.clients.trl_client import CHECKS, run_client

if __name__ == "__main__":
    sys.exit(run_client(CHECKS))
