"""An answer that moves to another server has the experts of all its tokens."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from tests.router.test_kill import COMPLETIONS, RealFleet, real_fleet

BODY: dict[str, Any] = {
    "prompt": list(range(40, 60)),
    "max_tokens": 3000,
    "seed": 1,
    "ignore_eos": True,
    "stream": True,
    "return_routed_experts": True,
}


def answer(fleet: RealFleet, salt: str, *, killing: bool) -> str:
    """The experts in the last event of a stream, whose server is killed when the first events have arrived."""
    body, found, events = BODY | {"cache_salt": salt}, [], 0
    with httpx.stream("POST", fleet.router.url + COMPLETIONS, json=body, timeout=100, trust_env=False) as response:
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line[6:])
            assert "error" not in event, event
            found += [choice["routed_experts"] for choice in event["choices"] if "routed_experts" in choice]
            events += 1
            if killing and events == 5:
                kill_the_busy_one(fleet)
    (experts,) = found
    return experts


def kill_the_busy_one(fleet: RealFleet) -> None:
    workers = httpx.get(f"{fleet.router.url}/v1/workers", timeout=60, trust_env=False).json()["workers"]
    (busy,) = (worker["url"] for worker in workers if worker["in_flight"])
    (server,) = (server for server in fleet.servers if server.url == busy)
    server.kill()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_56_a_stream_whose_server_is_killed_ends_with_the_experts_of_all_tokens(tmp_path: Path):
    with real_fleet(tmp_path, 2, "--routed-experts", architecture="qwen3_moe") as fleet:
        expected = answer(fleet, "alone", killing=False)
        before = fleet.resumes()
        assert answer(fleet, "killed", killing=True) == expected
        assert fleet.resumes() == before + 1
    assert np.load(io.BytesIO(base64.b64decode(expected))).shape == (20 + 2999, 2, 3)
