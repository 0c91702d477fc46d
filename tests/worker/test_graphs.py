"""Decode steps as graphs, where a graph is simulated by doing the step again: needs Triton's interpreter, no GPU."""

from __future__ import annotations

import importlib.util
import os

import pytest
import torch

from headgate.layers.backend import Heads
from headgate.models import DenseModel, read_spec
from headgate.protocol.request import SamplingParams
from headgate.testing.tiny import tiny_model
from headgate.worker.rows import Rows
from headgate.worker.runner import ModelRunner
from headgate.worker.weights import SafetensorsFolder, load_weights
from tests.worker.fakes import Text, step_plan

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
    """A graph that is no graph."""
    result = step().clone()
    return lambda: result.copy_(step()), result


def open_runner(folder, graphed):
    from headgate.layers.triton_backend import TritonBackend
    from headgate.worker.graphs import DecodeGraphs

    spec = read_spec(folder)
    heads = Heads(spec.heads, spec.kv_heads, spec.head_dim)
    model = DenseModel(spec, TritonBackend(torch.device("cpu"), torch.float32, heads))
    load_weights(model, SafetensorsFolder(folder))
    rows = Rows(max_rows=6, max_context=CONTEXT, block_size=BLOCK_SIZE, vocab_size=spec.vocab)
    kv = model.allocate_kv(24, BLOCK_SIZE)
    graphs = DecodeGraphs(model, kv, rows, do_again) if graphed else None
    return ModelRunner(model, kv, rows, max_tokens=64, graphs=graphs)


def generate(runner, steps):
    """Tokens of all rows, step by step: prompts that end just before, at and after the end of a block."""
    texts = [
        Text(row, list(range(row, row + 14 + row)), params, blocks=list(range(4 * row, 4 * row + 4)), block_size=16)
        for row, params in enumerate(PARAMS)
    ]
    joins = tuple(text.join() for text in texts)
    first = step_plan(0, [text.advance(len(text.prompt), True) for text in texts], joins=joins)
    found = [runner.run(first).tokens]
    for step in range(1, steps):
        slices = [text.advance(1, True) for text in texts]
        grown = tuple(each for text in texts for each in text.grown())
        found.append(runner.run(step_plan(step, slices, grown=grown)).tokens)
    return found


def test_graphs_give_the_tokens_of_plain_steps(folder):
    assert generate(open_runner(folder, graphed=True), 6) == generate(open_runner(folder, graphed=False), 6)


def test_only_steps_of_one_token_each_that_all_sample_are_graphs(folder):
    graphs = open_runner(folder, graphed=True)._graphs
    assert graphs.takes(step_plan(0, [(0, 5, 1, True), (1, 9, 1, True)]))
    assert not graphs.takes(step_plan(0, [(0, 5, 1, True), (1, 9, 1, False)]))
    assert not graphs.takes(step_plan(0, [(0, 5, 2, True), (1, 9, 1, True)]))
    assert not graphs.takes(step_plan(0, []))


def test_batches_are_padded_to_ever_coarser_sizes():
    from headgate.worker.graphs import batch_sizes, context_classes

    assert batch_sizes(6) == [1, 2, 4, 6]
    assert batch_sizes(256)[-3:] == [192, 224, 256]
    assert context_classes(5000) == [1024, 4096, 16384]
