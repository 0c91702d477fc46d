"""Request bodies: any body gets a 200 or a 4xx with a reason, and the engine gets only valid requests."""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import AsyncGenerator
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import strategies as st

from headgate.api.app import ServerApp
from headgate.contract.control import UpdateRequest, source_of
from headgate.contract.decoding import convert
from headgate.engine.client import Chunk
from headgate.errors import RequestError
from headgate.protocol.command import Source
from headgate.protocol.output import Ended, Timings
from headgate.protocol.plan import Logprobs
from headgate.protocol.request import GenerateRequest
from headgate.router.data_path.request_info import read_request_info
from headgate.testing.tiny import tiny_model
from headgate.text.tokenizer import Tokenizer, load_tokenizer
from tests.api.scripted import Client, ScriptedEngines, scripted_app
from tests.fuzzing.properties import bounded, damaged, fuzzed, odd_text, odd_values, replaced

CHAT = {
    "model": "scripted",
    "messages": [
        {"role": "system", "content": "s"},
        {"role": "user", "content": [{"type": "text", "text": "hi"}]},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
        },
        {"role": "tool", "content": "4", "tool_call_id": "1"},
    ],
    "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
    "tool_choice": "auto",
    "response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "object"}}},
    "max_tokens": 4,
    "n": 1,
    "stop": ["x"],
    "logit_bias": {"5": 1.0},
    "logprobs": True,
    "top_logprobs": 2,
    "seed": 7,
    "tags": {"a": "b"},
    "stream_options": {"include_usage": True},
    "chat_template_kwargs": {"enable_thinking": False},
    "deadline_ms": 1000,
}
COMPLETION = {
    "prompt": "a",
    "max_tokens": 4,
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 4,
    "min_p": 0.1,
    "logprobs": 1,
    "prompt_logprobs": 2,
    "echo": True,
    "stop_token_ids": [3],
    "request_id": "r",
    "generated_token_ids": [1],
    "cache_salt": "s",
    "priority": 1,
}
RESPONSES = {
    "input": [{"role": "user", "content": "hi"}],
    "instructions": "i",
    "max_output_tokens": 4,
    "text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "object"}}},
    "tools": [{"type": "function", "name": "f", "parameters": {"type": "object"}}],
}
MESSAGES = {
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "hi"}]},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "f", "input": {"x": 1}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": "y", "is_error": False}]},
    ],
    "system": "i",
    "max_tokens": 4,
    "stop_sequences": ["x"],
    "tools": [{"name": "f", "input_schema": {"type": "object"}}],
    "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
    "thinking": {"type": "disabled"},
    "metadata": {"user_id": "u"},
}
GENERATE = {
    "text": "hi",
    "sampling_params": {"max_new_tokens": 4, "stop": "x", "json_schema": "{}", "regex": None},
    "return_logprob": True,
    "rid": "1",
}
BODIES = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": COMPLETION,
    "/v1/responses": RESPONSES,
    "/v1/messages": MESSAGES,
    "/v1/messages/count_tokens": {name: MESSAGES[name] for name in ("messages", "system", "tools", "thinking")},
    "/generate": GENERATE,
    "/v1/embeddings": {"input": ["hi", "ho"], "dimensions": 2, "encoding_format": "float", "normalize": True},
    "/v1/score": {"text_1": "hi", "text_2": ["hi", "ho"], "priority": 1},
    "/rerank": {"query": "hi", "documents": ["ho", {"text": "hi"}], "top_n": 1, "return_documents": True},
    "/tokenize": {"prompt": "hi", "add_special_tokens": True},
    "/detokenize": {"tokens": [1, 2]},
    "/v1/abort_requests": {"req_ids": ["a"], "abort_all": False, "wait": True, "timeout": 1.0, "tags": {"a": "b"}},
}


