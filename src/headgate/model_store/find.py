"""Finds the files of the model that a user names.

A name is a folder, a GGUF file, or a hub id; no name means the default model. Local files are preferred over
downloads. The error for an id that cannot be found lists every place that was searched.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from headgate.errors import NotAModel
from headgate.model_store import default_model, hub

Say = Callable[[str], None]

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


@dataclass(frozen=True)
class Places:
    """The folders in which models are stored on this machine."""

    hub_cache: Path
    our_cache: Path

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> Places:
        """Return the folders that the environment configures; the rules for the hub cache are the hub library's."""
        cache = Path(environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        hub_home = Path(environ.get("HF_HOME") or cache / "huggingface")
        return cls(
            hub_cache=Path(environ.get("HF_HUB_CACHE") or hub_home / "hub").expanduser(),
            our_cache=cache / "headgate" / "models",
        )


@dataclass(frozen=True)
class ModelFiles:
    """A model on this machine's disk."""

    path: Path  # a folder with a config.json, or a GGUF file
    name: str  # the served model name, unless configured otherwise
    found: Literal["folder", "file", "hub cache", "hub", "default"]

    @property
    def is_gguf(self) -> bool:
        return self.path.is_file()


def say_on_stderr(line: str) -> None:
    print(f"headgate: {line}", file=sys.stderr, flush=True)


def find_model(name: str | None, places: Places | None = None, *, say: Say = say_on_stderr) -> ModelFiles:
    """Find the model called `name`, and fetch it if necessary; None means the default model."""
    places = places or Places.of(os.environ)
    if name is None:
        return ModelFiles(default_model.fetch(places.our_cache, say), default_model.NAME, "default")
    if not name:
        raise NotAModel("the name of the model is empty; give a folder, a GGUF file or a hub id")
    path = Path(name).expanduser()
    if path.exists():
        return _local(path, places)
    if _HUB_ID.fullmatch(name):
        return _from_hub(name, places, say)
    raise NotAModel(f"{name} is neither a folder, nor a GGUF file, nor a hub id such as org/name")


def _local(path: Path, places: Places) -> ModelFiles:
    if path.is_file():
        if path.suffix != ".gguf":
            raise NotAModel(f"{path} is not a GGUF file; give the folder of the model instead")
        # `headgate up` names the default model by its path.
        is_default = path.absolute() == default_model.file_in(places.our_cache).absolute()
        return ModelFiles(path, path.stem, "default" if is_default else "file")
    files = model_in(path)
    if files is None:
        raise NotAModel(f"{path} holds no model: neither a config.json with weights nor a single .gguf file")
    return ModelFiles(files, path.resolve().name, "folder")


def _from_hub(name: str, places: Places, say: Say) -> ModelFiles:
    snapshot = hub.cached_snapshot(places.hub_cache, name)
    files = model_in(snapshot) if snapshot else None
    if files is not None:
        return ModelFiles(files, name, "hub cache")
    say(f"{name} is not in {places.hub_cache}; querying the hub")
    files = model_in(hub.download(name, places.hub_cache))
    if files is None:
        raise NotAModel(
            f"{name} was downloaded, but holds neither a config.json with weights nor a single .gguf file"
        )
    return ModelFiles(files, name, "hub")


def model_in(folder: Path) -> Path | None:
    """Return what can be served from `folder`: the folder itself, its only GGUF file, or None."""
    # A cache folder may have a config without weights, fetched by a program that needed only the config.
    if (folder / "config.json").is_file() and any(folder.glob("*.safetensors")):
        return folder
    gguf_files = list(folder.glob("*.gguf"))
    return gguf_files[0] if len(gguf_files) == 1 else None
