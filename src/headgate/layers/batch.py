"""`Batch`: where the tokens of a step are in their sequences and in the paged cache. Every layer takes one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch


@dataclass(frozen=True, slots=True)
class Batch:
    """`T` tokens of `S` slices, one slice after another. All tensors are on the model's device.

    Slice `s` owns tokens `query_starts[s] : query_starts[s + 1]`, the last positions of a sequence whose KV length,
    including this step's tokens, is `context_lens[s]`. Token `t` writes its KV to `slots[t]`, which is `block *
    block_size + offset`.
    """

    tokens: torch.Tensor  # [T] int64
    positions: torch.Tensor  # [T] int64
    slots: torch.Tensor  # [T] int64
    query_starts: torch.Tensor  # [S + 1] int32
    context_lens: torch.Tensor  # [S] int32
    block_tables: torch.Tensor  # [S, W] int32; entries past a sequence's last block are undefined
    max_query: int  # longest slice
    max_context: int  # longest context
    # [S] int32: slices sorted by context, longest first, so that no long slice starts last and delays the kernel
    order: torch.Tensor | None = None
    # If layers are in several groups: this batch for the layers of each, with the slots and block tables of its blocks
    groups: tuple[Batch, ...] = ()
    singles: bool = False  # there may be slices of one token among longer ones


def of_groups(batches: Sequence[Batch]) -> Batch:
    """One batch from those of all groups of layers, which differ only in their slots and block tables."""
    return batches[0] if len(batches) == 1 else replace(batches[0], groups=tuple(batches))
