"""From plans to batches: every tensor is compared with values computed from the plan in a simple way."""

from __future__ import annotations

import random

import pytest
import torch

from headgate.contract.sampling import SamplingParams
from headgate.device.inputs import Inputs
from headgate.device.rows import Rows
from headgate.layers.batch import Batch
from headgate.protocol.plan import Join, StepPlan
from tests.device.fakes import step_plan

GREEDY = SamplingParams(temperature=0)
PENALISED = SamplingParams(temperature=0, presence_penalty=1.0)


def rows_of(texts: list[list[int]], *, block_size: int = 4, max_context: int = 40) -> tuple[Rows, list[list[int]]]:
    """Rows 0, 1, ... holding `texts`, and the block table of each."""
    rows = Rows(max_rows=len(texts), max_context=max_context, block_size=block_size, vocab_size=1000)
    per_row = -(-max_context // block_size)
    tables = [[row * per_row + (i * 7) % per_row for i in range(per_row)] for row in range(len(texts))]
    joins = [Join(row, tuple(text), 1, GREEDY, tuple(tables[row])) for row, text in enumerate(texts)]
    rows.apply(step_plan(0, [], joins=tuple(joins)))
    return rows, tables


def build(inputs: Inputs, plan: StepPlan) -> Batch:
    return inputs.gather(inputs.lay_out(plan))


def test_a_batch_matches_its_plan():
    rng = random.Random(1)
    texts = [[rng.randrange(1000) for _ in range(40)] for _ in range(9)]
    rows, tables = rows_of(texts)
    inputs = Inputs(rows, max_tokens=200)
    for step in range(50):
        order = rng.sample(range(9), rng.randint(1, 9))
        slices = []
        for row in order:
            start = rng.randrange(39)
            slices.append((row, start, rng.choice([1, rng.randint(1, 40 - start)]), rng.random() < 0.5))
        slices = slices[: 1 + next((i for i in range(9) if sum(s[2] for s in slices[: i + 2]) > 200), 9)]
        batch = build(inputs, step_plan(step, slices))
        expected = [(row, p) for row, start, count, _ in slices for p in range(start, start + count)]
        assert batch.positions.tolist() == [p for _, p in expected]
        assert batch.tokens.tolist() == [texts[row][p] for row, p in expected]
        assert batch.slots.tolist() == [tables[row][p // 4] * 4 + p % 4 for row, p in expected]
        ends = [start + count for _, start, count, _ in slices]
        assert batch.context_lens.tolist() == ends
        assert batch.query_starts.tolist() == [sum(s[2] for s in slices[:i]) for i in range(len(slices) + 1)]
        assert (batch.max_query, batch.max_context) == (max(s[2] for s in slices), max(ends))
        for i, (row, *_) in enumerate(slices):
            used = -(-ends[i] // 4)
            assert batch.block_tables[i, :used].tolist() == tables[row][:used]


def test_tensors_have_the_types_that_layers_expect():
    rows, _ = rows_of([[1, 2, 3]])
    batch = build(Inputs(rows, max_tokens=8), step_plan(0, [(0, 0, 3, True)]))
    assert {batch.tokens.dtype, batch.positions.dtype, batch.slots.dtype} == {torch.int64}
    assert {batch.query_starts.dtype, batch.context_lens.dtype, batch.block_tables.dtype} == {torch.int32}
    assert all(
        tensor.is_contiguous()
        for tensor in (batch.tokens, batch.positions, batch.slots, batch.query_starts, batch.block_tables)
    )


def test_steady_decode_builds_every_batch_in_the_same_memory():
    rows, _ = rows_of([[1, 2, 3], [4, 5, 6]])
    inputs = Inputs(rows, max_tokens=8)
    first, second = (build(inputs, step_plan(i, [(0, 1, 1, True), (1, 2, 1, True)])) for i in range(2))
    assert first.tokens.data_ptr() == second.tokens.data_ptr()
    assert first.block_tables.data_ptr() == second.block_tables.data_ptr()


def test_layout_knows_which_slices_sample():
    rows, _ = rows_of([[1, 2, 3], [4, 5, 6], [7, 8, 9]])
    plan = step_plan(0, [(2, 0, 3, True), (0, 0, 2, False), (1, 0, 3, True)])
    layout = Inputs(rows, max_tokens=8).lay_out(plan)
    assert layout.sampling.tolist() == [0, 2]


def test_a_plan_beyond_the_step_budget_is_a_bug():
    rows, _ = rows_of([[1] * 20])
    with pytest.raises(AssertionError, match="plan 3 has 20 tokens; steps take at most 8"):
        Inputs(rows, max_tokens=8).lay_out(step_plan(3, [(0, 0, 20, True)]))


def test_a_sampled_token_is_read_by_the_next_batch():
    rows, _ = rows_of([[1, 2, 3], [4, 5]])
    layout = Inputs(rows, max_tokens=8).lay_out(step_plan(0, [(1, 0, 2, True), (0, 0, 3, True)]))
    rows.write_tokens(layout.rows, layout.ends, torch.tensor([77, 88]))
    batch = build(Inputs(rows, max_tokens=8), step_plan(1, [(0, 3, 1, True), (1, 2, 1, True)]))
    assert batch.tokens.tolist() == [88, 77]


def test_the_last_token_of_a_full_context_has_a_place():
    rows, _ = rows_of([[1] * 40, [2] * 40])
    layout = Inputs(rows, max_tokens=40).lay_out(step_plan(0, [(0, 0, 40, True)]))
    rows.write_tokens(layout.rows, layout.ends, torch.tensor([9]))
    assert rows.tokens[1].tolist()[:40] == [2] * 40


@pytest.mark.parametrize(("params", "expected"), [(GREEDY, [0, 0, 7, 8]), (PENALISED, [5, 6, 7, 8])])
def test_cached_tokens_are_written_only_if_penalties_read_them(params, expected):
    rows = Rows(max_rows=2, max_context=16, block_size=2, vocab_size=10)
    rows.apply(step_plan(0, [(1, 2, 2, True)], joins=(Join(1, (5, 6, 7, 8), 4, params, (8, 9)),)))
    assert rows.tokens[1, :4].tolist() == expected
    assert not rows.tokens[0].any()


def test_tables_grow_at_their_end():
    rows = Rows(max_rows=2, max_context=16, block_size=4, vocab_size=10)
    rows.apply(step_plan(0, [], joins=(Join(1, (1, 2), 2, GREEDY, (8,)),)))
    rows.apply(step_plan(1, [], grown=((1, (5, 3)),)))
    rows.apply(step_plan(2, [], grown=((1, (6,)),)))
    assert rows.tables[0, 1].tolist() == [8, 5, 3, 6]


def test_each_group_of_layers_has_tables_and_slots_of_its_own():
    rows = Rows(max_rows=2, max_context=16, block_size=4, vocab_size=10, groups=2)
    inputs = Inputs(rows, max_tokens=8)
    plan = step_plan(0, [(1, 0, 6, True)], joins=(Join(1, tuple(range(6)), 6, GREEDY, (7, 3, 5, 2)),))
    rows.apply(plan)
    rows.apply(step_plan(1, [], grown=((1, (6, 9)),)))
    assert rows.tables[:, 1, :3].tolist() == [[7, 5, 6], [3, 2, 9]]
    batch = inputs.gather(inputs.lay_out(plan))
    assert [part.block_tables.tolist() for part in batch.groups] == [[[7, 5]], [[3, 2]]]
    assert [part.slots.tolist() for part in batch.groups] == [[28, 29, 30, 31, 20, 21], [12, 13, 14, 15, 8, 9]]
    assert all(part.tokens.tolist() == list(range(6)) for part in batch.groups)


def test_a_new_sequence_overwrites_its_row():
    rows = Rows(max_rows=1, max_context=16, block_size=4, vocab_size=10)
    first = SamplingParams(seed=1, logit_bias={3: 1.0}, min_tokens=2, stop_token_ids=(4,), logprobs=3)
    rows.apply(step_plan(0, [], joins=(Join(0, (1,) * 9, 9, first, (1, 2, 3)),)))
    rows.apply(step_plan(1, [], joins=(Join(0, (5, 6), 2, GREEDY, (7,)),), grown=((0, (9,)),)))
    assert rows.tokens[0, :2].tolist() == [5, 6]
    assert rows.tables[0, 0, :2].tolist() == [7, 9]
    assert not rows.sampling[0]["biased"]
    assert rows.sampling[0]["logprobs"] == -1
    assert not len(rows.stop_ids[0])


def test_a_row_has_the_number_of_its_adapter():
    rows = Rows(max_rows=3, max_context=16, block_size=4, vocab_size=10, adapters=("a", "b"))
    joins = [Join(row, (1,), 1, GREEDY, (row + 1,), adapter) for row, adapter in enumerate(("b", "", "a"))]
    rows.apply(step_plan(0, [], joins=tuple(joins)))
    assert rows.adapters.tolist() == [2, 0, 1]
    rows.apply(step_plan(1, [], joins=(Join(0, (1,), 1, GREEDY, (4,)),)))
    assert rows.adapters.tolist() == [0, 0, 1]


def test_a_table_never_grows_into_the_next_row():
    rows = Rows(max_rows=2, max_context=16, block_size=4, vocab_size=10)
    with pytest.raises(AssertionError, match="row 0 has 5 stripes of blocks; its tables hold 4"):
        rows.apply(step_plan(0, [], joins=(Join(0, (1,), 1, GREEDY, (1, 2, 3, 4, 5)),)))
