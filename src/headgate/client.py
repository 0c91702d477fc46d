"""For trainers and operators: a fleet behind one address, from Python.

    fleet = Fleet("http://127.0.0.1:8000")
    sample = fleet.generate("Once upon a time", max_tokens=64)
    fleet.pause()
    with publish(model.state_dict()) as files:  # headgate.weights
        fleet.update_weights(files)
    fleet.resume()

`AsyncFleet` has the same methods as coroutines. Cancelling a `generate` aborts it on the server. An answer that was cut
(`sample.cut`) goes on from its own tokens with `fleet.generate(after=sample)`, under whatever weights there are by then.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPSConnection
from typing import Any

import msgspec

from headgate.contract.operations import control, fleet, generation
from headgate.contract.operations.operation import Operation
from headgate.errors import HeadgateError, RequestError
from headgate.httpclient import HttpAddress, HttpFailure, call
from headgate.protocol.command import (
    DEFAULT_TIMEOUT_S,
    BroadcastSource,
    FileSource,
    PauseMode,
    SharedMemorySource,
    Source,
)

TIMEOUT_S = 600.0
LOOK_EVERY_S = 0.02
MARGIN_S = 30.0  # a control call that has used up its time still has to be answered


class FleetError(RequestError):
    """The fleet has refused, and says why."""

    def __init__(self, status: int, message: str, code: str | None, param: str | None) -> None:
        super().__init__(message, param=param, code=code)
        self.status = status


class FleetLost(HeadgateError):
    """Nobody answers at that address, or not in time."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One answer. After `generate(after=...)`, all of it: what was there before and what has come since."""

    request_id: str
    prompt_token_ids: list[int]
    token_ids: list[int]
    text: str
    finish_reason: str
    cause: str
    logprobs: list[float]  # of the tokens, if asked
    weight_versions: list[int]  # of the weights that made them, one per token

    @property
    def cut(self) -> bool:
        """It was ended before it was done, and can go on."""
        return self.finish_reason == "abort"


@dataclass(frozen=True, slots=True)
class Aborted:
    """What became of an abort, by request id."""

    aborted: dict[str, int]  # and how many tokens each had
    not_found: list[str] = field(default_factory=list)
    already_finished: list[str] = field(default_factory=list)
    errors: dict[str, str] = field(default_factory=dict)
    accepted: list[str] = field(default_factory=list)  # when nobody waits


class FleetState(msgspec.Struct, kw_only=True, frozen=True):
    """Where the engines stand."""

    is_paused: bool
    state: str
    mode: str | None = None
    weight_version: int = 0
    asleep: list[str] = []
    engines: list[dict[str, Any]] = []
    aborted: int = 0  # by a pause
    finished: int = 0
    forced: list[str] = []
    elapsed_s: float = 0.0


class FleetSize(msgspec.Struct, kw_only=True, frozen=True):
    """How many servers there are, by role."""

    wanted: dict[str, int]
    ready: dict[str, int]
    done: bool = True  # False: it was not so in time, and becomes so


@dataclass(frozen=True, slots=True)
class _Ask:
    """One call as a value: what to send, how long to wait, and what to make of the answer."""

    operation: Operation
    read: Callable[[Any], Any]
    body: Mapping[str, Any] | None = None
    timeout_s: float = TIMEOUT_S

    @property
    def method(self) -> str:
        return self.operation.method

    @property
    def path(self) -> str:
        return self.operation.path


# ------------------------------------------------------------------------------------------------------------ the calls


def _generate(
    prompt: str | Sequence[int] | None, after: Sample | None, timeout_s: float, more: dict[str, Any]
) -> _Ask:
    body: dict[str, Any] = {"return_token_ids": True, "return_weight_versions": True, **more}
    if (prompt is None) == (after is None):
        raise ValueError("give either a prompt or a sample to go on from")
    if after is not None:
        body |= {"prompt": after.prompt_token_ids, "generated_token_ids": after.token_ids}
    else:
        body["prompt"] = prompt if isinstance(prompt, str) else list(prompt or ())
    return _Ask(generation.COMPLETIONS, lambda told: _sample(told, after), body, timeout_s)


