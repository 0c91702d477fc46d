"""Anthropic's Messages API: bodies, answers, streams and errors. The engine is scripted, except where a server is named."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest

from headgate.api.generate.message_input import as_chat
from headgate.api.generate.prompts import plain_message
from headgate.contract.decoding import convert
from headgate.contract.keys import Keys
from headgate.contract.messages import MessagesRequest
from headgate.engine.client import Chunk
from headgate.errors import EngineDead
from headgate.protocol.output import Cause, Ended, FinishReason, Timings
from headgate.protocol.request import GenerateRequest
from headgate.testing.tiny import tiny_model
from headgate.text.parsers.reader import AnswerParsers
from headgate.text.tokenizer import load_tokenizer
from tests.api.live import LiveServer
from tests.api.scripted import Client, ScriptedEngines, scripted_app

PATH, COUNT = "/v1/messages", "/v1/messages/count_tokens"
HELLO = {"role": "user", "content": "hi"}
ASKED: dict[str, Any] = {"max_tokens": 500, "messages": [HELLO]}
LOOK = {"name": "look", "description": "Looks.", "input_schema": {"type": "object"}}
THOUGHT = "<think>\nFirst this.\n</think>\n\nThen that."
CALL = '<tool_call>\n{"name": "look", "arguments": {"at": "the sky"}}\n</tool_call>'


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("messages") / "tiny")


def ask(
    model: Path,
    text: str,
    body: dict[str, Any],
    *,
    path: str = PATH,
    end: tuple[FinishReason, Cause] = ("stop", "eos"),
    cached: int = 0,
    reasoning: str = "qwen3",
    headers: dict[str, str] | None = None,
    prompts: list[str] | None = None,
    **settings: Any,
) -> Client:
    """The answer of a model that generates `text`, one token at a time."""
    tokenizer = load_tokenizer(model)
    assert tokenizer is not None
    ids = tokenizer.encode(text, add_special=False) + ([256] if end[1] == "eos" else [])

    async def script(request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        if prompts is not None:
            prompts.append(tokenizer.decode(request.prompt, skip_special=False))
        for token in ids[:-1]:
            yield Chunk([token], [0])
        ended = Ended(0, *end, len(request.prompt), cached, len(ids), Timings(0, 0, 0, 0))
        yield Chunk(ids[-1:], [0], ended=ended)

    async def main() -> Client:
        parsers = AnswerParsers.choose(reasoning, "hermes", None)
        app = scripted_app(model, ScriptedEngines(script), parsers=parsers, **settings)
        client = Client(app, path, body, headers or {})
        await asyncio.wait_for(client.call(), 60)
        return client

    return asyncio.run(main())


def whole(model: Path, text: str, body: dict[str, Any] = ASKED, **options: Any) -> dict[str, Any]:
    client = ask(model, text, body, **options)
    assert client.status == 200, client.body
    message: dict[str, Any] = json.loads(client.body)
    return message


def events(client: Client) -> list[dict[str, Any]]:
    told = []
    for block in client.body.decode().removesuffix("\n\n").split("\n\n"):
        name, data = block.split("\n")
        told.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {told[-1]['type']}"
    return told


def accumulated(told: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that a client assembles from a stream."""
    message = told[0]["message"]
    for event in told[1:]:
        match event:
            case {"type": "content_block_start", "index": index, "content_block": block}:
                assert index == len(message["content"])
                message["content"].append(block)
            case {"type": "content_block_delta", "index": index, "delta": {"type": "input_json_delta"} as delta}:
                block = message["content"][index]
                block["json"] = block.get("json", "") + delta["partial_json"]
            case {"type": "content_block_delta", "index": index, "delta": {"type": kind} as delta}:
                name = kind.removesuffix("_delta")
                message["content"][index][name] += delta[name]
            case {"type": "content_block_stop", "index": index} if "json" in message["content"][index]:
                message["content"][index]["input"] = json.loads(message["content"][index].pop("json"))
            case {"type": "message_delta", "delta": delta, "usage": usage}:
                message |= delta
                message["usage"] |= usage
    assert told[-1] == {"type": "message_stop"}
    return message


def error(client: Client) -> tuple[int, str, str | None, str]:
    body = json.loads(client.body)
    assert body["type"] == "error" and body["request_id"] == client.headers["x-request-id"]
    problem = body["error"]
    return client.status, problem["type"], problem["param"], problem["code"]


