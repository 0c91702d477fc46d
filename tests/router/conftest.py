from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from headgate.testing.tiny import tiny_model
from tests.api.live import LiveServer, live_server


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip the tests that need a real vLLM unless one is configured."""
    if "HEADGATE_VLLM" in os.environ:
        return
    unasked = [item for item in items if item.get_closest_marker("vllm")]
    if unasked:
        config.hook.pytest_deselected(items=unasked)
        items[:] = [item for item in items if item not in unasked]


@pytest.fixture(scope="session")
def weights(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The same tiny model with three sets of weights."""
    folder = tmp_path_factory.mktemp("routed")
    return [tiny_model(folder / f"seed{seed}", seed=seed, max_position_embeddings=32768) for seed in range(3)]


@pytest.fixture(scope="session")
def servers(weights: list[Path]) -> Iterator[list[LiveServer]]:
    """Two real servers for all router tests. Tests leave them running and idle."""
    options = {"device": "cpu", "kv_blocks": 4096, "max_running": 8}
    with live_server(weights[0], **options) as one, live_server(weights[0], **options) as two:
        yield [one, two]
