from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

from headgate.layers.onednn import avoid_hidden_tiles

avoid_hidden_tiles()  # references are computed in this process, with torch alone

# No deadline: how long an example takes on a busy machine does not depend on the code. The same examples every time:
# a flaky test would not point to the change that broke it; `make fuzz-inputs` tries new ones.
settings.register_profile("unhurried", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("unhurried")


@pytest.fixture(scope="session", autouse=True)
def _one_thread():
    """Use one thread: tiny models are faster with one, and on a busy machine, more threads cost seconds per test."""
    import torch

    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _own_log() -> Iterator[None]:
    """Reset logging: a test that runs a command logs to its captured standard error, which is closed with it."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
