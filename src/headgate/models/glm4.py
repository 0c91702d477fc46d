"""GLM-4 (0414): norms before and after attention and MLP; half of each head is rotated, in pairs of neighbours."""

from __future__ import annotations

from headgate.models.config import Config, decoder_spec, read_rope, same_layers
from headgate.models.spec import AttentionSpec, ModelSpec, NormNames

NORMS = NormNames(after_attention="post_self_attn_layernorm", after_mlp="post_mlp_layernorm")


def glm4(config: Config) -> ModelSpec:
    config = config.otherwise(partial_rotary_factor=0.5, rms_norm_eps=1.5625e-7, head_dim=128)
    attention = AttentionSpec(qkv_bias=config.flag("attention_bias", True))
    rope = read_rope(config, partial=True, interleaved=True)
    return decoder_spec(config, same_layers(config, attention, norms=NORMS), rope)
