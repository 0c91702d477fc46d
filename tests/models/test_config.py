"""Reading configs, and every refusal with its message."""

from __future__ import annotations

import json
import math

import pytest
import torch

from headgate.errors import NotAModel, UnsupportedModel
from headgate.layers.rotary import LinearScaling, Llama3Scaling, LongScaling, Rope, YarnScaling
from headgate.models import Config, read_spec, spec_of
from headgate.models.registry import ARCHITECTURES
from headgate.models.spec import AttentionSpec, Dense, LayerSpec
from headgate.testing.tiny import tiny_config, tiny_model


def write_config(folder, architecture="llama", **overrides):
    config = tiny_config(architecture, "float32") | overrides
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def windows_of(spec):
    return tuple(layer.attention.window for layer in spec.layers)


def test_a_spec_states_the_shape_of_the_model(tmp_path):
    spec = read_spec(write_config(tmp_path, "qwen2", dtype="bfloat16"))
    assert (spec.hidden, spec.heads, spec.kv_heads, spec.head_dim) == (64, 4, 2, 16)
    assert (spec.vocab, spec.max_positions, spec.tied) == (260, 512, True)
    assert spec.layers == (LayerSpec(AttentionSpec(qkv_bias=True), Dense(96)),) * 2
    assert spec.dtype is torch.bfloat16


def test_torch_dtype_is_the_old_name_of_dtype(tmp_path):
    assert read_spec(write_config(tmp_path, dtype=None, torch_dtype="float16")).dtype is torch.float16


def test_the_end_of_a_turn_may_be_named_in_the_generation_config(tmp_path):
    folder = write_config(tmp_path, eos_token_id=1)
    (folder / "generation_config.json").write_text('{"eos_token_id": [2, 1]}')
    assert read_spec(folder).eos_ids == (1, 2)


def test_a_model_may_have_no_eos_token(tmp_path):
    assert read_spec(write_config(tmp_path, eos_token_id=None)).eos_ids == ()


def test_old_configs_put_rope_at_the_top(tmp_path):
    scaling = {"type": "linear", "factor": 2}
    rope = read_spec(write_config(tmp_path, rope_parameters=None, rope_theta=5e5, rope_scaling=scaling)).rope
    assert (rope.theta, rope.scaling) == (5e5, LinearScaling(2.0))


def test_llama3_rope_is_read_whole(tmp_path):
    parameters = {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    rope = read_spec(write_config(tmp_path, rope_parameters=parameters)).rope
    assert rope.scaling == Llama3Scaling(8.0, 1.0, 4.0, 8192)


def test_yarn_takes_the_context_of_the_model_for_the_original_one(tmp_path):
    parameters = {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.25}
    rope = read_spec(write_config(tmp_path, rope_parameters=parameters)).rope
    assert rope.scaling == YarnScaling(factor=4.0, original_positions=512, magnitude=1.25)


@pytest.mark.parametrize(
    ("architecture", "overrides", "windows"),
    [
        ("mistral", {"sliding_window": 9}, (9, 9)),
        ("mistral", {"sliding_window": None}, (None, None)),
        ("qwen2", {"sliding_window": 9}, (None, None)),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}, (None, 9)),
        (
            "qwen3",
            {
                "use_sliding_window": True,
                "sliding_window": 9,
                "layer_types": ["sliding_attention", "full_attention"],
            },
            (9, None),
        ),
    ],
)
def test_windows_are_stated_per_layer(tmp_path, architecture, overrides, windows):
    assert windows_of(read_spec(write_config(tmp_path, architecture, **overrides))) == windows


def test_a_mistral_config_without_a_window_gets_the_default_window(tmp_path):
    folder = write_config(tmp_path, "mistral")
    config = json.loads((folder / "config.json").read_text())
    del config["sliding_window"]
    (folder / "config.json").write_text(json.dumps(config))
    assert windows_of(read_spec(folder)) == (4096, 4096)


