"""Each operation of each backend is compared with a formula, and cache blocks are copied between backends."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward

from headgate.layers.backend import KV, Heads, Rotary, Softmax
from headgate.layers.batch import Batch
from headgate.layers.choice import available_backends, choose_backend
from headgate.layers.formats import floating

CPU = torch.device("cpu")
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
HEADS = Heads(query=4, kv=2, size=16)
BLOCK_SIZE = 16


def open_backend(name, dtype=torch.float32, deterministic=False):
    return choose_backend(name, CPU, dtype, HEADS, deterministic=deterministic)


@pytest.fixture(params=[*available_backends(), "torch, deterministic"])
def name(request):
    return request.param


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def backend(request, name):
    torch.manual_seed(0)
    plain, _, deterministic = name.partition(", ")
    return open_backend(plain, request.param, deterministic=bool(deterministic))


def close(found, expected, backend):
    assert found.dtype == backend.dtype
    tolerance = TOLERANCE[backend.dtype]
    torch.testing.assert_close(found.float(), expected.float(), rtol=tolerance, atol=tolerance)


def random(backend, *shape):
    return torch.randn(shape).to(backend.dtype)


def packed(backend, *weights):
    matrix = backend.matrix(sum(len(weight) for weight in weights), weights[0].shape[1])
    row = 0
    for weight in weights:
        backend.pack(matrix, floating(weight), row)
        row += len(weight)
    return matrix


def test_a_matrix_of_several_parts_multiplies_as_their_concatenation(backend):
    parts = [random(backend, rows, 40) for rows in (32, 5, 11)]
    x, bias = random(backend, 7, 40), random(backend, 48)
    expected = x.float() @ torch.cat(parts).float().T
    close(backend.linear(x, packed(backend, *parts), None) / 8, expected / 8, backend)
    close(backend.linear(x, packed(backend, *parts), bias) / 8, (expected + bias) / 8, backend)


def test_parts_can_be_replaced_one_at_a_time(backend):
    first, second, update = (random(backend, 20, 40) for _ in range(3))
    matrix = packed(backend, first, second)
    backend.pack(matrix, floating(update), 20)
    x = random(backend, 3, 40)
    assert torch.equal(backend.linear(x, matrix, None), backend.linear(x, packed(backend, first, update), None))


def test_a_weight_of_another_type_is_converted(backend):
    weight = torch.randn(20, 40, dtype=torch.float64)
    x = random(backend, 3, 40)
    expected = backend.linear(x, packed(backend, weight.to(backend.dtype)), None)
    assert torch.equal(backend.linear(x, packed(backend, weight), None), expected)


def test_logits_are_float32(backend):
    weight, x = random(backend, 50, 40) / 8, random(backend, 3, 40)
    logits = backend.logits(x, packed(backend, weight))
    assert logits.dtype == torch.float32
    tolerance = TOLERANCE[backend.dtype]
    torch.testing.assert_close(logits, x.float() @ weight.float().T, rtol=tolerance, atol=tolerance)


def test_rows_of_a_matrix_are_embeddings(backend):
    weight = random(backend, 50, 40)
    tokens = torch.tensor([49, 0, 17, 17])
    assert torch.equal(backend.embed(tokens, packed(backend, weight)), weight[tokens])


def test_gate_up_multiplies_up_by_the_silu_of_the_gate(backend):
    gate, up, x = random(backend, 24, 40) / 8, random(backend, 24, 40) / 8, random(backend, 5, 40)
    matrix = backend.gate_up_matrix(24, 40)
    backend.pack_gate_up(matrix, floating(up), 24)
    backend.pack_gate_up(matrix, floating(gate), 0)
    expected = torch.nn.functional.silu(x.float() @ gate.float().T) * (x.float() @ up.float().T)
    close(backend.gate_up(x, matrix, None), expected, backend)


def test_gate_up_multiplies_up_by_the_gelu_of_the_gate(backend):
    gate, up, x = random(backend, 24, 40) / 3, random(backend, 24, 40) / 8, random(backend, 5, 40)
    matrix = backend.gate_up_matrix(24, 40)
    backend.pack_gate_up(matrix, floating(gate), 0)
    backend.pack_gate_up(matrix, floating(up), 24)
    activated = torch.nn.functional.gelu(x.float() @ gate.float().T, approximate="tanh")
    close(backend.gate_up(x, matrix, None, "gelu_tanh"), activated * (x.float() @ up.float().T), backend)


def test_a_float32_weight_of_a_norm_multiplies_before_rounding(backend):
    x, weight = random(backend, 5, 40), torch.randn(40)
    wide = x.float() / (x.float().square().mean(-1, keepdim=True) + 0.5).sqrt()
    found = backend.rms_norm(x, weight, 0.5)
    close(found, wide * weight, backend)
    if backend.dtype == torch.bfloat16:
        assert (found == (wide * weight).to(backend.dtype)).float().mean() > 0.9


def test_a_float32_weight_norms_heads_before_they_are_rotated(backend):
    batch, kv = one_slice(20, [3, 1]), backend.allocate_kv(5, BLOCK_SIZE)
    qkv, weights = random(backend, 20, 8 * 16), torch.randn(2, 16)
    q, k, _ = (part.clone().float() for part in qkv.view(20, 8, 16).split([4, 2, 2], dim=1))
    expected = [
        x / (x.square().mean(-1, keepdim=True) + 0.5).sqrt() * w for x, w in zip((q, k), weights, strict=True)
    ]
    rotary = Rotary(torch.ones(20, 16), torch.zeros(20, 16), *weights, 0.5)
    close(backend.rope_and_write(qkv, batch, rotary, kv).view(20, 4, 16), expected[0], backend)
    close(backend.read_blocks(kv, torch.tensor([3, 1])).k.flatten(0, 1)[:20], expected[1], backend)


def test_the_norm_adds_into_the_residual(backend):
    x, residual, weight = random(backend, 5, 40), random(backend, 5, 40), random(backend, 40)
    total = x + residual
    wide = total.float()
    expected = wide / (wide.square().mean(-1, keepdim=True) + 0.5).sqrt() * weight
    close(backend.add_rms_norm(x, residual, weight, 0.5), expected, backend)
    assert torch.equal(residual, total)


def test_the_norm_of_rows_that_are_not_adjacent_leaves_them_unchanged(backend):
    whole, weight = random(backend, 5, 100), random(backend, 40)
    x, before = whole[:, 30:70], whole.clone()
    wide = x.float()
    expected = wide / (wide.square().mean(-1, keepdim=True) + 0.5).sqrt() * weight
    close(backend.rms_norm(x, weight, 0.5), expected, backend)
    assert torch.equal(whole, before)


def test_an_empty_batch_is_supported(backend):
    x, matrix = random(backend, 0, 40), packed(backend, random(backend, 32, 40))
    assert backend.linear(x, matrix, None).shape == (0, 32)
    assert backend.logits(x, matrix).shape == (0, 32)
    assert backend.add_rms_norm(x, x.clone(), random(backend, 40), 0.5).shape == (0, 40)
    assert backend.rms_norm(x, random(backend, 40), 0.5).shape == (0, 40)


def one_slice(length, blocks):
    positions = torch.arange(length)
    return Batch(
        tokens=torch.zeros(length, dtype=torch.int64),
        positions=positions,
        slots=torch.tensor(blocks)[positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE,
        query_starts=torch.tensor([0, length], dtype=torch.int32),
        context_lens=torch.tensor([length], dtype=torch.int32),
        block_tables=torch.tensor([blocks], dtype=torch.int32),
        max_query=length,
        max_context=length,
    )


def unturned(length):
    return Rotary(cos=torch.ones(length, HEADS.size), sin=torch.zeros(length, HEADS.size))


def test_what_is_written_to_the_cache_can_be_read_block_by_block(backend):
    batch = one_slice(20, [3, 1])
    qkv = random(backend, 20, 8 * 16)
    q, k, v = (part.clone() for part in qkv.view(20, 8, 16).split([4, 2, 2], dim=1))
    kv = backend.allocate_kv(5, BLOCK_SIZE)
    assert torch.equal(backend.rope_and_write(qkv, batch, unturned(20), kv).view(20, 4, 16), q)
    read = backend.read_blocks(kv, torch.tensor([3, 1]))
    assert torch.equal(read.k.flatten(0, 1)[:20], k)
    assert torch.equal(read.v.flatten(0, 1)[:20], v)


@pytest.mark.parametrize("rotated", [0, 6, 8])
def test_dimensions_beyond_the_tables_are_not_rotated(backend, rotated):
    batch, kv = one_slice(20, [3, 1]), backend.allocate_kv(5, BLOCK_SIZE)
    qkv = random(backend, 20, 8 * 16)
    q, k, _ = (part.clone() for part in qkv.view(20, 8, 16).split([4, 2, 2], dim=1))
    half_turn = Rotary(cos=-torch.ones(20, rotated), sin=torch.zeros(20, rotated))
    turned = backend.rope_and_write(qkv, batch, half_turn, kv).view(20, 4, 16)
    assert torch.equal(turned, torch.cat([-q[..., :rotated], q[..., rotated:]], -1))
    written = backend.read_blocks(kv, torch.tensor([3, 1])).k.flatten(0, 1)[:20]
    assert torch.equal(written, torch.cat([-k[..., :rotated], k[..., rotated:]], -1))


def test_blocks_move_between_backends(backend):
    content = KV(*(random(backend, 2, BLOCK_SIZE, 2, 16) for _ in range(2)))
    for other in [open_backend(name, backend.dtype) for name in available_backends()]:
        ours, theirs = backend.allocate_kv(4, BLOCK_SIZE), other.allocate_kv(6, BLOCK_SIZE)
        backend.write_blocks(ours, torch.tensor([3, 0]), content)
        moved = backend.read_blocks(ours, torch.tensor([3, 0]))
        other.write_blocks(theirs, torch.tensor([1, 5]), moved)
        arrived = other.read_blocks(theirs, torch.tensor([1, 5]))
        assert torch.equal(arrived.k, content.k)
        assert torch.equal(arrived.v, content.v)


def test_kv_bytes_per_block_is_the_allocated_size(backend):
    kv = backend.allocate_kv(3, BLOCK_SIZE)
    assert kv.k.nbytes + kv.v.nbytes == 3 * backend.kv_bytes_per_block(BLOCK_SIZE)


def test_sinks_are_those_of_transformers(backend):
    """One more score per head, in the denominator only, as `transformers` computes it for gpt-oss."""
    batch, kv = one_slice(20, [3, 1]), backend.allocate_kv(5, BLOCK_SIZE)
    qkv = random(backend, 20, 8 * 16)
    q, k, v = (part.clone().transpose(0, 1)[None] for part in qkv.view(20, 8, 16).split([4, 2, 2], dim=1))
    layer = SimpleNamespace(num_key_value_groups=2, sinks=torch.tensor([-1.0, 0.5, 2.0, 6.0]), training=False)
    distance = torch.arange(20)[:, None] - torch.arange(20)
    for window in (None, 7):
        hidden = (distance < 0) | (distance >= (window or 20))
        mask = torch.zeros(20, 20).masked_fill(hidden, -torch.inf)
        expected = eager_attention_forward(layer, q.float(), k.float(), v.float(), mask, scaling=0.3)[0]
        turned = backend.rope_and_write(qkv.clone(), batch, unturned(20), kv)
        found = backend.attention(turned, kv, batch, Softmax(scale=0.3, window=window, sinks=layer.sinks))
        close(found, expected[0].flatten(1), backend)


@pytest.mark.parametrize("sinks", [None, torch.tensor([-1.0, 0.5, 2.0, 6.0])], ids=["no sinks", "sinks"])
def test_capped_scores_follow_the_formula(backend, sinks):
    batch, kv = one_slice(20, [3, 1]), backend.allocate_kv(5, BLOCK_SIZE)
    qkv = random(backend, 20, 8 * 16)
    q, k, v = (part.clone().float() for part in qkv.view(20, 8, 16).split([4, 2, 2], dim=1))
    scores = 1.5 * torch.tanh(torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(2, 1)) * 0.3 / 1.5)
    weights = scores.masked_fill(torch.ones(20, 20).triu(1).bool(), -torch.inf).exp()
    total = weights.sum(-1) + (0 if sinks is None else sinks.exp()[:, None])
    expected = torch.einsum("hqk,khd->qhd", weights / total[..., None], v.repeat_interleave(2, 1))
    turned = backend.rope_and_write(qkv, batch, unturned(20), kv)
    found = backend.attention(turned, kv, batch, Softmax(scale=0.3, cap=1.5, sinks=sinks))
    close(found, expected.flatten(1), backend)
