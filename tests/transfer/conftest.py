from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from headgate.device.weights import ipc
from headgate.testing.tiny import tiny_model
from tests.transfer.peers import OneCard

collect_ignore = [] if find_spec("nixl") else ["test_nixl.py"]


@pytest.fixture(autouse=True)
def card(request, monkeypatch) -> OneCard:
    """Instead of a GPU, where there need not be one."""
    card = OneCard()
    if request.node.get_closest_marker("gpu") is None:
        for name in ("gpu_of", "export_storage", "open_storage"):
            monkeypatch.setattr(ipc, name, getattr(card, name))
    return card


@pytest.fixture(scope="session")
def model(tmp_path_factory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"), tokenizer=False)
