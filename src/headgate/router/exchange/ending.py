"""Final answers that the router composes, for requests that end while no worker has them: queued or between workers.

The router does not know text that the client has not received. It reports `finish_reason: abort` for every unfinished
choice. If the client waits for a whole answer, the tokens of a lost worker are given as token ids.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec
from msgspec import structs

from headgate.contract.error_answers import error_event_at
from headgate.contract.errors import Problem, cut_short, problem_of
from headgate.contract.event_json import encode
from headgate.contract.journal import MOVABLE_CAUSES, RESCHEDULED
from headgate.contract.messages import (
    MessageEnd,
    MessageErrorBody,
    MessageObject,
    MessageUsage,
    event,
    message_delta,
    message_start,
    stop_reason_of,
)
from headgate.contract.operations.generation import MESSAGES
from headgate.errors import RequestError, Unavailable
from headgate.router.data_path.request_info import UNREADABLE
from headgate.router.exchange.journal import Journal

Usage = dict[str, int]

CAUSE: Final = "api_abort"
DEADLINE: Final = "deadline"
PAUSE: Final = "pause"
# The end in an event that a worker withheld; strict clients receive `length`.
_MOVABLE = "|".join(sorted(MOVABLE_CAUSES)).encode()
WORKERS_END = re.compile(
    rb'"finish_reason":"(?:abort|length|%b)","cause":"(?:%b)"' % (RESCHEDULED.encode(), _MOVABLE)
)
# The same in an answer of the Messages API, in which it precedes everything that the model wrote.
_END_OF_MESSAGE = rb'"stop_reason":"%b","stop_sequence":null,"cause":"%b"'
WORKERS_MESSAGE_END = re.compile(_END_OF_MESSAGE % (rb"(?:abort|max_tokens)", b"(?:%b)" % _MOVABLE))
# The error that explains such an end to a strict client. Errors of choices that had ended before keep their causes.
CUT_SHORT = re.compile(
    rb'\{"message":"[^"\\]* after (\d+) tokens \((?:%b)\)","type":"(\w+)","param":null,"code":"\w+"\}' % _MOVABLE
)


class RequestEnded(RequestError):
    """The end of a request as an error, for endpoints whose answers have no finish reason."""

    status = 409
    code = "aborted"


@dataclass(frozen=True, slots=True)
class End:
    """How one choice ended, and its tokens, whose text the router does not know."""

    index: int
    ids: Sequence[int] = ()
    cause: str = CAUSE
    versions: Sequence[Sequence[int]] = ()  # weight versions as [version, count] spans

    def choice(self, content: dict[str, Any], *, strict: bool) -> dict[str, Any]:
        reason = {"finish_reason": "length" if strict else "abort", "cause": self.cause}
        return {"index": self.index, **content, "logprobs": None, **reason, **self.error(strict=strict)}

    def error(self, *, strict: bool) -> dict[str, Problem]:
        return {"error": problem_of(cut_short(len(self.ids), self.cause))} if strict else {}


def is_resumable(path: str) -> bool:
    """Whether workers take `resume` for every request to this endpoint."""
    return path in _SHAPES or path == MESSAGES.path


def final_answer(
    path: str,
    id: str,
    created: int,
    model: str,
    ends: Sequence[End],
    *,
    stream: bool,
    usage: Usage | None,
    cause: str = CAUSE,
    strict: bool = False,
) -> bytes:
    """Return the ends as events or as a whole answer; raises RequestEnded or Unavailable for other endpoints."""
    if path == MESSAGES.path:
        return _final_message(id, model, ends, stream=stream, usage=usage, strict=strict)
    shape = _SHAPES.get(path)
    if shape is None:
        if cause == DEADLINE:
            raise RequestEnded("the deadline of this request passed before a worker received it", code=DEADLINE)
        if cause == PAUSE:
            raise Unavailable("the fleet was paused before a worker received this request", code="paused")
        raise RequestEnded("this request was aborted before a worker received it")
    kind, prefix, streamed, whole = shape
    common: dict[str, Any] = {"id": prefix + id.removeprefix("req-"), "created": created, "model": model}
    if not stream:
        choices = [_with_ids(end, end.choice(whole, strict=strict)) for end in ends]
        error = ends[0].error(strict=strict) if ends else {}
        return encode({**common, "object": kind, "choices": choices, "usage": usage, **error})
    kind += ".chunk" if kind == "chat.completion" else ""
    events: list[bytes] = []
    for end in ends:
        events.append(encode({**common, "object": kind, "choices": [end.choice(streamed, strict=strict)]}))
        events += [encode(end.error(strict=strict))] if strict else []
    if usage is not None:
        events.append(encode({**common, "object": kind, "choices": [], "usage": usage}))
    return b"".join(b"data: %b\n\n" % event for event in [*events, b"[DONE]"])


def _final_message(
    id: str, model: str, ends: Sequence[End], *, stream: bool, usage: Usage | None, strict: bool
) -> bytes:
    """The end of a message. A block that is open stays open: its number is not known here."""
    counts = usage or {"prompt_tokens": 0, "completion_tokens": 0}
    tokens = MessageUsage(counts["prompt_tokens"], 0, counts["completion_tokens"])
    message = MessageObject(id="msg_" + id.removeprefix("req-"), model=model, usage=tokens)
    reasons = [(end, stop_reason_of("abort", end.cause, called=False, strict=strict)) for end in ends]
    if not stream:
        ((end, reason),) = reasons
        problem = MessageErrorBody.of(_cut(end), id).error if strict else msgspec.UNSET
        whole = structs.replace(message, stop_reason=reason, cause=end.cause, error=problem)
        return encode({**msgspec.to_builtins(whole), **_ids(end)})
    events = b""
    for end, reason in reasons:  # none if the client has received the end of the message
        events += b"" if end.ids else message_start(message)
        events += message_delta(MessageEnd(stop_reason=reason, cause=end.cause), tokens)
        events += error_event_at(MESSAGES.path, _cut(end), id) if strict else b""
    return events + event("message_stop")


def _cut(end: End) -> RequestError:
    return cut_short(len(end.ids), end.cause)


def as_aborted(ending: bytes, cause: str = CAUSE, *, strict: bool = False) -> bytes:
    """Return a withheld end, rewritten as the end that was requested in the meantime."""
    reason = b"length" if strict else b"abort"
    ending = WORKERS_END.sub(b'"finish_reason":"%b","cause":"%b"' % (reason, cause.encode()), ending)
    ending = WORKERS_MESSAGE_END.sub(
        _END_OF_MESSAGE % (_stop_reason(cause, strict=strict), cause.encode()), ending, count=1
    )
    return CUT_SHORT.sub(lambda found: _problem(int(found[1]), found[2], cause), ending) if strict else ending


def _stop_reason(cause: str, *, strict: bool) -> bytes:
    return stop_reason_of("abort", cause, called=False, strict=strict).encode()


def _problem(tokens: int, kind: bytes, cause: str) -> bytes:
    """`kind`: the type of the error, which differs between APIs."""
    return encode(structs.replace(problem_of(cut_short(tokens, cause)), type=kind.decode()))


def usage_of(journal: Journal) -> Usage:
    """Return the usage of what the client has received. The prompt length is 0 until a worker has sent a token."""
    prompt = journal.prompt
    return {"prompt_tokens": prompt, "completion_tokens": journal.tokens, "total_tokens": prompt + journal.tokens}


def wants_usage(path: str, body: bytes) -> bool:
    """Whether the end of a stream has the usage: always in the Messages API, otherwise if the client asked for it."""
    if path == MESSAGES.path:
        return True
    try:
        options = msgspec.json.decode(body).get("stream_options")
    except UNREADABLE:  # workers validate bodies
        return False
    return isinstance(options, dict) and options.get("include_usage") is True


def _with_ids(end: End, choice: dict[str, Any]) -> dict[str, Any]:
    """Add the token ids that a lost worker generated. A client can send them back to continue the answer."""
    return {**choice, **_ids(end)}


def _ids(end: End) -> dict[str, Any]:
    if not end.ids:
        return {}
    spans = [{"version": version, "tokens": tokens} for version, tokens in end.versions]
    return {"completion_token_ids": list(end.ids), "weight_versions": spans}


# path -> value of `object`, prefix of `id`, an empty choice in a stream, an empty choice in a whole answer
_SHAPES: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "/v1/chat/completions": (
        "chat.completion",
        "chatcmpl-",
        {"delta": {}},
        {"message": {"role": "assistant", "content": ""}},
    ),
    "/v1/completions": ("text_completion", "cmpl-", {"text": ""}, {"text": ""}),
}
