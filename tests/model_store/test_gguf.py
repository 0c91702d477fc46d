from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from headgate.device.weights.gguf import GGUFWeights
from headgate.device.weights.loading import TensorInfo
from headgate.errors import BrokenCheckpoint, UnsupportedModel
from headgate.model_store.gguf import hub_config, read_gguf
from headgate.text.template import load_template
from headgate.text.tokenizer import load_tokenizer
from tests.model_store.files import END, HEAD_DIM, TOKENS, write_gguf
from tests.model_store.reference import reference_config, reference_tensors, reference_tokenizer

KINDS = ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K"]
TEXTS = [
    "hello world",
    "  spaces\n\n",
    "naïve 你好 😀",
    "<|im_start|>user\nhi<|im_end|>",
    "12 and 1234.5",
    "it's I'LL",
    "",
]

SAME_NAMES = """
    hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads rms_norm_eps vocab_size
    max_position_embeddings tie_word_embeddings bos_token_id eos_token_id model_type hidden_act
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "model.gguf"


def same_as_transformers(path: Path) -> None:
    ours, theirs = dict(GGUFWeights(path)), reference_tensors(path)
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert torch.equal(ours[name].float(), tensor.float()), name


@pytest.mark.parametrize("kind", KINDS)
def test_tensors_of_every_number_format_are_those_of_transformers(path: Path, kind: str) -> None:
    same_as_transformers(write_gguf(path, "llama", kind=kind))


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3", "llama"])
@pytest.mark.parametrize("tied", [True, False])
def test_tensors_of_every_family_are_those_of_transformers(path: Path, architecture: str, tied: bool) -> None:
    same_as_transformers(write_gguf(path, architecture, tied=tied, kind="Q8_0"))


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [True, False])
def test_the_config_is_that_of_transformers(path: Path, architecture: str, tied: bool) -> None:
    write_gguf(path, architecture, tied=tied)
    ours, theirs = hub_config(read_gguf(path)), reference_config(path)
    names = SAME_NAMES.split()
    assert {name: ours[name] for name in names} == {name: getattr(theirs, name) for name in names}
    assert ours["rope_theta"] == theirs.rope_parameters["rope_theta"]
    # For qwen3 `transformers` does not read the width of a head and takes its default, which need not fit the weights.
    assert ours["head_dim"] == HEAD_DIM


def test_metadata_matches_what_iteration_yields(path: Path) -> None:
    weights = GGUFWeights(write_gguf(path, kind="Q4_0"), dtype=torch.bfloat16)
    given = {name: TensorInfo(tensor.dtype, tuple(tensor.shape)) for name, tensor in weights}
    assert given == weights.metadata()
    assert torch.bfloat16 in {info.dtype for info in given.values()}


@pytest.mark.parametrize("pre", ["qwen2", "llama-bpe", "tekken", "gpt-2"])
def test_the_tokenizer_is_that_of_transformers(path: Path, pre: str) -> None:
    write_gguf(path, pre=pre)
    ours, theirs = load_tokenizer(path), reference_tokenizer(path)
    assert ours is not None
    assert (ours.bos_id, ours.eos_id, ours.vocab_size) == (END + 1, END, len(TOKENS))
    for text in TEXTS:
        assert ours.encode(text, add_special=False) == theirs.encode(text, add_special_tokens=False), text
        assert ours.decode(ours.encode(text), skip_special=False) == text


def test_smollm_splits_digits_one_by_one(path: Path) -> None:
    """`transformers` ignores this rule; no file in use has merges of digits, but the rule belongs to the model."""
    tokenizer = load_tokenizer(write_gguf(path, pre="smollm"))
    assert tokenizer is not None
    assert [tokenizer.decode([token_id]) for token_id in tokenizer.encode("hello 12")] == ["hello", " ", "1", "2"]


@pytest.mark.parametrize("add_bos", [True, False])
def test_bos_is_added_when_the_file_says_so(path: Path, add_bos: bool) -> None:
    tokenizer = load_tokenizer(write_gguf(path, tokenizer__ggml__add_bos_token=add_bos))
    assert tokenizer is not None
    assert (tokenizer.encode("hi")[0] == tokenizer.bos_id) is add_bos
    assert tokenizer.encode("hi", add_special=False)[0] != tokenizer.bos_id


def test_the_chat_template_is_in_the_file(path: Path) -> None:
    template = load_template(write_gguf(path))
    assert template is not None
    assert template.render([{"role": "user", "content": "hi"}]) == "<|im_start|>user: hi\n"


def test_every_id_that_ends_a_turn_is_an_eos(path: Path) -> None:
    write_gguf(path, tokenizer__ggml__eot_token_id=END + 2)
    assert hub_config(read_gguf(path))["eos_token_id"] == [END, END + 2]


def llama3_factors(theta: float, factor: float) -> np.ndarray:
    """Return the factors as llama.cpp's converter computes them."""
    factors = []
    for i in range(0, HEAD_DIM, 2):
        wavelength = 2 * math.pi * theta ** (i / HEAD_DIM)
        if wavelength < 8192 / 4:
            factors.append(1.0)
        elif wavelength > 8192 / 1:
            factors.append(factor)
        else:
            smooth = (8192 / wavelength - 1) / (4 - 1)
            factors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(factors, dtype=np.float32)


def test_llama_3_scaling_is_recovered_from_its_table(path: Path) -> None:
    write_gguf(path, tensors={"rope_freqs.weight": llama3_factors(50000.0, 32.0)})
    assert hub_config(read_gguf(path))["rope_scaling"] == {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    assert "rope_freqs.weight" not in GGUFWeights(path).metadata()


def test_another_table_of_rotary_factors_is_refused(path: Path) -> None:
    write_gguf(path, tensors={"rope_freqs.weight": np.linspace(1, 2, HEAD_DIM // 2, dtype=np.float32)})
    with pytest.raises(UnsupportedModel, match="rotary factors"):
        hub_config(read_gguf(path))


def test_a_file_cut_anywhere_is_a_broken_checkpoint(path: Path) -> None:
    whole = write_gguf(path).read_bytes()
    for size in [0, 3, 10, 100, 5000, len(whole) // 2, len(whole) - 100]:
        path.write_bytes(whole[:size])
        with pytest.raises(BrokenCheckpoint, match=r"cut short|not a GGUF"):
            read_gguf(path)


def test_a_length_beyond_the_file_is_rejected(path: Path) -> None:
    path.write_bytes(b"GGUF" + (3).to_bytes(4, "little") + (2**60).to_bytes(8, "little") * 3)
    with pytest.raises(BrokenCheckpoint, match="cut short"):
        read_gguf(path)


def test_unsupported_files_are_refused_by_name(path: Path) -> None:
    write_gguf(path, "gemma2")
    with pytest.raises(UnsupportedModel, match="gemma2"):
        hub_config(read_gguf(path))
    write_gguf(path, "qwen2", qwen2__expert_count=8)
    with pytest.raises(UnsupportedModel, match="qwen2; GGUF files of mixtures of experts llama, qwen2moe"):
        hub_config(read_gguf(path))
    write_gguf(path, split__count=3)
    with pytest.raises(UnsupportedModel, match="llama-gguf-split"):
        read_gguf(path)
