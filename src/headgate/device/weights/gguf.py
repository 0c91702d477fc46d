"""Weights from a GGUF file: a `WeightSource` that dequantises one tensor at a time, on demand.

Tensors have their Hugging Face names and layout, so a model does not depend on where its weights come from.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import gguf
import numpy as np
import torch

from headgate.device.weights.loading import OpenFile, TensorInfo, refuse_checksums
from headgate.model_store.gguf import NamedTensor, StoredTensor, hub_tensors, read_gguf

# Types that torch can read directly; all others are dequantised to float32 first.
UNQUANTISED = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class GGUFWeights:
    """The weights of one GGUF file. Quantised tensors are returned as `dtype`, the others as stored."""

    def __init__(
        self, path: str | Path, checksum: Mapping[str, str] | None = None, *, dtype: torch.dtype = torch.float32
    ) -> None:
        self.path = Path(path)
        self.checksum = checksum or {}
        self.dtype = dtype
        self._tensors = hub_tensors(read_gguf(self.path))

    def __repr__(self) -> str:
        return f"<GGUFWeights {self.path.name}, {len(self._tensors)} tensors>"

    def metadata(self) -> Mapping[str, TensorInfo]:
        refuse_checksums([OpenFile(self.path)], self.checksum)
        return {
            tensor.name: TensorInfo(UNQUANTISED.get(tensor.stored.kind, self.dtype), tensor.shape)
            for tensor in self._tensors
        }

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for tensor in self._tensors:
            yield tensor.name, self._load(tensor)

    def _load(self, tensor: NamedTensor) -> torch.Tensor:
        values = self._unpack(tensor.stored).reshape(tensor.shape)
        return values if tensor.rotary_heads is None else halves_from_pairs(values, tensor.rotary_heads)

    def _unpack(self, stored: StoredTensor) -> torch.Tensor:
        # Copied from the file: a memory map would be read-only, and its pages would outlive the tensor.
        data = np.fromfile(self.path, dtype=np.uint8, count=stored.size, offset=stored.start)
        if stored.kind in UNQUANTISED:
            return torch.from_numpy(data).view(UNQUANTISED[stored.kind]).reshape(stored.shape)
        rows = data.reshape(*stored.shape[:-1], -1)
        values = gguf.dequantize(rows, gguf.GGMLQuantizationType[stored.kind])
        return torch.from_numpy(values).to(self.dtype)


def halves_from_pairs(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """Undo llama.cpp's order of rotary rows: within a head, from (a0 b0 a1 b1 ...) to (a0 a1 ... b0 b1 ...)."""
    pairs = rows.reshape(heads, rows.shape[0] // heads // 2, 2, *rows.shape[1:])
    return pairs.transpose(1, 2).reshape(rows.shape)