REFUSED = [
    (
        {"architectures": ["MambaForCausalLM"]},
        f"architecture MambaForCausalLM is not supported; {', '.join(ARCHITECTURES)} are",
    ),
    ({"architectures": None, "model_type": "gpt2"}, "architecture gpt2 is not supported"),
    (
        {"rope_parameters": {"rope_type": "dynamic"}},
        "rope type 'dynamic' is not supported; default, linear, llama3, yarn, longrope are",
    ),
    (
        {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
        "partial_rotary_factor 0.5 is not supported; the whole head must be rotated",
    ),
    (
        {"rope_parameters": {"full_attention": {"rope_type": "default"}}},
        "config.json: rope_parameters differs from layer to layer",
    ),
    (
        {"rope_parameters": {"rope_type": "linear"}},
        "config.json: rope_parameters lacks factor",
    ),
    ({"hidden_act": "gelu"}, "activation 'gelu' is not supported; silu, swish, gelu_pytorch_tanh are"),
    (
        {"quantization_config": {"quant_method": "bitsandbytes"}},
        "quantised with bitsandbytes, which cannot be read; fp8, fbgemm_fp8, awq, gptq, compressed-tensors can, or use",
    ),
    ({"dtype": "float8_e4m3fn"}, "dtype 'float8_e4m3fn' is not supported; float32, bfloat16, float16 are"),
    ({"hidden_size": None}, "config.json lacks hidden_size"),
    ({"hidden_size": "big"}, "config.json: hidden_size is 'big', which is not valid"),
    ({"num_hidden_layers": 0}, "layers = 0 is not valid"),
    ({"num_hidden_layers": -1}, "layers = -1 is not valid"),
    ({"intermediate_size": 0}, "a model with intermediate = 0 is not valid; it must be at least 1"),
    ({"num_key_value_heads": 3}, "4 attention heads cannot share 3 KV heads evenly"),
    ({"head_dim": 15}, "head size 15 is odd"),
]


@pytest.mark.parametrize(("overrides", "sentence"), REFUSED)
def test_an_unsupported_model_is_refused_by_name(tmp_path, overrides, sentence):
    with pytest.raises(UnsupportedModel) as refusal:
        read_spec(write_config(tmp_path, **overrides))
    assert sentence in str(refusal.value)


def test_unknown_layer_types_are_refused_by_name(tmp_path):
    types = ["linear_attention", "full_attention"]
    folder = write_config(tmp_path, "qwen3", use_sliding_window=True, sliding_window=4, layer_types=types)
    with pytest.raises(UnsupportedModel, match="layer type 'linear_attention' is not supported"):
        read_spec(folder)


def test_the_number_of_layer_types_must_match_the_layers(tmp_path):
    folder = write_config(
        tmp_path, "qwen3", use_sliding_window=True, sliding_window=4, layer_types=["full_attention"]
    )
    with pytest.raises(UnsupportedModel, match="1 layer types are given for 2 layers"):
        read_spec(folder)


def test_a_window_sees_at_least_the_token_itself(tmp_path):
    with pytest.raises(UnsupportedModel, match="a sliding window shorter than one token sees nothing"):
        read_spec(write_config(tmp_path, "mistral", sliding_window=0))


def test_mistral_with_layer_types_is_refused(tmp_path):
    folder = write_config(tmp_path, "mistral", layer_types=["full_attention"] * 2)
    with pytest.raises(UnsupportedModel, match="Mistral with layer_types is not supported"):
        read_spec(folder)


def test_a_path_that_is_not_a_folder_is_refused(tmp_path):
    with pytest.raises(NotAModel, match=r"nowhere is not a folder"):
        read_spec(tmp_path / "nowhere")


def test_a_folder_without_a_config_is_refused(tmp_path):
    with pytest.raises(NotAModel, match=r"has no config\.json"):
        read_spec(tmp_path)


@pytest.mark.parametrize(
    ("text", "sentence"), [("{", "is not valid JSON"), ("[]", "is not a JSON object"), ("\xff", "JSON")]
)
def test_a_config_that_is_not_json_is_refused(tmp_path, text, sentence):
    (tmp_path / "config.json").write_text(text, encoding="latin-1")
    with pytest.raises(NotAModel, match=sentence):
        read_spec(tmp_path)


def test_a_tiny_model_is_a_model(tmp_path):
    assert read_spec(tiny_model(tmp_path)).architecture == "LlamaForCausalLM"


FACTORS = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
OF_FAMILIES = [
    (
        "phi3",
        {"rope_parameters": {"rope_type": "longrope"} | FACTORS | {"long_factor": [1.0]}},
        "must be 8 numbers each",
    ),
    (
        "phi3",
        {"rope_parameters": {"rope_type": "longrope"} | FACTORS | {"long_factor": ["1"] * 8}},
        "not positive numbers",
    ),
    ("phi3", {"rope_parameters": {"rope_type": "longrope", "short_factor": [1.0] * 8}}, "lacks long_factor"),
    ("phi3", {"rope_parameters": {"partial_rotary_factor": 1.5}}, "cannot rotate 24 dimensions of heads of 16"),
    ("glm4", {"partial_rotary_factor": 0.2}, "cannot rotate 3 dimensions of heads of 16"),
    ("granite", {"logits_scaling": 0}, "logits cannot be divided by zero"),
    ("smollm3", {"no_rope_layers": [1]}, "no_rope_layers and layer_types must have 2 entries each"),
    ("smollm3", {"no_rope_layer_interval": 0}, "no_rope_layer_interval = 0 is not valid"),
    ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention is not supported"),
    ("gemma2", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar is 0.0; it must be positive"),
    ("gemma2", {"attn_logit_softcapping": -1.0}, "cannot be capped at -1.0"),
    ("gemma2", {"hidden_activation": "gelu"}, "activation 'gelu' is not supported"),
    ("gemma2", {"layer_types": ["chunked_attention"] * 2}, "layer type 'chunked_attention' is not supported"),
    ("gemma3", {"attn_logit_softcapping": 50.0}, "Gemma 3 with attn_logit_softcapping is not supported"),
    ("gemma3", {"sliding_window_pattern": 0}, "sliding_window_pattern = 0 is not valid"),
]
CLASSES = {
    "phi3": "Phi3",
    "glm4": "Glm4",
    "granite": "Granite",
    "smollm3": "SmolLM3",
    "gemma2": "Gemma2",
    "gemma3": "Gemma3",
}


@pytest.mark.parametrize(("family", "overrides", "sentence"), OF_FAMILIES)
def test_an_unsupported_variant_of_a_family_is_refused_by_name(family, overrides, sentence):
    own = {"architectures": [f"{CLASSES[family]}ForCausalLM"], "head_dim": 16, "rope_parameters": {"rope_theta": 1e4}}
    values = tiny_config("llama", "float32") | own | {"hidden_activation": None} | overrides
    with pytest.raises(UnsupportedModel) as refused:
        spec_of(Config("config.json", values))
    assert sentence in str(refused.value)


def test_gemma_3_reads_two_rotary_bases_from_configs_before_transformers_5():
    own = {"architectures": ["Gemma3ForCausalLM"], "head_dim": 16, "num_hidden_layers": 6, "sliding_window": 9}
    old = {"rope_theta": 1e6, "rope_local_base_freq": 1e4, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    values = tiny_config("llama", "float32") | {"rope_parameters": None, "hidden_act": None} | own | old
    spec = spec_of(Config("config.json", values))
    assert [spec.rope_of(layer) for layer in spec.layers] == [Rope(1e4)] * 5 + [Rope(1e6, LinearScaling(8.0))]
    assert [layer.attention.window for layer in spec.layers] == [9] * 5 + [None]


def test_phi_3_reads_the_earlier_names_of_longrope():
    values = tiny_config("llama", "float32") | {"architectures": ["Phi3ForCausalLM"], "rope_parameters": None}
    scaling = {"type": "su"} | FACTORS
    spec = spec_of(Config("config.json", values | {"rope_scaling": scaling, "original_max_position_embeddings": 64}))
    magnitude = (1 + math.log(8) / math.log(64)) ** 0.5
    assert spec.rope.scaling == LongScaling((1.0,) * 8, (2.0,) * 8, 64, magnitude)
