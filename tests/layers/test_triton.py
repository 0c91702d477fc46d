"""Each Triton kernel against the reference backend: on a GPU, and on small shapes in Triton's interpreter.

Blocks are scattered over the cache, table entries past a sequence's end are invalid, and memory that a kernel must
write is filled with NaN first.
"""

from __future__ import annotations

import importlib.util
import os
import random
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from headgate.device.sampling.draw import Knobs, draw, stream_keys
from headgate.layers.backend import KV, NO_FP8, Fp8, Heads, Rotary, Softmax
from headgate.layers.batch import Batch
from headgate.layers.formats import floating
from headgate.layers.rotary import Rope
from headgate.layers.torch_backend import TorchBackend

HAS_GPU = torch.cuda.is_available()
if not HAS_GPU:
    os.environ.setdefault("TRITON_INTERPRET", "1")
INTERPRETED = pytest.mark.skipif(
    HAS_GPU or importlib.util.find_spec("triton") is None, reason="needs Triton, and no GPU beside its interpreter"
)
DEVICES = [pytest.param("cuda", marks=pytest.mark.gpu), pytest.param("cpu", marks=INTERPRETED)]
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}
POSITIONS = 4096
FP8 = Fp8(weights=True)


@pytest.fixture(params=DEVICES)
def device(request):
    torch.manual_seed(7)
    random.seed(7)
    return torch.device(request.param)


@pytest.fixture
def dtypes(device):
    """Return the dtypes to test; the interpreter on a CPU does not support the others."""
    return [torch.float32] if device.type == "cpu" else [torch.bfloat16, torch.float16, torch.float32]


def triton_backend(device, dtype, heads, fp8=NO_FP8):
    from headgate.layers.triton_backend import TritonBackend

    return TritonBackend(device, dtype, heads, fp8)


def assert_close(found, expected, dtype):
    found, expected = found.double().cpu(), expected.double().cpu()
    assert torch.isfinite(found).all()
    error = (found - expected).norm() / expected.norm()
    assert error < TOLERANCE[dtype], f"off by {error:.2e}"


