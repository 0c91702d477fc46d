"""The last words for a client whose request has ended while no worker had it: in a queue, or between two workers.

A worker tells the end of what it has itself. Here nothing was computed that the client has not seen, so all there is to say
is that it is over: `finish_reason: abort`, for every choice that has not finished.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import msgspec

from headgate.api.errors import cut_short, error_body
from headgate.errors import RequestError
from headgate.router.ask import UNREADABLE
from headgate.router.journal import Journal

Usage = dict[str, int]

CAUSE, DEADLINE = "api_abort", "deadline"
WORKERS_END = re.compile(
    rb'"finish_reason":"(?:abort|length|pd_reschedule)","cause":"(?:shutdown|pause|engine_lost|preempted)"'
)
CUT_SHORT = re.compile(rb'\{"message":"[^"\\]* after (\d+) tokens \(\w+\)","type":"\w+","param":null,"code":"\w+"\}')
encode = msgspec.json.Encoder().encode


class Ended(RequestError):
    """For endpoints whose answers have no place for a reason."""

    status = 409
    code = "aborted"


def last_words(
    path: str,
    id: str,
    created: int,
    model: str,
    choices: Mapping[int, int],
    *,
    stream: bool,
    usage: Usage | None,
    cause: str = CAUSE,
    strict: bool = False,
) -> bytes:
    """The end of `choices` (each with its tokens), in events or whole; raises `Ended` where only an error can say it."""
    words = _WORDS.get(path)
    if words is None:
        if cause == DEADLINE:
            raise Ended("the deadline of this request has passed before a worker had it", code=DEADLINE)
        raise Ended("this request was aborted before a worker had it")
    kind, prefix, streamed, whole = words
    common: dict[str, Any] = {"id": prefix + id.removeprefix("req-"), "created": created, "model": model}
    reason = "length" if strict else "abort"
    errors = {i: error_body(cut_short(tokens, cause)) for i, tokens in choices.items()} if strict else {}
    if not stream:
        answer = {**common, "object": kind, "choices": [_choice(i, whole, reason, cause) for i in choices]}
        error = msgspec.json.decode(next(iter(errors.values()))) if errors else {}
        return encode({**answer, "usage": usage, **error})
    kind += ".chunk" if kind == "chat.completion" else ""
    events: list[bytes] = []
    for i in choices:
        events.append(encode({**common, "object": kind, "choices": [_choice(i, streamed, reason, cause)]}))
        events += [errors[i]] if strict else []
    if usage is not None:
        events.append(encode({**common, "object": kind, "choices": [], "usage": usage}))
    return b"".join(b"data: %b\n\n" % event for event in [*events, b"[DONE]"])


def as_aborted(ending: bytes, cause: str = CAUSE, *, strict: bool = False) -> bytes:
    """What a worker told when it ended an answer for reasons of its own, as the end that was asked for since."""
    reason = b"length" if strict else b"abort"
    ending = WORKERS_END.sub(b'"finish_reason":"%b","cause":"%b"' % (reason, cause.encode()), ending)
    return CUT_SHORT.sub(lambda found: _problem(int(found[1]), cause), ending) if strict else ending


def _problem(tokens: int, cause: str) -> bytes:
    return error_body(cut_short(tokens, cause)).removeprefix(b'{"error":').removesuffix(b"}")


def usage_told(journal: Journal) -> Usage:
    """What the client has got; how long its prompt is, only a worker that has finished a choice has said."""
    prompts = [int(str(told.finish[2])) for told in journal.choices.values() if told.finish is not None]
    prompt = prompts[0] if prompts else 0
    return {"prompt_tokens": prompt, "completion_tokens": journal.tokens, "total_tokens": prompt + journal.tokens}


def wants_usage(body: bytes) -> bool:
    """Whether a stream is to end with its usage."""
    try:
        options = msgspec.json.decode(body).get("stream_options")
    except UNREADABLE:  # what it says is its worker's business
        return False
    return isinstance(options, dict) and options.get("include_usage") is True


def _choice(index: int, content: dict[str, Any], reason: str, cause: str) -> dict[str, Any]:
    return {"index": index, **content, "logprobs": None, "finish_reason": reason, "cause": cause}


# path -> object, prefix of its id, what a choice says in a stream and in a whole answer
_WORDS: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "/v1/chat/completions": (
        "chat.completion",
        "chatcmpl-",
        {"delta": {}},
        {"message": {"role": "assistant", "content": ""}},
    ),
    "/v1/completions": ("text_completion", "cmpl-", {"text": ""}, {"text": ""}),
}
