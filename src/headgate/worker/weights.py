"""Weights in: from where tensors come to where the model keeps them, at start-up and at every live update alike.

`load_weights` verifies all that a source declares before it writes anything, so a checkpoint that does not fit is
refused with the model untouched. Tensors are then written one at a time; at no moment does a second copy of the model
exist. A source that breaks *while* it delivers leaves the model half written: the caller must load again before
computing anything.
"""

from __future__ import annotations

import json
import math
import mmap
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from tqdm import tqdm

from headgate.errors import BrokenCheckpoint, NotAModel
from headgate.layers.parameter import Parameter

DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
}
CONVERTIBLE = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class TensorInfo(NamedTuple):
    dtype: torch.dtype
    shape: tuple[int, ...]


class WeightSource(Protocol):
    """Where weights come from: a folder, shared memory, a process group."""

    def metadata(self) -> Mapping[str, TensorInfo]:
        """Every tensor that iteration will give."""

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Each tensor once, in any order, on any device; it need only live until the next one is asked for."""


class Loadable(Protocol):
    def parameters(self) -> Iterator[tuple[str, Parameter]]: ...


def load_weights(model: Loadable, source: WeightSource, *, progress: bool = False) -> None:
    """Fill `model` from `source`: all of it, or BrokenCheckpoint before the first write."""
    parameters = dict(model.parameters())
    verify(parameters, source.metadata())
    missing = set(parameters)
    for name, tensor in watched(source, len(parameters), progress):
        if name in parameters:
            parameters[name].write(tensor)
            missing.discard(name)
    refuse_missing(missing)


def verify(parameters: Mapping[str, Parameter], found: Mapping[str, TensorInfo]) -> None:
    refuse_missing(parameters.keys() - found.keys())
    refuse_unexpected(name for name in found.keys() - parameters.keys() if not harmless(name))
    for name, parameter in parameters.items():
        refuse_shape(name, parameter.shape, found[name].shape)
        refuse_dtype(name, found[name].dtype)


def harmless(name: str) -> bool:
    """Old checkpoints carry rotary tables, and some that tie embeddings store them twice."""
    return name.endswith("rotary_emb.inv_freq") or name == "lm_head.weight"


def refuse_missing(names: set[str]) -> None:
    if names:
        raise BrokenCheckpoint(f"the checkpoint lacks {listed(names)}")


def refuse_unexpected(names: Iterator[str]) -> None:
    if unexpected := set(names):
        raise BrokenCheckpoint(f"the model has no place for {listed(unexpected)} of the checkpoint")


def refuse_shape(name: str, expected: tuple[int, ...], found: tuple[int, ...]) -> None:
    if expected != found:
        raise BrokenCheckpoint(f"tensor {name} has shape {list(found)}; the model expects {list(expected)}")


def refuse_dtype(name: str, found: torch.dtype) -> None:
    if found not in CONVERTIBLE:
        known = ", ".join(map(type_name, CONVERTIBLE))
        raise BrokenCheckpoint(f"tensor {name} has dtype {type_name(found)}; it must be one of {known}")


def listed(names: set[str]) -> str:
    first, *others = sorted(names)
    return f"tensor {first}" + (f" and {len(others)} more" if others else "")


def type_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def watched(source: WeightSource, total: int, progress: bool) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of `source`, with a bar on a terminal."""
    hidden = not (progress and sys.stderr.isatty())
    return iter(tqdm(source, desc="loading weights", total=total, unit="tensor", disable=hidden, leave=False))


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor in a file: what it is, and where its bytes lie."""

    info: TensorInfo
    path: Path
    start: int
    end: int

    def map(self) -> torch.Tensor:
        """A view of the file. Each tensor has a mapping of its own, so its pages go when the tensor does."""
        if self.start == self.end:
            return torch.empty(self.info.shape, dtype=self.info.dtype)
        aligned = self.start - self.start % mmap.ALLOCATIONGRANULARITY
        with self.path.open("rb") as file:
            # Copy on write, because torch warns of buffers that it cannot write to. Nobody writes.
            pages = mmap.mmap(file.fileno(), self.end - aligned, offset=aligned, access=mmap.ACCESS_COPY)
        count = math.prod(self.info.shape)
        view = torch.frombuffer(pages, dtype=self.info.dtype, count=count, offset=self.start - aligned)
        return view.view(self.info.shape)


class SafetensorsFolder:
    """The weights of a Hugging Face folder: `model.safetensors`, or the files that its index names."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.files = weight_files(self.folder)
        self._stored: dict[str, Stored] | None = None

    def metadata(self) -> Mapping[str, TensorInfo]:
        return {name: stored.info for name, stored in self._tensors().items()}

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, stored in self._tensors().items():
            yield name, stored.map()

    def __repr__(self) -> str:
        return f"<SafetensorsFolder {self.folder}, {len(self._tensors())} tensors>"

    def _tensors(self) -> dict[str, Stored]:
        if self._stored is None:
            self._stored = {name: stored for path in self.files for name, stored in read_header(path).items()}
        return self._stored


def weight_files(folder: Path) -> list[Path]:
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if index.is_file():
        return indexed_files(index)
    if single.is_file():
        return [single]
    raise NotAModel(f"{folder} has no weights: neither model.safetensors nor model.safetensors.index.json")


def indexed_files(index: Path) -> list[Path]:
    try:
        names = set(json.loads(index.read_bytes())["weight_map"].values())
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise BrokenCheckpoint(f"{index} is not an index of weights: {error!r}") from error
    files = [index.parent / name for name in sorted(names)]
    for path in files:
        if not path.is_file():
            raise BrokenCheckpoint(f"{path} is missing, and {index.name} names it")
    return files


def read_header(path: Path) -> dict[str, Stored]:
    """What a safetensors file says it holds, checked against the size of the file."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 + length:
            raise BrokenCheckpoint(f"{path} is cut short or corrupt: {size} bytes cannot hold its header")
        header = file.read(length)
    tensors = parse_header(path, header)
    data = 8 + length
    stored = {name: locate(path, name, entry, data) for name, entry in tensors.items()}
    for name, tensor in stored.items():
        if tensor.end > size:
            raise BrokenCheckpoint(f"{path} is cut short: {size} bytes, but tensor {name} ends at {tensor.end}")
    return stored


def parse_header(path: Path, header: bytes) -> dict[str, Any]:
    try:
        tensors = json.loads(header)
    except ValueError as error:
        raise BrokenCheckpoint(f"{path} has a corrupt header: {error}") from error
    if not isinstance(tensors, dict):
        raise BrokenCheckpoint(f"{path} has a corrupt header: not a JSON object")
    tensors.pop("__metadata__", None)
    return tensors


def locate(path: Path, name: str, entry: dict[str, Any], data: int) -> Stored:
    try:
        info = TensorInfo(DTYPES[entry["dtype"]], tuple(entry["shape"]))
        start, end = entry["data_offsets"]
    except (KeyError, TypeError, ValueError) as error:
        raise BrokenCheckpoint(f"{path} describes tensor {name} in a way we do not know: {error!r}") from error
    if start < 0 or end - start != math.prod(info.shape) * info.dtype.itemsize:
        kind = f"{list(info.shape)} of {type_name(info.dtype)}"
        raise BrokenCheckpoint(f"{path} has a corrupt header: bytes {start} to {end} for tensor {name}, {kind}")
    return Stored(info, path, data + start, data + end)
