"""The sampling parameters that a model's authors recommend, for requests that do not set them.

They are in the `generation_config.json` of a checkpoint. GGUF files have none, so those of the default model are declared
with it. Other values of the file, such as `do_sample`, are ignored, as vLLM does.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from headgate.contract.decoding import convert
from headgate.contract.sampling import PARAMETERS, SamplingParams
from headgate.errors import BrokenCheckpoint, HeadgateError, NotAModel
from headgate.model_store import default_model
from headgate.model_store.find import ModelFiles

FILE: Final = "generation_config.json"
# The parameters that a file may recommend, by their names there.
NAMES: Final = {name: name for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")} | {
    "max_new_tokens": "max_tokens"
}

AUTO: Final = "auto"
NONE: Final = ("none", "vllm")  # vLLM's name for its own defaults


def recommended_sampling(model: ModelFiles, source: str = AUTO) -> dict[str, Any]:
    """The parameters recommended by `source`: `auto` (those of the model), `none`, or the path of a folder or file."""
    if source in NONE:
        return {}
    if source != AUTO:
        return _read(_file_at(Path(source).expanduser()))
    if model.found == "default":
        return dict(default_model.SAMPLING)
    file = model.path / FILE
    return _read(file) if file.is_file() else {}


def described(sampling: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value:g}" for name, value in sampling.items())


def _file_at(path: Path) -> Path:
    file = path / FILE if path.is_dir() else path
    if not file.is_file():
        raise NotAModel(f"there is no {FILE} at {path}; give its folder, or start with --generation-config none")
    return file


def _read(file: Path) -> dict[str, Any]:
    try:
        values = convert(json.loads(file.read_bytes()), dict[str, Any], FILE)
        given = {ours: _value(ours, values[name]) for name, ours in NAMES.items() if values.get(name) is not None}
        SamplingParams(**given)
    except (ValueError, RecursionError, HeadgateError) as error:
        raise BrokenCheckpoint(f"{file} cannot be used ({error}); start with --generation-config none") from None
    return given


def _value(name: str, value: Any) -> Any:
    parameter = PARAMETERS[name]
    checked = convert(value, parameter.json, name)
    return checked if parameter.read is None else parameter.read(checked)
