"""Weights from a GGUF file, one tensor at a time, on demand: as stored (`StoredGGUF`), or dequantised (`GGUFWeights`).

Tensors have their Hugging Face names and layout, so a model does not depend on where its weights come from. A model
that is started from a file may keep them as the file stores them (`keep_as_stored`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import torch

from headgate.device.weights.loading import Loadable, OpenFile, refuse_checksums
from headgate.device.weights.source import TensorInfo
from headgate.device.weights.stacking import pieces_of
from headgate.layers.formats import GgufBlocks, Weight, numbers_of_blocks
from headgate.model_store.gguf import NamedTensor, StoredTensor, hub_tensors, read_gguf

# Types that torch can read directly; all others are dequantised to float32 first.
UNQUANTISED = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class StoredGGUF:
    """The weights of one GGUF file. Quantised tensors are weights in blocks, and `dtype` has room for their numbers."""

    def __init__(
        self, path: str | Path, checksum: Mapping[str, str] | None = None, *, dtype: torch.dtype = torch.float32
    ) -> None:
        self.path = Path(path)
        self.checksum = checksum or {}
        self.dtype = dtype
        self._tensors = hub_tensors(read_gguf(self.path))

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.path.name}, {len(self._tensors)} tensors>"

    def metadata(self) -> Mapping[str, TensorInfo]:
        refuse_checksums([OpenFile(self.path)], self.checksum)
        return {tensor.name: self._info(tensor) for tensor in self._tensors}

    def _info(self, tensor: NamedTensor) -> TensorInfo:
        dtype = UNQUANTISED.get(tensor.stored.kind, self.dtype)
        return TensorInfo(dtype, tensor.shape, format_of(tensor.stored))

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor | Weight]]:
        for tensor in self._tensors:
            rows, format = self._rows(tensor), format_of(tensor.stored)
            yield tensor.name, rows if format is None else Weight(rows, format)

    def _rows(self, tensor: NamedTensor) -> torch.Tensor:
        """The numbers, or the bytes of the blocks of each row."""
        stored = tensor.stored
        # Copied from the file: a memory map would be read-only, and its pages would outlive the tensor.
        data = torch.from_numpy(np.fromfile(self.path, dtype=np.uint8, count=stored.size, offset=stored.start))
        if stored.kind in UNQUANTISED:
            rows = data.view(UNQUANTISED[stored.kind]).reshape(tensor.shape)
        else:
            rows = data.reshape(*tensor.shape[:-1], -1)
        return rows if tensor.rotary_heads is None else halves_from_pairs(rows, tensor.rotary_heads)


class GGUFWeights(StoredGGUF):
    """The same weights in numbers: quantised tensors as `dtype`, the others as stored."""

    def _info(self, tensor: NamedTensor) -> TensorInfo:
        return super()._info(tensor)._replace(format=None)

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for tensor in self._tensors:
            rows, format = self._rows(tensor), format_of(tensor.stored)
            yield tensor.name, rows if format is None else numbers_of_blocks(rows, format).to(self.dtype)


def format_of(stored: StoredTensor) -> GgufBlocks | None:
    return None if stored.kind in UNQUANTISED else GgufBlocks(stored.kind)


def keep_as_stored(model: Loadable, path: Path) -> None:
    """Let the model store the weights of the GGUF file `path` as the file does, as far as its backend supports it."""
    parameters = dict(model.parameters())
    shapes = {name: parameter.shape for name, parameter in parameters.items()}
    for tensor in hub_tensors(read_gguf(path)):
        if (format := format_of(tensor.stored)) is None:
            continue
        for piece in pieces_of(tensor.name, tensor.shape, shapes):
            if (parameter := parameters.get(piece.name)) is not None and parameter.keep is not None:
                parameter.keep(format)


def halves_from_pairs(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """Undo llama.cpp's order of rotary rows: within a head, from (a0 b0 a1 b1 ...) to (a0 a1 ... b0 b1 ...)."""
    pairs = rows.reshape(heads, rows.shape[0] // heads // 2, 2, *rows.shape[1:])
    return pairs.transpose(1, 2).reshape(rows.shape)
