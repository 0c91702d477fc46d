from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from headgate.device.weights import ipc
from headgate.testing.tiny import tiny_model
from tests.transfer.peers import OneGpu

collect_ignore = [] if find_spec("nixl") else ["test_nixl.py"]


@pytest.fixture(autouse=True)
def gpu(request, monkeypatch) -> OneGpu:
    """Replaces the GPU in tests that do not need one."""
    gpu = OneGpu()
    if request.node.get_closest_marker("gpu") is None:
        for name in ("gpu_of", "export_storage", "open_storage"):
            monkeypatch.setattr(ipc, name, getattr(gpu, name))
    return gpu


@pytest.fixture(scope="session")
def model(tmp_path_factory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"), tokenizer=False)
