"""verl with `headgate.integrations.verl`: its manager, load balancer, clients and checkpoint worker on a real replica."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

from tests.frameworks.clients.checks import Servers, ask, given, run_checks

EXAMPLE = Path(__file__).parents[3] / "examples/verl_rollout.py"
DEADLINE_S = 600
RESPONSE_LENGTH = 2000  # as configured by the example


@cache
def example() -> dict[str, Any]:
    """What examples/verl_rollout.py prints in its last line."""
    done = subprocess.run([sys.executable, EXAMPLE], check=True, stdout=subprocess.PIPE, timeout=DEADLINE_S)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def answers_equal_those_of_a_server_with_the_same_weights(servers: Servers) -> None:
    body = {"prompt": list(b"1: "), "temperature": 0, "max_tokens": 8, "ignore_eos": True, "return_token_ids": True}
    (choice,) = ask(f"{servers.url}/v1/completions", body)["choices"]
    assert example()["before"] == choice["token_ids"]


def an_answer_that_an_update_interrupts_is_continued_by_verls_client(servers: Servers) -> None:
    assert example()["across the update"] == {"tokens": RESPONSE_LENGTH, "log_probs": RESPONSE_LENGTH}


def weights_of_the_rollout_worker_are_served_with_their_step(servers: Servers) -> None:
    assert example()["after"] != example()["before"] and example()["step"] == 1


CHECKS = (
    answers_equal_those_of_a_server_with_the_same_weights,
    an_answer_that_an_update_interrupts_is_continued_by_verls_client,
    weights_of_the_rollout_worker_are_served_with_their_step,
)

if __name__ == "__main__":
    sys.exit(run_checks("verl", CHECKS, given()))
