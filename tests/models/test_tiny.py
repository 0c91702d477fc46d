"""The tiny models that many tests use."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoTokenizer

from headgate.device.weights.loading import SafetensorsFolder
from headgate.testing.tiny import NAMES, tiny_model
from tests.models.pages import Pages, load, prompt


@pytest.mark.parametrize("architecture", NAMES)
def test_greedy_answers_are_varied_and_depend_on_the_prompt(tmp_path, architecture):
    model = load(tiny_model(tmp_path, architecture, tokenizer=False), backend="torch")
    answers = {tuple(greedy(model, prompt(10, seed), 24)) for seed in range(4)}
    assert len(answers) == 4
    assert all(len(set(answer)) > 6 for answer in answers)


def greedy(model, tokens, count):
    pages, answer = Pages(model), []
    for _ in range(count):
        tokens = [int(pages.step({"a": tokens})["a"][-1].argmax())]
        answer += tokens
    return answer


def test_the_seed_decides_the_weights(tmp_path):
    first, same, other = (
        dict(SafetensorsFolder(tiny_model(tmp_path / name, seed=seed)))
        for name, seed in [("first", 0), ("same", 0), ("other", 1)]
    )
    assert all(torch.equal(first[name], same[name]) for name in first)
    assert not any(torch.equal(first[name], other[name]) for name in first)


def test_the_tokenizer_round_trips_any_text(tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(tiny_model(tmp_path))
    text = "Grüße, 世界 <|im_start|>\n\x00"
    ids = tokenizer.encode(text)
    assert max(ids) < 260
    assert tokenizer.decode(ids) == text


def test_the_chat_template_marks_turns(tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(tiny_model(tmp_path))
    messages = [{"role": "user", "content": "hi"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.eos_token_id == 256
