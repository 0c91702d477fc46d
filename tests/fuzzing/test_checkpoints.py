"""Model files: any header is read or refused with one sentence, without allocating more than the file's size."""

from __future__ import annotations

import json
import math
import tempfile
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import strategies as st

from headgate.config import EngineConfig
from headgate.device.build import build_device, read_model_spec, refuse_oversized
from headgate.device.weights.gguf import GGUFWeights
from headgate.device.weights.loading import SafetensorsFiles, load_weights
from headgate.device.weights.resources import open_files
from headgate.errors import BrokenCheckpoint, HeadgateError, ModelError, OutOfMemory
from headgate.model_store.gguf import hub_config, hub_tensors, read_gguf
from headgate.models import build_model, read_spec
from headgate.testing.tiny import tiny_config, tiny_model
from headgate.text.template import load_template
from headgate.text.tokenizer import load_tokenizer
from tests.formats.encoders import CASES, write_quantised
from tests.fuzzing.properties import bounded, damaged, fuzzed, replaced
from tests.model_store.files import write_gguf

HEADER = {
    "__metadata__": {"format": "pt"},
    "a": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]},
    "b": {"dtype": "BF16", "shape": [4], "data_offsets": [16, 24]},
    "c": {"dtype": "U8", "shape": [0, 7], "data_offsets": [24, 24]},
}
DATA = bytes(range(24))


def safetensors(header: Any, length: int | None = None) -> bytes:
    packed = json.dumps(header).encode()
    return (len(packed) if length is None else length).to_bytes(8, "little") + packed + DATA


@st.composite
def checkpoints(draw: Any) -> bytes:
    if draw(st.booleans()):
        return draw(damaged(safetensors(HEADER)))  # type: ignore[no-any-return]
    lied = draw(st.one_of(st.none(), st.integers(0, 2**64 - 1)))
    return safetensors(draw(replaced(HEADER)), lied)


@fuzzed(checkpoints(), few=30)
def test_a_safetensors_file_is_read_or_refused(content: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder, suppress(ModelError):
        path = Path(folder, "model.safetensors")
        path.write_bytes(content)
        with SafetensorsFiles([path]) as source:
            for name, tensor in source:
                info = source.metadata()[name]
                assert tuple(tensor.shape) == info.shape and tensor.dtype == info.dtype
                assert tensor.numel() * tensor.element_size() <= len(content)


def refusal(content: bytes, folder: Path) -> str:
    path = folder / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(BrokenCheckpoint) as refused, SafetensorsFiles([path]) as source:
        source.metadata()
    return str(refused.value)


@pytest.mark.parametrize(
    ("header", "sentence"),
    [
        (
            {
                "a": {"dtype": "U8", "shape": [8], "data_offsets": [0, 8]},
                "b": {"dtype": "U8", "shape": [8], "data_offsets": [4, 12]},
            },
            "tensors a and b overlap",
        ),
        ({"a": {"dtype": "U8", "shape": [-2, -4], "data_offsets": [0, 8]}}, "-2 is not a size"),
        ({"a": {"dtype": "U8", "shape": [2.0], "data_offsets": [0, 2]}}, "2.0 is not a size"),
        ({"a": {"dtype": "U8", "shape": ["x"], "data_offsets": [0, 1]}}, "'x' is not a size"),
        ({"a": {"dtype": "U8", "shape": [2**62, 4], "data_offsets": [0, 2**64]}}, "cut short"),
        ({"a": {"dtype": "U8", "shape": [True], "data_offsets": [0, 1]}}, "True is not a size"),
    ],
)
def test_a_false_header_is_refused_with_the_reason(header: Any, sentence: str, tmp_path: Path):
    assert sentence in refusal(safetensors(header), tmp_path)


def test_an_oversized_header_is_refused_before_it_is_read(tmp_path: Path):
    path = tmp_path / "model.safetensors"
    with path.open("wb") as file:
        file.write((2**40).to_bytes(8, "little"))
        file.truncate(2**41)  # sparse, so that it takes no disk space
    with pytest.raises(BrokenCheckpoint, match="at most 100000000 are read"), SafetensorsFiles([path]) as source:
        source.metadata()


def test_a_header_nested_too_deep_is_refused(tmp_path: Path):
    packed = b"[" * 100_000
    assert "corrupt header" in refusal(len(packed).to_bytes(8, "little") + packed, tmp_path)


# ------------------------------------------------------------------------------------------------------- config.json

NUMBERS = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "max_position_embeddings",
    "rms_norm_eps",
    "eos_token_id",
    "sliding_window",
    "max_window_layers",
    "rope_theta",
    "partial_rotary_factor",
)
OF_ROPE = ("rope_theta", "factor", "low_freq_factor", "original_max_position_embeddings", "beta_fast", "mscale")
absurd = st.one_of(
    st.sampled_from(
        (0, -1, 10**9, 10**12, 10**18, 10**400, 2**31, 2**63, math.inf, -math.inf, math.nan, 1e308, 0.0, 1e-320)
    ),
    st.integers(2**25, 2**64),
    st.lists(st.integers(-(2**70), 2**70), max_size=3),
)
ENGINE = EngineConfig(device="cpu", backend="torch", kv_blocks=16, max_running=2)


