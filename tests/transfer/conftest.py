from __future__ import annotations

from pathlib import Path

import pytest

from headgate.testing.tiny import tiny_model


@pytest.fixture(scope="session")
def model(tmp_path_factory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"), tokenizer=False)
