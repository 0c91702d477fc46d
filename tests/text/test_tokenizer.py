from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tokenizers.processors import TemplateProcessing

from headgate.errors import BrokenCheckpoint, UnsupportedModel
from headgate.testing.tiny import write_tokenizer
from headgate.text.tokenizer import Tokenizer, load_tokenizer
from tests.text.conftest import byte_fallback, byte_level

TEXTS = ["Hello, world!", "  spaces ", "naïve 你好 😀", "<s>in the text</s>", "a\n\nb", ""]


def save(folder: Path, tokenizer: Tokenizer, **config: Any) -> Path:
    tokenizer.backend.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"} | config
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def adds_bos(tokenizer: Tokenizer) -> Tokenizer:
    specials = [("<s>", tokenizer.bos_id)]
    tokenizer.backend.post_processor = TemplateProcessing(single="<s> $A", pair="<s> $A $B", special_tokens=specials)
    return tokenizer


CHECKPOINTS = {
    "no post-processor": (byte_level, {}),
    "a post-processor that adds BOS": (lambda: adds_bos(byte_level()), {}),
    "a config that would take BOS away": (lambda: adds_bos(byte_level()), {"add_bos_token": False}),
    "a config that would add BOS and EOS": (byte_level, {"add_bos_token": True, "add_eos_token": True}),
    "sentencepiece": (lambda: adds_bos(byte_fallback()), {"bos_token": {"content": "<s>", "__type": "AddedToken"}}),
    "a token that only the config knows": (
        byte_level,
        {"added_tokens_decoder": {"9999": {"content": "<|late|>", "special": True, "normalized": False}}},
    ),
}


@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
def test_ids_and_text_are_those_of_transformers(tmp_path: Path, checkpoint: str) -> None:
    from transformers import AutoTokenizer

    build, config = CHECKPOINTS[checkpoint]
    folder = save(tmp_path, build(), **config)
    ours, theirs = load_tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    assert ours is not None
    assert (ours.vocab_size, ours.bos_id, ours.eos_id) == (len(theirs), theirs.bos_token_id, theirs.eos_token_id)
    for text in [*TEXTS, "<|late|>"]:
        for add in (True, False):
            assert ours.encode(text, add_special=add) == theirs.encode(text, add_special_tokens=add)
        ids = theirs.encode(text)
        for skip in (True, False):
            theirs_text = theirs.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
            assert ours.decode(ids, skip_special=skip) == theirs_text


def test_a_saved_length_limit_does_not_cut_prompts(tmp_path: Path) -> None:
    tokenizer = byte_level()
    tokenizer.backend.enable_truncation(max_length=3)
    tokenizer.backend.enable_padding(length=8)
    loaded = load_tokenizer(save(tmp_path, tokenizer))
    assert loaded is not None
    assert loaded.decode(loaded.encode("Hello, world!")) == "Hello, world!"


def test_a_tiny_model_has_one_token_per_byte(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer is not None
    assert len(tokenizer.encode("né")) == 3
    assert tokenizer.eos_id in tokenizer.special_ids


def test_a_folder_without_a_tokenizer_has_none(tmp_path: Path) -> None:
    assert load_tokenizer(tmp_path) is None


def test_a_broken_tokenizer_is_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(BrokenCheckpoint, match=r"tokenizer\.json"):
        load_tokenizer(tmp_path)


def test_an_unreadable_vocabulary_is_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"not a sentencepiece model")
    with pytest.raises(UnsupportedModel, match="cannot be loaded"):
        load_tokenizer(tmp_path)


def test_reading_a_tokenizer_json_imports_neither_transformers_nor_torch(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    script = (
        "import sys, pathlib; from headgate.text.tokenizer import load_tokenizer;"
        "assert load_tokenizer(pathlib.Path(sys.argv[1])).encode('hi');"
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=True)
