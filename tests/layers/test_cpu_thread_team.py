"""The threads that share a kernel's work: the result is the same whichever of them take part."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from headgate.layers.cpu import Kernels, load_kernels


@pytest.fixture
def kernels():
    kernels = load_kernels()
    assert isinstance(kernels, Kernels), "these tests need a C++ compiler"
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield kernels
    torch.set_num_threads(before)


def packed(kernels: Kernels, rows: int, columns: int) -> torch.Tensor:
    weight = kernels.empty_packed(rows, columns, torch.float32)
    kernels.pack_into(weight, torch.randn(rows, columns), 0)
    return weight


def test_concurrent_callers_each_get_their_own_result(kernels):
    torch.manual_seed(0)
    weights = [packed(kernels, 512, 256) for _ in range(4)]
    x = torch.randn(8, 256)
    expected = [kernels.linear(x, weight, 512) for weight in weights]

    def repeat(i: int) -> bool:
        return all(torch.equal(kernels.linear(x, weights[i], 512), expected[i]) for _ in range(200))

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(repeat, range(4))) == [True] * 4


def test_the_number_of_threads_changes_no_bit(kernels):
    torch.manual_seed(1)
    weight = packed(kernels, 1000, 96)
    x = torch.randn(5, 96)
    results = []
    for threads in (1, 2, 3, 8):
        torch.set_num_threads(threads)
        results.append(kernels.linear(x, weight, 1000))
    assert all(torch.equal(result, results[0]) for result in results[1:])
