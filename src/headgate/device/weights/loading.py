"""Loads weights into a model, at start-up and at every live update.

`load_weights` verifies everything that a source declares before it writes anything, so a checkpoint that does not fit
is refused and the model is unchanged. Tensors are then written one at a time; there is never a second copy of the
model, unless the source keeps one. A source that fails while it delivers leaves the model partly written
(HalfWritten): the caller must load again before computing anything.

Files are read, never memory-mapped: truncating a mapped file while it is read would end the process.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import torch
from tqdm import tqdm

from headgate.device.weights.source import TensorInfo, WeightSource, type_name
from headgate.device.weights.stacking import StoredPiece, pieces_of
from headgate.device.weights.whole import WholeWeights
from headgate.errors import BrokenCheckpoint, HalfWritten, ModelError, NotAModel, OutOfMemory, RankLost, SourceLost
from headgate.layers.formats import Floating, GgufBlocks, Weight, WeightFormat, convertible
from headgate.layers.parameter import WeightParameter

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
LONGEST_HEADER = 100_000_000  # bytes, as the format defines
CHUNK = 4 * 2**20  # bytes per read while hashing a file
CONVERTIBLE = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class Loadable(Protocol):
    def parameters(self) -> Iterator[tuple[str, WeightParameter]]: ...


def load_weights(
    model: Loadable, source: WeightSource, *, before_write: Callable[[], None] | None = None, progress: bool = False
) -> None:
    """Fill `model` from `source` completely, or raise a ModelError before the first write, or HalfWritten after it.

    `before_write` is called once the source is verified; errors it raises are passed on.
    """
    try:
        with ExitStack() as opened:
            if isinstance(source, AbstractContextManager):
                opened.enter_context(source)
            parameters = dict(model.parameters())
            unused: tuple[str, ...] = getattr(model, "unused", ())
            whole = WholeWeights(source, getattr(model, "quantisation", None), unused)
            stored = whole.metadata()
            shapes = {name: parameter.shape for name, parameter in parameters.items()}
            pieces = {name: pieces_of(name, info.shape, shapes) for name, info in stored.items()}
            found = contents(stored, pieces)
            if getattr(source, "partial", False):  # the other parameters keep their values
                parameters = {name: parameter for name, parameter in parameters.items() if name in found}
            verify(parameters, found, unused)
            if before_write is not None:
                before_write()
            weights = watched(whole, len(pieces), progress)
            write(parameters, ((piece.name, piece.of(weight)) for name, weight in weights for piece in pieces[name]))
    except (ModelError, RankLost, OutOfMemory):
        raise
    except Exception as error:  # any other error, which occurred before the first write
        raise SourceLost(f"the weights cannot be read: {error}") from error


def contents(stored: Mapping[str, TensorInfo], pieces: Mapping[str, list[StoredPiece]]) -> dict[str, TensorInfo]:
    """The tensors of a source as the model names them."""
    found: dict[str, TensorInfo] = {}
    for name, info in stored.items():
        for piece in pieces[name]:
            if piece.name in found:
                raise BrokenCheckpoint(f"the checkpoint has tensor {piece.name} twice: alone, and in {name}")
            found[piece.name] = info if piece.name == name else info._replace(shape=piece.shape(info.shape))
    return found


def write(parameters: Mapping[str, WeightParameter], weights: Iterator[tuple[str, Weight]]) -> None:
    """Fill all of `parameters`. Errors before the first write are passed on unchanged."""
    missing = set(parameters)
    try:
        for name, weight in weights:
            if name in parameters:
                missing.discard(name)
                parameters[name].write(weight)
        refuse_missing(missing)
    except BaseException as error:
        if len(missing) == len(parameters):
            raise
        raise HalfWritten(str(error)) from error


def verify(
    parameters: Mapping[str, WeightParameter], found: Mapping[str, TensorInfo], unused: tuple[str, ...] = ()
) -> None:
    """Raise BrokenCheckpoint unless `found` fits. Names that begin with one of `unused` may be there."""
    refuse_missing(parameters.keys() - found.keys())
    unexpected = found.keys() - parameters.keys()
    refuse_unexpected(name for name in unexpected if not harmless(name) and not name.startswith(unused))
    for name, parameter in parameters.items():
        refuse_shape(name, parameter.shape, found[name].shape)
        refuse_dtype(name, found[name].dtype)
        refuse_format(name, parameter.format, found[name])


def harmless(name: str) -> bool:
    """Old checkpoints contain rotary tables, and some with tied embeddings store them twice."""
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


def refuse_format(name: str, stored: WeightFormat | None, info: TensorInfo) -> None:
    """Refuse a tensor that cannot be converted to the format in which the engine stores it."""
    if isinstance(stored, GgufBlocks) and not convertible(info.format or Floating(info.dtype), stored):
        given = info.format.kind if isinstance(info.format, GgufBlocks) else type_name(info.dtype)
        raise BrokenCheckpoint(
            f"tensor {name} has dtype {given}; this engine stores it as the {stored.kind} blocks of its GGUF file, to "
            f"which no other numbers can be converted. Start the engine with a dtype, such as bfloat16, to convert the "
            f"file instead"
        )


def listed(names: set[str]) -> str:
    first, *others = sorted(names)
    return f"tensor {first}" + (f" and {len(others)} more" if others else "")


def watched(weights: WholeWeights, total: int, progress: bool) -> Iterator[tuple[str, Weight]]:
    """The weights, with a progress bar on a terminal."""
    hidden = not (progress and sys.stderr.isatty())
    return iter(tqdm(weights, desc="loading weights", total=total, unit="tensor", disable=hidden, leave=False))


class OpenFile:
    """An open file. It stays the same file even if the path is renamed or removed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise SourceLost(f"{path} cannot be opened: {error.strerror}") from error

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        descriptor, self._descriptor = getattr(self, "_descriptor", -1), -1
        if descriptor >= 0:
            os.close(descriptor)

    @property
    def size(self) -> int:
        return os.fstat(self._descriptor).st_size

    def read(self, start: int, count: int) -> bytes:
        """Up to `count` bytes."""
        return os.pread(self._descriptor, count, start)

    def fill(self, buffer: memoryview, start: int) -> bool:
        """Read into all of `buffer`; False if the file ends before that."""
        done = 0
        while done < len(buffer):
            if not (count := os.preadv(self._descriptor, [buffer[done:]], start + done)):
                return False
            done += count
        return True

    def sha256(self) -> str:
        digest, buffer, done = hashlib.sha256(), memoryview(bytearray(CHUNK)), 0
        while count := os.preadv(self._descriptor, [buffer], done):
            digest.update(buffer[:count])
            done += count
        return digest.hexdigest()


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor in a file: its type and shape, and the position of its bytes."""

    info: TensorInfo
    file: OpenFile
    start: int
    end: int

    def read(self, name: str) -> torch.Tensor:
        data = torch.empty(self.end - self.start, dtype=torch.uint8)
        if not self.file.fill(data.numpy().data, self.start):
            raise SourceLost(f"{self.file.path} was cut short while tensor {name} was read from it")
        return data.view(self.info.dtype).view(self.info.shape)


class SafetensorsFiles:
    """The tensors of some safetensors files. Verifies the SHA-256 of files named in `checksum` first."""

    def __init__(self, files: list[Path], checksum: Mapping[str, str] | None = None) -> None:
        self.files = files
        self.checksum = checksum or {}
        self._opened: list[OpenFile] = []
        self._stored: dict[str, Stored] | None = None

    def __enter__(self) -> SafetensorsFiles:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        # Immediately, because removed files in shared memory use memory until they are closed.
        while self._opened:
            self._opened.pop().close()
        self._stored = None

    def metadata(self) -> Mapping[str, TensorInfo]:
        return {name: stored.info for name, stored in self._tensors().items()}

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name in together(self._tensors()):
            yield name, self.read(name)

    def read(self, name: str) -> torch.Tensor:
        return self._tensors()[name].read(name)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.files[0].parent}, {len(self.files)} files>"

    def _tensors(self) -> dict[str, Stored]:
        if self._stored is None:
            self._opened += map(OpenFile, self.files)
            stored = {name: stored for file in self._opened for name, stored in read_header(file).items()}
            refuse_checksums(self._opened, self.checksum)
            # A file that has a tensor under both names is refused: the model has no place for one of them.
            self._stored = {
                name if (full := prefixed(name)) in stored else full: each for name, each in stored.items()
            }
        return self._stored


def prefixed(name: str) -> str:
    """Embedding models are often stored without the output layer, and therefore without the prefix of all others."""
    return f"model.{name}" if name.startswith(("embed_tokens.", "layers.", "norm.")) else name


def together(names: Collection[str]) -> list[str]:
    """The names in the order of the files, but those of one module together, because they may be parts of one weight."""
    order: dict[str, int] = {}
    for name in names:
        order.setdefault(name.rpartition(".")[0], len(order))
    return sorted(names, key=lambda name: order[name.rpartition(".")[0]])


class SafetensorsFolder(SafetensorsFiles):
    """The weights of a Hugging Face folder: `model.safetensors`, or the files named in its index."""

    def __init__(self, folder: str | Path, checksum: Mapping[str, str] | None = None) -> None:
        super().__init__(weight_files(Path(folder)), checksum)


def refuse_checksums(files: list[OpenFile], checksum: Mapping[str, str]) -> None:
    if unknown := checksum.keys() - {file.path.name for file in files}:
        raise BrokenCheckpoint(f"there is a checksum for {min(unknown)}, and no such file")
    for file in files:
        expected = checksum.get(file.path.name)
        if expected is not None and (found := file.sha256()) != expected.lower():
            raise BrokenCheckpoint(f"{file.path} has SHA-256 {found}; {expected.lower()} was promised")


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


def read_header(file: OpenFile) -> dict[str, Stored]:
    """Parse the header of a safetensors file and check it against the size of the file."""
    path, size = file.path, file.size
    length = int.from_bytes(file.read(0, 8), "little")
    if size < 8 + length:
        raise BrokenCheckpoint(f"{path} is cut short or corrupt: {size} bytes cannot hold its header")
    if length > LONGEST_HEADER:
        raise BrokenCheckpoint(f"{path} has a header of {length} bytes; at most {LONGEST_HEADER} are read")
    tensors = parse_header(path, file.read(8, length))
    data = 8 + length
    stored = {name: locate(file, name, entry, data) for name, entry in tensors.items()}
    for name, tensor in stored.items():
        if tensor.end > size:
            raise BrokenCheckpoint(f"{path} is cut short: {size} bytes, but tensor {name} ends at {tensor.end}")
    refuse_overlaps(path, stored)
    return stored


def refuse_overlaps(path: Path, stored: Mapping[str, Stored]) -> None:
    """Tensors must not share bytes; otherwise a small file could describe a huge model."""
    ordered = sorted((tensor.start, tensor.end, name) for name, tensor in stored.items() if tensor.start < tensor.end)
    for (_, end, one), (start, _, other) in pairwise(ordered):
        if start < end:
            raise BrokenCheckpoint(f"{path} has a corrupt header: tensors {one} and {other} overlap")


def parse_header(path: Path, header: bytes) -> dict[str, Any]:
    try:
        tensors = json.loads(header)
    except (ValueError, RecursionError) as error:
        raise BrokenCheckpoint(f"{path} has a corrupt header: {error}") from error
    if not isinstance(tensors, dict):
        raise BrokenCheckpoint(f"{path} has a corrupt header: not a JSON object")
    tensors.pop("__metadata__", None)
    return tensors


def locate(file: OpenFile, name: str, entry: dict[str, Any], data: int) -> Stored:
    path = file.path
    try:
        info = TensorInfo(DTYPES[entry["dtype"]], tuple(map(size_of, entry["shape"])))
        start, end = map(size_of, entry["data_offsets"])
    except (KeyError, TypeError, ValueError) as error:
        raise BrokenCheckpoint(f"{path} describes tensor {name} in an unknown format: {error!r}") from error
    if end - start != math.prod(info.shape) * info.dtype.itemsize:
        kind = f"{list(info.shape)} of {type_name(info.dtype)}"
        raise BrokenCheckpoint(f"{path} has a corrupt header: bytes {start} to {end} for tensor {name}, {kind}")
    return Stored(info, file, data + start, data + end)


def size_of(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is not a size")
    return value
