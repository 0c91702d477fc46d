"""The journal, byte for byte, with a scripted engine; see docs/decisions/0006-the-journal.md.

Guarantee 36: an answer that another server continues equals an uninterrupted one.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from headgate.api.accounting.ledger import Record
from headgate.api.generate import journal
from headgate.contract.control import LEAST_VERSION_HEADER
from headgate.engine.client import Chunk
from headgate.errors import EngineDead, RequestError, Unavailable
from headgate.protocol.output import Cause, Ended, FinishReason, Timings
from headgate.protocol.plan import Logprobs
from headgate.protocol.request import GenerateRequest
from headgate.testing.tiny import tiny_model
from headgate.text.parsers.reader import AnswerParsers
from headgate.text.tokenizer import load_tokenizer
from tests.api.scripted import Client, ScriptedEngines, scripted_app
from tests.journal import blocks, resume_of, shown, unveiled

CHAT, COMPLETIONS, MESSAGES, GENERATE, TOKENS = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/messages",
    "/generate",
    "/inference/v1/generate",
)
CREATED = 1234567890
HEADERS = {"X-Headgate-Journal": str(CREATED), "X-Request-Id": "moved"}
EOS = 256


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("journal") / "tiny")


@pytest.fixture(autouse=True)
def no_coalescing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal, "WHOLE_EVERY_S", 0.0)


@dataclass
class Engine:
    """Generates `text`, or continues it, and ends as specified; weights change after `change` tokens."""

    text: str
    reason: FinishReason = "length"
    cause: Cause = "max_tokens"
    size: int = 1
    change: int = 10**6
    extra: list[int] = field(default_factory=list)  # ids after those of the text
    error: Exception | None = None  # instead of an end
    parsers: AnswerParsers = field(default_factory=AnswerParsers)

    def ids(self, model: Path) -> list[int]:
        tokenizer = load_tokenizer(model)
        assert tokenizer is not None
        return [*tokenizer.encode(self.text), *self.extra]

    def script(self, model: Path) -> Callable[[GenerateRequest], AsyncGenerator[Chunk, None]]:
        ids = self.ids(model)

        async def script(request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
            at, sampling = len(request.generated), request.sampling
            if sampling.prompt_logprobs is not None:
                yield Chunk(prompt_logprobs=[Logprobs(-1.0, (), ())] * (len(request.prompt) - 1))
            while True:
                await asyncio.sleep(0)
                said = range(at, min(at + self.size, len(ids)))
                at = said.stop
                chunk = Chunk([ids[i] for i in said], [int(i >= self.change) for i in said])
                if sampling.logprobs is not None:
                    chunk.logprobs = [Logprobs(-i - 0.5, (), ()) for i in said]
                if at >= len(ids):
                    if self.error is not None:
                        raise self.error
                    tokens = len(request.prompt), 0, at
                    chunk.ended = Ended(0, self.reason, self.cause, *tokens, Timings(0, 0, 0, 0))
                    yield chunk
                    return
                yield chunk

        return script


def ask(
    model: Path, engine: Engine, path: str, body: dict[str, Any], headers: dict[str, str] = HEADERS, **settings: Any
) -> Client:
    client, _ = ask_and_look(model, engine, path, body, headers, **settings)
    return client


def ask_and_look(
    model: Path, engine: Engine, path: str, body: dict[str, Any], headers: dict[str, str] = HEADERS, **settings: Any
) -> tuple[Client, ScriptedEngines]:
    engines = ScriptedEngines(engine.script(model))
    settings.setdefault("parsers", engine.parsers)

    async def main() -> Client:
        client = Client(scripted_app(model, engines, **settings), path, body, headers)
        await asyncio.wait_for(client.call(), 60)
        return client

    return asyncio.run(main()), engines


def journalled(model: Path, engine: Engine, path: str, body: dict[str, Any]) -> bytes:
    client = ask(model, engine, path, body)
    assert client.status == 200, client.body
    assert client.headers["x-headgate-journal"] == "1"
    assert client.headers["content-type"].startswith("text/event-stream")
    return client.body


PARSERS = AnswerParsers.choose("qwen3", "hermes", None)
TALK = "Grüße 😀 und 漢字, dann ENDE und mehr"
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
CALLS = (
    'Let me see. <tool_call>\n{"name": "look", "arguments": {"at": "the sky"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "look", "arguments": {"at": ["the", "sea"]}}\n</tool_call>'
)
USAGE = {"stream_options": {"include_usage": True}}
CHATTING = {"messages": [{"role": "user", "content": "hi"}]}
COMPLETING = {"prompt": "ab"}

# Requests, and what the engine generates. Some apply to streams only.
FEATURES: dict[str, tuple[str, dict[str, Any], Engine]] = {
    "chat": (CHAT, CHATTING | USAGE, Engine(TALK)),
    "chat in chunks": (CHAT, CHATTING, Engine(TALK, size=3)),
    "a first character in parts": (CHAT, CHATTING, Engine("😀 hi")),
    "a broken character": (CHAT, CHATTING, Engine("ab", extra=[172, 173])),
    "stop strings": (CHAT, CHATTING | USAGE | {"stop": ["ENDE", "漢字x"]}, Engine(TALK)),
    "stop strings, kept": (
        CHAT,
        CHATTING | USAGE | {"stop": ["ENDE"], "include_stop_str_in_output": True},
        Engine(TALK),
    ),
    "tools": (CHAT, CHATTING | {"tools": [TOOL]}, Engine(CALLS, "stop", "eos", extra=[EOS])),
    "reasoning": (CHAT, CHATTING | USAGE, Engine(f"<think>\nEin Gruß?\n\n</think>\n\n{TALK}", parsers=PARSERS)),
    "reasoning in chunks": (CHAT, CHATTING, Engine(f"<think>\nHm.\n</think>\n{TALK}", size=3, parsers=PARSERS)),
    "reasoning that is cut": (CHAT, CHATTING, Engine("<think>\nLet me see.\n\n", parsers=PARSERS)),
    "reasoning and tools": (
        CHAT,
        CHATTING | {"tools": [TOOL]},
        Engine(f"<think>\nLook.\n</think>\n\n{CALLS}", "stop", "eos", extra=[EOS], parsers=PARSERS),
    ),
    "tagged calls and ids": (
        CHAT,
        CHATTING | {"tools": [TOOL], "return_token_ids": True},
        Engine(
            "Well.\n<tool_call>look\n<arg_key>at</arg_key>\n<arg_value>the 漢 sea</arg_value>\n</tool_call>",
            "stop",
            "eos",
            extra=[EOS],
            parsers=AnswerParsers.choose("none", "glm45", None),
        ),
    ),
    "tools and ids": (
        CHAT,
        CHATTING | {"tools": [TOOL], "return_token_ids": True, "return_weight_versions": True},
        Engine(CALLS, "stop", "eos", extra=[EOS], change=30),
    ),
    "everything that can be returned": (
        COMPLETIONS,
        COMPLETING | USAGE | {"return_token_ids": True, "return_weight_versions": True},
        Engine(TALK, change=10),
    ),
    "versions within a chunk": (
        COMPLETIONS,
        COMPLETING | {"return_weight_versions": True},
        Engine(TALK, size=4, change=6),
    ),
    "echo": (COMPLETIONS, COMPLETING | {"echo": True}, Engine(TALK)),
    "a stop token": (
        COMPLETIONS,
        COMPLETING | {"stop_token_ids": [65]},
        Engine("hello", "stop", "stop_token", extra=[65]),
    ),
    "ids given before": (
        COMPLETIONS,
        COMPLETING | {"generated_token_ids": [71, 114, 127], "delivered_chars": 1, "return_token_ids": True},
        Engine(TALK),
    ),
    "a strict client": (COMPLETIONS, COMPLETING | USAGE, Engine(TALK, "abort", "deadline")),
    "messages": (
        MESSAGES,
        CHATTING | {"return_token_ids": True, "return_weight_versions": True},
        Engine(TALK, size=3, change=6),
    ),
    "messages with stop strings": (
        MESSAGES,
        CHATTING | {"stop_sequences": ["ENDE", "漢字x"]},
        Engine(TALK, size=2),
    ),
    "messages with reasoning and tools": (
        MESSAGES,
        CHATTING | {"tools": [{"name": "look", "input_schema": {"type": "object"}}]},
        Engine(f"<think>\nLook.\n</think>\n\n{CALLS}", "stop", "eos", size=3, extra=[EOS], parsers=PARSERS),
    ),
    "messages that are cut": (
        MESSAGES,
        CHATTING | {"tools": [{"name": "look", "input_schema": {"type": "object"}}]},
        Engine(CALLS[:70], "abort", "deadline", size=3),
    ),
}
STREAMED: dict[str, tuple[str, dict[str, Any], Engine]] = {
    "chat logprobs": (CHAT, CHATTING | {"logprobs": True, "stop": ["漢字x"]}, Engine(TALK)),
    "logprobs": (COMPLETIONS, COMPLETING | {"logprobs": 0, "stop": ["漢字x"]}, Engine(TALK)),
    "echo and logprobs": (COMPLETIONS, COMPLETING | {"logprobs": 0, "echo": True}, Engine(TALK)),
    "tokens": (TOKENS, {"token_ids": [70, 71], "sampling_params": {"logprobs": 0}}, Engine(TALK)),
}
CASES = [
    *((name, stream) for name in FEATURES for stream in (True, False)),
    *((name, True) for name in STREAMED),
]


@pytest.mark.parametrize(("name", "stream"), CASES)
def test_36_an_answer_cut_at_any_block_and_continued_by_another_server_is_identical(
    model: Path, name: str, stream: bool, monkeypatch: pytest.MonkeyPatch
):
    if name == "a strict client":
        monkeypatch.setitem(HEADERS, "X-OpenAI-Strict", "true")
    path, body, engine = (FEATURES | STREAMED)[name]
    body = body | {"stream": stream}
    whole = journalled(model, engine, path, body)
    told = blocks(whole)
    assert b"".join(told) == whole and len(told) > 3
    for k in range(len(told)):
        resume = resume_of(told[:k], stream=stream)
        rest = journalled(model, engine, path, body | {"resume": resume})
        assert shown(b"".join(told[:k]) + rest) == shown(whole), f"cut before block {k}: {told[k]!r}"
        # Cut a second time: both journals together are equivalent to one.
        again = [*told[:k], *blocks(rest)[:2]][: len(told) - 1]
        last = journalled(model, engine, path, body | {"resume": resume_of(again, stream=stream)})
        assert shown(b"".join(again) + last) == shown(whole), f"cut before block {k} and two later"


def same_but_time(body: bytes) -> bytes:
    return re.sub(rb'"(created|e2e_latency)":[\d.e-]+', b"", body)


@pytest.mark.parametrize(("name", "stream"), CASES)
def test_a_journal_does_not_change_what_the_client_reads(model: Path, name: str, stream: bool):
    path, body, engine = (FEATURES | STREAMED)[name]
    body = body | {"stream": stream}
    seen = shown(journalled(model, engine, path, body))
    plain = ask(model, engine, path, body, {"X-Request-Id": "moved"})
    assert "x-headgate-journal" not in plain.headers and b"\n:" not in plain.body
    assert same_but_time(seen) == same_but_time(plain.body if stream else b"data: " + plain.body + b"\n\n")


@pytest.mark.parametrize("stream", [True, False])
def test_the_time_of_the_answer_is_the_one_in_the_header(model: Path, stream: bool):
    body = journalled(model, Engine("hi"), CHAT, CHATTING | {"stream": stream})
    times = [json.loads(line[6:])["created"] for line in body.split(b"\n") if line.startswith(b"data: {")]
    assert set(times) == {CREATED}


def test_the_lines_of_a_journal(model: Path):
    """The documented form: tokens, versions and characters of a block; several lines if the weights changed."""
    body = journalled(
        model, Engine("hé!", size=2, change=1), COMPLETIONS, COMPLETING | {"stream": True, "stop": ["!?"]}
    )
    lines = [line for line in body.split(b"\n") if line.startswith(b":")]
    assert lines == [
        b":p 2",
        b":j 0 0 1 71",
        b":j 0 1 1 127",
        b":j 0 1 3 102,0",
        b":f 0 length max_tokens 2 0 4",
    ]
    assert b"\n:f 0 length max_tokens 2 0 4\ndata: {" in body


def test_53_the_length_of_each_prompt_is_written_once(model: Path):
    """A router that ends the answer itself needs the prompt length for the usage."""
    for stream in (True, False):
        asked = COMPLETING | {"stream": stream, "prompt": [[5, 6, 7], [8, 9], [8, 9]], "n": 2}
        body = journalled(model, Engine("ab", size=1), COMPLETIONS, asked)
        assert body.startswith(b":p 7\n:j ") and body.count(b":p ") == 1


def test_tokens_whose_text_is_held_back_are_journaled_at_once(model: Path):
    told = blocks(journalled(model, Engine("ab<!", size=1), CHAT, CHATTING | {"stream": True, "stop": ["<!-"]}))
    assert told[2] == b":j 0 0 2 27\n\n"  # "<" may begin a stop string: an id, and no additional characters


# -- withheld ends -----------------------------------------------------------------------------------------------------

VEILED: list[tuple[FinishReason, Cause]] = [
    *(("abort", cause) for cause in ("pause", "shutdown", "preempted", "transfer_failed", "engine_lost")),
    ("pd_reschedule", "preempted"),
]
KINDS = [
    (CHAT, CHATTING | USAGE | {"stream": True}),
    (CHAT, CHATTING),
    (COMPLETIONS, COMPLETING | USAGE | {"stream": True, "stop": ["."], "return_token_ids": True}),
    (COMPLETIONS, COMPLETING),
    (MESSAGES, CHATTING | {"stream": True}),
    (MESSAGES, CHATTING),
]


@pytest.mark.parametrize(("path", "body"), KINDS)
@pytest.mark.parametrize(("reason", "cause"), VEILED)
@pytest.mark.parametrize("strict", [False, True])
def test_a_movable_end_is_withheld_and_its_release_equals_the_normal_end(
    model: Path, path: str, body: dict[str, Any], reason: FinishReason, cause: Cause, strict: bool
):
    engine = Engine(TALK[:9], reason, cause, size=2)
    strictly = {"X-OpenAI-Strict": "true"} if strict else {}
    told = ask(model, engine, path, body, HEADERS | strictly).body
    assert b"finish_reason" not in b"".join(
        line for line in told.split(b"\n") if line.startswith(b"data:") and b'"finish_reason":null' not in line
    )
    assert b'"stop_reason":"' not in b"".join(line for line in told.split(b"\n") if line.startswith(b"data:"))
    assert (
        b"[DONE]" not in shown(told)
        and b"message_stop" not in shown(told)
        and b"\n:f" not in told
        and told.endswith(b":m \n\n")
    )
    plain = ask(model, engine, path, body, {"X-Request-Id": "moved"} | strictly).body
    expected = plain if body.get("stream") else b"data: " + plain + b"\n\n"
    assert same_but_time(shown(told) + unveiled(told)) == same_but_time(expected)
    assert told.count(b":m :j 0 ") == bool(body.get("stream"))  # the last tokens, in case the end is released
    # Guarantee 73: the actual reason, strict or not.
    assert told.count(b":m :f 0 %b %b " % (reason.encode(), cause.encode())) == 1


@pytest.mark.parametrize(("path", "body"), KINDS)
def test_an_answer_with_a_withheld_end_continues_on_another_server_unchanged(
    model: Path, path: str, body: dict[str, Any]
):
    whole = journalled(model, Engine(TALK), path, body)
    for length in range(1, len(TALK)):
        cut = journalled(model, Engine(TALK[:length], "abort", "pause"), path, body)
        resume = resume_of(blocks(cut), stream=bool(body.get("stream")))
        rest = journalled(model, Engine(TALK), path, body | {"resume": resume})
        assert shown(cut + rest) == shown(whole)


def texts(body: bytes) -> dict[int, str]:
    said: dict[int, str] = {}
    for line in body.split(b"\n"):
        if line.startswith(b"data: {"):
            for choice in json.loads(line[6:])["choices"]:
                said[choice["index"]] = said.get(choice["index"], "") + choice["text"]
    return said


@pytest.mark.parametrize("stream", [True, False])
def test_a_withheld_end_of_a_choice_does_not_affect_others_and_withholds_the_closing(model: Path, stream: bool):
    ends = Engine("abc", "abort", "pause").script(model), Engine("defghi").script(model)
    body = COMPLETING | {"n": 2, "seed": 0, "stream": stream}
    body |= USAGE if stream else {}

    async def main() -> Client:
        engines = ScriptedEngines(lambda request: ends[request.sampling.seed or 0](request))
        client = Client(scripted_app(model, engines), COMPLETIONS, body, HEADERS)
        await asyncio.wait_for(client.call(), 60)
        return client

    told = asyncio.run(main()).body
    assert b":f 1 length max_tokens " in told and b"\n:f 0 " not in told and b":m :f 0 abort pause " in told
    closing = blocks(told)[-1]
    assert shown(closing) == b"" and (b"[DONE]" in unveiled(closing)) == stream
    assert texts(shown(told) + unveiled(told)) == {0: "abc", 1: "defghi"}
    # Only the first choice is run again, as on another server.
    resume = resume_of(blocks(told), stream=stream)
    assert [choice["finish"] is not None for choice in resume["choices"]] == [False, True]
    client, engines = ask_and_look(model, Engine("abcxyz"), COMPLETIONS, body | {"resume": resume})
    assert len(engines.streams) == 1
    assert texts(shown(told + client.body)) == {0: "abcxyz", 1: "defghi"}
    usage = re.findall(rb'"completion_tokens":(\d+)', shown(client.body))
    assert usage == [b"12"]


@pytest.mark.parametrize("cause", ["api_abort", "deadline", "client_disconnect", "grammar"])
def test_a_requested_end_is_not_withheld(model: Path, cause: Cause):
    told = journalled(model, Engine("hi", "abort", cause), CHAT, CHATTING | {"stream": True})
    assert b":m " not in told and f":f 0 abort {cause} ".encode() in told and b"[DONE]" in told


@pytest.mark.parametrize(
    ("reason", "cause"), [("abort", "shutdown"), ("abort", "engine_lost"), ("pd_reschedule", "preempted")]
)
def test_2_5_an_end_that_was_asked_for_is_not_withheld_whatever_cause_the_engine_gives(
    model: Path, monkeypatch: pytest.MonkeyPatch, reason: FinishReason, cause: Cause
):
    """An abort reported the choice as aborted, and another server continued it."""
    monkeypatch.setattr(Record, "asked_to_end", lambda *_: "api_abort")
    told = journalled(model, Engine("hi", reason, cause), COMPLETIONS, COMPLETING | {"stream": True})
    assert b":m " not in told and b":f 0 abort api_abort " in told and b"[DONE]" in told
    assert texts(shown(told)) == {0: "hi"}


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("error", "status"),
    [(EngineDead("killed"), 503), (Unavailable("paused", code="paused"), 503), (RequestError("no"), 400)],
)
def test_a_failure_after_the_start_is_withheld_if_another_server_may_continue(
    model: Path, stream: bool, error: Exception, status: int
):
    told = ask(model, Engine("hello", error=error), CHAT, CHATTING | {"stream": stream}).body
    last = blocks(told)[-1]
    assert last.startswith(b":e %d\n" % status)
    seen = unveiled(last) if status == 503 else shown(last)
    assert json.loads(seen.removeprefix(b"data: "))["error"]["code"]
    assert (b'"error"' in shown(told)) == (status != 503)
    assert resume_of(blocks(told), stream=stream)["choices"][0]["token_ids"] == Engine("hell").ids(model)


def test_batched_tokens_are_journaled_before_a_failure(model: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(journal, "WHOLE_EVERY_S", 3600.0)
    told = blocks(ask(model, Engine("hello", error=EngineDead("killed")), CHAT, CHATTING).body)
    assert [b":m " in block for block in told] == [False, False, True]
    assert resume_of(told[:2], stream=False)["choices"][0]["token_ids"] == Engine("hell").ids(model)


@pytest.mark.parametrize("stream", [True, False])
def test_an_engine_lost_before_the_first_token_is_a_503_with_a_journal_too(model: Path, stream: bool):
    client = ask(model, Engine("", error=EngineDead("killed")), CHAT, CHATTING | {"stream": stream})
    assert client.status == 503 and json.loads(client.body)["error"]["code"] == "engine_lost"
    assert "x-headgate-journal" not in client.headers


def test_a_complete_answer_has_keep_alive_comments_while_the_engine_is_silent(model: Path):
    """Guarantee 51."""

    async def script(request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        while client.body.count(b": keep-alive\n\n") < 3:
            await asyncio.sleep(0.01)
        yield Chunk([70], [0], ended=Ended(0, "length", "max_tokens", 1, 0, 1, Timings(0, 0, 0, 0)))

    client = Client(scripted_app(model, ScriptedEngines(script), keep_alive_s=0.03), CHAT, CHATTING, HEADERS)
    asyncio.run(asyncio.wait_for(client.call(), 60))
    assert client.status == 200 and b'"choices"' in client.body


def test_tokens_of_a_complete_answer_are_journaled_in_batches(model: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(journal, "WHOLE_EVERY_S", 3600.0)
    first, rest, answer = blocks(journalled(model, Engine("hello"), CHAT, CHATTING))
    assert first.count(b":j ") == 1 and answer.startswith(b"data: {")
    assert rest.count(b":j ") == 4 and b":f " in rest  # the end is sent at once


# -- resuming an answer that has ended----------------------------------------------------------------------------------


def going_on(**choice: Any) -> dict[str, Any]:
    said = {"index": 0, "versions": [[0, len(choice.get("token_ids", ()))]]} | choice
    return {"resume": {"choices": [said]}, "stream": True, **USAGE}


@pytest.mark.parametrize(
    ("body", "said", "chars", "rest", "cause"),
    [
        ({"stop": ["b"]}, "ab", 1, "", "stop_string"),
        ({"stop": ["b"]}, "ab", 0, "a", "stop_string"),
        ({"stop": ["b"], "include_stop_str_in_output": True}, "ab", 2, "", "stop_string"),
        ({"stop": ["b"], "include_stop_str_in_output": True}, "ab", 1, "b", "stop_string"),
        ({"stop_token_ids": [65]}, "ab", 1, "", "stop_token"),
        ({"stop_token_ids": [65], "include_stop_str_in_output": True}, "ab", 1, "b", "stop_token"),
        ({}, "ab<eos>", 1, "b", "eos"),
    ],
)
def test_resumed_ids_that_end_an_answer_end_it_without_an_engine(
    model: Path, body: dict[str, Any], said: str, chars: int, rest: str, cause: str
):
    ids = Engine(said.removesuffix("<eos>"), extra=[EOS] if said.endswith("<eos>") else []).ids(model)
    asked = COMPLETING | body | going_on(token_ids=ids, delivered_chars=chars)
    client, engines = ask_and_look(model, Engine("never"), COMPLETIONS, asked)
    first, usage = [json.loads(line[6:]) for line in client.body.split(b"\n") if line.startswith(b"data: {")]
    (choice,) = first["choices"]
    assert (choice["text"], choice["finish_reason"], choice["cause"]) == (rest, "stop", cause)
    assert usage["usage"]["completion_tokens"] == len(ids)
    assert engines.streams == []


@pytest.mark.parametrize(
    ("said", "chars", "rest"), [("ab", 1, "b"), ("ab", 2, ""), ("ab STO", 0, "ab STO"), ("", 0, "")]
)
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("stream", [True, False])
def test_4_a_resumed_choice_that_was_asked_to_end_ends_without_an_engine(
    model: Path, said: str, chars: int, rest: str, path: str, stream: bool
):
    """Everything that the first server generated is sent once, with the cause of the abort."""
    ids, body = Engine(said).ids(model), CHATTING if path == CHAT else COMPLETING
    versions = [[0, len(ids)]] if ids else []
    resumed = going_on(token_ids=ids, versions=versions, delivered_chars=chars if stream else 0, end="api_abort")
    asked = body | {"stop": ["STOP"]} | resumed | ({} if stream else {"stream": False, "stream_options": None})
    client, engines = ask_and_look(model, Engine("never"), path, asked)
    events = [json.loads(line[6:]) for line in client.body.split(b"\n") if line.startswith(b"data: {")]
    (choice,) = events[0]["choices"]
    message = choice.get("delta") or choice.get("message") or {}
    assert (choice.get("text") or message.get("content") or "") == (rest if stream else said)
    assert (choice["finish_reason"], choice["cause"]) == ("abort", "api_abort")
    assert message.get("role") == ("assistant" if path == CHAT and not (stream and chars) else None)
    assert events[-1]["usage"]["completion_tokens"] == len(ids)
    assert engines.streams == []


@pytest.mark.parametrize("fields", [{"min_tokens": 2}, {"ignore_eos": True}])
def test_a_resumed_stop_token_that_does_not_apply_does_not_end_the_answer(model: Path, fields: dict[str, Any]):
    asked = COMPLETING | fields | going_on(token_ids=[70, EOS], delivered_chars=1)
    _, engines = ask_and_look(model, Engine("more!"), COMPLETIONS, asked)
    assert len(engines.streams) == 1


def test_an_answer_whose_choices_have_all_ended_is_closed_without_an_engine(model: Path):
    asked = COMPLETING | going_on(token_ids=[70], delivered_chars=1, finish=["length", "max_tokens", 2, 1, 1])
    client, engines = ask_and_look(model, Engine("never"), COMPLETIONS, asked)
    usage, done = shown(client.body).split(b"\n\n")[:-1]
    assert client.status == 200 and client.headers["x-headgate-journal"] == "1" and done == b"data: [DONE]"
    told = json.loads(usage[6:])["usage"]
    assert (told["prompt_tokens"], told["completion_tokens"]) == (2, 1)
    assert told["prompt_tokens_details"]["cached_tokens"] == 0  # guarantee 68: no cache was used here
    assert engines.streams == []


@pytest.mark.parametrize(
    "finish",
    [
        ["stop", "eos", 2**31 - 1, 0, 1],
        ["stop", "eos", 2, 0, 2**31 - 1],
        ["stop", "eos", 2, 2**31 - 1, 1],
        ["stop", "eos", 2, 3, 1],
        ["stop", "eos", 1, 0, 1],
        ["stop", "eos", 2, 0, 0],
    ],
)
@pytest.mark.parametrize("stream", [True, False])
def test_68_claims_that_contradict_the_prompt_or_the_ids_are_refused_and_not_counted(
    model: Path, finish: list[Any], stream: bool
):
    app = scripted_app(model, ScriptedEngines(Engine("never").script(model)))
    asked = COMPLETING | {"stream": stream} | going_on(token_ids=[70], finish=finish)
    asked["stream_options"] = asked.get("stream_options") if stream else None

    async def main() -> None:
        client = Client(app, COMPLETIONS, asked, HEADERS)
        await asyncio.wait_for(client.call(), 60)
        assert client.status == 400 and b"resume.choices[0].finish" in client.body

    asyncio.run(main())
    assert not any(app.state.api.ledger.metrics.tokens.values())


def test_68_counts_that_a_router_does_not_have_are_computed_here(model: Path):
    asked = COMPLETING | going_on(token_ids=[70], finish=["abort", "deadline", 0, 2**31 - 1, 2**31 - 1])
    client, _ = ask_and_look(model, Engine("never"), COMPLETIONS, asked)
    usage = json.loads(shown(client.body).split(b"\n\n")[-3][6:])["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (2, 1)


def test_68_resumed_tokens_are_in_the_usage_and_in_no_metric(model: Path):
    """For a finished choice and one that continues: only the prompt and tokens generated here are counted."""
    app = scripted_app(model, ScriptedEngines(Engine("abc").script(model)))
    ended = {"index": 0, "token_ids": [70, 70, 70], "versions": [[0, 3]], "finish": ["stop", "eos", 2, 2, 3]}
    begun = {"index": 1, "token_ids": [70], "versions": [[0, 1]]}
    body = COMPLETING | {"n": 2, "resume": {"choices": [ended, begun]}}

    async def main() -> None:
        client = Client(app, COMPLETIONS, body, HEADERS)
        await asyncio.wait_for(client.call(), 60)
        assert client.status == 200

    asyncio.run(main())
    ledger = app.state.api.ledger
    usage = ledger.past("moved").usage
    made = usage.choices[1].output_tokens - 1
    assert usage.choices[0].output_tokens == 3 and made > 0
    assert (ledger.metrics.tokens["output"], ledger.metrics.tokens["cached"]) == (made, 0)


def test_53_the_record_of_a_resumed_answer_has_all_its_choices(model: Path):
    app = scripted_app(model, ScriptedEngines(Engine("abc").script(model)))
    ended = {"index": 0, "token_ids": [70], "versions": [[0, 1]], "finish": ["stop", "eos", 2, 1, 1]}
    stopped = {"index": 1, "token_ids": [71, 72], "versions": [[0, 2]]}
    body = COMPLETING | {"n": 3, "stop": ["i"], "resume": {"choices": [ended, stopped]}}

    async def main() -> None:
        client = Client(app, COMPLETIONS, body, HEADERS)
        await asyncio.wait_for(client.call(), 60)
        assert client.status == 200

    asyncio.run(main())
    usage = app.state.api.ledger.past("moved").usage
    told = [(choice.finish_reason, choice.cause, choice.output_tokens) for choice in usage.choices]
    assert told == [("stop", "eos", 1), ("stop", "stop_string", 2), ("length", "max_tokens", 3)]


# -- SGLang's cumulative streams -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [True, False])
def test_a_resumed_sglang_answer_repeats_the_earlier_text(model: Path, stream: bool):
    body = {"text": "ab", "sampling_params": {"max_new_tokens": 99}, "stream": stream}
    whole = journalled(model, Engine(TALK), GENERATE, body)
    told = blocks(whole)
    for k in range(len(told)):
        resume = resume_of(told[:k], stream=stream)
        rest = journalled(model, Engine(TALK), GENERATE, body | {"resume": resume})
        assert same_but_time(shown(b"".join(told[:k]) + rest)) == same_but_time(shown(whole))


# -- refusals ------------------------------------------------------------------------------------------------------------

ONE = {"index": 0, "token_ids": [70], "versions": [[0, 1]], "delivered_chars": 1}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (COMPLETIONS, {"choices": [ONE | {"index": 1}]}, "resume.choices[0].index"),
        (COMPLETIONS, {"choices": [ONE, ONE]}, "resume.choices[1].index"),
        (COMPLETIONS, {"choices": [ONE | {"versions": [[0, 2]]}]}, "resume.choices[0].versions"),
        (COMPLETIONS, {"choices": [ONE | {"versions": [[0, 2**31 - 1]] * 9}]}, "resume.choices[0].versions"),
        (COMPLETIONS, {"choices": [ONE | {"delivered_chars": 2}]}, "resume"),
        (COMPLETIONS, {"choices": [ONE | {"finish": ["abort", "boredom", 1, 1, 1]}]}, "resume.choices[0].finish[1]"),
        (COMPLETIONS, {"choices": [ONE | {"more": 1}]}, "resume.choices[0].more"),
        ("/v1/responses", {"choices": [ONE]}, "resume"),
    ],
)
def test_an_invalid_resume_is_refused_by_name(model: Path, path: str, body: dict[str, Any], param: str):
    asked = {"input": "a"} if path == "/v1/responses" else COMPLETING
    client = ask(model, Engine("never"), path, asked | {"stream": True, "resume": body})
    assert client.status == 400, client.body
    assert json.loads(client.body)["error"]["param"] == param


def test_resume_without_a_journal_is_refused_by_name(model: Path):
    client = ask(model, Engine("never"), CHAT, CHATTING | {"resume": {"choices": []}}, {})
    assert client.status == 400 and json.loads(client.body)["error"]["param"] == "resume"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, CHATTING | {"logprobs": True}),
        (COMPLETIONS, COMPLETING | {"logprobs": 1}),
        (COMPLETIONS, COMPLETING | {"prompt_logprobs": 1}),
        (TOKENS, {"token_ids": [70, 71], "sampling_params": {"prompt_logprobs": 0}}),
        (GENERATE, {"text": "ab", "return_logprob": True}),
        (GENERATE, {"text": "ab", "return_logprob": True, "stream": True}),
    ],
)
def test_what_a_journal_cannot_rebuild_cannot_be_resumed(model: Path, path: str, body: dict[str, Any]):
    client = ask(model, Engine("never"), path, body | {"resume": {"choices": [ONE]}})
    assert client.status == 400 and json.loads(client.body)["error"]["param"] == "resume"


@pytest.mark.parametrize("value", ["", "now", "-1", "1.5", "٣", "1" * 13])
def test_a_journal_header_without_a_valid_time_is_refused(model: Path, value: str):
    client = ask(model, Engine("never"), CHAT, CHATTING, {"X-Headgate-Journal": value})
    assert client.status == 400 and json.loads(client.body)["error"]["param"] == "X-Headgate-Journal"


def test_a_responses_stream_has_no_journal_and_a_complete_response_has_one(model: Path):
    stream = ask(model, Engine("hi"), "/v1/responses", {"input": "a", "stream": True})
    assert stream.status == 200 and "x-headgate-journal" not in stream.headers and b"\n:j" not in stream.body
    whole = journalled(model, Engine(TALK), "/v1/responses", {"input": "a"})
    told = blocks(whole)
    for k in range(len(told)):
        resume = resume_of(told[:k], stream=False)
        rest = journalled(model, Engine(TALK), "/v1/responses", {"input": "a", "resume": resume})
        assert shown(rest) == shown(whole)


# -- seeds ---------------------------------------------------------------------------------------------------------------


def seeds(model: Path, body: dict[str, Any], headers: dict[str, str]) -> list[int | None]:
    asked: list[int | None] = []
    engine = Engine("hi").script(model)

    def script(request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        asked.append(request.sampling.seed)
        return engine(request)

    async def main() -> None:
        client = Client(scripted_app(model, ScriptedEngines(script)), CHAT, CHATTING | body, headers)
        await asyncio.wait_for(client.call(), 60)
        assert client.status == 200

    asyncio.run(main())
    return asked


def test_with_a_journal_the_seeds_derive_from_the_request_id(model: Path):
    first = seeds(model, {"n": 3}, HEADERS)
    assert first == seeds(model, {"n": 3}, HEADERS) and len(set(first)) == 3
    assert first != seeds(model, {"n": 3}, HEADERS | {"X-Request-Id": "another"})
    assert first == seeds(model, {"n": 3, "request_id": "moved"}, {"X-Headgate-Journal": "1"})
    assert seeds(model, {"seed": 7}, HEADERS) == [7]
    assert seeds(model, {}, {"X-Request-Id": "moved"}) != seeds(model, {}, {"X-Request-Id": "moved"})


def test_49_a_retry_with_the_same_key_gets_the_same_journal_under_any_request_id(model: Path):
    app = scripted_app(model, engines := ScriptedEngines(Engine("hello").script(model)))

    async def main() -> list[bytes]:
        bodies = []
        for name in ("one", "two"):
            headers = {"X-Headgate-Journal": "1", "X-Request-Id": name, "Idempotency-Key": "k"}
            client = Client(app, CHAT, CHATTING, headers)
            await asyncio.wait_for(client.call(), 60)
            assert client.status == 200
            bodies.append(client.body)
        plain = Client(app, CHAT, CHATTING, {"Idempotency-Key": "k"})
        await asyncio.wait_for(plain.call(), 60)
        assert plain.status == 422  # it did not request a journal
        return bodies

    first, second = asyncio.run(main())
    assert first == second and len(engines.streams) == 1


@pytest.mark.parametrize(
    ("least", "status"), [("3", 200), ("2", 200), ("4", 503), ("", 400), ("-1", 400), ("9" * 30, 400)]
)
def test_55_a_server_with_older_weights_than_required_refuses_the_request(model, least, status):
    engines = ScriptedEngines(Engine("hello").script(model))
    client = Client(
        scripted_app(model, engines), CHAT, CHATTING, {**HEADERS, LEAST_VERSION_HEADER: least, "idempotency-key": "k"}
    )
    asyncio.run(asyncio.wait_for(client.call(), 60))
    assert client.status == status and len(engines.streams) == (status == 200)
    if status == 503:
        assert b'"code":"engine_lost"' in client.body and b"version 3" in client.body
