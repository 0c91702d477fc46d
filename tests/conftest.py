from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings

# How long a draw takes on a crowded machine says nothing about the code.
settings.register_profile("unhurried", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("unhurried")


@pytest.fixture(scope="session", autouse=True)
def _one_thread():
    """Tiny models are faster on one, and on a busy machine threads that wait for each other cost seconds a test."""
    import torch

    torch.set_num_threads(1)