def tiny_folder(folder: Path, architecture: str, claims: dict[str, Any]) -> Path:
    """A model whose config contradicts its weights."""
    tiny_model(folder, architecture)
    (folder / "config.json").write_text(json.dumps(tiny_config(architecture, "float32") | claims))
    return folder


@st.composite
def claims(draw: Any) -> tuple[str, dict[str, Any]]:
    architecture = draw(st.sampled_from(("llama", "mistral", "qwen2", "qwen3")))
    claimed = draw(st.dictionaries(st.sampled_from(NUMBERS), absurd, min_size=1, max_size=2))
    if draw(st.booleans()):
        kind = draw(st.sampled_from(("default", "linear", "llama3", "yarn")))
        scaling = draw(st.dictionaries(st.sampled_from(OF_ROPE), absurd, max_size=2))
        usual = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
        claimed["rope_parameters"] = {"rope_type": kind, **usual, **scaling}
    return architecture, claimed | draw(st.sampled_from(({}, {"use_sliding_window": True})))


@fuzzed(claims(), few=40)
def test_any_numbers_in_a_config_are_served_or_refused(drawn: tuple[str, dict[str, Any]]) -> None:
    with tempfile.TemporaryDirectory() as folder, suppress(HeadgateError):
        build_device(tiny_folder(Path(folder), *drawn), ENGINE).executor.close()


@pytest.mark.parametrize(
    ("field", "claimed"),
    [
        ("num_hidden_layers", 10**9),
        ("vocab_size", 10**12),
        ("max_position_embeddings", 10**18),
        ("head_dim", 2**40),
        ("num_hidden_layers", 4000),
        ("vocab_size", 2_000_000),
        ("intermediate_size", 1_000_000),
    ],
)
def test_an_absurd_number_of_a_config_is_refused_by_its_name_before_anything_is_built(
    field: str, claimed: int, tmp_path: Path
):
    with bounded(), pytest.raises(ModelError, match=f"{field} (is )?"):
        build_device(tiny_folder(tmp_path, "llama", {field: claimed}), ENGINE)


def test_positions_that_memory_cannot_hold_are_refused_before_the_tables_are_made(tmp_path: Path):
    folder = tiny_folder(tmp_path, "llama", {"max_position_embeddings": 2**24})
    with pytest.raises(OutOfMemory, match="max_position_embeddings is 16777216"):
        refuse_oversized(read_model_spec(folder), folder, free=2**30)


# --------------------------------------------------------------------------------------------------- quantised weights

QUANTISED = ("fp8, blocks", "float-quantized, blocks", "int-quantized, groups", "awq, groups", "gptq, ordered zeros")


@cache
def quantised_files(case: str) -> tuple[dict[str, Any], bytes]:
    """The config of a quantised model, and its weights."""
    with tempfile.TemporaryDirectory() as folder:
        plain = tiny_model(Path(folder, "plain"), tokenizer=False, hidden_size=128)
        packed, _ = write_quantised(plain, Path(folder), CASES[case])
        return json.loads((packed / "config.json").read_text()), (packed / "model.safetensors").read_bytes()


@st.composite
def quantised(draw: Any) -> tuple[str, Any]:
    case = draw(st.sampled_from(QUANTISED))
    stated = draw(replaced(CASES[case].config)) if draw(st.booleans()) else CASES[case].config
    keys = st.sampled_from(("group_size", "bits", "weight_block_size", "num_bits"))
    return case, stated | draw(st.dictionaries(keys, absurd, max_size=1)) if isinstance(stated, dict) else stated


@fuzzed(quantised(), few=40)
def test_any_quantisation_config_is_read_or_refused(drawn: tuple[str, Any]) -> None:
    case, stated = drawn
    config, weights = quantised_files(case)
    with tempfile.TemporaryDirectory() as name, suppress(HeadgateError):
        folder = Path(name)
        (folder / "config.json").write_text(json.dumps(config | {"quantization_config": stated}))
        (folder / "model.safetensors").write_bytes(weights)
        with bounded():
            load_weights(build_model(read_spec(folder), backend="torch"), open_files(folder))


# --------------------------------------------------------------------------------------------------------------- GGUF


@cache
def gguf_head() -> tuple[bytes, int]:
    """The header of a GGUF file, and the size of the file."""
    with tempfile.TemporaryDirectory() as folder:
        path = write_gguf(Path(folder, "m.gguf"))
        start = min(tensor.start for tensor in read_gguf(path).tensors.values())
        content = path.read_bytes()
    return content[:start], len(content)


