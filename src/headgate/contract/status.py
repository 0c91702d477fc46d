"""Answers of the health probes and of GET /v1/models."""

from __future__ import annotations

import msgspec


class ModelEntry(msgspec.Struct, kw_only=True):
    id: str
    object: str = "model"
    created: int
    owned_by: str = "headgate"
    max_model_len: int


class ModelList(msgspec.Struct, kw_only=True):
    object: str = "list"
    data: list[ModelEntry]


class EngineHealth(msgspec.Struct, frozen=True):
    engine: int
    state: str  # ok, busy (a long step), outdated (lacks the fleet's weights), down (restarting), wedged
    restarts: int
    last_turn_s: float | None = None  # seconds since the last iteration of the step loop


class Health(msgspec.Struct, frozen=True):
    status: str  # ok, degraded (some engine is down or outdated), unhealthy
    oldest_without_progress_s: float
    engines: list[EngineHealth]


class Readiness(msgspec.Struct, frozen=True):
    ready: bool
    reason: str = ""
