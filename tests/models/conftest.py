import pytest
import torch


@pytest.fixture(scope="package", autouse=True)
def _one_thread():
    """Tiny models are faster on one, and on a busy machine threads that wait for each other cost seconds a test."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
