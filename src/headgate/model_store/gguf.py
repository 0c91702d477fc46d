"""Reads GGUF files: metadata, an equivalent Hugging Face config, and the location of each tensor.

Only the header is read, in one pass and without torch. The `gguf` package is used only for dequantisation (in
`headgate.device.weights.gguf`): its reader builds a numpy view per string and takes seconds on a real vocabulary.

Every length in the file is checked against the file's size before it is used: a truncated or hostile file raises
BrokenCheckpoint and never causes a huge allocation.
"""

from __future__ import annotations

import math
import mmap
import re
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headgate.errors import BrokenCheckpoint, UnsupportedModel

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
LONGEST_HEADER = 256 * 2**20  # bytes; a vocabulary of a million words takes a tenth of it

# name: (id, values per block, bytes per block). The `gguf` package has this table too, but takes 150 ms to import.
_TENSOR_TYPES = {
    "F32": (0, 1, 4),
    "F16": (1, 1, 2),
    "Q4_0": (2, 32, 18),
    "Q4_1": (3, 32, 20),
    "Q5_0": (6, 32, 22),
    "Q5_1": (7, 32, 24),
    "Q8_0": (8, 32, 34),
    "Q2_K": (10, 256, 84),
    "Q3_K": (11, 256, 110),
    "Q4_K": (12, 256, 144),
    "Q5_K": (13, 256, 176),
    "Q6_K": (14, 256, 210),
    "BF16": (30, 1, 2),
}
_TYPE_BY_ID = {number: (name, values, size) for name, (number, values, size) in _TENSOR_TYPES.items()}

_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_ARRAY = 9


@dataclass(frozen=True)
class StoredTensor:
    """The location of one tensor in the file, with its name and number format in GGUF's terms."""

    name: str
    kind: str  # a key of _TENSOR_TYPES
    shape: tuple[int, ...]  # outermost first, as in torch; the file has the reverse order
    start: int
    size: int  # bytes


@dataclass(frozen=True)
class GGUFFile:
    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, StoredTensor]

    def __repr__(self) -> str:
        return f"<GGUFFile {self.path.name}: {self.architecture}, {len(self.tensors)} tensors>"

    @property
    def architecture(self) -> str:
        return str(self.metadata.get("general.architecture", "unknown"))


def read_gguf(path: Path) -> GGUFFile:
    """Read the header of a GGUF file."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _parse(path, data)
    except (struct.error, ValueError) as error:  # mmap raises ValueError for an empty file
        raise BrokenCheckpoint(f"{path} is cut short or is not a GGUF file: {error}") from error


def _parse(path: Path, data: mmap.mmap) -> GGUFFile:
    cursor = _Cursor(data)
    if cursor.take(4) != MAGIC:
        raise BrokenCheckpoint(f"{path} is not a GGUF file: it does not begin with {MAGIC.decode()}")
    version = cursor.scalar("<I")
    if version not in VERSIONS:
        raise UnsupportedModel(f"{path} is GGUF version {version}; versions 2 and 3, little-endian, are read")
    tensor_count, field_count = cursor.scalar("<Q"), cursor.scalar("<Q")
    metadata = {cursor.string(): cursor.value(cursor.scalar("<I")) for _ in range(field_count)}
    if _whole(metadata, "split.count", 1) > 1:
        raise UnsupportedModel(f"{path} is one part of several; join them with `llama-gguf-split --merge`")
    layouts = [_read_layout(path, cursor) for _ in range(tensor_count)]
    base = _align(cursor.position, _whole(metadata, "general.alignment", DEFAULT_ALIGNMENT))
    tensors = {name: _place(path, name, layout, base, len(data)) for name, layout in layouts}
    return GGUFFile(path, metadata, tensors)


def _whole(metadata: Mapping[str, Any], name: str, default: int) -> int:
    value = metadata.get(name, default)
    if type(value) is not int or value < 1:
        raise ValueError(f"{name} is {value!r}")
    return value


class _Cursor:
    """Reads values sequentially; reading past the end raises struct.error."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self._end = min(len(data), LONGEST_HEADER)
        self.position = 0

    def take(self, size: int) -> bytes:
        end = self.position + size
        if end > self._end:
            raise struct.error(f"{size} bytes wanted at {self.position} of {self._end}")
        taken = self._data[self.position : end]
        self.position = end
        return taken

    def scalar(self, code: str) -> Any:
        (value,) = struct.unpack(code, self.take(struct.calcsize(code)))
        return value

    def string(self) -> str:
        # Vocabularies are not always valid UTF-8; one bad token must not make the model unusable.
        return self.take(self.scalar("<Q")).decode("utf-8", errors="replace")

    def value(self, kind: int) -> Any:
        match kind:
            case 8:
                return self.string()
            case 9:
                return self._array(self.scalar("<I"), self.scalar("<Q"))
            case _ if kind in _SCALARS:
                return self.scalar(_SCALARS[kind])
        raise struct.error(f"metadata of unknown type {kind}")

    def _array(self, kind: int, count: int) -> list[Any]:
        if kind in _SCALARS:
            size = struct.calcsize(_SCALARS[kind])
            return list(struct.unpack(f"<{count}{_SCALARS[kind][1]}", self.take(count * size)))
        if kind == _ARRAY:
            raise struct.error("arrays of arrays are not read")
        return [self.value(kind) for _ in range(count)]


