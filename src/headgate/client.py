"""A Python client for trainers and operators: a server or a fleet behind one address.

    fleet = Fleet("http://127.0.0.1:8000")
    sample = fleet.generate("Once upon a time", max_tokens=64)
    fleet.pause()
    with publish(model.state_dict()) as files:  # headgate.weights
        fleet.update_weights(files)
    fleet.resume()

`AsyncFleet` has the same methods as coroutines. Cancelling a `generate` aborts it on the server. An answer that was
cut short (`sample.cut`) is continued from its own tokens with `fleet.generate(after=sample)`, under the weights
loaded by then.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from headgate.config import SYSTEM_CAS, TlsFiles
from headgate.contract.operations import control, fleet, generation
from headgate.contract.operations.operation import Operation
from headgate.errors import HeadgateError, RequestError
from headgate.httpclient import HttpAddress, HttpFailure, blocking_connection, call
from headgate.protocol.command import (
    DEFAULT_TIMEOUT_S,
    BroadcastSource,
    FileSource,
    PauseMode,
    SharedMemorySource,
    Source,
)
from headgate.tls import why

TIMEOUT_S = 600.0
POLL_INTERVAL_S = 0.02
MARGIN_S = 30.0  # added to a control call's own timeout, so that the server's answer can arrive


class FleetError(RequestError):
    """The fleet refused a call; the message is the one in the server's answer."""

    def __init__(self, status: int, message: str, code: str | None, param: str | None) -> None:
        super().__init__(message, param=param, code=code)
        self.status = status


class FleetLost(HeadgateError):
    """The address cannot be reached, or does not answer in time."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One answer. After `generate(after=...)` it includes the tokens of the earlier sample."""

    request_id: str
    prompt_token_ids: list[int]
    token_ids: list[int]
    text: str
    finish_reason: str
    cause: str
    logprobs: list[float]  # one per token, if requested
    weight_versions: list[int]  # version of the weights that computed each token

    @property
    def cut(self) -> bool:
        """Whether the answer was cut short and can be continued."""
        return self.finish_reason == "abort"


@dataclass(frozen=True, slots=True)
class Aborted:
    """The outcome of an abort, by request id."""

    aborted: dict[str, int]  # number of tokens by request id; for an admin, of all tenants that use the id
    not_found: list[str] = field(default_factory=list)
    already_finished: list[str] = field(default_factory=list)
    errors: dict[str, str] = field(default_factory=dict)
    accepted: list[str] = field(default_factory=list)  # with `wait=False`: requests whose abort was accepted


class FleetState(msgspec.Struct, kw_only=True, frozen=True):
    """The lifecycle state of the engines."""

    is_paused: bool
    state: str
    mode: str | None = None
    weight_version: int = 0
    weight_label: str = ""  # the trainer's label of that version, or its number as text
    asleep: list[str] = []
    engines: list[dict[str, Any]] = []
    aborted: int = 0  # number of requests that a pause aborted
    finished: int = 0
    forced: list[str] = []
    elapsed_s: float = 0.0


class FleetSize(msgspec.Struct, kw_only=True, frozen=True):
    """The number of servers, by role."""

    wanted: dict[str, int]
    ready: dict[str, int]
    done: bool = True  # False: the timeout passed before all servers were ready; scaling continues


@dataclass(frozen=True, slots=True)
class _Call:
    """One call: what to send, how long to wait, and how to read the answer."""

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
) -> _Call:
    body: dict[str, Any] = {"return_token_ids": True, "return_weight_versions": True, **more}
    if (prompt is None) == (after is None):
        raise ValueError("give either a prompt or a sample to continue")
    if after is not None:
        body |= {"prompt": after.prompt_token_ids, "generated_token_ids": after.token_ids}
    else:
        body["prompt"] = prompt if isinstance(prompt, str) else list(prompt or ())
    return _Call(generation.COMPLETIONS, lambda answer: _sample(answer, after), body, timeout_s)


