"""Decode steps as graphs. A graph is simulated by running the step again, in Triton's interpreter, without a GPU."""

from __future__ import annotations

import importlib.util
import os

import pytest
import torch
from msgspec import structs

from headgate.contract.sampling import SamplingParams
from headgate.device.routed import RoutedReader, new_record, routed_shape
from headgate.device.rows import Rows
from headgate.device.runner import ModelRunner
from headgate.device.weights.loading import SafetensorsFolder, load_weights
from headgate.layers.backend import Heads
from headgate.models import Decoder, read_spec
from headgate.testing.tiny import tiny_model
from tests.device.fakes import Text, step_plan

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
pytestmark = pytest.mark.skipif(
    torch.cuda.is_available() or importlib.util.find_spec("triton") is None,
    reason="needs Triton, and no GPU beside its interpreter",
)

BLOCK_SIZE, CONTEXT = 16, 64
PARAMS = [
    SamplingParams(temperature=0),
    SamplingParams(temperature=0.8, seed=3),
    SamplingParams(temperature=0.8, seed=4, top_k=3),
    SamplingParams(temperature=0.8, seed=5, repetition_penalty=1.5),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    shape = {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 32}
    return tiny_model(tmp_path_factory.mktemp("model"), "qwen3", tokenizer=False, **shape)


def do_again(step):
    """Replace a CUDA graph: replaying it runs the step again."""
    result = step().clone()
    return lambda: result.copy_(step()), result


def open_runner(folder, graphed, keeps_experts=False):
    from headgate.device.graphs import StepGraphs
    from headgate.layers.triton_backend import TritonBackend

    spec = read_spec(folder)
    heads = Heads(spec.heads, spec.kv_heads, spec.head_dim)
    model = Decoder(spec, TritonBackend(torch.device("cpu"), torch.float32, heads))
    load_weights(model, SafetensorsFolder(folder))
    groups = len(spec.kv_layout.windows)
    rows = Rows(max_rows=6, max_context=CONTEXT, block_size=BLOCK_SIZE, vocab_size=spec.vocab, groups=groups)
    kv = model.allocate_kv(24 * groups, BLOCK_SIZE)
    record = new_record(routed_shape(spec), 24 * groups, BLOCK_SIZE, torch.device("cpu")) if keeps_experts else None
    if record is not None:
        model.record_experts(record)
    graphs = StepGraphs(model, kv, rows, max_tokens=64, prompts=True, record=do_again) if graphed else None
    routed = None if record is None else RoutedReader(record, rows)
    return ModelRunner(model, kv, rows, max_tokens=64, graphs=graphs, routed=routed)


def striped(plan, groups):
    """`plan` for a model with several groups of layers, each of which has a block where there was one."""

    def stripes(blocks):
        return tuple(block * groups + group for block in blocks for group in range(groups))

    joins = tuple(structs.replace(join, blocks=stripes(join.blocks)) for join in plan.joins)
    return structs.replace(plan, joins=joins, grown=tuple((row, stripes(blocks)) for row, blocks in plan.grown))


def generate(runner, steps):
    """Return the tokens of all rows, step by step, for prompts that end before, at and after the end of a block."""
    texts = [
        Text(row, list(range(row, row + 14 + row)), params, blocks=list(range(4 * row, 4 * row + 4)), block_size=16)
        for row, params in enumerate(PARAMS)
    ]
    *early, late = texts
    joins = tuple(text.join() for text in early)
    first = step_plan(0, [text.advance(len(text.prompt), True) for text in early], joins=joins)
    groups = runner.rows.groups
    found = [runner.run(striped(first, groups)).tokens]
    # The last prompt is computed in two parts, while the others continue.
    for step, (count, samples) in enumerate(((9, False), (len(late.prompt) - 9, True)), 1):
        slices = [
            *(text.advance(1, True) for text in early[:2]),
            late.advance(count, samples),
            early[2].advance(1, True),
        ]
        grown = tuple(each for text in (early if step == 1 else texts) for each in text.grown())
        plan = step_plan(step, slices, joins=(late.join(),) if step == 1 else (), grown=grown)
        found.append(runner.run(striped(plan, groups)).tokens)
    for step in range(3, steps):
        slices = [text.advance(1, True) for text in texts]
        grown = tuple(each for text in texts for each in text.grown())
        found.append(runner.run(striped(step_plan(step, slices, grown=grown), groups)).tokens)
    return found


# For padding, the model computes with arbitrary data from memory.
@pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")
def test_graphs_give_the_tokens_of_steps_without_graphs(folder):
    graphed = open_runner(folder, graphed=True)
    assert generate(graphed, 5) == generate(open_runner(folder, graphed=False), 5)
    # Texts of 14 to 16 tokens, then of 3 + 9 and 3 + 8, then single ones.
    assert [*graphed._graphs.mixed._captured] == [64, 32]
    assert [*graphed._graphs.decode._captured] == [(4, 1024)]


@pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")
def test_graphs_use_the_block_tables_of_each_group_of_layers(tmp_path):
    shape = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 32}
    windows = {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}
    folder = tiny_model(tmp_path, "qwen3", tokenizer=False, **shape, **windows)
    graphed, plain = (open_runner(folder, graphed) for graphed in (True, False))
    assert graphed.rows.groups == 2
    assert generate(graphed, 5) == generate(plain, 5)


@pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")
@pytest.mark.parametrize("mode", ["raw", "scaled", "processed"])
def test_graphs_give_the_log_probabilities_of_steps_without_graphs(folder, mode, monkeypatch):
    unscored, *others = [SamplingParams(temperature=temperature, seed=2) for temperature in (0.5, 0.0, 0.5, 2.0)]
    scored = [structs.replace(each, logprobs=0, logprobs_mode=mode) for each in others]
    found = []
    for graphed in (True, False):
        runner = open_runner(folder, graphed)
        if graphed:
            monkeypatch.setattr(runner._sampler, "sample", None)  # the graph draws and scores by itself
        texts = [Text(row, [row, 5, 6], params, blocks=[row]) for row, params in enumerate([unscored, *scored])]
        plans = [
            step_plan(0, [text.advance(3, True) for text in texts], joins=tuple(text.join() for text in texts)),
            step_plan(1, [text.advance(1, True) for text in texts]),
        ]
        found.append([runner.run(plan) for plan in plans])
    for one, other in zip(*found, strict=True):
        assert one.tokens == other.tokens and [*one.logprobs] == [*other.logprobs] == [1, 2, 3]
        for at, score in one.logprobs.items():
            assert score.token == pytest.approx(other.logprobs[at].token, abs=1e-5)


def test_a_mixed_step_that_scores_a_prompt_does_not_run_as_a_graph(folder):
    runner = open_runner(folder, graphed=True)
    asking = SamplingParams(temperature=0, prompt_logprobs=0)
    text = Text(0, list(range(9)), asking, blocks=[0, 1], block_size=16)
    result = runner.run(step_plan(0, [text.advance(9, True)], joins=(text.join(),)))
    assert len(result.prompt_logprobs[0]) == 8
    assert not runner._graphs.mixed._captured


@pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")
def test_a_step_that_pools_a_prompt_does_not_run_as_a_graph_and_its_row_is_forgotten(folder):
    found = []
    for graphed in (True, False):
        runner = open_runner(folder, graphed)
        text = Text(0, list(range(9)), SamplingParams(max_tokens=0, temperature=0), blocks=[0, 1], block_size=16)
        join = structs.replace(text.join(), pooling="mean")
        runner.run(step_plan(0, [text.advance(4, False)], joins=(join,)))  # and its sequence is aborted
        other = Text(0, [7], SamplingParams(temperature=0), blocks=[2])
        runner.run(step_plan(1, [other.advance(1, True)], joins=(other.join(),)))
        assert not runner._pooler.needs(step_plan(2, [other.advance(1, True)]))
        text.computed = 0
        runner.run(step_plan(3, [text.advance(4, False)], joins=(join,)))
        found.append(runner.run(step_plan(4, [text.advance(5, False)])).vectors[0])
        assert runner._graphs is None or not runner._graphs.mixed._captured
    assert found[0] == found[1] and len(found[0]) == 4 * 32


def test_only_steps_whose_slices_all_compute_and_sample_one_token_are_decode_graphs(folder):
    graphs = open_runner(folder, graphed=True)._graphs.decode
    assert graphs.takes(step_plan(0, [(0, 5, 1, True), (1, 9, 1, True)]))
    assert not graphs.takes(step_plan(0, [(0, 5, 1, True), (1, 9, 1, False)]))
    assert not graphs.takes(step_plan(0, [(0, 5, 2, True), (1, 9, 1, True)]))
    assert not graphs.takes(step_plan(0, []))


def test_batches_are_padded_to_ever_coarser_sizes():
    from headgate.device.graphs import batch_sizes, context_classes

    assert batch_sizes(6) == [1, 2, 4, 6]
    assert batch_sizes(256)[-3:] == [192, 224, 256]
    assert context_classes(5000) == [1024, 4096, 16384]


def test_mixed_steps_are_padded_to_powers_of_two():
    from headgate.device.graphs import token_sizes

    assert token_sizes(100) == [32, 64, 100]
    assert token_sizes(8) == [8]


@pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")
def test_graphs_report_the_experts_of_steps_without_graphs(tmp_path, monkeypatch):
    """A batch of three is padded to four: what the padding chose is written nowhere that is read."""
    # The interpreter cannot choose experts of padding whose arbitrary data are no numbers; a GPU can.
    monkeypatch.setattr(torch.Tensor, "new_empty", torch.Tensor.new_zeros)
    shape = {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 32, "moe_intermediate_size": 16}
    folder = tiny_model(tmp_path, "qwen3_moe", tokenizer=False, **shape)
    params = SamplingParams(temperature=0, return_routed_experts=True)
    found = []
    for graphed in (True, False):
        runner = open_runner(folder, graphed, keeps_experts=True)
        # The last one computes the last slot of the cache in its second step.
        prompts = [[0, 5, 6], [1, 5, 6], list(range(15))]
        texts = [Text(row, prompt, params, blocks=[row + 21]) for row, prompt in enumerate(prompts)]
        joins = tuple(text.join() for text in texts)
        prefill = step_plan(0, [text.advance(len(text.prompt), True) for text in texts], joins=joins)
        results = [runner.run(prefill), runner.run(step_plan(1, [text.advance(1, True) for text in texts]))]
        found.append([(result.tokens, result.routed) for result in results])
    assert found[0] == found[1]
    (_, first), (_, second) = found[0]
    assert [(report.start, len(report.ids)) for report in first.values()] == [(0, 9), (0, 9), (0, 45)]
    assert [(report.start, len(report.ids)) for report in second.values()] == [(3, 3), (3, 3), (15, 3)]
