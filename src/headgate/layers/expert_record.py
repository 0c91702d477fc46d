"""The experts that routers chose for the tokens whose KV is in the cache, kept beside it by the same blocks.

A layer notes its choice as it routes; at the end of the forward pass all choices of the step are written to the slots of
its tokens, as their KV was. Nothing is read from the device, so this can be captured in a graph. What prefix hits,
preemption and transfers do to a block therefore holds for the experts of its tokens, too.
"""

from __future__ import annotations

import torch


class ExpertRecord:
    """`ids` [blocks + 1, block size, layers with experts, top]. The last block belongs to no token: tokens that only
    pad a batch have slot -1, which is in it."""

    def __init__(
        self, num_blocks: int, block_size: int, *, layers: int, top: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.ids = torch.zeros(num_blocks + 1, block_size, layers, top, dtype=dtype, device=device)
        self._by_slot = self.ids.view(-1, layers, top)
        self._noted: list[torch.Tensor] = []

    def note(self, chosen: torch.Tensor) -> None:
        """Add the choice of the next layer that has experts, `[T, top]`."""
        self._noted.append(chosen)

    def write(self, slots: torch.Tensor) -> None:
        """Write what all layers have noted for the tokens at `slots` [T]."""
        noted, self._noted = self._noted, []
        self._by_slot[slots] = torch.stack(noted, dim=1).to(self.ids.dtype)

    def read(self, slots: torch.Tensor) -> torch.Tensor:
        """A copy of the choices for `slots`, `[len(slots), layers, top]`."""
        return self._by_slot[slots]
