"""The answer to `export_kv`: a stream with a ticket, as soon as it is issued, and the outcome.

The stream stays open as long as the KV is kept; if the client disconnects, the KV is released.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from headgate.api.generate.generation import ChoiceJob, Finish, Piece
from headgate.contract.errors import Problem, error_body, problem_of
from headgate.contract.tickets import KvTicket, kv_ticket
from headgate.edge.sse import DONE
from headgate.errors import HeadgateError, PdError


class KvExport(msgspec.Struct, kw_only=True, frozen=True):
    """The outcome: another server fetched the KV, the prompt has no full block to export, or the KV was dropped."""

    state: Literal["fetched", "empty", "dropped"]
    cause: str
    prompt_tokens: int
    cached_tokens: int
    error: Problem | UnsetType = UNSET  # if the KV was dropped


class ExportEvent(msgspec.Struct, kw_only=True, omit_defaults=True):
    kv_ticket: KvTicket | None = None
    kv_export: KvExport | None = None


_encode = msgspec.json.Encoder().encode


class ExportFormat:
    def __init__(self) -> None:
        self._issued = False  # a ticket was sent

    def event(self, job: ChoiceJob, piece: Piece) -> bytes:
        events = b""
        if piece.ticket is not None:
            self._issued = True
            events += _event(ExportEvent(kv_ticket=kv_ticket(piece.ticket)))
        if piece.finish is not None:
            events += _event(ExportEvent(kv_export=self._end(piece.finish)))
        return events

    def _end(self, finish: Finish) -> KvExport:
        done = finish.cause == "exported"
        return KvExport(
            state="dropped" if not done else "fetched" if self._issued else "empty",
            cause=finish.cause,
            prompt_tokens=finish.prompt_tokens,
            cached_tokens=finish.cached_tokens,
            error=UNSET if done else problem_of(PdError(f"the KV of this prompt is no longer kept ({finish.cause})")),
        )

    def closing(self) -> bytes:
        return DONE

    def failure(self, error: HeadgateError) -> bytes:
        return b"data: " + error_body(error) + b"\n\n"

    def whole(self, jobs: Sequence[ChoiceJob], answers: Sequence[Piece]) -> bytes:
        raise AssertionError("an export is always a stream")


def _event(event: ExportEvent) -> bytes:
    return b"data: " + _encode(event) + b"\n\n"