_Layout = tuple[tuple[int, ...], int, int]  # shape, type, offset


def _read_layout(path: Path, cursor: _Cursor) -> tuple[str, _Layout]:
    name = cursor.string()
    dimensions = cursor.scalar("<I")
    if dimensions > 4:
        raise BrokenCheckpoint(f"{path}: tensor {name} has {dimensions} dimensions")
    shape = tuple(cursor.scalar("<Q") for _ in range(dimensions))[::-1]
    return name, (shape, cursor.scalar("<I"), cursor.scalar("<Q"))


def _place(path: Path, name: str, layout: _Layout, base: int, file_size: int) -> StoredTensor:
    shape, type_id, offset = layout
    if type_id not in _TYPE_BY_ID:
        known = ", ".join(_TENSOR_TYPES)
        raise UnsupportedModel(f"{path}: tensor {name} is stored as GGML type {type_id}; known are {known}")
    kind, values, size = _TYPE_BY_ID[type_id]
    row = shape[-1] if shape else 1
    if row % values:
        raise BrokenCheckpoint(f"{path}: rows of tensor {name} ({row}) are not whole {kind} blocks of {values}")
    total = math.prod(shape) // values * size
    if base + offset + total > file_size:
        raise BrokenCheckpoint(f"{path} is cut short: tensor {name} ends after the file does")
    return StoredTensor(name, kind, shape, base + offset, total)