NAMES = (
    b"general.alignment",
    b"llama.attention.head_count",
    b"llama.attention.head_count_kv",
    b"llama.embedding_length",
    b"llama.block_count",
    b"llama.context_length",
    b"llama.feed_forward_length",
    b"llama.attention.key_length",
    b"llama.attention.layer_norm_rms_epsilon",
    b"llama.rope.freq_base",
    b"llama.rope.dimension_count",
    b"llama.expert_count",
    b"split.count",
    b"tokenizer.ggml.eos_token_id",
    b"tokenizer.ggml.bos_token_id",
    b"tokenizer.ggml.merges",
    b"tokenizer.ggml.tokens",
    b"tokenizer.ggml.token_type",
    b"tokenizer.ggml.pre",
    b"tokenizer.chat_template",
)
VALUES = (
    b"\x04\0\0\0" + b"\0" * 4,  # the number 0
    b"\x04\0\0\0" + b"\xff" * 4,
    b"\x05\0\0\0" + b"\xff" * 4,  # -1
    b"\x06\0\0\0" + b"\0\0\xc0\x7f",  # not a number
    b"\x07\0\0\0\x01",
    b"\x08\0\0\0" + (1).to_bytes(8, "little") + b"x",
    b"\x08\0\0\0" + (3).to_bytes(8, "little") + b"{{(",
    b"\x09\0\0\0" + b"\x04\0\0\0" + (2).to_bytes(8, "little") + b"\x01\0\0\0" * 2,
    b"\x09\0\0\0" + b"\x08\0\0\0" + (2**60).to_bytes(8, "little"),
    b"\x0a\0\0\0" + b"\xff" * 8,
    b"\x04\0\0\0" + (4000).to_bytes(4, "little"),
    b"\x0a\0\0\0" + (10**12).to_bytes(8, "little"),
)


@st.composite
def gguf_heads(draw: Any) -> bytes:
    head, _ = gguf_head()
    if draw(st.booleans()):
        # Damage the part with the numbers; most of the header is vocabulary.
        return draw(damaged(head[:700])) + head[700:]
    fields = draw(st.lists(st.tuples(st.sampled_from(NAMES), st.sampled_from(VALUES)), min_size=1, max_size=3))
    more = b"".join(len(name).to_bytes(8, "little") + name + value for name, value in fields)
    kept = int.from_bytes(head[16:24], "little")
    # The last entry wins, so repeat a field with another value.
    at = head.index(b"token_embd.weight") - 8 if draw(st.booleans()) else 24
    return head[:16] + (kept + len(fields)).to_bytes(8, "little") + head[24:at] + more + head[at:]


@fuzzed(gguf_heads(), few=25)
def test_a_gguf_file_is_read_or_refused(head: bytes) -> None:
    _, size = gguf_head()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "m.gguf")
        with path.open("wb") as file:
            file.write(head)
            file.truncate(size)
        with suppress(ModelError):
            file_ = read_gguf(path)
            hub_config(file_)
            for named in hub_tensors(file_):
                assert named.stored.size <= size and math.prod(named.stored.shape) <= 2 * size
            GGUFWeights(path).metadata()
            refuse_oversized(read_model_spec(path), path, free=2**40)
        with suppress(ModelError):
            load_tokenizer(path)
        with suppress(ModelError):
            load_template(path)


@pytest.mark.parametrize(
    ("field", "claimed", "named"),
    [("block_count", 2**31, "num_hidden_layers is"), ("block_count", 4000, "num_hidden_layers 4000")],
)
def test_an_absurd_number_in_a_gguf_file_is_refused(field: str, claimed: int, named: str, tmp_path: Path):
    path = write_gguf(tmp_path / "m.gguf", **{f"llama.{field}": claimed})
    with bounded(), pytest.raises(ModelError, match=named):
        build_device(path, ENGINE)


# ---------------------------------------------------------------------------------------------- tokenizers and templates

CONFIG = {
    "bos_token": "<s>",
    "eos_token": {"content": "</s>"},
    "added_tokens_decoder": {"3": {"content": "<x>", "special": True}},
    "chat_template": [{"name": "default", "template": "{{ messages }}"}],
}
TOKENIZER = {
    "version": "1.0",
    "added_tokens": [
        {
            "id": 0,
            "content": "<s>",
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
    ],
    "model": {"type": "BPE", "vocab": {"<s>": 0, "a": 1, "b": 2, "ab": 3}, "merges": [["a", "b"]]},
}


@fuzzed(st.tuples(replaced(CONFIG), replaced(TOKENIZER)), few=20)
def test_a_tokenizer_and_its_templates_are_read_or_refused(drawn: tuple[Any, Any]) -> None:
    config, tokenizer = drawn
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
        (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
        with suppress(ModelError):
            loaded = load_tokenizer(folder)
            assert loaded is not None and isinstance(loaded.encode("ab"), list)
        with suppress(ModelError):
            load_template(folder)
