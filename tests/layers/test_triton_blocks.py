"""Copying blocks in one launch, against a loop in torch: on a GPU, and in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from headgate.device.same_gpu import gather, scatter
from tests.layers.test_triton import DEVICES  # which also sets the interpreter up


@pytest.fixture(params=DEVICES)
def device(request) -> torch.device:
    torch.manual_seed(3)
    return torch.device(request.param)


def drawn(device: torch.device, *shape: int) -> torch.Tensor:
    return torch.randint(-(2**62), 2**62, shape, device=device)


@pytest.mark.parametrize("words", [1, 40, 1024, 1500])
def test_blocks_are_gathered_and_scattered_as_torch_would_and_nothing_else_is_touched(device, words):
    from headgate.layers.triton.blocks import gather_blocks, scatter_blocks

    caches = [drawn(device, 12, words) for _ in range(4)]
    index, other = torch.tensor([3, 0, 11], device=device), torch.tensor([1, 10, 2], device=device)
    ours, right = (torch.full((4, 5, words), -1, device=device) for _ in range(2))
    sums = gather_blocks(caches, index, ours[:, :3])
    assert torch.equal(sums, gather(caches, index, right[:, :3])) and torch.equal(ours, right)

    stored, expected = ([torch.full_like(cache, 7) for cache in caches] for _ in range(2))
    assert torch.equal(scatter_blocks(stored, other, ours[:, :3]), sums)
    assert torch.equal(scatter(expected, other, ours[:, :3]), sums)
    assert all(torch.equal(one, two) for one, two in zip(stored, expected, strict=True))
