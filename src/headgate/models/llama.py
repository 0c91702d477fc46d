"""Llama: the plain dense decoder. Where it has attention biases, the output projection has one too."""

from __future__ import annotations

from headgate.models.config import Config, dense_spec
from headgate.models.spec import ModelSpec


def llama(config: Config) -> ModelSpec:
    bias = config.flag("attention_bias")
    return dense_spec(config, "LlamaForCausalLM", qkv_bias=bias, out_bias=bias, mlp_bias=config.flag("mlp_bias"))
