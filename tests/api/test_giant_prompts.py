"""The cost of a prompt is bounded before it is tokenised, and the memory of bodies is bounded per tenant.

Guarantees 64 and 63.
"""

from __future__ import annotations

import asyncio
import random
import socket
from typing import Any
from urllib.parse import urlsplit

import pytest
from tokenizers import normalizers, pre_tokenizers

from headgate.api.bodies import BODIES_AT_ONCE, FREE_BYTES, Bodies
from headgate.contract.abort import MOST_NAMES
from headgate.contract.errors import BodyTooLarge, QueueFull
from headgate.edge import reading
from headgate.edge.sharing import Sharing
from headgate.text.bounds import longest_token
from headgate.text.tokenizer import Tokenizer
from tests.api.live import LiveServer
from tests.text.conftest import byte_fallback, byte_level, word_piece

TEXT = "word " * 180_000  # about the largest body that the test server accepts, for a context of 512 tokens
USER = {"role": "user", "content": TEXT}


def test_64_the_names_in_one_abort_are_bounded_because_each_is_looked_up_on_the_event_loop(server: LiveServer):
    response = server.post("/v1/abort_requests", {"req_ids": [f"{i}-1" for i in range(MOST_NAMES + 1)]})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "req_ids"
    response = server.post("/v1/abort_requests", {"req_ids": [f"{i}-1" for i in range(MOST_NAMES)]})
    assert len(response.json()["result"]["not_found"]) == MOST_NAMES


@pytest.mark.parametrize("path", ["/v1/abort_requests", "/abort_request", "/v1/pause"])
def test_64_a_control_body_of_very_many_values_is_refused_before_they_are_built(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch, path: str
):
    monkeypatch.setattr(reading, "CONTROL_VALUES", 1 << 16)
    response = server.post(path, {"req_ids": ["a"] * (1 << 17)})
    assert (response.status_code, response.json()["error"]["code"]) == (400, "too_many_values")


@pytest.mark.parametrize("body", [{"prompt": "a", "x" * 500_000: 1}, {"prompt": "a", "model": "x" * 500_000}])
def test_64_a_refusal_does_not_repeat_a_giant_name(server: LiveServer, body: Any):
    response = server.post("/v1/completions", body)
    assert response.status_code in (400, 404)
    assert len(response.content) < 3000


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": TEXT}),
        ("/v1/completions", {"prompt": ["a", TEXT]}),
        ("/v1/completions", {"prompt": TEXT, "stream": True}),
        ("/v1/chat/completions", {"messages": [USER]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": "text", "text": TEXT}]}]}),
        ("/v1/chat/completions", {"messages": [{"role": "assistant", "content": TEXT}]}),
        ("/v1/responses", {"input": TEXT}),
        ("/v1/responses", {"input": "a", "instructions": TEXT}),
        ("/v1/messages", {"messages": [USER]}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "a"}], "system": TEXT}),
        ("/v1/messages/count_tokens", {"messages": [USER]}),
        ("/generate", {"text": TEXT}),
        ("/tokenize", {"prompt": TEXT}),
        ("/tokenize", {"messages": [USER]}),
    ],
)
def test_64_a_text_that_cannot_fit_is_refused_by_its_length(server: LiveServer, path: str, body: Any):
    response = server.post(path, body)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert error["message"].startswith("prompt has at least ")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": [5] * 600}),
        ("/v1/completions", {"prompt": [[5], [5] * 600]}),
        ("/generate", {"input_ids": [5] * 600}),
        ("/inference/v1/generate", {"token_ids": [5] * 600}),
    ],
)
def test_64_token_ids_that_cannot_fit_are_refused_by_their_number(server: LiveServer, path: str, body: Any):
    response = server.post(path, body)
    assert response.status_code == 400
    assert response.json()["error"]["message"] == "prompt has at least 600 tokens; this model takes 512"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": [5] * 400_000}),
        ("/v1/completions", {"prompt": ["a"] * 200_000}),
        ("/v1/completions", {"prompt": "a", "metadata": [1] * 400_000}),
        ("/v1/chat/completions", {"messages": [{}] * 300_000}),
        ("/inference/v1/generate", {"token_ids": [5] * 400_000}),
    ],
)
def test_64_a_body_of_very_many_values_is_refused_before_they_are_built(server: LiveServer, path: str, body: Any):
    error = server.post(path, body).json()["error"]
    assert error["message"] == "the body has more than 69632 values; this model takes 512 tokens"


