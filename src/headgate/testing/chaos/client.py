"""Sends one request and records everything that the client receives, token by token."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from headgate.httpclient import HttpAddress, HttpFailure, HttpResponse, call
from headgate.testing.chaos.catalogue import CatalogueItem

clock = time.monotonic


@dataclass(slots=True)
class ObservedChoice:
    tokens: list[int] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)  # weight version of each token
    text: str = ""
    # Finish reasons with their causes; a correct answer has exactly one.
    ends: list[tuple[str, str]] = field(default_factory=list)
    prompt: list[int] = field(default_factory=list)

    @property
    def cut(self) -> bool:
        return any(reason == "abort" for reason, _ in self.ends)


@dataclass(slots=True)
class ObservedAnswer:
    """The answer to one request. `problem` is a short description by which failures are counted."""

    begun_s: float
    ended_s: float = 0.0
    status: int = 0
    problem: str | None = None
    detail: str = ""
    choices: dict[int, ObservedChoice] = field(default_factory=dict)
    output_tokens: int | None = None  # number of tokens according to the answer's usage
    done: int = 0  # number of [DONE] events
    retry_after_s: float = 0.0
    first_s: float | None = None
    strict: bool = False  # the client accepts only OpenAI's finish reasons


async def send_request(
    address: HttpAddress,
    item: CatalogueItem,
    more: Mapping[str, Any],
    observed: ObservedAnswer,
    timeout_s: float,
    *,
    api_key: str | None = None,
    strict: bool = False,
) -> None:
    """Send a request and fill `observed` while the answer arrives. Raises only if it is cancelled."""
    observed.strict = strict
    headers = {"X-OpenAI-Strict": "true"} if strict else {}
    try:
        async with asyncio.timeout(timeout_s):
            body = msgspec.json.encode(item.body | dict(more))
            async with call(address, "POST", item.path, body, api_key, headers) as answer:
                await _read(answer, item, observed)
    except TimeoutError:
        observed.problem = "hung"
    except (OSError, EOFError, ValueError, HttpFailure) as error:
        observed.problem = type(error).__name__
        observed.detail = str(error)
    finally:
        observed.ended_s = clock()


async def _read(answer: HttpResponse, item: CatalogueItem, observed: ObservedAnswer) -> None:
    observed.status = answer.status
    if answer.status != 200:
        raw = await answer.body()
        observed.problem, observed.detail = f"{answer.status} {_code(raw)}", raw.decode("utf-8", "replace")[:300]
        observed.retry_after_s = float(answer.headers.get("retry-after", 0))
    elif item.streamed:
        await _read_events(answer, observed)
    else:
        _add_event(msgspec.json.decode(await answer.body()), observed)


def _code(raw: bytes) -> str:
    try:
        return str(msgspec.json.decode(raw)["error"]["code"])
    except (msgspec.DecodeError, KeyError, TypeError):
        return "without a code"


async def _read_events(answer: HttpResponse, observed: ObservedAnswer) -> None:
    async for line in answer.lines():
        if not line.startswith(b"data:"):
            continue
        data = line[5:].strip()
        if data == b"[DONE]":
            observed.done += 1
        else:
            _add_event(msgspec.json.decode(data), observed)
    if not observed.done and observed.problem is None:
        observed.problem = "stream cut"


def _add_event(event: dict[str, Any], observed: ObservedAnswer) -> None:
    for part in event.get("choices", ()):
        if observed.first_s is None:
            observed.first_s = clock()
        _add(observed.choices.setdefault(part["index"], ObservedChoice()), part)
    if (error := event.get("error")) is not None and not _explained(error, observed):
        observed.problem, observed.detail = f"error {error.get('code')}", str(error.get("message"))
    if event.get("usage") is not None:
        observed.output_tokens = int(event["usage"]["completion_tokens"])


def _explained(error: dict[str, Any], observed: ObservedAnswer) -> bool:
    """Whether the error repeats, for a strict client, why a choice was cut."""
    ends = [choice.ends[-1:] for choice in observed.choices.values() if observed.strict]
    return [("abort", error.get("code"))] in ends


def _add(choice: ObservedChoice, part: dict[str, Any]) -> None:
    choice.tokens += part.get("completion_token_ids") or []
    choice.prompt = part.get("prompt_token_ids") or choice.prompt
    for span in part.get("weight_versions") or []:
        choice.versions += [span["version"]] * span["tokens"]
    message = part.get("delta") or part.get("message") or {}
    choice.text += part.get("text") or message.get("content") or ""
    if part.get("finish_reason") is not None:
        cut = part["finish_reason"] == "length" and part.get("error", {}).get("code") == part.get("cause", "")
        choice.ends.append(("abort" if cut else part["finish_reason"], part.get("cause", "")))
