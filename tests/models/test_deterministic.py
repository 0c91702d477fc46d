"""In deterministic mode the bits of a row depend on its own sequence only (invariant 10, bfloat16)."""

from __future__ import annotations

import pytest
import torch

from tests.models.families import write_model
from tests.models.pages import BACKENDS, BLOCK_SIZE, Pages, chunked, load, prompt


@pytest.fixture(
    scope="module",
    params=["llama", "qwen3", "windowed", "qwen2_moe", "olmo2", "glm4", "glm4_moe", "gpt_oss", "gemma2"],
)
def folder(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    if request.param == "windowed":
        return write_model(path, "mistral", dtype="bfloat16", sliding_window=20, tokenizer=False)
    return write_model(path, request.param, dtype="bfloat16", tokenizer=False)


@pytest.fixture(params=BACKENDS)
def model(request, folder):
    """A model on the CPU kernels, with two threads, because sums could then depend on other rows."""
    before = torch.get_num_threads()
    torch.set_num_threads(2 if request.param == "cpu" else 1)
    yield load(folder, backend=request.param, dtype=torch.bfloat16, deterministic=True)
    torch.set_num_threads(before)


TOKENS = prompt(70, seed=1)


def test_chunks_do_not_change_a_bit(model):
    whole = Pages(model).step({"a": TOKENS})["a"]
    for sizes in [(16, 16, 16), (1, 2, 3, 30, 1), (69,)]:
        pages = Pages(model)
        pieces = [pages.step({"a": chunk})["a"] for chunk in chunked(TOKENS, *sizes)]
        assert torch.equal(torch.cat(pieces), whole)


def test_other_sequences_in_the_batch_do_not_change_a_bit(model):
    alone = Pages(model).step({"a": TOKENS})["a"]
    pages = Pages(model, seed=1)
    company = {name: prompt(length, seed=length) for name, length in [("b", 3), ("c", 40), ("d", 1)]}
    together = pages.step({"b": company["b"], "a": TOKENS[:69], "c": company["c"], "d": company["d"]})
    last = pages.step({"d": [1], "b": [2], "a": TOKENS[69:], "c": [3]})
    assert torch.equal(torch.cat([together["a"], last["a"]]), alone)


def test_a_prefix_hit_does_not_change_a_bit(model):
    pages = Pages(model, cached=True)
    whole = pages.step({"a": TOKENS})["a"]
    pages.share("b", "a", num_blocks=3)
    assert torch.equal(pages.step({"b": TOKENS[3 * BLOCK_SIZE :]})["b"], whole[3 * BLOCK_SIZE :])


def test_a_slice_may_read_what_another_slice_of_the_same_step_writes(model):
    whole = Pages(model).step({"a": TOKENS})["a"]
    pages = Pages(model)
    pages.grow("a", 2 * BLOCK_SIZE)
    pages.lengths["a"] = 0
    pages.share("b", "a", num_blocks=2)
    both = pages.step({"b": TOKENS[2 * BLOCK_SIZE :], "a": TOKENS[: 2 * BLOCK_SIZE]})
    assert torch.equal(torch.cat([both["a"], both["b"]]), whole)
