"""Mixtures of experts of the CPU kernels, on every instruction set this machine can run."""

import pytest
import torch

from headgate.layers.backend import Routing
from headgate.layers.cpu import Kernels
from headgate.layers.cpu.build import supported_isas
from headgate.layers.experts import combined, route
from tests.layers.test_cpu_linear import DTYPES, kernels, random

EXPERTS, HIDDEN, WIDTH = 6, 70, 45
CLAMPED = (1.702, 2.0)


@pytest.fixture(params=supported_isas())
def k(request: pytest.FixtureRequest) -> Kernels:
    return kernels(request.param)


class Weights:
    """Experts in one stack each, and one by one."""

    def __init__(self, k: Kernels, dtype: torch.dtype) -> None:
        self.k = k
        self.gate_up = k.empty_packed_expert_pairs(EXPERTS, WIDTH, HIDDEN, dtype)
        self.down = k.empty_packed_experts(EXPERTS, HIDDEN, WIDTH, dtype)
        self.gate_up_bias = random(4, EXPERTS, 2 * WIDTH, dtype=dtype)
        self.down_bias = random(5, EXPERTS, HIDDEN, dtype=dtype)
        for i in range(EXPERTS):
            k.pack_pair_into(self.gate_up[i], random(10 + i, WIDTH, HIDDEN, dtype=dtype) / 8, 0, "gate")
            k.pack_pair_into(self.gate_up[i], random(20 + i, WIDTH, HIDDEN, dtype=dtype) / 8, 0, "up")
            k.pack_into(self.down[i], random(30 + i, HIDDEN, WIDTH, dtype=dtype) / 7)

    def compute(self, x, ids, weights, *, biased=False, clamped=None):
        biases = (self.gate_up_bias, self.down_bias) if biased else (None, None)
        return self.k.experts(x, self.gate_up, self.down, WIDTH, ids, weights, *biases, clamped)

    def one_by_one(self, x, ids, weights, biased=False):
        """Each row with each of its experts in a product of its own."""
        rows = []
        for row, experts in zip(x, ids.tolist(), strict=True):
            for e in experts:
                first, second = (self.gate_up_bias[e], self.down_bias[e]) if biased else (None, None)
                inner = self.k.linear_silu_mul(row[None], self.gate_up[e], WIDTH, first)
                rows.append(self.k.linear(inner, self.down[e], HIDDEN, second))
        return combined(torch.cat(rows).view(len(x), -1, HIDDEN), weights)


def chosen(count: int, top: int = 3, skew: float = 0.0) -> tuple[torch.Tensor, torch.Tensor]:
    logits = random(7, count, EXPERTS, dtype=torch.float32) - skew * torch.arange(EXPERTS)
    routed = route(logits, Routing(top=top), None)
    return routed.ids, routed.weights


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("count", "skew"), [(1, 0.0), (5, 0.0), (40, 0.0), (70, 9.0)])
@pytest.mark.parametrize("biased", [False, True])
def test_60_a_row_has_the_bits_of_its_experts_computed_alone(k, dtype, count, skew, biased):
    weights, x, choice = Weights(k, dtype), random(1, count, HIDDEN, dtype=dtype), chosen(count, skew=skew)
    assert torch.equal(weights.compute(x, *choice, biased=biased), weights.one_by_one(x, *choice, biased=biased))


