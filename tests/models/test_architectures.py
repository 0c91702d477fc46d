"""The registry: an architecture that the documentation shows is added, and computes what `transformers` computes."""

from __future__ import annotations

import inspect
import re
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch
from transformers import ArceeConfig, ArceeForCausalLM

from headgate.errors import RequestError, UnsupportedModel
from headgate.layers.ranks import ALONE
from headgate.models import ARCHITECTURES, Architecture, Config, build_model, read_spec, refuse_uneven, spec_of
from headgate.models.qwen2 import qwen2
from headgate.models.spec import AttentionSpec, Dense, LayerSpec
from headgate.testing.tiny import tiny_model
from tests.models.pages import BACKENDS, Pages, chunked, load, prompt
from tests.models.reference import reference_logits

PAGE = Path(__file__).parents[2] / "docs/architectures.md"


@pytest.fixture
def arcee(monkeypatch) -> ModuleType:
    """The file that the documentation shows, with its row in the registry."""
    text = PAGE.read_text("utf-8")
    (source,) = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    module = ModuleType("arcee")
    exec(compile(source, str(PAGE), "exec"), module.__dict__)
    (row,) = re.findall(r'`("ArceeForCausalLM": .*?)`\.', text)
    shown = eval(f"{{{row}}}", {"Architecture": Architecture} | module.__dict__)
    for name, architecture in shown.items():
        monkeypatch.setitem(ARCHITECTURES, name, architecture)
    return module


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    torch.manual_seed(0)
    config = ArceeConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.2,
    )
    model = ArceeForCausalLM(config)
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):  # all ones as they are made, which would hide a norm that is left out
            torch.nn.init.normal_(parameter, mean=1.0, std=0.1)
    folder = tmp_path_factory.mktemp("arcee")
    model.save_pretrained(folder)
    return folder


def test_the_documentation_quotes_the_qwen2_function_exactly():
    (quoted,) = re.findall(r"^```\n(def qwen2.*?)^```$", PAGE.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    assert inspect.getsource(qwen2) == quoted


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_architecture_that_the_documentation_adds_computes_what_transformers_computes(arcee, folder, backend):
    pages, tokens = Pages(load(folder, backend=backend)), prompt(50)
    logits = torch.cat([pages.step({"a": chunk})["a"] for chunk in chunked(tokens, 7, 1, 30)])
    torch.testing.assert_close(logits, reference_logits(folder, tokens), rtol=0, atol=1e-4)


def test_the_architecture_that_the_documentation_adds_refuses_what_it_does_not_compute(arcee):
    values = {"architectures": ["ArceeForCausalLM"], "hidden_act": "silu"}
    with pytest.raises(UnsupportedModel, match="Arcee with activation 'silu' or mlp_bias is not supported"):
        spec_of(Config("config.json", values))


def test_an_architecture_without_a_row_is_refused(folder):
    with pytest.raises(
        UnsupportedModel,
        match=r"architecture ArceeForCausalLM is not supported; Ernie4_5ForCausalLM, .*LlamaForCausalLM,",
    ):
        read_spec(folder)


def test_the_row_of_an_architecture_decides_which_network_is_built(monkeypatch, tmp_path):
    spec = read_spec(tiny_model(tmp_path, tokenizer=False))
    built = []
    row = Architecture(ARCHITECTURES[spec.architecture].read, lambda *given: built.append(given))
    monkeypatch.setitem(ARCHITECTURES, spec.architecture, row)
    build_model(spec, backend="torch")
    [(given, backend, ranks)] = built
    assert (given, backend.name, ranks) == (spec, "torch", ALONE)


def test_a_layer_that_cannot_be_divided_among_ranks_is_refused_with_its_width(tmp_path):
    spec = read_spec(tiny_model(tmp_path, tokenizer=False))
    odd = replace(spec.layers[0], mlp=Dense(33))
    refuse_uneven(spec, 2)
    with pytest.raises(
        RequestError, match=r"2 KV heads and MLP width of 33 and 96 cannot be divided by that; choose from 1$"
    ):
        refuse_uneven(replace(spec, layers=(spec.layers[0], odd)), 2)


def test_layers_of_one_model_may_differ(tmp_path):

    spec = read_spec(tiny_model(tmp_path, tokenizer=False))
    narrow = LayerSpec(AttentionSpec(qkv_bias=True, window=3), Dense(32, bias=True))
    mixed = replace(spec, layers=(spec.layers[0], narrow))
    shapes = {name: parameter.shape for name, parameter in build_model(mixed, backend="torch").parameters()}
    assert [shapes[f"model.layers.{i}.mlp.up_proj.weight"] for i in (0, 1)] == [(96, 64), (32, 64)]
    assert [f"model.layers.{i}.self_attn.q_proj.bias" in shapes for i in (0, 1)] == [False, True]
    assert (mixed.intermediate, spec.num_parameters - mixed.num_parameters) == (96, 3 * 64 * 64)
