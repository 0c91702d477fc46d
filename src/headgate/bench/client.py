"""Sends one streaming request and times its answer, with the minimal HTTP client in `headgate.httpclient`."""

from __future__ import annotations

import asyncio
import time

import msgspec

from headgate.config import TlsFiles
from headgate.errors import RequestError
from headgate.httpclient import HttpAddress, HttpFailure, HttpResponse, call

clock = time.perf_counter


class TimedRequest(msgspec.Struct):
    """One request, as measured by its client. Times are in seconds; `start_s` counts from the start of the run."""

    start_s: float = 0.0
    first_token_s: float | None = None
    total_s: float = 0.0
    gaps_s: list[float] = []  # between consecutive pieces of text
    prompt_tokens: int = 0
    output_tokens: int = 0
    finish_reason: str | None = None
    error: str | None = None  # short, so that equal errors can be counted
    cached_tokens: int = 0  # prompt tokens that were cached, as reported by the server
    worker: str | None = None  # the worker that answered, as reported by a router


class TimedReply(msgspec.Struct):
    sample: TimedRequest
    text: str = ""


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None


class _Choice(msgspec.Struct):
    delta: _Delta | None = None
    text: str | None = None
    finish_reason: str | None = None

    @property
    def content(self) -> str:
        return self.text or (self.delta and self.delta.content) or ""

    @property
    def has_text(self) -> bool:
        return bool(self.content or (self.delta and self.delta.reasoning_content))


class _PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _PromptDetails | None = None


class _Error(msgspec.Struct):
    message: str = ""
    code: str | int | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: _Error | None = None


_event: msgspec.json.Decoder[_Event] = msgspec.json.Decoder(_Event)


def address_of(url: str, tls: TlsFiles) -> HttpAddress:
    try:
        return HttpAddress.of(url, tls)
    except ValueError as error:
        raise RequestError(f"{url!r} is not the address of a server: {error}") from None


async def ask(address: HttpAddress, path: str, body: bytes, *, api_key: str | None, timeout_s: float) -> TimedReply:
    """Send one streaming request and time its answer. An error is recorded in the reply's sample."""
    sample, text = TimedRequest(gaps_s=[]), ""
    begun_s = clock()
    try:
        async with asyncio.timeout(timeout_s), call(address, "POST", path, body, api_key) as answer:
            sample.worker = answer.headers.get("x-headgate-worker")
            if answer.status != 200:
                sample.error = _refusal(answer.status, await answer.body())
            else:
                text = await _watch(answer, sample, begun_s)
    except TimeoutError:
        sample.error = "timeout"
    except (OSError, EOFError, ValueError, HttpFailure) as error:
        sample.error = type(error).__name__
    sample.total_s = clock() - begun_s
    return TimedReply(sample, text)


async def _watch(answer: HttpResponse, sample: TimedRequest, begun_s: float) -> str:
    last_s, pieces, text = None, 0, []
    async for line in answer.lines():
        if not line.startswith(b"data:"):
            continue
        data = line[5:].strip()
        if data == b"[DONE]":
            break
        event = _event.decode(data)
        if event.error is not None:
            sample.error = str(event.error.code or event.error.message)
        if event.usage is not None:
            _count(event.usage, sample)
        for choice in event.choices:
            sample.finish_reason = choice.finish_reason or sample.finish_reason
            if choice.has_text:
                now_s = clock()
                text.append(choice.content)
                if last_s is None:
                    sample.first_token_s = now_s - begun_s
                else:
                    sample.gaps_s.append(now_s - last_s)
                last_s, pieces = now_s, pieces + 1
    else:
        sample.error = sample.error or "stream cut"
    sample.output_tokens = sample.output_tokens or pieces
    return "".join(text)


def _count(usage: _Usage, sample: TimedRequest) -> None:
    sample.prompt_tokens, sample.output_tokens = usage.prompt_tokens, usage.completion_tokens
    if usage.prompt_tokens_details is not None:
        sample.cached_tokens = usage.prompt_tokens_details.cached_tokens or 0


def _refusal(status: int, body: bytes) -> str:
    try:
        error = _event.decode(body).error
    except msgspec.MsgspecError:
        error = None
    return f"{status} {error.code}" if error and error.code else str(status)
