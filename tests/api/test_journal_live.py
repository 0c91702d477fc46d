"""Guarantees 36 and 56 with two real servers: one continues the other's answer, wherever it was cut.

The grouping of tokens into events depends on timing, so the tests compare the combined content of a choice's events.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import pytest

from headgate.contract.keys import Keys
from headgate.testing.tiny import tiny_model
from tests.api.clients import Missed, post, unless_missed, until
from tests.api.live import LiveServer, live_server
from tests.api.test_moved import rounded
from tests.journal import blocks, resume_of, shown, unveiled

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
NAMES = count()
CREATED = 1700000000

Pair = tuple[LiveServer, LiveServer]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("journal") / "tiny", max_position_embeddings=32768)


@pytest.fixture(scope="module")
def pair(model: Path) -> Iterator[Pair]:
    with ExitStack() as stack:
        first, second = (
            stack.enter_context(live_server(model, device="cpu", kv_blocks=4096, block_size=16)) for _ in range(2)
        )
        yield first, second


def ask(server: LiveServer, path: str, body: dict[str, Any], name: str) -> bytes:
    """Return the body of an answer with a journal. Requests share no cached prefix, so usage is always the same."""
    headers = {"X-Headgate-Journal": str(CREATED), "X-Request-Id": name}
    response = server.post(path, body | {"cache_salt": str(next(NAMES))}, headers=headers)
    assert response.status_code == 200, response.text
    assert response.headers["x-headgate-journal"] == "1"
    return response.content


def summed(events: bytes) -> dict[str, Any]:
    """Return the combined content of an answer's events, however they were split."""
    told: dict[str, Any] = {"choices": {}, "heads": set(), "done": 0, "usage": [], "errors": []}
    for line in events.decode().split("\n"):
        if line == "data: [DONE]":
            told["done"] += 1
        elif line:
            event = json.loads(line.removeprefix("data: "))
            told["heads"].add(tuple(event.pop(name, None) for name in ("id", "object", "created", "model")))
            told["usage"] += [event["usage"]] if event.get("usage") else []
            told["errors"] += [event["error"]] if "error" in event else []
            for choice in event.get("choices", ()):
                add_up(told["choices"].setdefault(choice.pop("index"), {}), choice)
    return rounded(told)


def add_up(total: Any, more: dict[str, Any]) -> None:
    for name, value in more.items():
        match value:
            case str() if name in ("text", "content", "arguments"):
                total[name] = total.get(name, "") + value
            case dict():
                add_up(total.setdefault(name, {}), value)
            case list() if name == "tool_calls":
                for piece in value:
                    add_up(total.setdefault(name, {}).setdefault(piece.pop("index"), {}), piece)
            case list() if name == "weight_versions":
                total.setdefault(name, []).extend(span["version"] for span in value for _ in range(span["tokens"]))
            case list():
                total.setdefault(name, []).extend(value)
            case None:
                pass
            case _:
                total.setdefault(name, []).append(value)  # a role or an id that occurs twice is detected


NUMBERS = {"type": "array", "items": {"type": "integer"}, "minItems": 5}
TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {
            "type": "object",
            "properties": {"numbers": NUMBERS},
            "required": ["numbers"],
            "additionalProperties": False,
        },
    },
}
CHATTING = {"messages": [{"role": "user", "content": "naïve 😀 文字"}], "max_tokens": 24, "seed": 7}
COMPLETING = {"prompt": "go on", "max_tokens": 24, "seed": 3, "ignore_eos": True}
USAGE = {"stream_options": {"include_usage": True}}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "many", "schema": NUMBERS}}
TAGGED = {
    "type": "structural_tag",
    "format": {
        "type": "tag",
        "begin": "<n>",
        "content": {"type": "json_schema", "json_schema": NUMBERS},
        "end": "</n>",
    },
}