# ------------------------------------------------------------------------------------------------------------- answers


def test_a_message_equals_the_answer_of_the_same_chat(server: LiveServer):
    sampling = {"max_tokens": 30, "seed": 5, "model": "tiny"}
    chat = {"messages": [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Tell\nme."}]}
    same = server.post("/v1/chat/completions", chat | sampling).json()
    asked = {
        "system": [{"type": "text", "text": "Be kind.", "cache_control": {"type": "ephemeral"}}],
        "messages": [{"role": "user", "content": [{"type": "text", "text": t} for t in ("Tell", "me.")]}],
        "metadata": {"user_id": "u"},
        "service_tier": "auto",
    }
    told = server.post(PATH, asked | sampling).json()
    assert (told["type"], told["role"], told["model"], told["id"][:4]) == ("message", "assistant", "tiny", "msg_")
    assert told["content"] == [{"type": "text", "text": same["choices"][0]["message"]["content"]}]
    assert (told["stop_reason"], told["stop_sequence"], told["cause"]) == ("max_tokens", None, "max_tokens")
    usage, counted = told["usage"], same["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == counted["prompt_tokens"]
    assert (usage["output_tokens"], usage["cache_creation_input_tokens"]) == (counted["completion_tokens"], 0)
    again = server.post(COUNT, {name: asked[name] for name in ("system", "messages")} | {"model": "tiny"}).json()
    assert again == {"input_tokens": counted["prompt_tokens"]}


def test_cached_tokens_are_not_counted_as_input_tokens(model: Path):
    usage = whole(model, "yes", cached=3)["usage"]
    told = events(ask(model, "yes", ASKED | {"stream": True}, cached=3))
    assert told[0]["message"]["usage"]["input_tokens"] == usage["input_tokens"] + 3
    assert usage["cache_read_input_tokens"] == 3 and usage == accumulated(told)["usage"]


@pytest.mark.parametrize("text", ["", "yes", THOUGHT, f"{THOUGHT}\n{CALL}\n{CALL}", CALL])
@pytest.mark.parametrize("more", [{}, {"return_token_ids": True, "return_weight_versions": True}])
def test_a_stream_adds_up_to_the_complete_message(model: Path, text: str, more: dict[str, Any]):
    body = ASKED | {"tools": [LOOK], "request_id": "one"} | more
    told = events(ask(model, text, body | {"stream": True}))
    assert accumulated(told) == whole(model, text, body)


def test_an_open_block_is_closed_before_the_next_one(model: Path):
    told = events(ask(model, f"{THOUGHT} {CALL}", ASKED | {"tools": [LOOK], "stream": True}))
    kinds = [event["type"] for event in told if event["type"] != "content_block_delta"]
    assert kinds == [
        "message_start",
        *("content_block_start", "content_block_stop") * 3,
        "message_delta",
        "message_stop",
    ]
    indices = [event["index"] for event in told if "index" in event]
    assert indices == sorted(indices)


def test_reasoning_text_and_calls_are_blocks(model: Path):
    told = whole(model, f"{THOUGHT} {CALL}", ASKED | {"tools": [LOOK]})
    thought, text, call = told["content"]
    assert thought == {"type": "thinking", "thinking": "First this.", "signature": ""}
    assert text == {"type": "text", "text": "Then that."}
    assert call == {"type": "tool_use", "id": call["id"], "name": "look", "input": {"at": "the sky"}}
    assert (told["stop_reason"], told["cause"]) == ("tool_use", "eos")


def test_5_a_call_that_the_end_cut_keeps_what_was_generated(model: Path):
    told = whole(model, CALL[:50], ASKED | {"tools": [LOOK]}, end=("abort", "api_abort"))
    (call,) = told["content"]
    assert call["input"] == {} and call["partial_json"] and '{"at": "the sky"}'.startswith(call["partial_json"])
    assert (told["stop_reason"], told["cause"]) == ("abort", "api_abort")


@pytest.mark.parametrize(
    ("end", "strict", "reason"),
    [
        (("stop", "eos"), "false", "end_turn"),
        (("stop", "stop_token"), "false", "end_turn"),
        (("length", "max_tokens"), "false", "max_tokens"),
        (("abort", "deadline"), "false", "abort"),
        (("abort", "deadline"), "true", "max_tokens"),
        (("pd_reschedule", "preempted"), "true", "max_tokens"),
    ],
)
def test_5_16_73_the_stop_reason_is_anthropics_and_the_cause_ours(
    model: Path, end: tuple[FinishReason, Cause], strict: str, reason: str
):
    told = whole(model, "yes", end=end, headers={"X-OpenAI-Strict": strict})
    assert (told["stop_reason"], told["cause"]) == (reason, end[1])


@pytest.mark.parametrize(("reason", "code"), [("abort", "pause"), ("pd_reschedule", "pd_error")])
def test_57_a_message_that_was_cut_short_has_an_error_for_a_strict_client(
    model: Path, reason: FinishReason, code: str
):
    end, strict = (reason, "pause"), {"X-OpenAI-Strict": "true"}
    problem = whole(model, "yes", end=end, headers=strict)["error"]
    client = ask(model, "yes", ASKED | {"stream": True}, end=end, headers=strict)
    *_, delta, error, stop = events(client)
    assert [delta["type"], error["type"], stop["type"]] == ["message_delta", "error", "message_stop"]
    assert error["error"] == problem and (problem["type"], problem["code"]) == ("overloaded_error", code)
    assert "error" not in whole(model, "yes", end=end) and "error" not in whole(model, "yes", headers=strict)


@pytest.mark.parametrize("stream", [False, True])
def test_the_stop_sequence_that_ended_the_answer_is_named(model: Path, stream: bool):
    client = ask(model, "one two three", ASKED | {"stop_sequences": ["x", " thr"], "stream": stream})
    told = accumulated(events(client)) if stream else json.loads(client.body)
    assert told["content"] == [{"type": "text", "text": "one two"}]
    assert (told["stop_reason"], told["stop_sequence"], told["cause"]) == ("stop_sequence", " thr", "stop_string")


def test_a_stream_whose_engine_is_lost_ends_with_an_error_event(model: Path):
    async def lost(request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        yield Chunk([70], [0])
        raise EngineDead("it was killed")

    client = Client(scripted_app(model, ScriptedEngines(lost)), PATH, ASKED | {"stream": True})
    asyncio.run(client.call())
    last = events(client)[-1]
    assert (last["type"], last["error"]["type"], last["error"]["code"]) == (
        "error",
        "overloaded_error",
        "engine_lost",
    )
    assert last["request_id"] == client.headers["x-request-id"]


# -------------------------------------------------------------------------------------------------------------- bodies


def prompt_of(model: Path, **fields: Any) -> str:
    prompts: list[str] = []
    client = ask(model, "yes", ASKED | fields, prompts=prompts)
    assert client.status == 200, client.body
    return prompts[0]


def test_blocks_of_a_conversation_become_messages_of_the_template():
    conversation = [
        {"role": "user", "content": "What"},
        {"role": "user", "content": [{"type": "text", "text": "now?"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": "s"},
                {"type": "redacted_thinking", "data": "?"},
                {"type": "text", "text": "Look:"},
                {"type": "tool_use", "id": "a", "name": "look", "input": {"at": "sky"}},
                {"type": "tool_use", "id": "b", "name": "look", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "text", "text": "blue"}]},
                {"type": "tool_result", "tool_use_id": "b", "is_error": True},
                {"type": "text", "text": "And?"},
            ],
        },
    ]
    chat = as_chat(convert({"messages": conversation, "system": "Be kind."}, MessagesRequest, ""))
    calls = [("a", '{"at":"sky"}'), ("b", "{}")]
    assert [plain_message(message, "") for message in chat.messages] == [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "What\nnow?"},
        {
            "role": "assistant",
            "content": "Look:",
            "reasoning_content": "Hm.",
            "tool_calls": [{"id": id, "function": {"name": "look", "arguments": given}} for id, given in calls],
        },
        {"role": "tool", "content": "blue", "tool_call_id": "a"},
        {"role": "tool", "content": "", "tool_call_id": "b"},
        {"role": "user", "content": "And?"},
    ]


@pytest.mark.parametrize(
    ("role", "block"),
    [
        ("user", {"type": "text", "text": "a" * 100}),
        ("assistant", {"type": "tool_use", "id": "a", "name": "look", "input": {}}),
    ],
)
def test_a_message_of_many_blocks_does_not_hold_the_event_loop(role: str, block: dict[str, Any]):
    messages = [{"role": role, "content": [block] * 50_000}, {"role": "user", "content": "?"}]
    body = convert({"messages": messages}, MessagesRequest, "")
    started_s = time.thread_time()
    as_chat(body)
    assert time.thread_time() - started_s < 2


def test_a_last_message_of_the_assistant_is_continued(model: Path):
    begun = prompt_of(model, messages=[HELLO, {"role": "assistant", "content": "The answer is"}])
    assert begun.endswith("The answer is") and begun != prompt_of(model)


@pytest.mark.parametrize(
    ("choice", "constrained"),
    [
        ({"type": "auto"}, False),
        ({"type": "none"}, False),
        ({"type": "any"}, True),
        ({"type": "tool", "name": "look"}, True),
    ],
)
def test_a_tool_choice_constrains_the_answer_as_in_chat(model: Path, choice: dict[str, Any], constrained: bool):
    grammars: list[str | None] = []

    async def script(request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        grammars.append(request.sampling.grammar)
        yield Chunk(ended=Ended(0, "stop", "eos", 1, 0, 0, Timings(0, 0, 0, 0)))

    client = Client(
        scripted_app(model, ScriptedEngines(script)), PATH, ASKED | {"tools": [LOOK], "tool_choice": choice}
    )
    asyncio.run(client.call())
    assert client.status == 200 and [grammar is not None for grammar in grammars] == [constrained]


def test_with_an_output_format_the_answer_is_json(server: LiveServer):
    schema = {
        "type": "object",
        "properties": {"n": {"enum": [1, 2]}},
        "required": ["n"],
        "additionalProperties": False,
    }
    body = {
        "messages": [HELLO],
        "max_tokens": 60,
        "output_config": {"format": {"type": "json_schema", "schema": schema}},
    }
    (block,) = server.post(PATH, body).json()["content"]
    assert block["text"].lstrip().startswith("{")


@pytest.mark.parametrize(("kind", "on"), [("enabled", True), ("adaptive", True), ("disabled", False)])
def test_thinking_sets_the_variables_of_templates(kind: str, on: bool):
    thinking = {"type": kind} | ({"budget_tokens": 1024} if kind == "enabled" else {})
    chat = as_chat(convert({"messages": [HELLO], "thinking": thinking}, MessagesRequest, ""))
    assert chat.chat_template_kwargs == {"enable_thinking": on, "thinking": on}


def test_thinking_of_a_model_whose_reasoning_is_not_separated_gets_a_warning(model: Path):
    body = ASKED | {"thinking": {"type": "enabled", "budget_tokens": 1024}}
    assert "x-headgate-warning" in ask(model, "yes", body, reasoning="none").headers
    assert "x-headgate-warning" not in ask(model, "yes", body).headers


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"messages": []}, "messages", "invalid_type"),
        ({"messages": [{"role": "user", "content": []}]}, "messages[0].content", "invalid_request"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role", "invalid_type"),
        *(
            (
                {"messages": [{"role": "user", "content": [{"type": kind, "source": {}}]}]},
                "messages[0].content[0]",
                "unsupported_content",
            )
            for kind in ("image", "document", "search_result", "container_upload", "tool_use")
        ),
        (
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [{"type": "tool_result", "tool_use_id": "a", "content": [{"type": "image"}]}],
                    }
                ]
            },
            "messages[0].content[0].content[0]",
            "unsupported_content",
        ),
        (
            {"messages": [{"role": "assistant", "content": [{"type": "server_tool_use", "id": "a"}]}]},
            "messages[0].content[0]",
            "unsupported_content",
        ),
        (
            {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "b"}]}]},
            "messages",
            "invalid_request",
        ),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type", "unsupported_tool"),
        ({"tools": [{"name": "look"}]}, "tools[0].input_schema", "invalid_request"),
        ({"tools": [LOOK | {"defer_loading": True}]}, "tools[0].defer_loading", "invalid_type"),
        ({"tool_choice": {"type": "any"}}, "tool_choice", "invalid_request"),
        ({"tools": [LOOK], "tool_choice": {"type": "tool"}}, "tool_choice.name", "invalid_request"),
        (
            {"tools": [LOOK], "tool_choice": {"type": "any"}, "thinking": {"type": "enabled", "budget_tokens": 9}},
            "thinking",
            "invalid_request",
        ),
        ({"mcp_servers": [{"name": "x"}]}, "mcp_servers", "unsupported_parameter"),
        ({"container": "x"}, "container", "unsupported_parameter"),
        ({"context_management": {"edits": [{"type": "x"}]}}, "context_management", "unsupported_parameter"),
        ({"stop": "x"}, "stop", "unknown_parameter"),
        ({"n": 2}, "n", "unknown_parameter"),
        ({"top_p": 2}, "top_p", "invalid_value"),
    ],
)
def test_a_field_without_its_effect_is_refused_by_name(model: Path, fields: dict[str, Any], param: str, code: str):
    assert error(ask(model, "yes", ASKED | fields)) == (400, "invalid_request_error", param, code)


