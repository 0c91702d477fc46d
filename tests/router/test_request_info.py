from __future__ import annotations

import json
from typing import Any

import pytest

from headgate.errors import RequestError
from headgate.router.data_path.request_info import RequestInfo, read_request_info
from headgate.router.fleet.prefix_index import PrefixIndex
from headgate.router.fleet.worker import Worker
from tests.router.compiled import compiled_fast_path

CHAT, COMPLETIONS, GENERATE = "/v1/chat/completions", "/v1/completions", "/generate"
HELLO = [{"role": "user", "content": "Hello, {water}!"}]


def read_with_c(path: str, body: bytes, **named: Any) -> RequestInfo:
    return read_request_info(path, body, peek=compiled_fast_path().peek, **named)


def ask(path: str = CHAT, /, *, session: str | None = None, tenant: str = "", **body: Any) -> RequestInfo:
    return read_with_c(path, json.dumps(body).encode(), session=session, tenant=tenant)


def test_only_the_fields_that_the_router_needs_are_read():
    read = ask(model="m", messages=HELLO, stream=True, request_id="r", n=3, temperature={"not": ["looked", "at"]})
    assert (read.model, read.stream, read.request_id, read.n, read.chat) == ("m", True, "r", 3, True)
    assert read.prompt == json.dumps(HELLO).encode()[:-1]


@pytest.mark.parametrize(
    ("path", "body", "prompt", "chat", "tokens"),
    [
        (CHAT, {"messages": HELLO}, json.dumps(HELLO)[:-1], True, 11),
        (COMPLETIONS, {"prompt": "x" * 400}, '"' + "x" * 400, False, 100),
        (COMPLETIONS, {"prompt": ["one", "two"]}, '["one", "two"', False, 3),
        (COMPLETIONS, {"prompt": [1, 2, 3]}, "[1, 2, 3", False, 3),
        (COMPLETIONS, {"prompt": [[1, 2], [3, 4]]}, "[[1, 2], [3, 4]", False, 4),
        (GENERATE, {"text": "Hello"}, '"Hello', False, 1),
        (GENERATE, {"input_ids": [7, 8]}, "[7, 8", False, 2),
        ("/inference/v1/generate", {"token_ids": [7, 8]}, "[7, 8", False, 2),
        ("/v1/responses", {"input": HELLO}, json.dumps(HELLO)[:-1], True, 11),
        ("/v1/messages", {"system": "Be kind.", "messages": HELLO}, json.dumps(HELLO)[:-1], True, 11),
        (COMPLETIONS, {"prompt": ""}, "", False, 0),
        (COMPLETIONS, {"prompt": []}, "", False, 0),
        (COMPLETIONS, {"prompt": None}, "", False, 0),
        (CHAT, {}, "", False, 0),
        (CHAT, {"messages": "not a list"}, '"not a list', False, 2),
        (CHAT, {"messages": 7}, "", False, 0),
        (CHAT, {"messages": {"a": 1}}, '{"a": 1', False, 1),
    ],
)
def test_40_every_kind_of_prompt_can_be_looked_up(path: str, body: Any, prompt: str, chat: bool, tokens: int):
    read = ask(path, **body)
    assert (read.prompt, read.chat, read.tokens) == (prompt.encode(), chat, tokens)
    index = PrefixIndex(fast_path=compiled_fast_path())
    way = index.path(read.root, read.prompt, chat=read.chat)
    assert not index.match(way).found
    index.insert(way, worker := Worker("http://w")).end(1.0)
    assert list(index.match(way).found) == ([worker] if prompt else [])


@pytest.mark.parametrize(
    ("body", "choices"),
    [
        ({"prompt": "one"}, 1),
        ({"prompt": ["one", "two"]}, 2),
        ({"prompt": ["one", "two"], "n": 3}, 6),
        ({"prompt": [1, 2, 3], "n": 2}, 2),
        ({"prompt": [[1, 2], [3], [4]]}, 3),
        ({"prompt": ["one", 2]}, 2),
        ({"prompt": []}, 1),
        ({"messages": HELLO * 3, "n": 2}, 2),
    ],
)
def test_an_answer_has_the_choices_of_all_its_prompts(body: Any, choices: int):
    assert ask(COMPLETIONS, **body).n == choices


