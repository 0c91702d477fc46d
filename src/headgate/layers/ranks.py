"""Ranks: processes that compute one model together, each with a part of every large matrix and of the KV heads.

All ranks run the same steps on the same batches and hold the same residual stream. Where a layer needs what the others
have, all of them ask at once, in the same order: that is what a `Ranks` is for.
"""

from __future__ import annotations

from typing import Protocol

import torch


class Ranks(Protocol):
    rank: int
    size: int

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of every rank's `x`, to the bit the same on all of them; `x` may be spoiled."""

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """Every rank's `x` side by side: the last dimension grows."""


class Alone:
    """One rank has everything."""

    rank = 0
    size = 1

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        return x


ALONE = Alone()


def share(ranks: Ranks, whole: int) -> slice:
    """Which of `whole` rows or columns are this rank's; where they cannot be divided evenly, the last ranks have fewer."""
    each = -(-whole // ranks.size)
    return slice(min(each * ranks.rank, whole), min(each * (ranks.rank + 1), whole))
