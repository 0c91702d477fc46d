"""Pause, resume, weight updates, sleep, wake-up and cache flush, for all engines of a server at once.

Every call has an id (the request's), a deadline, and an answer `{request_id, status, result}` with the outcome per engine.
An engine that is down is listed, and follows when it has restarted. An engine that has not answered in time is listed, and
still carries out the command. If an engine refuses, the call fails. While weights or memory change, no other call that
changes an engine's state is started.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import TypeVar

from msgspec import UNSET
from msgspec.structs import replace
from starlette.requests import Request
from starlette.responses import Response

from headgate.api.accounting.ledger import PREFILL, Record
from headgate.api.accounting.metrics import query_engines
from headgate.api.host import ServerContext, host_of
from headgate.api.state import Api
from headgate.contract.control import (
    BOOT_HEADER,
    LONG_S,
    UPDATE_TIMEOUT_S,
    ControlAnswer,
    ControlBody,
    EngineOutcome,
    FleetResult,
    PauseRequest,
    Refusal,
    UpdateRequest,
    memory_of,
    overall,
    source_of,
    tensor_checksums,
)
from headgate.contract.orders import UNORDERED, Order, Orders
from headgate.contract.tickets import NEWEST_VERSION
from headgate.edge.reading import read_control, read_object
from headgate.edge.responses import json_response
from headgate.engine.moving_stream import Place
from headgate.engine.replicas import finds_accepted
from headgate.errors import EngineDead, HeadgateError, Late, RequestError, Unavailable
from headgate.protocol.command import (
    DEFAULT_TIMEOUT_S,
    Command,
    Denied,
    EngineState,
    FileSource,
    Flush,
    Flushed,
    Pause,
    PauseMode,
    Result,
    Resume,
    Sleep,
    Source,
    Tag,
    UpdateWeights,
    Wake,
)

log = logging.getLogger(__name__)

T = TypeVar("T")

MARGIN_S = 0.7  # beyond the timeout: for an engine to end the remaining requests, and for the call to be answered
QUERY_TIMEOUT_S = 2.0
LEAST_FLUSH_S = 0.1  # least time for a flush, even if the pause before it has used the whole timeout
NOTIFY_S = 2.0  # how long the caller waits for clients of aborted requests to receive the end


# ----------------------------------------------------------------------------------------------------------- controls


class Controls:
    """The control operations on all engines. The compatible APIs use them too."""

    def __init__(self, api: Api, host: ServerContext) -> None:
        self._api = api
        self._host = host
        self._metrics = host.ledger.metrics
        self._moving: str | None = None  # describes the call that is changing weights or memory
        self._orders = Orders()
        self._labels = api.labels

    async def pause(self, pause: Pause, order: Order = UNORDERED) -> FleetResult:
        self._take(order)
        clock = asyncio.get_running_loop().time
        began_s, before = clock(), self._places()
        due_s = began_s + pause.timeout_s + MARGIN_S
        self._metrics.pauses[pause.mode] += 1
        self._metrics.paused.start()
        unplaced = self._govern(pause)
        outcome = await self._call(pause, pause.timeout_s + MARGIN_S)
        known, results = before | self._places(), states(outcome)
        forced = _records(known, {index: result.forced for index, result in results.items()})
        ended = [*unplaced, *_records(known, {index: result.ended for index, result in results.items()}), *forced]
        await _await_ends(ended, max(min(NOTIFY_S, due_s - clock()), 0))
        result = self._result(outcome)
        if result.mode is None and result.state == "pausing":
            result.mode = pause.mode
        aborted = _requests(ended)
        finished = [record for record in _requests(before.values()) if record.completed]
        result.aborted, result.finished = len(aborted), len(finished)
        if order.router:
            result.aborted_requests = [record.key for record in aborted]
            result.finished_requests = [record.key for record in finished]
        result.forced = [record.label for record in _requests(forced)]
        result.elapsed_s = round(clock() - began_s, 6)
        if result.state == "running":
            self._metrics.paused.stop()  # a resume arrived in the meantime
        return result

    async def resume(self, timeout_s: float = DEFAULT_TIMEOUT_S, order: Order = UNORDERED) -> FleetResult:
        self._take(order, resumes=True)
        result = self._result(await self._call(Resume(), timeout_s))
        self._metrics.paused.stop()
        return result

    async def update(
        self,
        source: Source,
        version: int | None = None,
        *,
        label: str | None = None,
        recompute: bool = True,
        base: int | None = None,
        checksum: Mapping[str, str] | None = None,
        timeout_s: float = UPDATE_TIMEOUT_S,
    ) -> FleetResult:
        """`version`: above the current one; None: the next. `label`: the trainer's name of it, which may repeat.

        `base`: the version that changed tensors apply to. `checksum`: SHA-256 in hex by tensor name.
        """
        if version is not None and not 0 <= version <= NEWEST_VERSION:
            raise RequestError(f"must be between 0 and {NEWEST_VERSION}", param="version")
        async with self._move("the weights are being updated"):
            number = self._api.engines.version + 1 if version is None else version
            with self._labelled(number, label):
                promised = dict(checksum) if checksum else None
                outcome = await self._call(UpdateWeights(source, number, recompute, base, promised), timeout_s)
        result = self._result(outcome)
        if verified := promised or (source.checksum if isinstance(source, FileSource) else None):
            result.checksum = verified
        return result

    def relabel(self, label: str) -> None:
        """Give the current weights another label."""
        self._refuse_while_moving()
        self._labels.set(self._api.engines.version, label)

    async def sleep(self, tags: Sequence[Tag], timeout_s: float = UPDATE_TIMEOUT_S) -> FleetResult:
        async with self._move("the engines are being put to sleep"):
            return self._result(await self._call(Sleep(tuple(tags)), timeout_s))

    async def wake(self, tags: Sequence[Tag], timeout_s: float = UPDATE_TIMEOUT_S) -> FleetResult:
        async with self._move("the engines are being woken"):
            return self._result(await self._call(Wake(tuple(tags)), timeout_s))

    async def flush(self, timeout_s: float = DEFAULT_TIMEOUT_S) -> FleetResult:
        clock = asyncio.get_running_loop().time
        due_s = clock() + timeout_s + MARGIN_S
        outcome = await self._call(Flush(), timeout_s)
        result = await self.status(min(QUERY_TIMEOUT_S, due_s - clock()))
        dropped = {index: flushed.blocks for index, flushed in outcome.items() if isinstance(flushed, Flushed)}
        for engine in result.engines:
            engine.blocks = dropped.get(engine.engine, 0)
            if isinstance(late := outcome.get(engine.engine), HeadgateError):
                engine.error = str(late)
        result.blocks = sum(dropped.values())
        return result

    async def status(self, timeout_s: float | None = None) -> FleetResult:
        """The state of all engines, from a query."""
        engines: list[EngineOutcome] = []
        modes: list[PauseMode | None] = []
        asleep: list[str] = []
        for view in await query_engines(self._host.replicas, QUERY_TIMEOUT_S if timeout_s is None else timeout_s):
            if view.pong is None:
                engines.append(self._unanswered(view.index, "it does not answer"))
                continue
            status = view.pong.status
            engines.append(EngineOutcome(engine=view.index, state=status.state, weight_version=status.version))
            modes.append(status.mode)
            asleep += status.asleep
        return self._fleet(engines, next(filter(None, modes), None), list(dict.fromkeys(asleep)))

    # -- parts ------------------------------------------------------------------

    async def call(self, command: Command, timeout_s: float) -> dict[int, Result]:
        """The results of a command that all engines must carry out. Raises if one has not."""
        outcome = await self._call(command, timeout_s)
        results = {index: result for index, result in outcome.items() if not isinstance(result, HeadgateError)}
        if len(results) < len(outcome):
            errors = "; ".join(str(result) for result in outcome.values() if isinstance(result, HeadgateError))
            raise Unavailable(errors, code="not_followed")
        return results

    async def _call(self, command: Command, timeout_s: float) -> dict[int, Result | HeadgateError]:
        """The outcome by engine. Raises if an engine refused, or if none could be reached."""
        outcome = await self._api.engines.call_all(command, timeout_s)
        denials = {index: result for index, result in outcome.items() if isinstance(result, Denied)}
        if denials:
            raise _refusal(denials, len(outcome))
        # A restarted engine takes the state that was requested last, so these two commands reach it later.
        if not isinstance(command, Pause | Resume) and outcome and all(map(_is_gone, outcome.values())):
            raise Unavailable("; ".join(str(result) for result in outcome.values()), code="no_engine")
        late = [str(result) for result in outcome.values() if isinstance(result, EngineDead)]
        if late:
            log.warning("not every engine has carried out the command: %s", "; ".join(late))
        return outcome

    def _take(self, order: Order, *, resumes: bool = False) -> None:
        self._refuse_while_moving()
        self._orders.take(order, paused=isinstance(self._api.engines.asked, Pause), resumes=resumes)

    def _refuse_while_moving(self) -> None:
        if self._moving is not None:
            raise Refusal(409, "updating", f"{self._moving}; try again when that is done")

    @asynccontextmanager
    async def _move(self, what: str) -> AsyncIterator[None]:
        self._refuse_while_moving()
        self._moving = what
        try:
            yield
        finally:
            self._moving = None

    @contextmanager
    def _labelled(self, version: int, label: str | None) -> Iterator[None]:
        """Set the label before the engines answer, because an update that is late may still succeed."""
        before = self._labels.given(version)
        self._labels.set(version, label)
        try:
            yield
        except HeadgateError:
            if self._api.engines.version != version:
                self._labels.set(version, before)
            raise

    def _govern(self, pause: Pause) -> list[Record]:
        """Apply a pause that begins now to requests that no engine has yet. Returns those that it ends."""
        live, before = list(self._api.ledger.live.values()), self._api.engines.asked
        if finds_accepted(pause, before):
            for record in live:
                record.accepted = True
        if pause.mode != "abort" or (isinstance(before, Pause) and before.mode == "abort"):
            return []
        return [record for record in live if record.accepted and record.end_unplaced("pause")]

    def _places(self) -> dict[Place, Record]:
        """The records that own the sequences of the engines."""
        return {
            stream.place: record
            for record in self._api.ledger.live.values()
            for stream in record.streams.values()
            if stream.place is not None
        }

    def _unanswered(self, index: int, why: str) -> EngineOutcome:
        """The outcome of an engine that has not answered: down, or its last known or requested state."""
        replica = self._host.replicas[index]
        state = "down" if replica.client is None or replica.known == "running" else replica.known
        return EngineOutcome(engine=index, state=state, error=why)

    def _result(self, outcome: Mapping[int, Result | HeadgateError]) -> FleetResult:
        engines, reported = [], states(outcome)
        for index, result in outcome.items():
            match result:
                case EngineState():
                    engines.append(_engine(index, result))
                case HeadgateError():
                    engines.append(self._unanswered(index, str(result)))
                case _:
                    pass
        mode = next((each.mode for each in reported.values() if each.mode), None)
        asleep = list(dict.fromkeys(tag for each in reported.values() for tag in each.asleep))
        return self._fleet(engines, mode, asleep)

    def _fleet(self, engines: list[EngineOutcome], mode: str | None, asleep: Sequence[str]) -> FleetResult:
        seen = {engine.state for engine in engines} - {"down"}
        versions = [engine.weight_version for engine in engines if isinstance(engine.weight_version, int)]
        if not seen and any(replica.known != "running" for replica in self._host.replicas):
            seen = {"pausing"}  # engines will be paused when they have restarted
        state = "draining" if self._host.ledger.closing else overall(seen)
        newest = max(versions, default=0)
        return FleetResult(
            is_paused=bool(seen) and not seen & {"running", "pausing"},
            state=state,
            mode=mode,
            weight_version=newest,
            weight_label=self._labels[newest],
            asleep=asleep,
            engines=engines,
        )


def followed(result: FleetResult) -> FleetResult:
    """For compatible APIs, whose answers have no `accepted`: raises unless every running engine did what was asked."""
    up = [engine for engine in result.engines if engine.state != "down"]
    if not up or any(engine.error is not UNSET for engine in up):
        errors = [str(engine.error) for engine in result.engines if engine.error is not UNSET]
        raise Unavailable(f"{'; '.join(errors)} (the engines are {result.state})", code="not_followed")
    return result


def pause_of(mode: PauseMode) -> Pause:
    """For compatible APIs, whose pauses have no timeout: new requests wait, and only a drain may take long."""
    return Pause(mode, queue=True, timeout_s=LONG_S if mode == "drain" else DEFAULT_TIMEOUT_S)


def _is_gone(result: Result | HeadgateError) -> bool:
    return isinstance(result, HeadgateError) and not isinstance(result, Late)


def states(outcome: Mapping[int, Result | HeadgateError]) -> dict[int, EngineState]:
    return {index: result for index, result in outcome.items() if isinstance(result, EngineState)}


def _engine(index: int, reported: EngineState) -> EngineOutcome:
    return EngineOutcome(
        engine=index,
        state=reported.state,
        weight_version=reported.version,
        elapsed_s=round(reported.elapsed_s, 6),
        held=len(reported.held),
    )


def _refusal(denials: Mapping[int, Denied], engines: int) -> Refusal:
    first = next(iter(denials.values()))
    if engines == 1:
        return Refusal(first.status, first.code, first.message)
    message = "; ".join(f"engine {index}: {denied.message}" for index, denied in denials.items())
    followed = engines - len(denials)
    return Refusal(first.status, first.code, f"{message} ({followed} of {engines} engines have followed)")


def _records(known: Mapping[Place, Record], ids: Mapping[int, Iterable[int]]) -> list[Record]:
    """The records that own these sequences, except those whose clients have disconnected."""
    places = [Place(engine, id) for engine, some in ids.items() for id in some]
    return [known[place] for place in places if place in known]


def _requests(records: Iterable[Record]) -> list[Record]:
    """Each request once, without prefill requests, which are part of other requests."""
    return list(dict.fromkeys(record for record in records if record.kind != PREFILL))


async def _await_ends(records: Sequence[Record], timeout_s: float) -> None:
    """Wait until clients have received the end, at most `timeout_s`, because a client may not read."""
    try:
        async with asyncio.timeout(timeout_s):
            for record in records:
                await record.ended()
    except TimeoutError:
        log.warning("%d clients have not read the end of their answers", sum(record.open for record in records))


# ----------------------------------------------------------------------------------------------------------- handlers


def controls_of(request: Request) -> Controls:
    controls: Controls = request.app.state.controls
    return controls


async def pause(request: Request) -> Response:
    body = await read_control(request, PauseRequest)
    command, controls = Pause(body.mode, body.new_requests == "queue", body.timeout), controls_of(request)
    result = await controls.pause(command, Order.of(request.headers))
    if body.clear_cache is True:
        await _clear_cache(controls, result, body.timeout)
    return answer(request, result)


async def _clear_cache(controls: Controls, result: FleetResult, timeout_s: float) -> None:
    """Drop cached prefixes after a pause, and add the outcome to the result of the pause."""
    assert isinstance(result.elapsed_s, float)
    try:
        flushed = await controls.flush(max(timeout_s - result.elapsed_s, LEAST_FLUSH_S))
    except HeadgateError as error:  # the engines are paused nevertheless
        outcomes = {engine.engine: replace(engine, error=str(error)) for engine in result.engines}
    else:
        outcomes = {engine.engine: engine for engine in flushed.engines}
        result.blocks = flushed.blocks
    for engine in result.engines:
        engine.blocks = outcomes[engine.engine].blocks
        if engine.error is UNSET:
            engine.error = outcomes[engine.engine].error


async def resume(request: Request) -> Response:
    body = await read_control(request, ControlBody)
    return answer(request, await controls_of(request).resume(body.timeout, Order.of(request.headers)))


async def is_paused(request: Request) -> Response:
    body = ControlAnswer(request.state.request_id, "success", await controls_of(request).status())
    return _signed(request, json_response(body))


async def update_weights(request: Request) -> Response:
    body = await read_control(request, UpdateRequest)
    result = await controls_of(request).update(
        source_of(body),
        body.version,
        label=body.label,
        recompute=body.kv == "recompute",
        base=body.base,
        checksum=tensor_checksums(body),
        timeout_s=body.timeout,
    )
    return answer(request, result)


async def sleep(request: Request) -> Response:
    body = memory_of(await read_object(request), request.query_params)
    return answer(request, await controls_of(request).sleep(body.tags, body.timeout))


async def wakeup(request: Request) -> Response:
    body = memory_of(await read_object(request), request.query_params)
    return answer(request, await controls_of(request).wake(body.tags, body.timeout))


async def flush_cache(request: Request) -> Response:
    body = await read_control(request, ControlBody)
    return answer(request, await controls_of(request).flush(body.timeout))


def answer(request: Request, result: FleetResult) -> Response:
    """200 if all engines are done, 202 if one is not."""
    id, done = request.state.request_id, all(engine.error is UNSET for engine in result.engines)
    log.info("%s: %s leaves the engines %s", id, request.url.path, result.state)
    body = ControlAnswer(id, "success" if done else "accepted", result)
    return _signed(request, json_response(body, 200 if done else 202))


def _signed(request: Request, response: Response) -> Response:
    """Add the boot id of this process, so that a router notices a restart."""
    response.headers[BOOT_HEADER] = host_of(request).boot_id
    return response
