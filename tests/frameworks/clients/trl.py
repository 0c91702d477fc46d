"""TRL's client since 1.11, which calls vLLM's API and reads the server's configuration."""

from __future__ import annotations

import sys
from typing import Any

from tests.frameworks.clients.checks import MODEL
from tests.frameworks.clients.trl_client import CHECKS, run_client


def the_server_describes_itself(client: Any, url: str) -> None:
    config = client.get_server_info()
    assert config["weight_transfer_config"] is not None
    assert config["model_config"]["logprobs_mode"] == "raw_logprobs"
    assert config["model_config"]["dtype"] == "torch.float32"
    assert client.model == MODEL and client.get_world_size() == 1


if __name__ == "__main__":
    sys.exit(run_client((*CHECKS, the_server_describes_itself)))