def test_64_commas_in_a_string_do_not_count_as_values(server: LiveServer):
    message = server.post("/v1/completions", {"prompt": "a," * 200_000}).json()["error"]["message"]
    assert message.startswith("prompt has at least ")


def test_64_a_text_that_cannot_fit_is_refused_while_it_arrives(server: LiveServer):
    body = b'{"prompt": "' + b"word " * 100_000  # incomplete
    head = b"POST /v1/completions HTTP/1.1\r\nhost: h\r\ncontent-length: 1000000\r\n\r\n"
    address = urlsplit(server.url)
    with socket.create_connection((address.hostname, address.port), 60) as connection:
        connection.sendall(head + body)
        answer = connection.recv(65536)
    assert answer.startswith(b"HTTP/1.1 400 ")


def test_64_many_prompts_of_token_ids_are_not_mistaken_for_a_text(server: LiveServer):
    body = {"prompt": [[100_000_005] * 500] * 64, "max_tokens": 1, "user": ", " + " " * 10_000}
    assert "outside the vocabulary" in server.post("/v1/completions", body).json()["error"]["message"]


def test_64_a_long_text_with_many_quotes_is_refused_too(server: LiveServer):
    response = server.post("/v1/completions", {"prompt": 'a "word" ' * 50_000})
    assert response.json()["error"]["message"].startswith("prompt has at least ")


def stripping() -> Tokenizer:
    tokenizer = byte_level()
    tokenizer.backend.normalizer = normalizers.Strip()
    return tokenizer


def composing() -> Tokenizer:
    tokenizer = byte_level()
    tokenizer.backend.normalizer = normalizers.NFC()
    return Tokenizer(tokenizer.backend)


def removing() -> Tokenizer:
    tokenizer = byte_level()
    tokenizer.backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(" ", "removed"), pre_tokenizers.ByteLevel()]
    )
    return tokenizer


@pytest.mark.parametrize("make", [word_piece, stripping, removing])
def test_64_tokenizers_that_drop_text_have_no_maximum_token_length(make: Any):
    assert longest_token(make().backend) is None


@pytest.mark.parametrize("make", [byte_level, byte_fallback, composing])
def test_64_no_text_has_fewer_tokens_than_the_bound_from_its_length(make: Any):
    tokenizer, draw = make(), random.Random(64)
    longest = longest_token(tokenizer.backend)
    assert longest is not None
    words = [*tokenizer.backend.get_vocab(), " ", "\n", "e\u0301", "α\u0313\u0300\u0345", "하", "\U0001f600", "\x00"]
    for _ in range(300):
        text = "".join(draw.choices(words, k=draw.randrange(1, 60))) * draw.randrange(1, 4)
        ids = tokenizer.encode(text, add_special=False)
        assert len(text) <= longest * len(ids), text


# ------------------------------------------------------------------------------------------------- memory for bodies

MAX = 10 * FREE_BYTES


def bodies(*tenants: str) -> Bodies:
    return Bodies(Sharing(tenants), MAX)


def test_63_the_memory_for_bodies_is_bounded_and_one_tenant_cannot_take_all_of_it():
    shared = bodies("greedy", "polite")
    charges = [shared.charge("greedy") for _ in range(BODIES_AT_ONCE)]
    for charge in charges[:-1]:
        charge.announced(MAX)
    with pytest.raises(QueueFull, match="large requests of"):
        charges[-1].announced(MAX)
    polite = shared.charge("polite")
    polite.announced(MAX // 2)
    for charge in (*charges, polite, polite):
        charge.release()
    assert shared.memory.taken == 0


def test_63_a_single_tenant_has_all_the_memory_for_bodies():
    shared = bodies("only")
    for _ in range(BODIES_AT_ONCE):
        shared.charge("only").announced(MAX)
    with pytest.raises(QueueFull):
        shared.charge("only").announced(MAX)
    shared.charge("only").announced(FREE_BYTES)  # small ones are not counted


def test_63_a_body_of_unknown_length_is_charged_as_it_arrives():
    shared = bodies("a", "b")
    parts = [{"type": "http.request", "body": b"x" * FREE_BYTES, "more_body": True} for _ in range(11)]

    async def receive() -> Any:
        return parts.pop()

    async def main() -> None:
        charge = shared.charge("a")
        counted = charge.counted(receive)
        for count in range(1, 11):
            await counted()
            assert shared.memory.taken == (0 if count == 1 else count * FREE_BYTES)
        with pytest.raises(BodyTooLarge):
            await counted()
        charge.release()
        assert shared.memory.taken == 0

    asyncio.run(main())
