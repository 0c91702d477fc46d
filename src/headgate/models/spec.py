"""The spec of a decoder: everything that the network, the cache and the scheduler need to know about a checkpoint.

Values that may differ between layers are in `LayerSpec`. The shape of attention is the same for the whole model,
because the KV cache is a single pool of equal blocks (see `kv_layout.py` for how layers share them).
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import torch

from headgate.errors import UnsupportedModel
from headgate.layers.backend import Activation, ClampedGate, Routing
from headgate.layers.rotary import LongScaling, Rope
from headgate.models.kv_layout import KvLayout, kv_layout
from headgate.models.quantisation import Quantisation


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec:
    window: int | None = None  # how many tokens back a token sees, including itself; None: all
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: bool = False
    whole_qk_norm: bool = False  # one norm for the queries of all heads together, and one for the keys
    scale: float | None = None  # of the scores; None: the inverse square root of the head size
    cap: float | None = None  # scores become `cap * tanh(score / cap)`
    sinks: bool = False  # each head has one more score, which is a parameter, and no value for it
    rope: Rope | None = None  # None: that of the model

    def __post_init__(self) -> None:
        if self.window is not None and self.window < 1:
            raise UnsupportedModel("a sliding window shorter than one token sees nothing")
        refuse_cap(self.cap)


@dataclass(frozen=True, slots=True)
class Dense:
    """An MLP whose weights all tokens share: `down(activation(gate(x)) * up(x))`."""

    intermediate: int
    bias: bool = False
    activation: Activation = "silu"

    def __post_init__(self) -> None:
        refuse_less_than_one("intermediate", self.intermediate)

    @property
    def widths(self) -> tuple[int, ...]:
        """The numbers that ranks divide among them."""
        return (self.intermediate,)

    def num_parameters(self, hidden: int) -> int:
        return 3 * self.intermediate * hidden


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertNames:
    """What a checkpoint calls the parts of a mixture of experts."""

    layer: str = "mlp"
    router: str = "gate"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    shared: str = "shared_expert"
    correction_bias: str = "gate.e_score_correction_bias"


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """A mixture of `count` MLPs of which each token uses some, beside one that all tokens share."""

    count: int
    intermediate: int
    routing: Routing
    router_bias: bool = False
    correction_bias: tuple[
        int, ...
    ] = ()  # shape of what is added to the scores that experts are chosen by; (): nothing
    gate: ClampedGate | None = None  # None: `silu(gate) * up`
    bias: bool = False
    interleaved: bool = False  # the checkpoint stacks experts, inputs before outputs, gate and up in turn
    shared: int = 0  # width of the MLP that all tokens share; 0: there is none
    shared_gate: bool = False  # the output of the shared MLP is multiplied by a sigmoid of the token
    names: ExpertNames = ExpertNames()

    def __post_init__(self) -> None:
        refuse_less_than_one("num_experts", self.count)
        refuse_less_than_one("the size of an expert", self.intermediate)
        routing = self.routing
        if not 1 <= routing.top <= self.count:
            raise UnsupportedModel(f"each token uses {routing.top} of {self.count} experts, which is not possible")
        if routing.groups < 1 or self.count % routing.groups or not 1 <= routing.top_groups <= routing.groups:
            raise UnsupportedModel(
                f"{routing.top_groups} of {routing.groups} groups of {self.count} experts cannot be chosen"
            )
        if routing.top > self.count // routing.groups * routing.top_groups:
            raise UnsupportedModel(f"{routing.top_groups} groups have fewer than {routing.top} experts")

    @property
    def widths(self) -> tuple[int, ...]:
        return (self.intermediate, self.shared) if self.shared else (self.intermediate,)

    def num_parameters(self, hidden: int) -> int:
        return (3 * (self.count * self.intermediate + self.shared) + self.count) * hidden


@dataclass(frozen=True, slots=True, kw_only=True)
class NormNames:
    """What a checkpoint calls the norms of a layer. None: there is no norm in this place."""

    before_attention: str | None = "input_layernorm"
    after_attention: str | None = None
    before_mlp: str | None = "post_attention_layernorm"
    after_mlp: str | None = None


PRE_NORMS = NormNames()


@dataclass(frozen=True, slots=True)
class LayerSpec:
    attention: AttentionSpec
    mlp: Dense | Experts
    norms: NormNames = PRE_NORMS


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """The spec of one model. Invalid values are refused at construction."""

    architecture: str
    hidden: int
    layers: tuple[LayerSpec, ...]
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    max_positions: int
    rms_eps: float
    rope: Rope
    dtype: torch.dtype  # dtype of the checkpoint
    tied: bool = False  # the output matrix is the embedding
    eos_ids: tuple[int, ...] = ()
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0  # of what attention and MLP add to the residual stream
    logits_divisor: float = 1.0
    unused: tuple[str, ...] = ()  # how the names of checkpoint tensors begin that only predict further tokens
    logits_cap: float | None = None  # logits become `cap * tanh(logit / cap)`
    wide_norms: bool = False  # weights of norms multiply before the result is rounded to the dtype
    norm_offset: float = 0.0  # added to the weights of norms
    quantisation: Quantisation | None = None  # how the checkpoint stores quantised weights

    def __post_init__(self) -> None:
        refuse_less_than_one("layers", len(self.layers))
        for field in fields(self):
            if field.type == "int":
                refuse_less_than_one(field.name, getattr(self, field.name))
        if not 0 <= self.rms_eps < 1:
            raise UnsupportedModel(f"a model with rms_norm_eps = {self.rms_eps} is not valid")
        if self.heads % self.kv_heads:
            raise UnsupportedModel(f"{self.heads} attention heads cannot share {self.kv_heads} KV heads evenly")
        if self.head_dim % 2:
            raise UnsupportedModel(f"head size {self.head_dim} is odd, and rotary embedding needs pairs")
        for rope in self.ropes:
            if not 0 <= (rotated := rope.dimensions(self.head_dim)) <= self.head_dim or rotated % 2:
                raise UnsupportedModel(
                    f"rotary embedding needs pairs and cannot rotate {rotated} dimensions of heads of {self.head_dim}"
                )
        if not self.logits_divisor:
            raise UnsupportedModel("logits cannot be divided by zero")
        refuse_cap(self.logits_cap)

    @property
    def kv_layout(self) -> KvLayout:
        """How layers share KV blocks. A window of the whole context is none."""
        windows = [layer.attention.window for layer in self.layers]
        return kv_layout([window if window and window < self.max_positions else None for window in windows])

    @property
    def ropes(self) -> tuple[Rope, ...]:
        """The different rotary embeddings of the layers."""
        return tuple(dict.fromkeys(self.rope_of(layer) for layer in self.layers))

    def rope_of(self, layer: LayerSpec) -> Rope:
        return layer.attention.rope or self.rope

    @property
    def has_long_angles(self) -> bool:
        """Whether angles are those for contexts beyond the original one; KV differs between the two."""
        scalings = (rope.scaling for rope in self.ropes)
        return any(isinstance(each, LongScaling) and each.is_long(self.max_positions) for each in scalings)

    def within(self, max_context: int | None) -> ModelSpec:
        """The spec of the same model for contexts of at most `max_context` tokens."""
        return self if max_context is None else replace(self, max_positions=min(max_context, self.max_positions))

    @property
    def intermediate(self) -> int:
        """The width of the widest MLP."""
        return max(max(layer.mlp.widths) for layer in self.layers)

    @property
    def num_parameters(self) -> int:
        """The number of parameters in all matrices."""
        attention = 2 * (self.heads + self.kv_heads) * self.head_dim * self.hidden
        layers = sum(attention + layer.mlp.num_parameters(self.hidden) for layer in self.layers)
        return layers + (1 if self.tied else 2) * self.vocab * self.hidden


def refuse_cap(cap: float | None) -> None:
    if cap is not None and cap <= 0:
        raise UnsupportedModel(f"scores and logits cannot be capped at {cap}")


def refuse_less_than_one(name: str, value: int) -> None:
    if value < 1:
        raise UnsupportedModel(f"a model with {name} = {value} is not valid; it must be at least 1")
