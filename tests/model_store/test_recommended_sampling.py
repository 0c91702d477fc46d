from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from headgate.cli.recommended import recommended_sampling
from headgate.errors import BrokenCheckpoint, NotAModel
from headgate.model_store import default_model
from headgate.model_store.find import ModelFiles, Places, find_model
from tests.model_store.files import write_gguf


def model_with(folder: Path, config: Any) -> ModelFiles:
    folder.mkdir(exist_ok=True)
    (folder / "generation_config.json").write_text(json.dumps(config))
    return ModelFiles(folder, "model", "folder")


def test_the_authors_parameters_are_read_and_everything_else_is_ignored(tmp_path: Path) -> None:
    config = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": None, "max_new_tokens": 2048}
    model = model_with(tmp_path, config | {"do_sample": False, "eos_token_id": [1, 2], "repetition_penalty": 1.05})
    assert recommended_sampling(model) == {
        "temperature": 0.6,
        "top_p": 0.95,
        "top_k": 20,
        "repetition_penalty": 1.05,
        "max_tokens": 2048,
    }
    assert recommended_sampling(model, "none") == recommended_sampling(model, "vllm") == {}


def test_the_parameters_of_another_folder_or_file_can_be_named(tmp_path: Path) -> None:
    model, other = model_with(tmp_path / "a", {"top_k": 20}), model_with(tmp_path / "b", {"top_k": -1})
    assert recommended_sampling(model, str(other.path)) == {"top_k": 0}
    assert recommended_sampling(model, str(other.path / "generation_config.json")) == {"top_k": 0}
    with pytest.raises(NotAModel, match=r"there is no generation_config.json at .*nowhere; give its folder"):
        recommended_sampling(model, str(tmp_path / "nowhere"))


def test_a_model_without_the_file_recommends_nothing(tmp_path: Path) -> None:
    assert recommended_sampling(ModelFiles(tmp_path, "model", "folder")) == {}
    assert recommended_sampling(ModelFiles(write_gguf(tmp_path / "model.gguf"), "model", "file")) == {}


@pytest.mark.parametrize("config", [[], {"temperature": -1}, {"top_k": "many"}, {"top_p": 2}])
def test_a_file_that_cannot_be_used_is_refused(tmp_path: Path, config: Any) -> None:
    with pytest.raises(BrokenCheckpoint, match=r"generation_config.json cannot be used .*--generation-config none"):
        recommended_sampling(model_with(tmp_path, config))


def test_the_default_model_has_the_parameters_of_its_authors_also_when_it_is_named_by_its_path(
    tmp_path: Path,
) -> None:
    places = Places(hub_cache=tmp_path / "hub", our_cache=tmp_path / "ours")
    places.our_cache.mkdir()
    file = write_gguf(default_model.file_in(places.our_cache))
    for name in (None, str(file)):
        assert recommended_sampling(find_model(name, places)) == {"temperature": 0.2, "top_p": 0.9}
