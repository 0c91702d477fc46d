"""Ranks: processes that compute one model together, each with a part of every large matrix and of the KV heads.

All ranks run the same steps on the same batches and hold the same residual stream. When a layer needs the other
ranks' data, all ranks call the same method of `Ranks`, in the same order.
"""

from __future__ import annotations

from typing import Protocol

import torch


class Ranks(Protocol):
    rank: int
    size: int

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of all ranks' `x`, bitwise identical on all ranks. May overwrite `x`."""

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """Return the `x` of all ranks, concatenated along the last dimension."""


class Alone:
    """A single rank, which has the whole model."""

    rank = 0
    size = 1

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        return x


ALONE = Alone()


def share(ranks: Ranks, whole: int) -> slice:
    """This rank's part of `whole` rows or columns. If they cannot be divided evenly, the last ranks get fewer."""
    each = -(-whole // ranks.size)
    return slice(min(each * ranks.rank, whole), min(each * (ranks.rank + 1), whole))
