"""Helpers that write answers: extra fields of a choice, finish reasons, errors, and the frame of stream events.

The fields that all events of a stream share (id, object, created, model) are encoded once, and so is the JSON around a
delta.
"""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from headgate.api.generate.generation import ChoiceJob, Finish, Piece
from headgate.api.generate.usage import version_spans
from headgate.api.weight_labels import WeightLabels
from headgate.contract import errors
from headgate.contract.answers import Usage
from headgate.contract.errors import Problem, error_body, problem_of
from headgate.contract.event_json import encode, escaped
from headgate.contract.schema import Sampled, StreamOptions
from headgate.errors import HeadgateError, PdError


def extras(
    body: Sampled, job: ChoiceJob, piece: Piece, labels: WeightLabels, *, first: bool, strict: bool
) -> dict[str, Any]:
    """Our extra fields of a choice, for a complete answer or a piece; the prompt's ids go with the first piece."""
    fields: dict[str, Any] = {}
    if piece.finish is not None:
        fields["cause"] = piece.finish.cause
        if strict:
            fields["error"] = cut_problem(piece.finish)
    if body.return_token_ids:
        fields["completion_token_ids"] = fields["token_ids"] = piece.tokens
        if first:
            fields["prompt_token_ids"] = job.request.prompt
    if piece.finish is not None and job.request.sampling.return_routed_experts:
        fields["routed_experts"] = piece.experts
    if piece.generated_ids is not None:
        fields["generated_token_ids"] = piece.generated_ids
    if body.return_weight_versions:
        fields["weight_versions"] = version_spans(piece.versions, labels)
    return fields


def finish_reason(finish: Finish | None, *, strict: bool, called: bool = False) -> str | None:
    """The finish reason for the client. OpenAI's API does not have `abort`; `strict` replaces it by `length`."""
    if finish is None:
        return None
    if finish.reason == "stop":
        return "tool_calls" if called else "stop"
    if strict and finish.reason in ("abort", "pd_reschedule"):
        return "length"
    return finish.reason


def cut_short(finish: Finish) -> HeadgateError | None:
    """The error for clients that do not accept the finish reason `abort`, if the choice was cut short."""
    if finish.reason == "pd_reschedule":
        return PdError(f"another server must continue after {finish.output_tokens} tokens ({finish.cause})")
    return errors.cut_short(finish.output_tokens, finish.cause) if finish.reason == "abort" else None


def cut_problem(finish: Finish) -> Problem | UnsetType:
    error = cut_short(finish)
    return problem_of(error) if error else UNSET


def error_event(error: HeadgateError) -> bytes:
    return b"data: " + escaped(error_body(error)) + b"\n\n"


class EventFrame:
    """The constant parts of a stream's events."""

    def __init__(self, head: dict[str, Any], *, with_usage: bool) -> None:
        self._opening = b"data: " + encode(head)[:-1] + b',"choices":['
        self._closing = b'],"usage":null}\n\n' if with_usage else b"]}\n\n"

    def around(self, before: bytes, after: bytes) -> tuple[bytes, bytes]:
        """The bytes of an event before and after the one part of a choice that varies."""
        return self._opening + before, after + self._closing

    def event(self, choice: msgspec.Struct, **more: Any) -> bytes:
        """An event of one choice; `more` are other fields of the event."""
        if not more:
            return self._opening + encode(choice) + self._closing
        if "usage" not in more and self._closing != b"]}\n\n":
            more["usage"] = None
        return self._opening + encode(choice) + b"]," + encode(more)[1:] + b"\n\n"

    def usage(self, usage: Usage) -> bytes:
        return self._opening + b'],"usage":' + encode(usage) + b"}\n\n"


def usage_asked(options: StreamOptions | None) -> bool:
    return bool(options and options.include_usage)


def usage_in_chunks(options: StreamOptions | None) -> bool:
    """Whether every chunk has the usage so far. As in vLLM, `include_usage` must be set too."""
    return bool(options and options.include_usage and options.continuous_usage_stats)