def _align(position: int, alignment: int) -> int:
    return -(-position // alignment) * alignment


# --------------------------------------------------------------------------- the file as a Hugging Face checkpoint


@dataclass(frozen=True)
class _Family:
    """The Hugging Face names and layout of one GGUF architecture."""

    model_type: str
    model_class: str
    interleaved_rotary: bool = False  # q and k rows are stored in pairs, as in Meta's rotary code
    parts: Mapping[str, str] = field(default_factory=dict)  # names of a layer's parts, beside those of all families
    rows: tuple[str, ...] = ()  # parts that are stored as a vector and expected as a matrix of one row
    config: Callable[[GGUFFile], dict[str, Any]] = lambda _: {}  # what the config has beside the common values


_FAMILIES = {
    "llama": _Family("llama", "LlamaForCausalLM", interleaved_rotary=True),  # Mistral's files use llama too
    "mistral": _Family("mistral", "MistralForCausalLM", interleaved_rotary=True),
    "qwen2": _Family("qwen2", "Qwen2ForCausalLM"),
    "qwen3": _Family("qwen3", "Qwen3ForCausalLM"),
}


def _expert_parts(layer: str, gate: str, up: str, down: str) -> dict[str, str]:
    """The router and the experts, which are stored in one tensor per kind."""
    experts = {"ffn_gate_exps": gate, "ffn_up_exps": up, "ffn_down_exps": down}
    return {"ffn_gate_inp": f"{layer}.gate"} | {part: f"{layer}.experts.{name}" for part, name in experts.items()}


def _shared_parts(name: str) -> dict[str, str]:
    return {f"ffn_{part}_shexp": f"mlp.{name}.{part}_proj" for part in ("gate", "up", "down")}


_EXPERT_PARTS = _expert_parts("mlp", "gate_proj", "up_proj", "down_proj")


def _mixtral_config(file: GGUFFile) -> dict[str, Any]:
    get = _fields(file)
    return {"num_local_experts": get("expert_count"), "num_experts_per_tok": get("expert_used_count")}


def _qwen_config(file: GGUFFile) -> dict[str, Any]:
    get = _fields(file)
    return {
        "num_experts": get("expert_count"),
        "num_experts_per_tok": get("expert_used_count"),
        "moe_intermediate_size": get("expert_feed_forward_length"),
        "shared_expert_intermediate_size": get("expert_shared_feed_forward_length", None),
        "norm_topk_prob": get("expert_weights_norm", file.architecture == "qwen3moe"),
    }


def _ernie_config(file: GGUFFile) -> dict[str, Any]:
    get = _fields(file)
    return {
        "moe_num_experts": get("expert_count"),
        "moe_k": get("expert_used_count"),
        "moe_intermediate_size": get("expert_feed_forward_length"),
        "moe_num_shared_experts": get("expert_shared_count", 0),
        "moe_layer_start_index": get("leading_dense_block_count", 0),
        "moe_layer_interval": get("interleave_moe_layer_step", 1),
    }


_MIXTURES = {
    "llama": _Family(
        "mixtral",
        "MixtralForCausalLM",
        interleaved_rotary=True,
        parts=_expert_parts("block_sparse_moe", "w1", "w3", "w2"),
        config=_mixtral_config,
    ),
    "qwen2moe": _Family(
        "qwen2_moe",
        "Qwen2MoeForCausalLM",
        parts=_EXPERT_PARTS | _shared_parts("shared_expert") | {"ffn_gate_inp_shexp": "mlp.shared_expert_gate"},
        rows=("ffn_gate_inp_shexp",),
        config=_qwen_config,
    ),
    "qwen3moe": _Family("qwen3_moe", "Qwen3MoeForCausalLM", parts=_EXPERT_PARTS, config=_qwen_config),
    "ernie4_5-moe": _Family(
        "ernie4_5_moe",
        "Ernie4_5_MoeForCausalLM",
        parts=_EXPERT_PARTS
        | _shared_parts("shared_experts")
        | {"exp_probs_b": "mlp.moe_statics.e_score_correction_bias"},
        rows=("exp_probs_b",),
        config=_ernie_config,
    ),
}

_DTYPES = {"F32": "float32", "F16": "float16"}  # quantised weights are computed in bfloat16

_LAYER_PARTS = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TOP_PARTS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER_NAME = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
ROPE_FACTORS = "rope_freqs.weight"


@dataclass(frozen=True)
class NamedTensor:
    """A stored tensor with its name in a Hugging Face checkpoint (hub name)."""

    name: str
    stored: StoredTensor
    rotary_heads: int | None  # rows are in rotary pairs, head by head, and must be rearranged into halves
    as_row: bool = False  # the vector is the only row of a matrix

    @property
    def shape(self) -> tuple[int, ...]:
        return (1, *self.stored.shape) if self.as_row else self.stored.shape


def hub_tensors(file: GGUFFile) -> list[NamedTensor]:
    """Return the tensors of the file with their hub names, in file order."""
    family = _family(file)
    get = _fields(file)
    heads = get("attention.head_count", kind=_is_whole)
    paired = {"attn_q": heads, "attn_k": get("attention.head_count_kv", heads, kind=_is_whole)}
    named = []
    for stored in file.tensors.values():
        if stored.name == ROPE_FACTORS:  # a table, not a weight; it is part of the config
            continue
        name, part = _hub_name(file, family, stored.name)
        heads_in_pairs = paired.get(part) if family.interleaved_rotary else None
        named.append(NamedTensor(name, stored, heads_in_pairs, part in family.rows and len(stored.shape) == 1))
    return named


def _hub_name(file: GGUFFile, family: _Family, name: str) -> tuple[str, str]:
    """Return the tensor's name in a Hugging Face checkpoint, and the GGUF name of its module, such as `attn_q`."""
    if match := _LAYER_NAME.fullmatch(name):
        layer, part, suffix = match.groups()
        hub_part = family.parts.get(part) or _LAYER_PARTS.get(part)
        if hub_part is not None:
            ending = "" if hub_part.endswith(f"_{suffix}") else f".{suffix}"
            return f"model.layers.{layer}.{hub_part}{ending}", part
    top, _, suffix = name.rpartition(".")
    if top in _TOP_PARTS:
        return f"{_TOP_PARTS[top]}.{suffix}", top
    raise UnsupportedModel(f"{file.path}: tensor {name} does not belong to a {file.architecture} model")


def hub_config(file: GGUFFile) -> dict[str, Any]:
    """Return the config.json that this checkpoint would have on the hub."""
    family = _family(file)
    get = _fields(file)
    heads, hidden = get("attention.head_count", kind=_is_whole), get("embedding_length", kind=_is_whole)
    theta = get("rope.freq_base", 10000.0, kind=_is_number)
    head_dim = get("attention.key_length", get("rope.dimension_count", hidden // heads), kind=_is_whole)
    config = {
        "architectures": [family.model_class],
        "model_type": family.model_type,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": get("feed_forward_length"),
        "num_hidden_layers": get("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": get("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": get("context_length"),
        "rms_norm_eps": get("attention.layer_norm_rms_epsilon"),
        "rope_theta": theta,
        "rope_scaling": _rope_scaling(file, theta, head_dim),
        "vocab_size": _tensor(file, "token_embd.weight").shape[0],
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "sliding_window": get("attention.sliding_window", None),
        "attention_bias": family.model_type == "llama" and "blk.0.attn_q.bias" in file.tensors,
        "bos_token_id": file.metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": _eos_ids(file),
        "pad_token_id": file.metadata.get("tokenizer.ggml.padding_token_id"),
        "dtype": _DTYPES.get(_tensor(file, "token_embd.weight").kind, "bfloat16"),
    }
    config |= family.config(file)
    # A null window is kept: for `transformers`, a Mistral config without the key has a window.
    return {key: value for key, value in config.items() if value is not None or key == "sliding_window"}


def _family(file: GGUFFile) -> _Family:
    families = _MIXTURES if file.metadata.get(f"{file.architecture}.expert_count") else _FAMILIES
    if file.architecture not in families:
        kind, known = "mixtures of experts " if families is _MIXTURES else "", ", ".join(families)
        raise UnsupportedModel(
            f"{file.path} has architecture {file.architecture}; GGUF files of {kind}{known} are served"
        )
    return families[file.architecture]


_MISSING = object()


def _is_whole(value: Any) -> bool:
    return type(value) is int and 0 < value < 2**31


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and 0 < value < math.inf


def _fields(file: GGUFFile) -> Callable[..., Any]:
    """Return a function that looks up metadata of the file's architecture; a field without a default is required.

    Values that this module computes with are checked here; all others are checked by the reader of the config.
    """

    def get(name: str, default: Any = _MISSING, kind: Callable[[Any], bool] | None = None) -> Any:
        value = file.metadata.get(f"{file.architecture}.{name}", default)
        if value is _MISSING:
            raise BrokenCheckpoint(f"{file.path} lacks {file.architecture}.{name}")
        if kind is not None and not kind(value):
            raise BrokenCheckpoint(f"{file.path} has an invalid {file.architecture}.{name}: {value!r:.100}")
        return value

    return get


def _tensor(file: GGUFFile, name: str) -> StoredTensor:
    if name not in file.tensors:
        raise BrokenCheckpoint(f"{file.path} has no tensor {name}")
    return file.tensors[name]


def _eos_ids(file: GGUFFile) -> int | list[int] | None:
    """Return every id that ends an answer: end of text, of turn and of message, if the file defines them."""
    named = (file.metadata.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot", "eom"))
    ids = list(dict.fromkeys(token_id for token_id in named if isinstance(token_id, int)))
    return ids[0] if len(ids) == 1 else ids or None


def _rope_scaling(file: GGUFFile, theta: float, head_dim: int) -> dict[str, Any] | None:
    if ROPE_FACTORS in file.tensors:
        return _llama3_scaling(file, theta, head_dim)
    get = _fields(file)
    kind, factor = get("rope.scaling.type", "none"), get("rope.scaling.factor", 1.0)
    if kind == "none" or factor == 1.0:
        return None
    if kind not in ("linear", "yarn"):
        raise UnsupportedModel(f"{file.path} scales its rotary embedding by {kind}; linear and yarn are known")
    original = get("rope.scaling.original_context_length", None)
    scaling = {"rope_type": kind, "factor": factor, "original_max_position_embeddings": original}
    return {key: value for key, value in scaling.items() if value is not None}


def _llama3_scaling(file: GGUFFile, theta: float, head_dim: int) -> dict[str, Any]:
    """Find the parameters of Llama 3.1's scaling, which the file stores as a table with a factor per frequency."""
    stored = _tensor(file, ROPE_FACTORS)
    if stored.kind != "F32" or stored.size != 4 * (head_dim // 2) or not stored.size:
        raise UnsupportedModel(f"{file.path} has a table of rotary factors that does not fit heads of {head_dim}")
    with file.path.open("rb") as data:
        data.seek(stored.start)
        factors = struct.unpack(f"<{stored.size // 4}f", data.read(stored.size))
    scaling = {
        "rope_type": "llama3",
        "factor": max(factors),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    expected = [_llama3_factor(scaling, 2 * math.pi * theta ** (i / head_dim)) for i in range(0, head_dim, 2)]
    if len(expected) != len(factors) or not all(map(_close, expected, factors)):
        raise UnsupportedModel(f"{file.path} has a table of rotary factors that is not Llama 3's")
    return scaling


def _llama3_factor(scaling: Mapping[str, Any], wavelength: float) -> float:
    """The factor by which one frequency is divided: 1 if it is high, the full factor if low, interpolated in between."""
    low, high = float(scaling["low_freq_factor"]), float(scaling["high_freq_factor"])
    turns = float(scaling["original_max_position_embeddings"]) / wavelength
    smooth = min(1.0, max(0.0, (turns - low) / (high - low)))
    return 1 / ((1 - smooth) / float(scaling["factor"]) + smooth)


def _close(a: float, b: float) -> bool:
    return math.isclose(a, b, rel_tol=1e-4)
