from __future__ import annotations

import pytest


@pytest.fixture(scope="session", autouse=True)
def _one_thread():
    """Tiny models are faster on one, and on a busy machine threads that wait for each other cost seconds a test."""
    import torch

    torch.set_num_threads(1)