FEATURES: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": (CHAT, CHATTING | USAGE),
    "without a seed": (CHAT, CHATTING | {"seed": None, "temperature": 1.5}),
    "three choices": (CHAT, CHATTING | USAGE | {"n": 3, "max_tokens": 10, "return_token_ids": True}),
    "tools": (CHAT, CHATTING | {"tools": [TOOL], "tool_choice": "required", "max_tokens": 60}),
    "structured": (CHAT, CHATTING | USAGE | {"response_format": SCHEMA, "max_tokens": 40}),
    "structural tag": (CHAT, CHATTING | USAGE | {"response_format": TAGGED, "max_tokens": 40}),
    "two prompts": (
        COMPLETIONS,
        COMPLETING
        | USAGE
        | {"prompt": ["go on", "go away"], "n": 2, "max_tokens": 8, "return_weight_versions": True},
    ),
    "penalties": (COMPLETIONS, COMPLETING | {"repetition_penalty": 1.3, "presence_penalty": 0.5}),
    "stop strings": (COMPLETIONS, COMPLETING | USAGE | {"stop": ["6", "jj", "E"], "max_tokens": 80}),
    "echo and ids": (COMPLETIONS, COMPLETING | {"echo": True, "return_token_ids": True}),
    "eos": (COMPLETIONS, COMPLETING | USAGE | {"ignore_eos": False, "logit_bias": {"256": 8}, "max_tokens": 200}),
}
SCORED: dict[str, tuple[str, dict[str, Any]]] = {
    "logprobs": (COMPLETIONS, COMPLETING | {"logprobs": 3, "stop": ["zzz"]}),
    "echo and logprobs": (COMPLETIONS, COMPLETING | {"echo": True, "logprobs": 1, "max_tokens": 10}),
    "chat logprobs": (CHAT, CHATTING | {"logprobs": True, "top_logprobs": 2, "n": 2, "max_tokens": 10}),
}


@pytest.mark.parametrize("name", [*FEATURES, *SCORED])
def test_36_56_a_stream_cut_anywhere_and_continued_by_another_server_is_identical(pair: Pair, name: str):
    path, body = (FEATURES | SCORED)[name]
    body = body | {"stream": True}
    whole = ask(pair[0], path, body, name.replace(" ", "-"))
    told, undisturbed = blocks(whole), summed(shown(whole))
    assert undisturbed["done"] == 1 and len(undisturbed["heads"]) == 1
    for k in range(len(told)):
        resume = {"resume": resume_of(told[:k], stream=True)}
        rest = ask(pair[1], path, body | resume, name.replace(" ", "-"))
        assert summed(shown(b"".join(told[:k]) + rest)) == undisturbed, f"cut before block {k}: {told[k]!r}"


@pytest.mark.parametrize("name", FEATURES)
def test_36_56_a_complete_answer_cut_anywhere_and_continued_by_another_server_is_identical(pair: Pair, name: str):
    path, body = FEATURES[name]
    streamed = blocks(ask(pair[0], path, body | {"stream": True}, name.replace(" ", "-")))
    whole = shown(ask(pair[0], path, body, name.replace(" ", "-")))
    for k in range(len(streamed)):
        # The journal of a stream has every possible cut; that of a complete answer only some.
        resume = {"resume": resume_of(streamed[:k], stream=False)}
        rest = shown(ask(pair[1], path, body | resume, name.replace(" ", "-")))
        assert rest == whole, f"cut before block {k}: {streamed[k]!r}"


@pytest.mark.parametrize("stream", [True, False])
def test_two_servers_write_the_same_journal(pair: Pair, stream: bool):
    """Checks the assumption of the two tests above, which compare with an uninterrupted run on the first server only."""
    path, body = FEATURES["without a seed"]
    first, second = (ask(server, path, body | {"stream": stream}, "same") for server in pair)
    assert summed(shown(first)) == summed(shown(second))
    assert resume_of(blocks(first), stream=stream)["choices"][0]["token_ids"]