def _sample(told: Any, after: Sample | None) -> Sample:
    (choice,) = told["choices"]
    scores = (choice.get("logprobs") or {}).get("token_logprobs") or []
    versions = [span["version"] for span in choice["weight_versions"] for _ in range(span["tokens"])]
    return Sample(
        request_id=told["id"].removeprefix("cmpl-"),
        prompt_token_ids=choice["prompt_token_ids"],
        token_ids=[*(after.token_ids if after else ()), *choice["completion_token_ids"]],
        text=choice["text"],
        finish_reason=choice["finish_reason"],
        cause=choice["cause"],
        logprobs=[*(after.logprobs if after else ()), *scores],
        weight_versions=[*(after.weight_versions if after else ()), *versions],
    )


def _abort(
    ids: Sequence[str], tags: Mapping[str, str] | None, everything: bool, wait: bool, timeout_s: float
) -> _Ask:
    body: dict[str, Any] = {"wait": wait, "timeout": timeout_s}
    if ids:
        body["req_ids"] = list(ids)
    if tags is not None:
        body["tags"] = dict(tags)
    if everything:
        body["abort_all"] = True
    return _Ask(control.ABORT_REQUESTS, _aborted, body, timeout_s + MARGIN_S)


def _aborted(told: Any) -> Aborted:
    result = told["result"]
    return Aborted(
        {each["request_id"]: each["output_token_count"] for each in result["aborted"]},
        result["not_found"],
        result["already_finished"],
        {each["request_id"]: each["message"] for each in result["errors"]},
        result.get("accepted", []),
    )


def _state(told: Any) -> FleetState:
    return msgspec.convert(told["result"], FleetState)


def _control(operation: Operation, body: Mapping[str, Any] | None = None, timeout_s: float = TIMEOUT_S) -> _Ask:
    return _Ask(operation, _state, body, timeout_s + MARGIN_S)


def _pause(mode: PauseMode, new_requests: str, timeout_s: float) -> _Ask:
    return _control(control.PAUSE, {"mode": mode, "new_requests": new_requests, "timeout": timeout_s}, timeout_s)


def _tags(tags: Sequence[str]) -> dict[str, Any]:
    return {"tags": tags} if tags else {}


def _update(source: Source | str, version: int | None, kv: str, timeout_s: float) -> _Ask:
    body: dict[str, Any] = {"kv": kv, "timeout": timeout_s}
    if version is not None:
        body["version"] = version
    match source:
        case BroadcastSource():
            body["group"] = {
                "init_method": source.init_method,
                "world_size": source.world_size,
                "rank": source.rank,
                "timeout": source.timeout_s,
                "backend": source.backend,
            }
        case SharedMemorySource(gpu, storages, tensors):
            body["shared"] = msgspec.to_builtins({"gpu": gpu, "storages": storages, "tensors": tensors})
        case FileSource(path, checksum):
            body["path"] = path
            if checksum is not None:
                body["verify_checksum"] = checksum
        case _:
            body["path"] = str(source)
    return _control(control.UPDATE_WEIGHTS, body, timeout_s)


def _size(told: Any) -> FleetSize:
    return msgspec.convert({**told["result"], "done": told["status"] == "success"}, FleetSize)


def _scale(counts: Mapping[str, int], timeout_s: float) -> _Ask:
    return _Ask(fleet.SCALE, _size, {**counts, "timeout": timeout_s}, timeout_s + MARGIN_S)


IS_PAUSED = _Ask(control.IS_PAUSED, _state)
REQUESTS = _Ask(control.LIST_REQUESTS, lambda told: list(told["data"]))
SIZE = _Ask(fleet.SHOW_SCALE, _size)