def test_spaces_and_line_breaks_do_not_hide_messages():
    read = read_with_c(CHAT, b'{"messages": [\n    {"role": "user", "content": "x"}\n  ]}')
    assert read.chat and read.prompt.endswith(b'"x"}\n  ')


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        (b"", "not valid JSON"),
        (b"{", "not valid JSON"),
        (b'{"model": "\xff"}', "not valid JSON"),
        (b"[" * 100_000, "cannot read this request|not valid JSON"),
        (b"[1, 2]", r"cannot read this request: Expected `object`, got `array`"),
        (b'{"model": 5}', r"cannot read this request: .*model"),
        (b'{"stream": "yes"}', r"cannot read this request: .*stream"),
        (b'{"n": 1.5}', r"cannot read this request: .*n"),
    ],
)
def test_an_invalid_request_is_refused_with_the_reason(body: bytes, sentence: str):
    with pytest.raises(RequestError, match=sentence) as caught:
        read_with_c(CHAT, body)
    assert caught.value.status == 400


def test_the_session_comes_from_the_header_or_else_from_the_body():
    assert ask(session_id="s", user="u").session == b'"s"'
    assert ask(user="u").session == b'"u"'
    assert ask(user={"any": "thing"}).session == b'{"any": "thing"}', "a worker ignores it, so the router does too"
    assert ask(session_id="s", session="header").session == b"header"
    assert ask().session == b""


def test_the_request_id_may_have_its_sglang_name():
    assert ask(GENERATE, rid="r", text="x").request_id == "r"
    assert ask(GENERATE, rid=["r", "s"], text="x").request_id is None, "several prompts have no single id"
    assert ask(GENERATE, rid="", text="x").request_id is None
    assert read_with_c(GENERATE, b'{"rid": "\xff", "text": "x"}').request_id is None, "the worker reports the error"


@pytest.mark.parametrize(
    ("body", "asked"),
    [
        ({"logprobs": True}, True),
        ({"logprobs": 0}, True),
        ({"return_logprob": True}, True),
        ({"logprobs": False}, False),
        ({"logprobs": None}, False),
        ({"prompt_logprobs": 0}, True),
        ({"prompt_logprobs": None}, False),
        ({"sampling_params": {"logprobs": 1}}, True),
        ({"sampling_params": {"prompt_logprobs": 0}}, True),
        ({"sampling_params": {"logprobs": None, "max_tokens": 1}}, False),
        ({}, False),
    ],
)
def test_requests_for_logprobs_are_recognised(body: dict[str, Any], asked: bool):
    assert ask(**body).logprobs is asked


@pytest.mark.parametrize(
    ("path", "body", "choices"),
    [
        ("/generate/", {"prompts": [[1, 2, 3], [4]], "n": 4}, 8),
        ("/generate/", {"prompts": ["one", "two"], "logprobs": None}, 2),
        ("/chat/", {"messages": [HELLO, HELLO], "n": 4}, 8),
        ("/chat/", {"messages": [HELLO]}, 1),
        ("/get_sequence_logprobs/", {"sequences": [[1, 2, 3], [4]]}, 2),
    ],
)
def test_a_batch_of_trl_has_all_its_answers_and_is_never_resumed(path: str, body: dict[str, Any], choices: int):
    read = ask(path, **body)
    assert (read.n, read.logprobs, read.stream) == (choices, True, False)
    assert read.prompt and read.tokens


def test_prompts_that_cannot_share_kv_have_different_roots():
    roots = [
        ask(messages=HELLO).root,
        ask(COMPLETIONS, messages=HELLO).root,
        ask(messages=HELLO, model="other").root,
        ask(messages=HELLO, tools=[{"name": "f"}]).root,
        ask(messages=HELLO, instructions="Be kind").root,
        ask(messages=HELLO, cache_salt="salt").root,
        ask(messages=HELLO, tenant="tenant").root,
    ]
    assert len(set(roots)) == len(roots)
    assert ask(messages=HELLO, temperature=1, user="u").root == roots[0]