def _sample(answer: Any, after: Sample | None) -> Sample:
    (choice,) = answer["choices"]
    scores = (choice.get("logprobs") or {}).get("token_logprobs") or []
    versions = [span["version"] for span in choice["weight_versions"] for _ in range(span["tokens"])]
    return Sample(
        request_id=answer["id"].removeprefix("cmpl-"),
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
) -> _Call:
    body: dict[str, Any] = {"wait": wait, "timeout": timeout_s}
    if ids:
        body["req_ids"] = list(ids)
    if tags is not None:
        body["tags"] = dict(tags)
    if everything:
        body["abort_all"] = True
    return _Call(control.ABORT_REQUESTS, _aborted, body, timeout_s + MARGIN_S)


def _aborted(answer: Any) -> Aborted:
    result = answer["result"]
    tokens: Counter[str] = Counter()
    for each in result["aborted"]:
        tokens[each["request_id"]] += each["output_token_count"]
    return Aborted(
        dict(tokens),
        result["not_found"],
        result["already_finished"],
        {each["request_id"]: each["message"] for each in result["errors"]},
        result.get("accepted", []),
    )


def _state(answer: Any) -> FleetState:
    return msgspec.convert(answer["result"], FleetState)


def _control(operation: Operation, body: Mapping[str, Any] | None = None, timeout_s: float = TIMEOUT_S) -> _Call:
    return _Call(operation, _state, body, timeout_s + MARGIN_S)


def _pause(mode: PauseMode, new_requests: str, timeout_s: float) -> _Call:
    return _control(control.PAUSE, {"mode": mode, "new_requests": new_requests, "timeout": timeout_s}, timeout_s)


def _tags(tags: Sequence[str]) -> dict[str, Any]:
    return {"tags": tags} if tags else {}


def _update(source: Source | str, kv: str, timeout_s: float, **given: Any) -> _Call:
    body: dict[str, Any] = {"kv": kv, "timeout": timeout_s}
    body |= {name: value for name, value in given.items() if value is not None}
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


def _size(answer: Any) -> FleetSize:
    return msgspec.convert({**answer["result"], "done": answer["status"] == "success"}, FleetSize)


def _scale(counts: Mapping[str, int], timeout_s: float) -> _Call:
    return _Call(fleet.SCALE, _size, {**counts, "timeout": timeout_s}, timeout_s + MARGIN_S)


IS_PAUSED = _Call(control.IS_PAUSED, _state)
REQUESTS = _Call(control.LIST_REQUESTS, lambda answer: list(answer["data"]))
SIZE = _Call(fleet.SHOW_SCALE, _size)


def _read(request: _Call, status: int, raw: bytes) -> Any:
    try:
        answer = msgspec.json.decode(raw) if raw else None
    except msgspec.DecodeError:
        raise FleetLost(f"{request.path} answered {status} with invalid JSON: {raw[:80]!r}") from None
    if status >= 400:
        error = (answer or {}).get("error", {})
        raise FleetError(
            status, error.get("message", f"{request.path}: {status}"), error.get("code"), error.get("param")
        )
    return request.read(answer)


# ------------------------------------------------------------------------------------------------------------- the fleets


class Fleet:
    """A blocking client. Several threads may use it at once."""

    def __init__(self, url: str, admin_key: str | None = None, *, tls: TlsFiles = SYSTEM_CAS) -> None:
        self._address = HttpAddress.of(url, tls)
        self._key = admin_key

    def generate(
        self,
        prompt: str | Sequence[int] | None = None,
        *,
        after: Sample | None = None,
        timeout_s: float = TIMEOUT_S,
        **more: Any,
    ) -> Sample:
        """Answer `prompt`, or continue the sample `after`. `more` are fields of /v1/completions."""
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
        self,
        source: Source | str,
        version: int | None = None,
        *,
        label: str | None = None,
        kv: str = "recompute",
        base: int | None = None,
        checksum: Mapping[str, str] | None = None,
        timeout_s: float = TIMEOUT_S,
    ) -> FleetState:
        """Update the weights of a paused fleet. `source` is a path that the servers can read, or a weight source.

        `base`: the source contains only the tensors changed since this version (`headgate.weights.changed`).
        `checksum`: SHA-256 in hex by tensor name (`headgate.weights.checksums`), or by file name for a path.
        """
        return self._state(
            _update(source, kv, timeout_s, version=version, label=label, base=base, verify_checksum=checksum)
        )

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
        """Set the number of servers by role, in a fleet started by `headgate up`."""
        size: FleetSize = self._do(_scale(counts, timeout_s))
        return size

    def requests(self) -> list[dict[str, Any]]:
        """The requests in flight."""
        listed: list[dict[str, Any]] = self._do(REQUESTS)
        return listed

    def wait_idle(self, timeout_s: float = TIMEOUT_S) -> None:
        """Return when no request is in flight; raises FleetLost after the timeout."""
        until_s = time.monotonic() + timeout_s
        while left := self.requests():
            if time.monotonic() > until_s:
                raise _still_busy(left, timeout_s)
            time.sleep(POLL_INTERVAL_S)

    def _state(self, request: _Call) -> FleetState:
        state: FleetState = self._do(request)
        return state

    def _do(self, request: _Call) -> Any:
        address = self._address
        connection = blocking_connection(address, request.timeout_s)
        body = b"" if request.body is None else msgspec.json.encode(request.body)
        headers = {"Content-Type": "application/json"}
        if self._key is not None:
            headers["Authorization"] = f"Bearer {self._key}"
        try:
            connection.request(request.method, address.path + request.path, body, headers)
            response = connection.getresponse()
            return _read(request, response.status, response.read())
        except OSError as error:
            where = f"{address.host}:{address.port}{request.path}"
            raise FleetLost(f"no answer from {where}: {why(error)}") from error
        finally:
            connection.close()