def test_an_answer_that_has_all_its_tokens_ends_at_once(pair: Pair):
    body = COMPLETING | USAGE | {"stream": True, "max_tokens": 4}
    resume = {"choices": [{"index": 0, "token_ids": [70, 71, 72, 73], "versions": [[0, 4]], "delivered_chars": 3}]}
    told = summed(shown(ask(pair[1], COMPLETIONS, body | {"resume": resume}, "full")))
    choice = told["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["cause"]) == ("j", ["length"], ["max_tokens"])
    assert told["usage"][0]["completion_tokens"] == 4


# -- a pause in the middle -----------------------------------------------------------------------------------------------


async def read(server: LiveServer, body: dict[str, Any], headers: dict[str, str], told: bytearray) -> None:
    async with (
        httpx.AsyncClient(base_url=server.url, timeout=60) as client,
        client.stream("POST", COMPLETIONS, json=body, headers=headers) as answer,
    ):
        assert answer.status_code == 200
        async for data in answer.aiter_raw():
            told += data


@pytest.mark.parametrize("stream", [True, False])
def test_the_end_by_a_pause_is_withheld_and_another_server_continues(pair: Pair, stream: bool):
    body = COMPLETING | USAGE | {"stream": stream, "max_tokens": 2500, "n": 2, "cache_salt": "paused"}
    if not stream:
        del body["stream_options"]
    plain, told = bytearray(), bytearray()

    async def main(longer: int) -> None:
        body["max_tokens"] = 2500 * longer
        plain.clear()
        told.clear()
        journalled = {"X-Headgate-Journal": str(CREATED), "X-Request-Id": "paused"}
        reading = [
            asyncio.create_task(read(pair[0], body, {"X-Request-Id": "plain"}, plain)),
            asyncio.create_task(read(pair[0], body, journalled, told)),
        ]
        await until(lambda: told.count(b":j 0") > 3 and told.count(b":j 1") > 3)
        await until(lambda: len(pair[0].api.ledger.live) == 2 or any(task.done() for task in reading))
        paused = await post(pair[0].url, "/v1/pause", {})
        await asyncio.wait_for(asyncio.gather(*reading), 60)
        if paused.result["aborted"] < 2:
            await post(pair[0].url, "/v1/resume", {})
            raise Missed
        assert paused.status == 200 and paused.result["aborted"] == 2

    try:
        unless_missed(main)
    finally:
        pair[0].post("/v1/resume", {})
    cut = bytes(told)
    assert b"\n:f " not in cut and b'finish_reason":"' not in shown(cut)
    ended, unmoved = summed(shown(cut) + unveiled(cut)), summed(bytes(plain) if stream else b"data: " + bytes(plain))
    for choice in ended["choices"].values():
        assert (choice["finish_reason"], choice["cause"]) == (["abort"], ["pause"])
    assert shape(ended) == shape(unmoved)
    resume = {"resume": resume_of(blocks(cut), stream=stream)}
    rest = ask(pair[1], COMPLETIONS, body | resume, "paused")
    undisturbed = ask(pair[1], COMPLETIONS, body, "paused")
    assert summed(shown(cut + rest)) == summed(shown(undisturbed))


def shape(value: Any) -> Any:
    """The kinds of lines, with their counts."""
    match value:
        case dict():
            return {name: shape(each) for name, each in value.items()}
        case list() | set():
            return len(value)
    return type(value)


# -- tenants -------------------------------------------------------------------------------------------------------------


def test_11_only_the_admin_may_act_for_a_tenant(model: Path):
    keys = Keys({"alice": "ka", "bob": "kb"}, admin="root")
    prompt = "a prompt that is long enough to fill a block or two of the cache" * 2
    body = {"prompt": prompt, "max_tokens": 2}

    def cached(server: LiveServer, key: str, **headers: str) -> int:
        asked = server.post(COMPLETIONS, body, headers={"Authorization": f"Bearer {key}"} | headers)
        assert asked.status_code == 200, asked.text
        return int(asked.json()["usage"]["prompt_tokens_details"]["cached_tokens"])

    for_alice = {"X-Headgate-Tenant": "alice"}
    with live_server(model, device="cpu", kv_blocks=64, block_size=16, keys=keys) as server, server.http as http:
        assert cached(server, "root", **for_alice, **{"X-Request-Id": "hers"}) == 0
        assert cached(server, "ka") > 0
        assert cached(server, "kb") == cached(server, "root") == 0

        def seen(key: str, **headers: str) -> int:
            return http.get("/v1/requests/hers", headers={"Authorization": f"Bearer {key}"} | headers).status_code

        assert (seen("ka"), seen("root", **for_alice), seen("root")) == (200, 200, 200)
        assert (seen("kb"), seen("root", **{"X-Headgate-Tenant": "bob"})) == (404, 404)
        assert (seen("kb", **for_alice), seen("ka", **for_alice)) == (403, 403)
        refused = http.post("/v1/pause", headers={"Authorization": "Bearer root"} | for_alice)
        assert refused.status_code == 403, "a tenant does not control the server, whoever calls for it"
