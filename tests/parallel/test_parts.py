"""A model divided among ranks: together they compute what one rank computes alone."""

from __future__ import annotations

import pytest
import torch

from headgate.errors import RequestError
from headgate.layers.ranks import ALONE, share
from headgate.models import build_model, read_spec
from headgate.testing.tiny import tiny_model
from tests.models.families import write_model
from tests.models.pages import Pages, load, prompt
from tests.parallel.threads import BACKENDS, run_ranks

KINDS = {
    "llama": ("llama", {}),
    "llama with biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama, not tied, odd vocabulary": ("llama", {"tie_word_embeddings": False, "vocab_size": 261}),
    "mistral with a window": ("mistral", {"sliding_window": 9}),
    "qwen2": ("qwen2", {}),
    "qwen3, tied, odd vocabulary": ("qwen3", {"vocab_size": 263}),
    "qwen2_moe": ("qwen2_moe", {}),
    "mixtral": ("mixtral", {}),
    "ernie4_5 with biases": ("ernie4_5", {"use_bias": True}),
    "olmo2": ("olmo2", {}),
    "granite": ("granite", {}),
    "glm4": ("glm4", {}),
    "ernie4_5_moe": ("ernie4_5_moe", {}),
    "glm4_moe": ("glm4_moe", {}),
    "gpt_oss": ("gpt_oss", {}),
    "phi3": ("phi3", {}),
    "gemma2": ("gemma2", {}),
    "gemma3": ("gemma3_text", {}),
}


def logits_of(folder, backend: str, ranks=ALONE) -> torch.Tensor:
    """Return the logits of two sequences in chunks, one of which starts with blocks of the other."""
    torch.set_num_threads(1)
    pages = Pages(load(folder, backend=backend, ranks=ranks))
    steps = [pages.step({"a": prompt(40)})["a"]]
    pages.share("b", "a", 2)
    steps += pages.step({"a": prompt(1, seed=2), "b": prompt(7, seed=3)}).values()
    return torch.cat(steps)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_give_the_logits_of_one_and_both_the_same(tmp_path, kind, backend):
    architecture, overrides = KINDS[kind]
    folder = write_model(tmp_path / "model", architecture, tokenizer=False, **overrides)
    alone = logits_of(folder, backend)
    first, second = run_ranks(tmp_path, 2, lambda ranks: logits_of(folder, backend, ranks))
    assert isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor), (first, second)
    assert first.shape == alone.shape and torch.equal(first, second)
    torch.testing.assert_close(first, alone, rtol=1e-4, atol=1e-4)


def test_four_ranks_sum_in_their_order_whatever_else_is_in_the_batch(tmp_path):
    """The sums are equal bit for bit: a row's sum must not depend on its position in a tensor."""
    rows = torch.randn(4, 33, 96, generator=torch.Generator().manual_seed(0))
    expected = ((rows[0] + rows[1]) + rows[2]) + rows[3]

    def sums(ranks) -> torch.Tensor:
        whole = ranks.sum(rows[ranks.rank].clone())
        single = torch.cat([ranks.sum(rows[ranks.rank, i : i + 1].clone()) for i in range(5)])
        return torch.cat([whole, single])

    for found in run_ranks(tmp_path, 4, sums):
        assert torch.equal(found, torch.cat([expected, expected[:5]]))


def weight_bytes(model) -> int:
    storages = {
        p.tensor.untyped_storage().data_ptr(): p.tensor.untyped_storage().nbytes() for _, p in model.parameters()
    }
    return sum(storages.values())


class Part:
    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("tied", [True, False])
def test_each_of_two_ranks_has_half_of_the_weights_and_of_the_cache(tmp_path, backend, tied):
    spec = read_spec(tiny_model(tmp_path, hidden_size=256, vocab_size=2000, tie_word_embeddings=tied))
    alone = build_model(spec, backend=backend)
    for rank in range(2):
        part = build_model(spec, backend=backend, ranks=Part(rank, 2))
        assert 0.49 < weight_bytes(part) / weight_bytes(alone) < 0.52
        assert part.kv_bytes_per_block(16) * 2 == alone.kv_bytes_per_block(16)


@pytest.mark.parametrize(("whole", "size"), [(260, 2), (261, 2), (7, 4), (3, 4), (9, 4)])
def test_shares_cover_the_whole_without_overlap(whole, size):
    shares = [share(Part(rank, size), whole) for rank in range(size)]
    assert [i for each in shares for i in range(whole)[each]] == list(range(whole))


def test_heads_that_cannot_be_divided_are_refused_with_the_possible_sizes(tmp_path):
    heads = {"num_attention_heads": 12, "num_key_value_heads": 6, "hidden_size": 96, "intermediate_size": 96}
    spec = read_spec(tiny_model(tmp_path, **heads))
    message = "this model's 6 KV heads and MLP width of 96 cannot be divided by that; choose from 1, 2, 3, 6"
    with pytest.raises(RequestError, match=message):
        build_model(spec, backend="torch", ranks=Part(0, 4))