class AsyncFleet:
    """A client with the methods of `Fleet` as coroutines."""

    def __init__(self, url: str, admin_key: str | None = None, *, tls: TlsFiles = SYSTEM_CAS) -> None:
        self._address = HttpAddress.of(url, tls)
        self._key = admin_key

    async def generate(
        self,
        prompt: str | Sequence[int] | None = None,
        *,
        after: Sample | None = None,
        timeout_s: float = TIMEOUT_S,
        **more: Any,
    ) -> Sample:
        """Answer `prompt`, or continue the sample `after`. `more` are fields of /v1/completions."""
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
        self,
        source: Source | str,
        version: int | None = None,
        *,
        label: str | None = None,
        kv: str = "recompute",
        base: int | None = None,
        checksum: Mapping[str, str] | None = None,
        timeout_s: float = TIMEOUT_S,
    ) -> FleetState:
        """Update the weights of a paused fleet. `source` is a path that the servers can read, or a weight source.

        `base`: the source contains only the tensors changed since this version (`headgate.weights.changed`).
        `checksum`: SHA-256 in hex by tensor name (`headgate.weights.checksums`), or by file name for a path.
        """
        return await self._state(
            _update(source, kv, timeout_s, version=version, label=label, base=base, verify_checksum=checksum)
        )

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
        """Set the number of servers by role, in a fleet started by `headgate up`."""
        size: FleetSize = await self._do(_scale(counts, timeout_s))
        return size

    async def requests(self) -> list[dict[str, Any]]:
        """The requests in flight."""
        listed: list[dict[str, Any]] = await self._do(REQUESTS)
        return listed

    async def wait_idle(self, timeout_s: float = TIMEOUT_S) -> None:
        """Return when no request is in flight; raises FleetLost after the timeout."""
        until_s = time.monotonic() + timeout_s
        while left := await self.requests():
            if time.monotonic() > until_s:
                raise _still_busy(left, timeout_s)
            await asyncio.sleep(POLL_INTERVAL_S)

    async def _state(self, request: _Call) -> FleetState:
        state: FleetState = await self._do(request)
        return state

    async def _do(self, request: _Call) -> Any:
        address = self._address
        body = b"" if request.body is None else msgspec.json.encode(request.body)
        try:
            async with (
                asyncio.timeout(request.timeout_s),
                call(address, request.method, request.path, body, self._key) as answer,
            ):
                return _read(request, answer.status, await answer.body())
        except (OSError, EOFError, TimeoutError, HttpFailure) as error:
            where = f"{address.host}:{address.port}{request.path}"
            raise FleetLost(f"no answer from {where}: {why(error)}") from error


def _still_busy(left: Sequence[Mapping[str, Any]], timeout_s: float) -> FleetLost:
    ids = ", ".join(str(each["request_id"]) for each in left[:5])
    return FleetLost(f"{len(left)} requests are still in flight after {timeout_s:g} s: {ids}")