async def answered(request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
    if request.pooling is not None:
        yield Chunk(
            vector=bytes(16), ended=Ended(request.id, "length", "max_tokens", 1, 0, 0, Timings(0, 0, None, 0))
        )
        return
    scores = Logprobs(-1.0, (104,), (-1.0,))
    if request.sampling.prompt_logprobs is not None:
        yield Chunk(prompt_logprobs=[scores] * (len(request.prompt) - 1))
    for token in (104, 105):
        yield Chunk(tokens=[token], versions=[0], logprobs=[scores] if request.sampling.logprobs is not None else [])
    yield Chunk(ended=Ended(request.id, "stop", "eos", len(request.prompt), 0, 2, Timings(0.0, 0.0, 0.0, 0.0)))


@cache
def folder() -> Path:
    return tiny_model(Path(tempfile.mkdtemp(prefix="headgate-fuzz-")) / "tiny")


@cache
def app() -> ServerApp:
    return scripted_app(folder(), ScriptedEngines(answered))


@cache
def tokenizer() -> Tokenizer:
    loaded = load_tokenizer(folder())
    assert loaded is not None
    return loaded


LOOP = asyncio.new_event_loop()


def post(path: str, body: bytes) -> tuple[int, bytes]:
    client = Client(app(), path, None)
    client._sent = [{"type": "http.request", "body": body, "more_body": False}]
    LOOP.run_until_complete(asyncio.wait_for(client.call(), 60))
    return client.status, client.body


@st.composite
def bodies(draw: Any) -> tuple[str, bytes]:
    path = draw(st.sampled_from(sorted(BODIES)))
    valid: Any = BODIES[path]
    if draw(st.integers(0, 3)):
        kept = {key: value for key, value in valid.items() if draw(st.integers(0, 3))}
        changed = draw(replaced(kept | {"stream": True} if draw(st.booleans()) else kept))
        return path, json.dumps(changed).encode()
    return path, draw(damaged(json.dumps(valid).encode()))


ODD = (
    b"",
    b"null",
    b"[]",
    b'"\\ud800"',
    b'{"prompt": "\\ud800"}',
    b'{"prompt": "\xed\xa0\x80"}',
    b'{"messages": [{"role": "user", "content": "\\udc00"}]}',
    b'{"prompt": ' + b"[" * 50_000,
    b'{"messages": ' + b'{"a":' * 50_000,
    b'{"prompt": 1e999}',
    b'{"prompt": "a", "temperature": NaN}',
    b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}",
    b'{"prompt": "a", "prompt": ["b"]}',
    b"\xff\xfe{}",
    b'\xef\xbb\xbf{"prompt": "a"}',
)


def check(path: str, body: bytes) -> None:
    status, answer = post(path, body)
    assert status == 200 or 400 <= status < 500, (status, answer)
    if status != 200:
        problem = json.loads(answer)["error"]
        assert set(problem) == {"message", "type", "param", "code"} and problem["message"]


@fuzzed(bodies(), few=30)
def test_any_body_is_answered_or_refused_with_a_reason(drawn: tuple[str, bytes]) -> None:
    check(*drawn)


@pytest.mark.parametrize("path", sorted(BODIES))
def test_almost_valid_json_is_refused_with_a_reason(path: str):
    for body in ODD:
        check(path, body)


def test_the_undamaged_bodies_are_valid():
    """If the undamaged bodies were invalid, only the first check would ever be tested."""
    for path, body in BODIES.items():
        if path != "/v1/abort_requests":
            status, answer = post(path, json.dumps(body).encode())
            assert status == 200, (path, answer)


# ------------------------------------------------------------------------------------------------------- the router's


@fuzzed(bodies(), few=30)
def test_the_router_reads_a_body_or_refuses_it(drawn: tuple[str, bytes]) -> None:
    with suppress(RequestError):
        ask = read_request_info(*drawn)
        assert ask.tokens >= 0 and len(ask.prompt) <= len(drawn[1])


# ----------------------------------------------------------------------------------------------------- weight updates

UPDATE = {"path": "/m", "version": 3, "verify_checksum": {"a": "b"}, "kv": "keep", "timeout": 3.0}
GROUP = {
    "group": {"init_method": "tcp://127.0.0.1:1", "world_size": 2, "rank": 1, "timeout": 3.0, "backend": "gloo"},
    "version": 3,
}
SHARED = {
    "shared": {
        "gpu": "x",
        "storages": [],
        "tensors": [{"name": "a", "dtype": "float32", "shape": [1], "storage": 0, "start": 0}],
    }
}


@fuzzed(st.one_of(*map(replaced, (UPDATE, GROUP, SHARED)), odd_values), few=30)
def test_any_update_body_is_accepted_or_refused(body: Any) -> None:
    with suppress(RequestError):
        assert isinstance(source_of(convert(body, UpdateRequest, "")), Source)


# ---------------------------------------------------------------------------------------------------------- tokenizers


@fuzzed(odd_text, few=30)
def test_any_text_survives_tokenising_and_detokenising(text: str) -> None:
    ids = tokenizer().encode(text, add_special=False)
    assert all(0 <= id < tokenizer().vocab_size for id in ids)
    assert tokenizer().decode(ids, skip_special=False) == text


@pytest.mark.parametrize(
    "text", ["a" * 1_000_000, "\u0301" * 300_000, " " * 1_000_000, "漢" * 300_000, "a b" * 300_000]
)
@pytest.mark.slow
def test_a_huge_text_is_tokenised_in_bounded_time(text: str):
    with bounded(30):
        assert len(tokenizer().encode(text)) >= len(text) // 10
