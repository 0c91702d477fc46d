from __future__ import annotations

from typing import Any

import pytest

from tests.api.live import MODEL, LiveServer


@pytest.mark.parametrize("text", ["", "plain", "naïve 😀 文字", "<|im_start|>"])
def test_tokenize_and_detokenize_are_inverse(server: LiveServer, text: str):
    answer = server.post("/tokenize", {"prompt": text}).json()
    assert answer["count"] == len(answer["tokens"]) and answer["max_model_len"] == 512
    assert server.post("/detokenize", {"tokens": answer["tokens"]}).json() == {"prompt": text}


def test_messages_are_tokenised_like_those_of_chat(server: LiveServer):
    messages = [{"role": "user", "content": "hi"}]
    tokens = server.post("/tokenize", {"messages": messages}).json()["tokens"]
    chat = {"messages": messages, "max_tokens": 1, "return_token_ids": True}
    assert tokens == server.post("/v1/chat/completions", chat).json()["choices"][0]["prompt_token_ids"]
    without = server.post("/tokenize", {"messages": messages, "add_generation_prompt": False}).json()["tokens"]
    assert tokens[: len(without)] == without and len(without) < len(tokens)


def test_token_strings_can_be_returned_and_special_tokens_skipped(server: LiveServer):
    answer = server.post("/tokenize", {"prompt": "a<|im_end|>", "return_token_strs": True}).json()
    assert answer["token_strs"] == ["a", "<|im_end|>"]
    body = {"tokens": answer["tokens"], "skip_special_tokens": True}
    assert server.post("/detokenize", body).json()["prompt"] == "a"


def test_a_long_text_is_tokenised_too(server: LiveServer):
    assert server.post("/tokenize", {"prompt": "word " * 10_000}).json()["count"] == 50_000


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": [{"role": "user", "content": "a"}]}, "prompt"),
        ("/tokenize", {"prompt": 1}, "prompt"),
        ("/detokenize", {"tokens": ["a"]}, "tokens[0]"),
        ("/detokenize", {"tokens": [-1]}, "tokens[0]"),
        ("/detokenize", {"tokens": [], "x": 1}, "x"),
    ],
)
def test_wrong_bodies_are_refused(server: LiveServer, path: str, body: Any, param: str):
    response = server.post(path, body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


def test_ids_beyond_the_vocabulary_have_no_text(server: LiveServer):
    assert server.post("/detokenize", {"tokens": [64, 4_000_000_000]}).json() == {"prompt": "a"}


def test_the_served_model_is_listed_and_found(server: LiveServer):
    with server.http as http:
        listed = http.get("/v1/models").json()
        assert [model["id"] for model in listed["data"]] == [MODEL]
        assert http.get(f"/v1/models/{MODEL}").json() == listed["data"][0]
        assert http.get("/v1/models/other").status_code == 404
