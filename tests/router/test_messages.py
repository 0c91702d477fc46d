"""Answers of the Messages API through a router: passed on, resumed by another worker, and ended by the router."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import pytest

from headgate.router.data_path.request_info import read_request_info
from headgate.router.exchange.ending import End, as_aborted, final_answer
from tests.router.client import Response, Wire, ask, routing, until
from tests.router.compiled import compiled_fast_path
from tests.router.mock import FINE, MESSAGES, Fault, Mock, text_of
from tests.router.run import run

BODY = {"model": "mock", "messages": [{"role": "user", "content": "hi"}], "seed": 1, "max_tokens": 20}


@dataclass
class Read:
    """A stream as a client reads it."""

    kinds: list[str] = field(default_factory=list)  # without repetition
    text: str = ""
    end: dict[str, Any] = field(default_factory=dict)
    usage: dict[str, Any] = field(default_factory=dict)
    error: dict[str, Any] = field(default_factory=dict)


def read(response: Response) -> Read:
    told = Read()
    for block in response.body.decode().split("\n\n"):
        lines = [line for line in block.split("\n") if line and not line.startswith(":")]
        if not lines:
            continue
        name, data = lines
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        told.kinds += [event["type"]] if told.kinds[-1:] != [event["type"]] else []
        match event["type"]:
            case "content_block_delta":
                told.text += event["delta"]["text"]
            case "message_delta":
                told.end, told.usage = event["delta"], event["usage"]
            case "error":
                told.error = event["error"]
    return told


WHOLE_STREAM = [
    "message_start",
    "content_block_start",
    "content_block_delta",
    "content_block_stop",
    "message_delta",
    "message_stop",
]


def check(body: dict[str, Any], response: Response) -> None:
    """The answer is exactly that of an undisturbed worker."""
    assert response.status == 200, response.body
    if body["stream"]:
        told = read(response)
        assert (told.kinds, told.text, told.end["stop_reason"]) == (WHOLE_STREAM, text_of(body), "max_tokens")
    else:
        assert response.json["content"] == [{"type": "text", "text": text_of(body)}]


FAULTS = [
    FINE,
    *(Fault("cut", at=at, part=part) for at in (0, 1, 3, 30) for part in (0.0, 0.5, 0.99)),
    Fault("after_head"),
    Fault("early_end", at=3),
    *(Fault("withheld", at=at, cause=cause) for at in (0, 4) for cause in ("pause", "pd_reschedule")),
    Fault("withheld_late", at=4, cause="shutdown"),
    Fault("status", status=503),
]


@pytest.mark.parametrize("stream", [True, False])
def test_36_45_a_message_that_fails_at_one_worker_resumes_at_another(stream: bool):
    async def main() -> None:
        left: list[Fault] = []

        def script(_: object) -> Fault:
            return left.pop() if left else FINE

        async with Mock(script) as one, Mock(script) as two, routing(one, two) as (_, url):
            for fault in FAULTS:
                left.append(fault)
                body = BODY | {"stream": stream}
                check(body, await ask(url, MESSAGES, body))
            assert one.mistakes == two.mistakes == []
            assert len(one.asked) + len(two.asked) == 2 * len(FAULTS) - 1

    run(main())


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(("strict", "reason"), [("false", "abort"), ("true", "max_tokens")])
def test_5_58_the_router_ends_a_message_that_no_worker_has(stream: bool, strict: str, reason: str):
    async def main() -> None:
        async with Mock() as mock, routing(mock) as (router, url):
            router.hold(queue=True)
            body = BODY | {"stream": stream, "deadline_ms": 50}
            answer = await ask(url, MESSAGES, body, {"X-OpenAI-Strict": strict})
            if stream:
                told = read(answer)
                errors = ["error"] if strict == "true" else []
                assert told.kinds == ["message_start", "message_delta", *errors, "message_stop"]
                end = told.end
            else:
                end = answer.json
                assert end["content"] == [] and end["usage"]["output_tokens"] == 0
                assert end.get("error", {}).get("code") == ("deadline" if strict == "true" else None)
            assert answer.status == 200 and (end["stop_reason"], end["cause"]) == (reason, "deadline")
            router.release()

    run(main())


def test_5_a_message_that_is_aborted_ends_after_its_partial_text():
    async def main() -> None:
        async with Mock(lambda _: Fault("stall", at=6)) as mock, routing(mock) as (router, url):
            wire = await Wire.open(url)
            wire.post(MESSAGES, BODY | {"stream": True, "request_id": "one"})
            await until(lambda: ("", "one", 0) in router.live and router.live["", "one", 0].journal.tokens > 5)
            exchange = router.live["", "one", 0]
            exchange.end()
            told = read(await wire.response())
            assert told.kinds == [*WHOLE_STREAM[:3], "message_delta", "message_stop"]
            assert told.text and text_of(BODY).startswith(told.text)
            assert (told.end["stop_reason"], told.end["cause"]) == ("abort", "api_abort")
            assert told.usage["output_tokens"] == exchange.journal.tokens and told.usage["input_tokens"] == 5
            wire.close()

    run(main())


def test_a_message_stream_that_has_ended_gets_only_its_last_event():
    told = final_answer(MESSAGES, "req-1", 1, "mock", [], stream=True, usage=None)
    assert told == b'event: message_stop\ndata: {"type":"message_stop"}\n\n'


def test_a_whole_message_that_the_router_ends_has_the_ids_of_the_lost_text():
    end = End(0, [1, 2], "api_abort", [[7, 2]])
    usage = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
    told = json.loads(final_answer(MESSAGES, "req-1", 1, "mock", [end], stream=False, usage=usage))
    assert told["completion_token_ids"] == [1, 2] and told["weight_versions"] == [{"version": 7, "tokens": 2}]
    assert (told["id"], told["usage"]["input_tokens"], told["usage"]["output_tokens"]) == ("msg_1", 3, 2)


@pytest.mark.parametrize(("strict", "reason"), [(False, b"abort"), (True, b"max_tokens")])
def test_73_a_withheld_end_becomes_the_one_that_was_requested_and_the_models_words_stay(strict: bool, reason: bytes):
    told = b'"stop_reason":"%b","stop_sequence":null,"cause":"%b"'
    message = b'{%b,"content":[{"type":"tool_use","input":{%b}}]}'
    before = message % (told % (reason, b"pause"), told % (b"abort", b"pause"))
    after = message % (told % (reason, b"api_abort"), told % (b"abort", b"pause"))
    assert as_aborted(before, "api_abort", strict=strict) == after


def test_73_the_error_of_a_withheld_end_has_the_requested_cause_and_its_own_type():
    event = b'{"message":"the answer was cut short after 5 tokens (%b)","type":"overloaded_error","param":null,"code":"%b"}'
    assert as_aborted(event % (b"pause", b"pause"), "api_abort", strict=True) == event % (b"api_abort", b"api_abort")


def test_refusals_by_the_router_have_anthropics_format():
    async def main() -> None:
        async with routing(api_keys={"a": "key"}) as (_, url):
            missing = await ask(url, MESSAGES, BODY)
            assert (missing.status, missing.json["type"], missing.error["type"]) == (
                401,
                "error",
                "authentication_error",
            )
            assert missing.json["request_id"] == dict(missing.headers)["x-request-id"]
            keyed = {"x-api-key": "key", "anthropic-version": "2023-06-01", "anthropic-beta": "x"}
            refused = await ask(url, MESSAGES, BODY, keyed)
            assert (refused.status, refused.error["type"]) == (503, "overloaded_error")
            assert refused.json["request_id"] == dict(refused.headers)["x-request-id"]
            other = await ask(url, "/v1/chat/completions", BODY)
            assert other.error["type"] == "authentication_error" and "type" not in other.json

    run(main())


def test_a_stream_that_waited_ends_with_an_error_event(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("headgate.router.router.KEEP_ALIVE_S", 0.02)

    async def main() -> None:
        async with Mock() as mock, routing(mock) as (router, url):
            router.hold(queue=True)
            wire = await Wire.open(url)
            wire.post(MESSAGES, BODY | {"stream": True})
            await wire.some(30)
            await router.close()
            told = read(await wire.response())
            assert told.kinds == ["error"]
            assert (told.error["type"], told.error["code"]) == ("overloaded_error", "shutting_down")
            wire.close()

    run(main())


def test_40_prompts_with_different_system_texts_share_no_prefix():
    def root(system: str) -> int:
        return read_request_info(
            MESSAGES, json.dumps(BODY | {"system": system}).encode(), peek=compiled_fast_path().peek
        ).root

    assert root("a") == root("a") != root("b")