def _read(ask: _Ask, status: int, raw: bytes) -> Any:
    try:
        told = msgspec.json.decode(raw) if raw else None
    except msgspec.DecodeError:
        raise FleetLost(f"{ask.path} answered {status} with something that is no JSON: {raw[:80]!r}") from None
    if status >= 400:
        error = (told or {}).get("error", {})
        raise FleetError(status, error.get("message", f"{ask.path}: {status}"), error.get("code"), error.get("param"))
    return ask.read(told)


# ------------------------------------------------------------------------------------------------------------- the fleets


class Fleet:
    """A fleet, for those who wait. May be used by several threads at once."""

    def __init__(self, url: str, admin_key: str | None = None) -> None:
        self._address = HttpAddress.of(url)
        self._key = admin_key

    def generate(
        self,
        prompt: str | Sequence[int] | None = None,
        *,
        after: Sample | None = None,
        timeout_s: float = TIMEOUT_S,
        **more: Any,
    ) -> Sample:
        """The answer to `prompt`, or the rest of one that was cut. `more` are fields of /v1/completions."""
        sample: Sample = self._do(_generate(prompt, after, timeout_s, more))
        return sample

    def abort(
        self,
        *request_ids: str,
        tags: Mapping[str, str] | None = None,
        everything: bool = False,
        wait: bool = True,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> Aborted:
        aborted: Aborted = self._do(_abort(request_ids, tags, everything, wait, timeout_s))
        return aborted

    def pause(
        self, mode: PauseMode = "abort", *, new_requests: str = "reject", timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> FleetState:
        return self._state(_pause(mode, new_requests, timeout_s))

    def resume(self) -> FleetState:
        return self._state(_control(control.RESUME))

    def state(self) -> FleetState:
        return self._state(IS_PAUSED)

    def update_weights(
        self, source: Source | str, version: int | None = None, *, kv: str = "recompute", timeout_s: float = TIMEOUT_S
    ) -> FleetState:
        """Update the weights of a paused fleet. `source` is a path that the servers can read, or a weight source."""
        return self._state(_update(source, version, kv, timeout_s))

    def sleep(self, *tags: str) -> FleetState:
        return self._state(_control(control.SLEEP, _tags(tags)))

    def wakeup(self, *tags: str) -> FleetState:
        return self._state(_control(control.WAKEUP, _tags(tags)))

    def flush_cache(self) -> FleetState:
        return self._state(_control(control.FLUSH_CACHE))

    def size(self) -> FleetSize:
        size: FleetSize = self._do(SIZE)
        return size

    def scale(self, counts: Mapping[str, int], *, timeout_s: float = TIMEOUT_S) -> FleetSize:
        """Have so many servers, by role; of a fleet of `headgate up`."""
        size: FleetSize = self._do(_scale(counts, timeout_s))
        return size

    def requests(self) -> list[dict[str, Any]]:
        """What is in flight."""
        listed: list[dict[str, Any]] = self._do(REQUESTS)
        return listed

    def wait_idle(self, timeout_s: float = TIMEOUT_S) -> None:
        """Return when nothing is in flight; FleetLost if that takes too long."""
        until_s = time.monotonic() + timeout_s
        while left := self.requests():
            if time.monotonic() > until_s:
                raise _still_busy(left, timeout_s)
            time.sleep(LOOK_EVERY_S)

    def _state(self, ask: _Ask) -> FleetState:
        state: FleetState = self._do(ask)
        return state

    def _do(self, ask: _Ask) -> Any:
        address = self._address
        connect = HTTPSConnection if address.tls else HTTPConnection
        connection = connect(address.host, address.port, timeout=ask.timeout_s)
        body = b"" if ask.body is None else msgspec.json.encode(ask.body)
        headers = {"Content-Type": "application/json"}
        if self._key is not None:
            headers["Authorization"] = f"Bearer {self._key}"
        try:
            connection.request(ask.method, address.path + ask.path, body, headers)
            response = connection.getresponse()
            return _read(ask, response.status, response.read())
        except OSError as error:
            where = f"{address.host}:{address.port}{ask.path}"
            raise FleetLost(f"no answer from {where}: {error or type(error).__name__}") from error
        finally:
            connection.close()


class AsyncFleet:
    """The same, for those who do other things meanwhile."""

    def __init__(self, url: str, admin_key: str | None = None) -> None:
        self._address = HttpAddress.of(url)
        self._key = admin_key

    async def generate(
        self,
        prompt: str | Sequence[int] | None = None,
        *,
        after: Sample | None = None,
        timeout_s: float = TIMEOUT_S,
        **more: Any,
    ) -> Sample:
        """The answer to `prompt`, or the rest of one that was cut. `more` are fields of /v1/completions."""
        sample: Sample = await self._do(_generate(prompt, after, timeout_s, more))
        return sample

    async def abort(
        self,
        *request_ids: str,
        tags: Mapping[str, str] | None = None,
        everything: bool = False,
        wait: bool = True,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> Aborted:
        aborted: Aborted = await self._do(_abort(request_ids, tags, everything, wait, timeout_s))
        return aborted

    async def pause(
        self, mode: PauseMode = "abort", *, new_requests: str = "reject", timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> FleetState:
        return await self._state(_pause(mode, new_requests, timeout_s))

    async def resume(self) -> FleetState:
        return await self._state(_control(control.RESUME))

    async def state(self) -> FleetState:
        return await self._state(IS_PAUSED)

    async def update_weights(
        self, source: Source | str, version: int | None = None, *, kv: str = "recompute", timeout_s: float = TIMEOUT_S
    ) -> FleetState:
        """Update the weights of a paused fleet. `source` is a path that the servers can read, or a weight source."""
        return await self._state(_update(source, version, kv, timeout_s))

    async def sleep(self, *tags: str) -> FleetState:
        return await self._state(_control(control.SLEEP, _tags(tags)))

    async def wakeup(self, *tags: str) -> FleetState:
        return await self._state(_control(control.WAKEUP, _tags(tags)))

    async def flush_cache(self) -> FleetState:
        return await self._state(_control(control.FLUSH_CACHE))

    async def size(self) -> FleetSize:
        size: FleetSize = await self._do(SIZE)
        return size

    async def scale(self, counts: Mapping[str, int], *, timeout_s: float = TIMEOUT_S) -> FleetSize:
        """Have so many servers, by role; of a fleet of `headgate up`."""
        size: FleetSize = await self._do(_scale(counts, timeout_s))
        return size

    async def requests(self) -> list[dict[str, Any]]:
        """What is in flight."""
        listed: list[dict[str, Any]] = await self._do(REQUESTS)
        return listed

    async def wait_idle(self, timeout_s: float = TIMEOUT_S) -> None:
        """Return when nothing is in flight; FleetLost if that takes too long."""
        until_s = time.monotonic() + timeout_s
        while left := await self.requests():
            if time.monotonic() > until_s:
                raise _still_busy(left, timeout_s)
            await asyncio.sleep(LOOK_EVERY_S)

    async def _state(self, ask: _Ask) -> FleetState:
        state: FleetState = await self._do(ask)
        return state

    async def _do(self, ask: _Ask) -> Any:
        address = self._address
        body = b"" if ask.body is None else msgspec.json.encode(ask.body)
        try:
            async with asyncio.timeout(ask.timeout_s), call(address, ask.method, ask.path, body, self._key) as answer:
                return _read(ask, answer.status, await answer.body())
        except (OSError, EOFError, TimeoutError, HttpFailure) as error:
            where = f"{address.host}:{address.port}{ask.path}"
            raise FleetLost(f"no answer from {where}: {error or type(error).__name__}") from error


def _still_busy(left: Sequence[Mapping[str, Any]], timeout_s: float) -> FleetLost:
    ids = ", ".join(str(each["request_id"]) for each in left[:5])
    return FleetLost(f"{len(left)} requests are still in flight after {timeout_s:g} s: {ids}")