def test_fields_without_effect_are_accepted(model: Path):
    fields = {
        "cache_control": {"type": "ephemeral"},
        "metadata": {"user_id": "u"},
        "service_tier": "auto",
        "mcp_servers": [],
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "tools": [LOOK | {"cache_control": {"type": "ephemeral"}, "strict": True, "type": "custom"}],
        "top_k": 4,
        "top_p": 0.9,
        "temperature": 0.5,
    }
    headers = {"anthropic-version": "2023-06-01", "anthropic-beta": "tools-2024-04-04"}
    assert whole(model, "yes", ASKED | fields, headers=headers)["stop_reason"] == "end_turn"


# -------------------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize("path", [PATH, COUNT])
def test_errors_have_anthropics_format_and_the_status_of_their_kind(model: Path, path: str):
    body = {"model": "other", "messages": [HELLO]}
    assert error(ask(model, "", body, path=path))[:2] == (404, "not_found_error")
    assert error(ask(model, "", {}, path=path)) == (
        400,
        "invalid_request_error",
        "messages",
        "missing_required_parameter",
    )
    assert error(ask(model, "", body, path=path, keys=Keys({"a": "key"})))[:2] == (401, "authentication_error")


def test_the_key_may_be_sent_as_x_api_key(model: Path):
    for name, value in (("x-api-key", "key"), ("authorization", "Bearer key")):
        whole(model, "yes", keys=Keys({"a": "key"}), headers={name: value})