class Case:
    """Slices of (queries, context) over a scattered cache, for both backends."""

    def __init__(self, device, dtype, heads, slices, *, block_size=32, normed=None, fp8=NO_FP8, rotated=1.0):
        self.heads, self.dtype = heads, dtype
        self.plain, self.fast = TorchBackend(device, dtype, heads), triton_backend(device, dtype, heads, fp8)
        blocks = [-(-context // block_size) for _, context in slices]
        free = random.sample(range(sum(blocks) + 3), sum(blocks))
        tables = [[free.pop() for _ in range(count)] for count in blocks]
        nowhere = [[*table, *[-(10**6)] * (max(blocks) - len(table))] for table in tables]
        places = [(s, p) for s, (queries, context) in enumerate(slices) for p in range(context - queries, context)]
        self.batch = Batch(
            tokens=torch.zeros(len(places), dtype=torch.int64, device=device),
            positions=torch.tensor([p for _, p in places], device=device),
            slots=torch.tensor([tables[s][p // block_size] * block_size + p % block_size for s, p in places]).to(
                device
            ),
            query_starts=torch.tensor([0, *(q for q, _ in slices)]).cumsum(0).int().to(device),
            context_lens=torch.tensor([c for _, c in slices], dtype=torch.int32, device=device),
            block_tables=torch.tensor(nowhere, dtype=torch.int32, device=device),
            max_query=max(q for q, _ in slices),
            max_context=max(c for _, c in slices),
        )
        shape = (sum(blocks) + 3, block_size, heads.kv, heads.size)
        content = KV(*(torch.randn(shape, device=device).to(dtype) for _ in range(2)))
        self.every = torch.arange(len(content.k), device=device)
        self.plain_kv, self.fast_kv = (b.allocate_kv(shape[0], block_size) for b in (self.plain, self.fast))
        self.plain.write_blocks(self.plain_kv, self.every, content)
        self.fast.write_blocks(self.fast_kv, self.every, content)
        cos, sin = (table.to(device) for table in Rope(10000.0, fraction=rotated).tables(heads.size, POSITIONS))
        norms = [torch.randn(heads.size, device=device).to(normed) for _ in range(2)] if normed else [None, None]
        self.rotary = Rotary(cos, sin, *norms, 1e-6)
        self.qkv = torch.randn(len(places), (heads.query + 2 * heads.kv) * heads.size, device=device).to(dtype)

    def check_rope(self):
        expected = self.plain.rope_and_write(self.qkv.clone(), self.batch, self.rotary, self.plain_kv)
        found = self.fast.rope_and_write(self.qkv.clone(), self.batch, self.rotary, self.fast_kv)
        assert_close(found, expected, self.dtype)
        read = (b.read_blocks(kv, self.every) for b, kv in ((self.plain, self.plain_kv), (self.fast, self.fast_kv)))
        for one, other in zip(*read, strict=True):
            assert_close(other, one, self.dtype)

    def check_attention(self, window=None, splits=None, **softmax):
        from headgate.layers.triton.attention import decode

        q = torch.randn(len(self.qkv), self.heads.query, self.heads.size, device=self.qkv.device).to(self.dtype)
        rule = Softmax(scale=self.heads.size**-0.5, window=window, **softmax)
        expected = self.plain.attention(q, self.plain_kv, self.batch, rule)
        for _ in range(2):  # twice, because the second run sees what the first left behind
            if splits is None:
                found = self.fast.attention(q, self.fast_kv, self.batch, rule)
            else:
                scratch = self.fast.scratch
                found = decode(q, self.fast_kv, self.batch, rule, self.heads, scratch, splits=splits)
            assert_close(found, expected, self.dtype)


SHAPES = [Heads(4, 2, 64), Heads(3, 3, 80), Heads(6, 2, 96), Heads(4, 2, 128), Heads(14, 2, 64), Heads(4, 1, 256)]


@pytest.mark.parametrize("heads", SHAPES, ids=str)
def test_queries_and_keys_are_normed_and_rotated_and_kv_is_written(device, dtypes, heads):
    for dtype in dtypes:
        for normed in (dtype, torch.float32, None):
            Case(device, dtype, heads, [(3, 3), (1, 40), (5, 37)], normed=normed).check_rope()


@pytest.mark.parametrize("rotated", [0.0, 0.5, 0.75])
def test_a_part_of_each_head_is_rotated(device, dtypes, rotated):
    for dtype in dtypes:
        for heads in SHAPES[1], SHAPES[3]:
            for normed in (dtype, None):
                Case(device, dtype, heads, [(3, 3), (1, 40)], normed=normed, rotated=rotated).check_rope()


@pytest.mark.parametrize("heads", SHAPES, ids=str)
@pytest.mark.parametrize("window", [None, 1, 50])
def test_decode_attends_like_the_reference(device, dtypes, heads, window):
    far = 300 if device.type == "cuda" else 70
    for dtype in dtypes:
        slices = [(1, 1), (1, far), (1, 33), (1, 64)]
        Case(device, dtype, heads, slices, block_size=random.choice((16, 32, 64))).check_attention(window)


@pytest.mark.parametrize("cap", [None, 0.7])
@pytest.mark.parametrize("sunk", [False, True])
def test_caps_and_sinks_are_those_of_the_reference(device, dtypes, cap, sunk):
    heads = Heads(6, 2, 64)
    sinks = torch.tensor([-3.0, 0.0, 1.0, 2.0, 4.0, 60.0], device=device) if sunk else None
    for dtype in dtypes:
        for window in (None, 20):
            Case(device, dtype, heads, [(1, 1), (1, 70)]).check_attention(window, cap=cap, sinks=sinks)
            Case(device, dtype, heads, [(1, 70), (1, 33)]).check_attention(window, splits=4, cap=cap, sinks=sinks)
            mixed = Case(device, dtype, heads, [(7, 7), (1, 40), (5, 40)])
            mixed.check_attention(window, cap=cap, sinks=sinks)
            mixed.batch = replace(mixed.batch, singles=True)
            mixed.check_attention(window, cap=cap, sinks=sinks)


@pytest.mark.parametrize("splits", [1, 2, 8, 64])
def test_any_number_of_splits_gives_the_same(device, dtypes, splits):
    if device.type == "cpu":
        splits = min(splits, 8)
    for dtype in dtypes:
        slices = [(1, 1), (1, 150), (1, 33)]
        for window in (None, 40):
            Case(device, dtype, Heads(4, 2, 64), slices).check_attention(window, splits)


@pytest.mark.parametrize("heads", SHAPES, ids=str)
@pytest.mark.parametrize("window", [None, 1, 20])
def test_prefill_attends_like_the_reference(device, dtypes, heads, window):
    most = 300 if device.type == "cuda" else 40
    for dtype in dtypes:
        slices = [(7, 7), (1, most), (most // 2, most), (3, 40), (most, most)]
        Case(device, dtype, heads, slices, block_size=random.choice((16, 32, 64))).check_attention(window)


def test_many_query_heads_may_share_keys_and_values(device, dtypes):
    for dtype in dtypes:
        Case(device, dtype, Heads(71, 1, 64), [(3, 3), (1, 20), (5, 40)]).check_attention()


@pytest.mark.parametrize("window", [None, 20])
def test_slices_of_one_token_among_longer_ones_attend_like_the_reference(device, dtypes, window):
    most = 300 if device.type == "cuda" else 70
    for dtype in dtypes:
        case = Case(device, dtype, Heads(4, 2, 64), [(1, most), (7, 7), (1, 1), (3, 40), (1, 33), (2, 5), (1, 20)])
        case.batch = replace(case.batch, singles=True)
        case.check_attention(window)
        order = torch.tensor([0, 3, 4, 6, 1, 5, 2], dtype=torch.int32, device=device)
        case.batch = replace(case.batch, order=order)
        case.check_attention(window)


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [Heads(16, 8, 128), Heads(32, 8, 128)], ids=str)
def test_long_contexts_and_large_batches_attend_like_the_reference(heads):
    cuda = torch.device("cuda")
    torch.manual_seed(7)
    random.seed(7)
    Case(cuda, torch.bfloat16, heads, [(1, 4000)]).check_attention()
    Case(cuda, torch.bfloat16, heads, [(1, random.randint(1, 2000)) for _ in range(200)]).check_attention()
    chunks = [(random.randint(1, 400), random.randint(400, 2000)) for _ in range(9)]
    Case(cuda, torch.bfloat16, heads, chunks).check_attention()
    mixed = Case(cuda, torch.bfloat16, heads, [*chunks, *((1, random.randint(1, 4000)) for _ in range(90))])
    mixed.batch = replace(mixed.batch, singles=True)
    mixed.check_attention()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_deterministic_products_have_the_same_bits_however_many_rows_there_are(dtype):
    from headgate.layers.triton_backend import DeterministicTritonBackend

    torch.manual_seed(7)
    cuda = torch.device("cuda")
    backend = DeterministicTritonBackend(cuda, dtype, Heads(4, 2, 64))
    for rows, columns in ((4096, 1024), (1024, 3072), (6144, 1024), (1000, 520)):
        matrix = backend.matrix(rows, columns)
        backend.pack(matrix, floating(torch.randn(rows, columns, device=cuda) / columns**0.5), 0)
        x = torch.randn(8192, columns, device=cuda).to(dtype)
        most = len(x) if dtype == torch.bfloat16 else 300
        whole, logits = backend.linear(x[:most], matrix, None), backend.logits(x[:most], matrix)
        for count in (n for n in (1, 5, 16, 17, 40, 64, 100, 128, 200, 256, 1000, 3000) if n <= most):
            assert torch.equal(backend.linear(x[:count], matrix, None), whole[:count]), (rows, columns, count)
            assert torch.equal(backend.logits(x[:count], matrix), logits[:count]), (rows, columns, count)


def test_an_empty_context_is_padding_and_gives_zeros(device):
    case = Case(device, torch.float32, Heads(4, 2, 64), [(1, 20), (1, 30)])
    case.batch.context_lens[1] = 0
    q = torch.randn(2, 4, 64, device=device)
    found = case.fast.attention(q, case.fast_kv, case.batch, Softmax(scale=0.1))
    assert not found[1].any() and found[0].all()


def test_slices_can_be_taken_in_any_order(device):
    case = Case(device, torch.float32, Heads(4, 2, 64), [(1, 20), (1, 70), (1, 30)])
    case.batch = replace(case.batch, order=torch.tensor([1, 2, 0], dtype=torch.int32, device=device))
    case.check_attention()


def test_a_negative_slot_is_not_written(device):
    case = Case(device, torch.float32, Heads(4, 2, 64), [(1, 20), (1, 30)])
    before = [cache.clone() for cache in case.fast_kv]
    case.batch.slots.fill_(-1)
    case.fast.rope_and_write(case.qkv, case.batch, case.rotary, case.fast_kv)
    assert all(torch.equal(old, new) for old, new in zip(before, case.fast_kv, strict=True))


@pytest.mark.parametrize("columns", [64, 100, 1024, 5120])
def test_norms_and_gates_are_those_of_the_reference(device, dtypes, columns):
    for dtype in dtypes:
        plain, fast = (backend(device, dtype, Heads(4, 2, 64)) for backend in (TorchBackend, triton_backend))
        x, residual, gate_up = (
            torch.randn(5, size, device=device).to(dtype) for size in (columns, columns, 2 * columns)
        )
        weight = torch.randn(columns, device=device).to(dtype)
        sums = residual.clone(), residual.clone()
        expected = plain.add_rms_norm(x, sums[0], weight, 1e-6)
        assert_close(fast.add_rms_norm(x, sums[1], weight, 1e-6), expected, dtype)
        assert torch.equal(*sums)
        part = gate_up[:, columns // 2 : columns // 2 + columns]  # rows that are not adjacent
        assert_close(fast.rms_norm(part, weight, 1e-6), plain.rms_norm(part, weight, 1e-6), dtype)

        from headgate.layers.triton.elementwise import gate_mul

        gate, up = gate_up.chunk(2, -1)
        assert_close(gate_mul(gate_up), F.silu(gate) * up, dtype)
        assert_close(gate_mul(gate_up, "gelu_tanh"), F.gelu(gate, approximate="tanh") * up, dtype)
        wide = torch.randn(columns, device=device)
        assert_close(fast.rms_norm(x, wide, 1e-6), plain.rms_norm(x, wide, 1e-6), dtype)


@pytest.mark.parametrize("count", [1, 3, 16, 50])
@pytest.mark.parametrize("rows", [50, 3072])
@pytest.mark.parametrize("biased", [False, True])
def test_products_of_a_few_rows_are_those_of_the_reference(device, dtypes, count, rows, biased):
    columns = 1000 if device.type == "cuda" else 72
    rows = rows if device.type == "cuda" else 50
    for dtype in dtypes:
        plain, fast = (backend(device, dtype, Heads(4, 2, 64)) for backend in (TorchBackend, triton_backend))
        weight = (torch.randn(2 * rows, columns, device=device) / columns**0.5).to(dtype)
        x, bias = torch.randn(count, columns, device=device).to(dtype), torch.randn(2 * rows, device=device).to(dtype)
        matrix = plain.gate_up_matrix(rows, columns)
        plain.pack_gate_up(matrix, floating(weight), 0)
        given = bias if biased else None
        assert_close(fast.linear(x, matrix, given), plain.linear(x, matrix, given), dtype)
        for activation in ("silu", "gelu_tanh"):
            expected = plain.gate_up(x, matrix, given, activation)
            assert_close(fast.gate_up(x, matrix, given, activation), expected, dtype)
        logits = fast.logits(x, matrix)
        assert logits.dtype == torch.float32
        assert_close(logits, x.double() @ weight.double().T, dtype)


def test_an_eight_bit_cache_is_rounded_on_write_and_attended_as_stored(device, dtypes):
    for dtype in dtypes:
        case = Case(device, dtype, Heads(4, 2, 64), [(1, 70), (7, 7), (1, 33), (3, 40)], fp8=Fp8(kv=True))
        assert case.fast_kv.k.dtype == torch.float8_e4m3fn
        assert case.fast.kv_bytes_per_block(32) == 2 * 32 * 2 * 64
        case.qkv[0, -1] = 1000.0  # more than eight bits hold
        case.fast.rope_and_write(case.qkv.clone(), case.batch, case.rotary, case.fast_kv)
        case.plain.rope_and_write(case.qkv.clone(), case.batch, case.rotary, case.plain_kv)
        written, expected = (
            b.read_blocks(kv, case.every) for b, kv in ((case.fast, case.fast_kv), (case.plain, case.plain_kv))
        )
        for one, other in zip(written, expected, strict=True):
            assert ((one - other.clamp(-448, 448)).norm() / other.norm()).item() < 0.04
        case.plain.write_blocks(case.plain_kv, case.every, written)
        case.check_attention()
        case.batch = replace(case.batch, singles=True)
        case.check_attention()


@pytest.mark.parametrize("count", [1, 3, 16, 200])
def test_eight_bit_matrices_multiply_as_their_dequantised_values(device, dtypes, count):
    rows, columns = (1536, 1024) if device.type == "cuda" else (48, 64)
    count = count if device.type == "cuda" else min(count, 5)
    for dtype in dtypes:
        plain, fast = (
            TorchBackend(device, dtype, Heads(4, 2, 64)),
            triton_backend(device, dtype, Heads(4, 2, 64), FP8),
        )
        weight = torch.randn(2 * rows, columns, device=device) / columns**0.5 * torch.rand(2 * rows, 1, device=device)
        x, bias = torch.randn(count, columns, device=device).to(dtype), torch.randn(2 * rows, device=device).to(dtype)
        stored, exact = fast.gate_up_matrix(rows, columns), plain.gate_up_matrix(rows, columns)
        for part in (0, rows):
            fast.pack_gate_up(stored, floating(weight[part : part + rows]), part)
        numbers = stored.data.float() * stored.scale[:, None]
        assert ((numbers - weight).norm() / weight.norm()).item() < 0.03
        plain.pack(exact, floating(numbers), 0)
        # Several rows of activations are rounded too.
        rounded = count > 1 and dtype == torch.bfloat16
        for given in (None, bias):
            for found, expected in (
                (fast.linear(x, stored, given), plain.linear(x, exact, given)),
                (fast.gate_up(x, stored, given), plain.gate_up(x, exact, given)),
            ):
                error = (found.double() - expected.double()).norm() / expected.double().norm()
                assert error < (0.05 if rounded else 1.5 * TOLERANCE[dtype]), f"off by {error:.2e}"


def test_eight_bit_values_are_clamped_to_the_largest_number(device):
    from headgate.layers.triton.rounding import round_rows

    rows = torch.tensor([[0.0, 0.0, 0.0], [7.0, 0.0, -3.5], [1e30, 0.0, -1e30]], device=device)
    assert round_rows(rows)[0].tolist() == [[0.0, 0.0, 0.0], [448.0, 0.0, -224.0], [448.0, 0.0, -448.0]]
    assert values_kept(device, torch.inf, -torch.inf) == [448.0, -448.0]


@pytest.mark.gpu  # the interpreter turns NaN into a number
def test_nan_stays_nan_in_eight_bits():
    from headgate.layers.triton.rounding import round_rows

    cuda = torch.device("cuda")
    numbers, _ = round_rows(torch.tensor([[7.0, torch.nan, -3.5], [1.0, 2.0, 4.0]], device=cuda))
    assert numbers.float().isnan().nonzero().tolist() == [[0, 1]]
    assert np.isnan(values_kept(cuda, torch.nan)).all()


def values_kept(device, *values):
    """The last values of a token after storage in an eight-bit cache."""
    case = Case(device, torch.float32, Heads(2, 1, 32), [(1, 1)], fp8=Fp8(kv=True))
    case.qkv[0, -len(values) :] = torch.tensor(values, device=device)
    case.fast.rope_and_write(case.qkv, case.batch, case.rotary, case.fast_kv)
    stored = case.fast.read_blocks(case.fast_kv, case.every).v.flatten(0, 2)
    return stored[case.batch.slots[0], -len(values) :].tolist()


def test_deterministic_products_fit_devices_with_little_shared_memory():
    pytest.importorskip("triton")
    from headgate.layers.triton.matmul import LARGE, invariant_cut

    for rows in (64, 1000, 4096, 151_936):
        for count in (1, 16, 17, 64, 100, 256, 1000, 8192):
            cut = invariant_cut(count, rows, torch.bfloat16, roomy=False)
            # Before Hopper, all stages but one are kept there.
            assert (cut.rows + cut.tokens) * cut.columns * 2 * (cut.stages - 1) <= 99 * 1024, (rows, count)
    assert invariant_cut(8192, 4096, torch.bfloat16) is LARGE


def test_vocabulary_matrices_are_never_eight_bit(device):
    backend = triton_backend(device, torch.float32, Heads(4, 2, 64), FP8)
    assert backend.vocabulary(8, 8).data.dtype == torch.float32 and backend.matrix(8, 8).data.itemsize == 1


@pytest.mark.parametrize("vocab", [97, 5000])
def test_tokens_are_drawn_as_the_reference_defines(device, vocab):
    from headgate.layers.triton.draw import draw_tokens

    rows = 40
    logits = torch.randn(rows, vocab, device=device) * 3
    logits[0, 5] = logits[0, 80] = 100.0  # a tie; the lowest id wins
    temperature = np.array([0.0, 0.3, 1.0, 2.5] * (rows // 4), dtype=np.float32)
    seeds = np.random.default_rng(7).integers(0, 2**64, rows, dtype=np.uint64)
    key = stream_keys(seeds, np.arange(rows, dtype=np.int64))
    off = np.zeros(rows, dtype=np.int32), np.ones(rows, dtype=np.float32), np.zeros(rows, dtype=np.float32)
    expected = draw(logits.clone(), Knobs(temperature, *off, key))
    columns = (torch.from_numpy(column).to(device) for column in (temperature, key.view(np.int64)))
    found = draw_tokens(logits, *columns)
    assert found[0] == 5
    assert torch.equal(found, expected)


def test_a_step_opens_from_rows_and_closes_into_them(device):
    from headgate.layers.triton.draw import Finalists
    from headgate.layers.triton.step import DrawInputs, Paging, close_step, open_step

    block_size, nowhere = 16, -(10**6)
    paging = Paging(
        torch.randint(100, (6, 65), dtype=torch.int32, device=device),
        torch.randint(50, (6, 4), dtype=torch.int32, device=device),
        block_size,
    )
    tokens_before = paging.tokens.clone()
    # Row 4 at position 20; row 1 at position 32, where its table grows by block 77; padding.
    # The log-probability of the second is requested, of its logits times 1.5.
    bits = int(np.float32(0.7).view(np.int32)) | int(np.float32(1.5).view(np.int32)) << 32
    columns = [[4, 1, -1], [20, 32, -1], [-1, 77, -1], [0, bits, 0], [5, 6, 7], [1, 0, 2]]
    columns = torch.tensor(columns, device=device)
    longs = [torch.full((3,), nowhere, device=device) for _ in range(4)]
    contexts = torch.full((3,), nowhere, dtype=torch.int32, device=device)
    tables = torch.full((3, 4), nowhere, dtype=torch.int32, device=device)
    starts, order = torch.arange(4, dtype=torch.int32, device=device), torch.zeros_like(contexts)
    batch = Batch(*longs[:3], starts, contexts, tables, 1, 64, order)
    draw_inputs = DrawInputs(torch.full((3,), -1.0, device=device), longs[3], torch.full((3,), -1.0, device=device))
    open_step(columns, paging, batch, draw_inputs)

    assert paging.tables[1, 2] == 77
    assert batch.tokens[:2].tolist() == [int(paging.tokens[4, 20]), int(paging.tokens[1, 32])]
    assert batch.positions[:2].tolist() == [20, 32]
    assert batch.slots.tolist() == [int(paging.tables[4, 1]) * block_size + 4, 77 * block_size, -1]
    assert contexts.tolist() == [21, 33, 0]
    assert tables[0, :2].tolist() == paging.tables[4, :2].tolist()
    assert tables[1, :3].tolist() == paging.tables[1, :3].tolist()
    assert order.tolist() == [1, 0, 2]
    assert draw_inputs.keys.tolist() == [5, 6, 7]
    assert draw_inputs.temperatures[:2].tolist() == [0.0, pytest.approx(0.7)]
    assert draw_inputs.factors.tolist() == [0.0, 1.5, 0.0]

    vocab = 5000  # several chunks
    logits = torch.randn(3, vocab, device=device)
    drawn, logprobs = torch.full((3,), nowhere, device=device), torch.full((3,), 9.0, device=device)
    greedy = DrawInputs(torch.zeros(3, device=device), draw_inputs.keys, draw_inputs.factors)
    close_step(columns, paging, logits, greedy, Finalists(3, vocab, device), drawn, logprobs)
    assert torch.equal(drawn, logits.argmax(-1))
    assert logprobs.tolist() == [
        9.0,
        pytest.approx(float((1.5 * logits[1]).log_softmax(-1)[drawn[1]]), abs=1e-5),
        9.0,
    ]
    tokens_before[4, 21], tokens_before[1, 33] = drawn[0], drawn[1]
    assert torch.equal(paging.tokens, tokens_before)
