from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

from headgate.layers.onednn import avoid_hidden_tiles

avoid_hidden_tiles()  # references are computed in this process, with torch alone

# How long a draw takes on a crowded machine says nothing about the code. And the same draws every time: a test that fails
# now and then says nothing about a change; `make fuzz-inputs` is for what nobody has tried.
settings.register_profile("unhurried", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("unhurried")


@pytest.fixture(scope="session", autouse=True)
def _one_thread():
    """Tiny models are faster on one, and on a busy machine threads that wait for each other cost seconds a test."""
    import torch

    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _own_log() -> Iterator[None]:
    """A test that runs a command sends the log to its own standard error, which is closed with it."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
