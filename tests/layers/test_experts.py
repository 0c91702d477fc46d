"""Mixtures of experts on every backend, against the definition: each token's experts, one after another, in float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from headgate.layers.backend import NO_FP8, ClampedGate, Fp8, Heads, Routed, Routing
from headgate.layers.cpu import Kernels, load_kernels
from headgate.layers.cpu_backend import CpuBackend
from headgate.layers.experts import route
from headgate.layers.formats import floating
from headgate.layers.torch_backend import DeterministicTorchBackend, TorchBackend
from tests.layers.test_triton import HAS_GPU, INTERPRETED, triton_backend

HEADS = Heads(4, 2, 64)
CPU = torch.device("cpu")
ROUTINGS = {
    "softmax": Routing(top=3),
    "not normalised": Routing(top=2, normalised=False),
    "sigmoid, scaled": Routing(top=4, scores="sigmoid", scale=2.5),
    "groups": Routing(top=3, scores="sigmoid", groups=4, top_groups=2),
    "groups of odd sizes": Routing(top=2, scores="sigmoid", groups=3, top_groups=2, normalised=False),
    "groups of one": Routing(top=5, groups=12, top_groups=5),
}
GATES = {"silu": None, "clamped": ClampedGate(alpha=1.702, limit=0.8)}


def deterministic(device, dtype, fp8=NO_FP8):
    from headgate.layers.triton_backend import DeterministicTritonBackend

    return DeterministicTritonBackend(device, dtype, HEADS, fp8)


def compiled(device, dtype):
    kernels = load_kernels()
    if not isinstance(kernels, Kernels):
        pytest.skip("the CPU kernels are not compiled")
    return CpuBackend(kernels, dtype, HEADS)


BACKENDS = [
    pytest.param(lambda: TorchBackend(CPU, torch.float32, HEADS), id="torch"),
    pytest.param(lambda: DeterministicTorchBackend(CPU, torch.float32, HEADS), id="torch, deterministic"),
    pytest.param(lambda: compiled(CPU, torch.float32), id="cpu"),
    pytest.param(lambda: triton_backend(CPU, torch.float32, HEADS), id="triton", marks=INTERPRETED),
    pytest.param(lambda: deterministic(CPU, torch.float32), id="triton, deterministic", marks=INTERPRETED),
]
GPU_BACKENDS = [
    pytest.param(lambda dtype, fp8: triton_backend(torch.device("cuda"), dtype, HEADS, fp8), id="triton"),
    pytest.param(lambda dtype, fp8: deterministic(torch.device("cuda"), dtype, fp8), id="triton, deterministic"),
]


class Weights:
    def __init__(self, backend, experts, hidden, width, seed=1, *, gate=None, biased=False):
        random = torch.Generator().manual_seed(seed)
        self.gate, self.up = torch.randn(2, experts, width, hidden, generator=random) / hidden**0.5
        self.down = torch.randn(experts, hidden, width, generator=random) / width**0.5
        self.gate_up_packed = backend.expert_gate_up_matrices(experts, width, hidden)
        self.down_packed = backend.expert_matrices(experts, hidden, width)
        for i in reversed(range(experts)):
            backend.pack_gate_up(self.gate_up_packed.each[i], floating(self.up[i]), width)
            backend.pack_gate_up(self.gate_up_packed.each[i], floating(self.gate[i]), 0)
            backend.pack(self.down_packed.each[i], floating(self.down[i]), 0)
        self.gate_kind = gate
        self.up_bias, self.down_bias = torch.zeros(experts, 2 * width), torch.zeros(experts, hidden)
        if biased:
            self.up_bias.normal_(generator=random)
            self.down_bias.normal_(generator=random)
            self.gate_up_packed = replace(self.gate_up_packed, bias=self.up_bias.to(backend.device, backend.dtype))
            self.down_packed = replace(self.down_packed, bias=self.down_bias.to(backend.device, backend.dtype))
        self.backend = backend

    def compute(self, x, routed):
        return self.backend.experts(x, self.gate_up_packed, self.down_packed, routed, self.gate_kind)

    def expected(self, x, routed):
        out = torch.zeros(len(x), self.down.shape[1], dtype=torch.float64)
        for t, row in enumerate(x.double().cpu()):
            for expert, weight in zip(routed.ids[t].tolist(), routed.weights[t].tolist(), strict=True):
                bias = self.up_bias[expert].double().chunk(2)
                gate, up = self.gate[expert].double() @ row + bias[0], self.up[expert].double() @ row + bias[1]
                inner = self.gated(gate, up)
                out[t] += weight * (self.down[expert].double() @ inner + self.down_bias[expert].double())
        return out

    def gated(self, gate, up):
        if self.gate_kind is None:
            return gate * gate.sigmoid() * up
        alpha, limit = self.gate_kind.alpha, self.gate_kind.limit
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        return gate * (alpha * gate).sigmoid() * (up + 1)


def routed_rows(count, experts, top, seed=2, skew=0.0):
    """With `skew`, a few experts get most rows."""
    random = torch.Generator().manual_seed(seed)
    logits = torch.randn(count, experts, generator=random) - skew * torch.arange(experts)
    return route(logits, Routing(top=top), None)


def assert_near(found, expected, most=1e-5):
    assert torch.isfinite(found).all()
    error = (found.double().cpu() - expected).norm() / expected.norm()
    assert error < most, f"off by {error:.2e}"


@pytest.mark.parametrize("make", BACKENDS)
@pytest.mark.parametrize(("count", "skew"), [(1, 0.0), (5, 0.0), (40, 0.0), (40, 1.5), (70, 9.0)])
def test_a_row_is_the_weighted_sum_of_its_experts(make, count, skew):
    backend = make()
    weights = Weights(backend, experts=6, hidden=64, width=48)
    x, routed = torch.randn(count, 64), routed_rows(count, 6, 3, skew=skew)
    assert_near(weights.compute(x, routed), weights.expected(x, routed))


@pytest.mark.parametrize("make", BACKENDS)
@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("count", [1, 5, 40])
def test_experts_may_have_biases_and_a_clamped_gate(make, gate, count):
    backend = make()
    weights = Weights(backend, experts=6, hidden=64, width=48, gate=GATES[gate], biased=True)
    x, routed = torch.randn(count, 64), routed_rows(count, 6, 3)
    assert_near(weights.compute(x, routed), weights.expected(x, routed))


@INTERPRETED
@pytest.mark.parametrize("columns", [16, 32])  # of 64 and 48: the last step of the second product is not full
def test_tiles_loaded_in_bulk_give_the_same_sums(columns):
    from headgate.layers.triton.experts import GroupCut, compute_grouped

    weights = Weights(triton_backend(CPU, torch.float32, HEADS), experts=6, hidden=64, width=48)
    x, routed = torch.randn(40, 64), routed_rows(40, 6, 3)
    cut = GroupCut(32, columns, 16, 4, 2, bulk=True)
    found = compute_grouped(x, weights.gate_up_packed, weights.down_packed, routed, None, (cut, cut))
    assert_near(found, weights.expected(x, routed))


@pytest.mark.parametrize("make", BACKENDS)
@pytest.mark.parametrize("name", ROUTINGS)
@pytest.mark.parametrize("biased", [False, True])
def test_every_backend_chooses_the_experts_of_the_reference(make, name, biased):
    logits, bias = torch.randn(33, 12), torch.randn(12) if biased else None
    ours, theirs = make().route(logits, ROUTINGS[name], bias), route(logits, ROUTINGS[name], bias)
    assert ours.ids.tolist() == theirs.ids.tolist()
    torch.testing.assert_close(ours.weights, theirs.weights)


def test_a_bias_changes_the_choice_and_not_the_weights():
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
    routed = route(logits, Routing(top=2, normalised=False), torch.tensor([0.0, 0.0, 0.0, 5.0]))
    assert routed.ids.tolist() == [[3, 0]]
    torch.testing.assert_close(routed.weights, logits.softmax(-1)[:, [3, 0]])


def test_experts_outside_the_best_groups_are_not_chosen():
    scores = torch.tensor([[0.9, 0.1, 0.6, 0.5, 0.8, 0.0]])  # groups of two: sums 1.0, 1.1, 0.8
    routed = route(scores.logit(1e-6), Routing(top=2, scores="sigmoid", groups=3, top_groups=1), None)
    assert routed.ids.tolist() == [[2, 3]]


@pytest.mark.parametrize("make", BACKENDS[1:3] + BACKENDS[4:])
@pytest.mark.parametrize("gate", GATES)
def test_60_a_row_does_not_depend_on_the_other_rows(make, gate):
    weights = Weights(make(), experts=6, hidden=64, width=48, gate=GATES[gate], biased=gate != "silu")
    x, routed = torch.randn(40, 64), routed_rows(40, 6, 3)
    together = weights.compute(x, routed)
    for some in ([7], [0, 7, 39], [*range(3, 20)]):
        part = Routed(routed.ids[some].contiguous(), routed.weights[some].contiguous())
        assert torch.equal(weights.compute(x[some], part), together[some])


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_GPU, reason="needs a GPU")
@pytest.mark.parametrize("make", GPU_BACKENDS)
@pytest.mark.parametrize("name", ROUTINGS)
@pytest.mark.parametrize("biased", [False, True])
def test_experts_are_chosen_as_by_the_reference_on_a_gpu(make, name, biased):
    logits = torch.randn(300, 12, device="cuda")
    bias = torch.randn(12, device="cuda") if biased else None
    ours = make(torch.bfloat16, NO_FP8).route(logits, ROUTINGS[name], bias)
    theirs = route(logits, ROUTINGS[name], bias)
    assert ours.ids.tolist() == theirs.ids.tolist()
    torch.testing.assert_close(ours.weights, theirs.weights)


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_GPU, reason="needs a GPU")
@pytest.mark.parametrize("make", GPU_BACKENDS)
@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("count", [1, 8, 9, 300])
def test_experts_may_have_biases_and_a_clamped_gate_on_a_gpu(make, gate, count):
    backend = make(torch.bfloat16, NO_FP8)
    weights = Weights(backend, experts=32, hidden=512, width=192, gate=GATES[gate], biased=True)
    x = torch.randn(count, 512, device="cuda", dtype=torch.bfloat16)
    routed = backend.route(torch.randn(count, 32, device="cuda"), Routing(top=4), None)
    assert_near(weights.compute(x, routed), weights.expected(x, routed), TOLERANCE[torch.bfloat16])


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_GPU, reason="needs a GPU")
@pytest.mark.parametrize("make", GPU_BACKENDS)
@pytest.mark.parametrize("fp8", [NO_FP8, Fp8(weights=True)], ids=["", "fp8"])
@pytest.mark.parametrize("count", [1, 2, 8, 9, 64, 256, 1000])
def test_experts_on_a_gpu(make, fp8, count):
    for dtype in (torch.bfloat16,) if fp8.weights else (torch.bfloat16, torch.float32):
        check_on_a_gpu(make(dtype, fp8), count, 6e-2 if fp8.weights else TOLERANCE[dtype])


TOLERANCE = {torch.bfloat16: 1.5e-2, torch.float32: 1e-5}


def check_on_a_gpu(backend, count, most):
    weights = Weights(backend, experts=32, hidden=512, width=192)
    x = torch.randn(count, 512, device="cuda", dtype=backend.dtype)
    logits = torch.randn(count, 32, device="cuda")
    routed = backend.route(logits, Routing(top=4), None)
    assert routed.ids.tolist() == route(logits, Routing(top=4), None).ids.tolist()
    found = backend.experts(x, weights.gate_up_packed, weights.down_packed, routed)
    assert_near(found, weights.expected(x, routed), most)


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_GPU, reason="needs a GPU")
def test_60_a_row_does_not_depend_on_the_other_rows_on_a_gpu():
    backend = deterministic(torch.device("cuda"), torch.bfloat16)
    weights = Weights(backend, experts=32, hidden=512, width=192)
    x = torch.randn(300, 512, device="cuda", dtype=torch.bfloat16)
    routed = backend.route(torch.randn(300, 32, device="cuda"), Routing(top=4), None)
    together = backend.experts(x, weights.gate_up_packed, weights.down_packed, routed)
    for some in ([7], [0, 7, 299], [*range(30, 130)]):
        part = Routed(routed.ids[some].contiguous(), routed.weights[some].contiguous())
        alone = backend.experts(x[some].contiguous(), weights.gate_up_packed, weights.down_packed, part)
        assert torch.equal(alone, together[some])
