"""Models that keep the weights of a GGUF file in its blocks: their logits, bits and memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from headgate.device.build import read_model_spec
from headgate.device.weights.gguf import GGUFWeights, StoredGGUF, keep_as_stored
from headgate.device.weights.loading import load_weights
from headgate.layers.choice import available_backends
from headgate.layers.formats import GGUF_BLOCKS, Floating, GgufBlocks
from headgate.layers.ranks import ALONE, Ranks
from headgate.model_store.gguf import read_gguf
from headgate.models import Network, build_model
from tests.model_store.files import write_gguf
from tests.models.pages import BLOCK_SIZE, Pages, chunked, prompt
from tests.parallel.threads import run_ranks

pytestmark = pytest.mark.skipif("cpu" not in available_backends(), reason="needs the compiled kernels")

# Every part of a merged matrix in another format, as in files that give some layers more bits.
MIXED = {
    "attn_q": "Q4_K",
    "attn_k": "Q5_1",
    "attn_v": "Q6_K",
    "attn_output": "F16",
    "0.ffn_gate": "Q3_K",
    "0.ffn_up": "Q2_K",
    "1.ffn_gate": "Q5_K",
    "1.ffn_up": "Q5_K",
    "token_embd": "Q8_0",
    "output.weight": "Q6_K",
}


def in_blocks(path: Path, dtype: torch.dtype = torch.float32, ranks: Ranks = ALONE) -> Network:
    model = build_model(read_model_spec(path), dtype=dtype, backend="cpu", ranks=ranks)
    keep_as_stored(model, path)
    load_weights(model, StoredGGUF(path))
    return model


def in_numbers(path: Path, backend: str = "torch") -> Network:
    model = build_model(read_model_spec(path), backend=backend)
    load_weights(model, GGUFWeights(path))
    return model


def logits(model: Network, tokens: list[int]) -> torch.Tensor:
    return Pages(model).step({"a": tokens})["a"]


def matrices(model: Network) -> dict[str, int]:
    """The bytes of the tensors that have the weights of matrices, by the name of one of these weights."""
    tensors = {p.tensor.data_ptr(): (name, p.tensor.nbytes) for name, p in model.parameters() if len(p.shape) == 2}
    return dict(tensors.values())


TOKENS = prompt(40, seed=1)


@pytest.mark.parametrize("kind", GGUF_BLOCKS)
def test_logits_are_those_of_the_dequantised_weights(tmp_path: Path, kind: str):
    path = write_gguf(tmp_path / "model.gguf", kind=kind)
    model, expected = in_blocks(path), logits(in_numbers(path), TOKENS)
    kept = {p.format for _, p in model.parameters() if p.format is not None}
    assert kept == {GgufBlocks(kind)}
    torch.testing.assert_close(logits(model, TOKENS), expected, rtol=1e-3, atol=1e-3 * expected.abs().max().item())


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_every_part_of_a_model_may_have_another_format(tmp_path: Path, architecture: str):
    path = write_gguf(tmp_path / "model.gguf", architecture, kind="Q4_1", kinds=MIXED, tied=False)
    model, expected = in_blocks(path), logits(in_numbers(path), TOKENS)
    formats = {name: p.format for name, p in model.parameters()}
    layer = "model.layers.0"
    assert formats[f"{layer}.self_attn.q_proj.weight"] == GgufBlocks("Q4_K")
    assert formats[f"{layer}.self_attn.k_proj.weight"] == GgufBlocks("Q5_1")
    assert formats[f"{layer}.self_attn.v_proj.weight"] == GgufBlocks("Q6_K")
    assert formats[f"{layer}.self_attn.o_proj.weight"] == Floating(torch.float32)
    # Rows of gate and up alternate in memory, so they are stored alike or converted.
    assert formats[f"{layer}.mlp.gate_proj.weight"] == Floating(torch.float32)
    assert formats["model.layers.1.mlp.up_proj.weight"] == GgufBlocks("Q5_K")
    assert formats["lm_head.weight"] == GgufBlocks("Q6_K")
    torch.testing.assert_close(logits(model, TOKENS), expected, rtol=1e-3, atol=1e-3 * expected.abs().max().item())


@pytest.mark.parametrize(("kind", "out"), [("Q4_1", GgufBlocks("Q4_1")), ("Q4_K", Floating(torch.float32))])
def test_ranks_keep_blocks_that_they_need_not_divide(tmp_path: Path, kind: str, out: object):
    """The columns of the output projection are divided: 128 columns are four blocks of 32, and half a block of 256."""
    path = write_gguf(tmp_path / "model.gguf", kind=kind)

    def work(ranks: Ranks) -> tuple[torch.Tensor, object, object]:
        torch.set_num_threads(1)
        model = in_blocks(path, ranks=ranks)
        formats = {name: p.format for name, p in model.parameters()}
        found = (formats[f"model.layers.0.self_attn.{part}_proj.weight"] for part in "qo")
        return logits(model, TOKENS), *found  # type: ignore[return-value]

    alone = logits(in_blocks(path), TOKENS)
    for found in run_ranks(tmp_path, 2, work):
        assert isinstance(found, tuple), found
        assert found[1:] == (GgufBlocks(kind), out)
        torch.testing.assert_close(found[0], alone, rtol=1e-3, atol=1e-3 * alone.abs().max().item())


def test_matrices_take_the_bytes_of_the_file_and_little_more(tmp_path: Path):
    path = write_gguf(tmp_path / "model.gguf", kind="Q4_1", kinds={"attn_v": "Q8_0", "ffn_down": "Q4_K"})
    stored = sum(each.size for each in read_gguf(path).tensors.values() if len(each.shape) == 2)
    assert stored <= sum(matrices(in_blocks(path)).values()) <= 1.01 * stored
    assert sum(matrices(in_numbers(path, "cpu")).values()) > 6 * stored


@pytest.fixture(scope="module", params=[{"kind": "Q4_1"}, {"kind": "Q4_K", "kinds": MIXED, "tied": False}])
def model(request, tmp_path_factory) -> Network:
    path = write_gguf(tmp_path_factory.mktemp("model") / "model.gguf", **request.param)
    return in_blocks(path, torch.bfloat16)


@pytest.fixture(scope="module")
def whole(model) -> torch.Tensor:
    return logits(model, TOKENS)


def test_chunks_do_not_change_a_bit(model, whole):
    for sizes in [(16, 16), (1, 2, 3, 25, 1), (39,), (1,) * 39]:
        pages = Pages(model)
        pieces = [pages.step({"a": chunk})["a"] for chunk in chunked(TOKENS, *sizes)]
        assert torch.equal(torch.cat(pieces), whole)


def test_other_sequences_do_not_change_a_bit(model, whole):
    pages = Pages(model, seed=1)
    together = pages.step({"b": prompt(3, seed=2), "a": TOKENS[:39], "c": prompt(40, seed=3), "d": [7]})
    last = pages.step({"d": [1], "b": [2], "a": TOKENS[39:], "c": [3]})
    assert torch.equal(torch.cat([together["a"], last["a"]]), whole)


def test_a_prefix_hit_does_not_change_a_bit(model, whole):
    pages = Pages(model)
    pages.step({"a": TOKENS})
    pages.share("b", "a", num_blocks=2)
    assert torch.equal(pages.step({"b": TOKENS[2 * BLOCK_SIZE :]})["b"], whole[2 * BLOCK_SIZE :])