def test_other_paths_keep_openais_format(model: Path):
    client = ask(model, "", {"model": "other", "messages": [HELLO]}, path="/v1/chat/completions")
    assert client.status == 404 and set(json.loads(client.body)) == {"error"}


# ----------------------------------------------------------------------------------------------------------- lifecycle


@pytest.mark.parametrize("stream", [False, True])
def test_2_5_an_aborted_message_keeps_its_text_and_is_found_by_its_id(model: Path, stream: bool):
    tokenizer = load_tokenizer(model)
    assert tokenizer is not None

    async def until_ended(request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        ids = tokenizer.encode("some text", add_special=False)
        yield Chunk(ids, [0] * len(ids))
        while not engines.streams[0].ends:
            await asyncio.sleep(0)

    async def main() -> None:
        app = scripted_app(model, engines)
        client = Client(app, PATH, ASKED | {"stream": stream, "request_id": "one"})
        answering = asyncio.create_task(client.call())
        while not engines.streams:
            await asyncio.sleep(0)
        abort = Client(app, "/v1/abort_requests", {"req_ids": ["msg_one"], "wait": False})
        await abort.call()
        await asyncio.wait_for(answering, 60)
        assert json.loads(abort.body)["result"]["not_found"] == [], abort.body
        told = accumulated(events(client)) if stream else json.loads(client.body)
        assert (told["stop_reason"], told["cause"]) == ("abort", "api_abort")
        assert "some text".startswith("".join(block["text"] for block in told["content"]))

    engines = ScriptedEngines(until_ended)
    asyncio.run(main())


def test_an_idempotency_key_repeats_the_message(server: LiveServer):
    body, key = {"messages": [HELLO], "max_tokens": 8}, {"Idempotency-Key": "messages-1"}
    first, second = (server.post(PATH, body, headers=key) for _ in range(2))
    assert first.content == second.content and second.headers["idempotent-replayed"] == "true"
