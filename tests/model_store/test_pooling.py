"""The pooling that a checkpoint for sentence-transformers declares."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from headgate.model_store.pooling import CONFIG, read_pooling


def declared(folder: Path, config: Any) -> Path:
    (folder / CONFIG).parent.mkdir(exist_ok=True)
    (folder / CONFIG).write_text(config if isinstance(config, str) else json.dumps(config))
    return folder


@pytest.mark.parametrize(
    ("config", "pooling"),
    [
        ({"word_embedding_dimension": 64, "pooling_mode_cls_token": False, "pooling_mode_lasttoken": True}, "last"),
        ({"pooling_mode_mean_tokens": True, "pooling_mode_lasttoken": False, "include_prompt": True}, "mean"),
        ({"pooling_mode": "lasttoken"}, "last"),
        ({"pooling_mode": "mean"}, "mean"),
    ],
)
def test_the_last_token_and_the_mean_are_known(tmp_path: Path, config: Any, pooling: str):
    assert read_pooling(declared(tmp_path, config)) == pooling


@pytest.mark.parametrize(
    "config",
    [
        {"pooling_mode_cls_token": True},
        {"pooling_mode_mean_tokens": True, "pooling_mode_max_tokens": True},
        {"pooling_mode": "weightedmean"},
        {},
        [],
        "no JSON",
    ],
)
def test_another_pooling_is_logged_and_not_used(tmp_path: Path, config: Any, caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.WARNING):
        assert read_pooling(declared(tmp_path, config)) is None
    assert CONFIG in caplog.text


def test_a_model_for_generation_has_none(tmp_path: Path):
    assert read_pooling(tmp_path) is None and read_pooling(tmp_path / "model.gguf") is None
