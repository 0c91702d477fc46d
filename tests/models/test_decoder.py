"""Our networks against `transformers`, in float32, on tiny random checkpoints of every kind."""

from __future__ import annotations

import pytest
import torch

from headgate.testing.tiny import tiny_model
from tests.models.families import write_model
from tests.models.pages import BACKENDS, Pages, chunked, load, prompt
from tests.models.reference import reference_greedy, reference_logits

CASES = {
    "llama": ("llama", {}),
    "llama untied": ("llama", {"tie_word_embeddings": False}),
    "llama one kv head": ("llama", {"num_key_value_heads": 1}),
    "llama all kv heads": ("llama", {"num_key_value_heads": 4}),
    "llama biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama head size apart": ("llama", {"head_dim": 32}),
    "llama eps": ("llama", {"rms_norm_eps": 1e-2}),
    "llama linear rope": (
        "llama",
        {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1000.0}},
    ),
    "llama llama3 rope": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ),
    "llama shards": ("llama", {"shards": 3}),
    "llama bfloat16 file": ("llama", {"dtype": "bfloat16"}),
    "llama float16 file": ("llama", {"dtype": "float16"}),
    "mistral": ("mistral", {}),
    "mistral window": ("mistral", {"sliding_window": 7}),
    "qwen2": ("qwen2", {}),
    "qwen2 untied": ("qwen2", {"tie_word_embeddings": False}),
    "qwen2 window above": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    ),
    "qwen2 old yarn": (
        "qwen2",
        {
            "rope_parameters": None,
            "rope_theta": 1e6,
            "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
        },
    ),
    "qwen3": ("qwen3", {}),
    "qwen3 bias": ("qwen3", {"attention_bias": True}),
    "qwen3 layer types": (
        "qwen3",
        {
            "use_sliding_window": True,
            "sliding_window": 6,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "qwen3 yarn": (
        "qwen3",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 32,
                "beta_fast": 16.0,
                "truncate": False,
            }
        },
    ),
    "mixtral": ("mixtral", {}),
    "mixtral window": ("mixtral", {"sliding_window": 7}),
    "qwen2_moe": ("qwen2_moe", {}),
    "qwen2_moe normalised": ("qwen2_moe", {"norm_topk_prob": True}),
    "qwen3_moe": ("qwen3_moe", {}),
    "qwen3_moe not normalised": ("qwen3_moe", {"norm_topk_prob": False}),
    "qwen3_moe dense layers": ("qwen3_moe", {"num_hidden_layers": 3, "mlp_only_layers": [2]}),
    "qwen3_moe sparse step": ("qwen3_moe", {"num_hidden_layers": 3, "decoder_sparse_step": 2}),
    "qwen3_moe bfloat16 file": ("qwen3_moe", {"dtype": "bfloat16"}),
    "ernie4_5": ("ernie4_5", {}),
    "ernie4_5 biases, untied": ("ernie4_5", {"use_bias": True, "tie_word_embeddings": False}),
    "smollm3": ("smollm3", {}),
    "smollm3 window, layers as listed": (
        "smollm3",
        {"no_rope_layers": [0, 1], "use_sliding_window": True, "sliding_window": 6, "attention_bias": True},
    ),
    "olmo2": ("olmo2", {}),
    "olmo2 biases": ("olmo2", {"attention_bias": True}),
    "granite": ("granite", {}),
    "granite biases, tied": ("granite", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "glm4": ("glm4", {}),
    "ernie4_5_moe": ("ernie4_5_moe", {}),
    "ernie4_5_moe untied": ("ernie4_5_moe", {"tie_word_embeddings": False}),
    "ernie4_5_moe range": (
        "ernie4_5_moe",
        {
            "num_hidden_layers": 6,
            "moe_layer_start_index": 2,
            "moe_layer_end_index": 4,
            "moe_layer_interval": 2,
            "moe_num_shared_experts": 0,
        },
    ),
    "gpt_oss": ("gpt_oss", {}),
    "gpt_oss full attention, no biases": (
        "gpt_oss",
        {"layer_types": ["full_attention", "full_attention"], "attention_bias": False},
    ),
    "glm4_moe": ("glm4_moe", {}),
    "glm4_moe one group": ("glm4_moe", {"n_group": 1, "topk_group": 1, "norm_topk_prob": False}),
    "glm4_moe biases, no norms": (
        "glm4_moe",
        {"attention_bias": True, "use_qk_norm": False, "first_k_dense_replace": 2},
    ),
    "glm4 no biases": ("glm4", {"attention_bias": False}),
    "gemma2": ("gemma2", {}),
    "gemma2 no caps, biases": (
        "gemma2",
        {"attn_logit_softcapping": None, "final_logit_softcapping": None, "attention_bias": True},
    ),
    "gemma3": ("gemma3_text", {}),
    "gemma3 capped logits": ("gemma3_text", {"final_logit_softcapping": 2.0}),
    "llama gelu": ("llama", {"hidden_act": "gelu_pytorch_tanh"}),
    "phi3": ("phi3", {}),
    "phi3 window, whole heads": (
        "phi3",
        {"sliding_window": 9, "rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
    ),
}


@pytest.fixture(scope="module", params=CASES)
def folder(request, tmp_path_factory):
    architecture, options = CASES[request.param]
    return write_model(tmp_path_factory.mktemp("model"), architecture, tokenizer=False, **options)


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_way_through_the_model_gives_the_logits_of_transformers(folder, backend):
    model = load(folder, backend=backend)
    a, b, c = prompt(50, seed=1), prompt(33, seed=2), prompt(20, seed=3)
    whole = Pages(model).step({"a": a})
    chunks = Pages(model)
    chunks_of_a = [chunks.step({"a": chunk})["a"] for chunk in chunked(a, 7, 1, 30, 1)]
    together = Pages(model)
    first = together.step({"a": a[:40], "b": b, "c": c[:1]})
    second = together.step({"c": c[1:], "a": a[40:]})

    expected = reference_logits(folder, a)
    close(whole["a"], expected)
    close(torch.cat(chunks_of_a), expected)
    close(torch.cat([first["a"], second["a"]]), expected)
    close(first["b"], reference_logits(folder, b))
    close(torch.cat([first["c"], second["c"]]), reference_logits(folder, c))


@pytest.mark.parametrize("backend", BACKENDS)
def test_greedy_decoding_of_two_sequences_gives_the_tokens_of_transformers(folder, backend):
    pages = Pages(load(folder, backend=backend))
    prompts = {"a": prompt(21, seed=4), "b": prompt(6, seed=5)}
    tokens = {name: [] for name in prompts}
    chunks = prompts
    for _ in range(12):
        logits = pages.step(chunks)
        chunks = {name: [int(logits[name][-1].argmax())] for name in prompts}
        for name in prompts:
            tokens[name] += chunks[name]
    assert tokens == {name: reference_greedy(folder, prompts[name], 12) for name in prompts}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
def test_half_precision_stays_as_close_to_float32_as_that_of_transformers(tmp_path, backend, dtype):
    folder = tiny_model(tmp_path, "qwen3", dtype="bfloat16", tokenizer=False)
    a = prompt(50, seed=1)
    exact, theirs = reference_logits(folder, a), reference_logits(folder, a, dtype).float()
    ours = Pages(load(folder, backend=backend, dtype=dtype)).step({"a": a})["a"]
    assert (ours - exact).abs().mean() < 1.2 * (theirs - exact).abs().mean()


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)