@pytest.mark.parametrize("dtype", DTYPES)
def test_60_a_row_does_not_depend_on_the_other_rows_or_on_threads(k, dtype):
    weights, x, (ids, shares) = Weights(k, dtype), random(1, 60, HIDDEN, dtype=dtype), chosen(60)
    together = weights.compute(x, ids, shares, clamped=CLAMPED)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        assert torch.equal(weights.compute(x, ids, shares, clamped=CLAMPED), together)
    finally:
        torch.set_num_threads(before)
    for some in ([7], [59, 0, 7], [*range(3, 20)]):
        part = ids[some].contiguous(), shares[some].contiguous()
        assert torch.equal(weights.compute(x[some], *part, clamped=CLAMPED), together[some])


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_clamped_gate_rounds_like_the_operations_of_torch(k, dtype):
    weights, x = Weights(k, dtype), 6 * random(1, 9, HIDDEN, dtype=dtype)
    ids, shares = chosen(9, top=1)
    expected = []
    for row, (e,) in zip(x, ids.tolist(), strict=True):
        every = torch.arange(WIDTH)
        parts = [k.unpack_pair_rows(weights.gate_up[e], every, HIDDEN, part) for part in ("gate", "up")]
        gate, up = (row.double() @ part.double().T for part in parts)
        bias = weights.gate_up_bias[e].double()
        gate, up = (gate + bias[:WIDTH]).to(dtype), (up + bias[WIDTH:]).to(dtype)
        alpha, limit = CLAMPED
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        inner = (up + 1) * (gate * torch.sigmoid(gate * alpha))
        expected.append(k.linear(inner[None], weights.down[e], HIDDEN, weights.down_bias[e]))
    found = weights.compute(x, ids, torch.ones_like(shares), biased=True, clamped=CLAMPED)
    tolerance = 1e-4 if dtype == torch.float32 else 3e-2
    torch.testing.assert_close(found, torch.cat(expected), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
def test_experts_that_no_row_uses_are_not_read(k, dtype):
    weights, x = Weights(k, dtype), random(1, 4, HIDDEN, dtype=dtype)
    ids, shares = torch.tensor([[0, 4]] * 4, dtype=torch.int32), torch.full((4, 2), 0.5)
    expected = weights.compute(x, ids, shares)
    for unused in (1, 2, 3, 5):
        weights.gate_up[unused].fill_(float("nan"))
        weights.down[unused].fill_(float("nan"))
    assert torch.equal(weights.compute(x, ids, shares), expected)


def test_no_rows_give_no_rows(k):
    ids, shares = torch.empty(0, 2, dtype=torch.int32), torch.empty(0, 2)
    assert Weights(k, torch.bfloat16).compute(torch.empty(0, HIDDEN, dtype=torch.bfloat16), ids, shares).shape == (
        0,
        HIDDEN,
    )


@pytest.mark.parametrize("expert", [-1, EXPERTS])
def test_an_expert_that_does_not_exist_is_refused(k, expert):
    weights, x = Weights(k, torch.float32), random(1, 1, HIDDEN, dtype=torch.float32)
    with pytest.raises(IndexError, match=f"expert {expert} of {EXPERTS}"):
        weights.compute(x, torch.tensor([[expert]], dtype=torch.int32), torch.ones(1, 1))


def test_weights_of_another_shape_are_refused(k):
    weights, x = Weights(k, torch.float32), random(1, 1, HIDDEN + 1, dtype=torch.float32)
    with pytest.raises(RuntimeError, match="not packed weights with"):
        weights.compute(x, torch.zeros(1, 1, dtype=torch.int32), torch.ones(1, 1))
    with pytest.raises(RuntimeError, match="dtypes differ"):
        weights.compute(x.bfloat16()[:, 1:], torch.zeros(1, 1, dtype=torch.int32), torch.ones(1, 1))
    with pytest.raises(RuntimeError, match="7 of 6 experts in 1 of 1 groups cannot be chosen"):
        k.route(
            torch.zeros(1, EXPERTS), None, top=7, sigmoid=False, normalised=True, scale=1.0, groups=1, top_groups=1
        )


@pytest.mark.parametrize("count", [1, 300])
def test_60_the_choice_of_a_row_does_not_depend_on_the_other_rows(k, count):
    logits = random(3, count, 40, dtype=torch.float32)
    options = {"top": 5, "sigmoid": False, "normalised": True, "scale": 1.0, "groups": 4, "top_groups": 2}
    ids, weights = k.route(logits, None, **options)
    for i in (0, count // 2, count - 1):
        one, weight = k.route(logits[i : i + 1].clone(), None, **options)
        assert torch.equal(one[0], ids[i]) and torch.equal(weight[0], weights[i])
    expected = route(logits, Routing(top=5, groups=4, top_groups=2), None)
    assert torch.equal(ids, expected.ids)
    torch.testing.assert_close(weights, expected.weights)
