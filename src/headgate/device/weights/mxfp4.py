"""Weights in MXFP4, converted to bfloat16 as they are read.

A checkpoint stores such a weight in two tensors of bytes: `NAME_blocks` [experts, rows, groups, 16], with two 4-bit
numbers (e2m1) per byte, the first in the lower half, and `NAME_scales` [experts, rows, groups], the exponent of each
group of 32 numbers. The model expects `NAME` [experts, columns, rows]. bfloat16 holds every such number exactly.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from headgate.device.weights.loading import SafetensorsFolder, TensorInfo
from headgate.errors import BrokenCheckpoint

BLOCKS, SCALES = "_blocks", "_scales"
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
BYTES_PER_GROUP = 16
BIAS = 127  # of the exponents


class Mxfp4Folder(SafetensorsFolder):
    """A folder some of whose tensors may be in MXFP4."""

    def metadata(self) -> Mapping[str, TensorInfo]:
        stored = super().metadata()
        found = {name: info for name, info in stored.items() if not is_part(name, stored)}
        for name in packed_names(stored):
            refuse_parts(name, stored[name + BLOCKS], stored.get(name + SCALES))
            experts, rows, groups, size = stored[name + BLOCKS].shape
            found[name] = TensorInfo(torch.bfloat16, (experts, 2 * groups * size, rows))
        return found

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        stored = self._tensors()
        for name in stored:
            if not is_part(name, stored):
                yield name, stored[name].read(name)
        for name in packed_names(stored):
            blocks, scales = (stored[name + part].read(name + part) for part in (BLOCKS, SCALES))
            yield name, unpacked(blocks, scales)


def packed_names(stored: Mapping[str, object]) -> list[str]:
    return [name.removesuffix(BLOCKS) for name in stored if name.endswith(BLOCKS)]


def is_part(name: str, stored: Mapping[str, object]) -> bool:
    return name.endswith(BLOCKS) or (name.endswith(SCALES) and name.removesuffix(SCALES) + BLOCKS in stored)


def refuse_parts(name: str, blocks: TensorInfo, scales: TensorInfo | None) -> None:
    if scales is None:
        raise BrokenCheckpoint(f"the checkpoint lacks tensor {name + SCALES}, and has {name + BLOCKS}")
    shape = blocks.shape
    if len(shape) != 4 or shape[3] != BYTES_PER_GROUP or scales.shape != shape[:3]:
        raise BrokenCheckpoint(
            f"tensors {name + BLOCKS} {list(shape)} and {name + SCALES} {list(scales.shape)} are not an MXFP4 weight"
        )
    if (blocks.dtype, scales.dtype) != (torch.uint8, torch.uint8):
        raise BrokenCheckpoint(f"tensors {name + BLOCKS} and {name + SCALES} must have dtype uint8")


def unpacked(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return the numbers, [experts, columns, rows], as a view of the transposed tensor."""
    numbers = torch.tensor([*E2M1, *(-number for number in E2M1)])
    byte = torch.arange(256)
    pairs = torch.stack((numbers[byte & 15], numbers[byte >> 4]), dim=1)
    experts, rows, groups, size = blocks.shape
    out = torch.empty(experts, rows, groups, 2 * size, dtype=torch.bfloat16)
    for i in range(experts):  # one at a time, because indices are eight times as large as the bytes
        exponents = scales[i].int() - BIAS
        out[i] = torch.ldexp(pairs[blocks[i].long()].flatten(2), exponents[..., None])
    return out.flatten(2).transpose(1, 2)
