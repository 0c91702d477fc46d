from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from headgate.testing.tiny import tiny_model

collect_ignore = [] if find_spec("nixl") else ["test_nixl.py"]


@pytest.fixture(scope="session")
def model(tmp_path_factory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"), tokenizer=False)
