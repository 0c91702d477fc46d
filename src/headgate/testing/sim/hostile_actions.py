"""Carries out the actions of hostile clients, and faults in the middle of a control call. Continues `actions`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec

from headgate.testing.sim.caller import ReceivedAnswer, call
from headgate.testing.sim.engine import EngineProcess
from headgate.testing.sim.fleet import SimFleet
from headgate.testing.sim.hostile import ANN, BOB, GENERATING, MALFORMED_ANSWERS, key_of
from headgate.testing.sim.hosts import MODEL, SimServer
from headgate.testing.sim.loop import SimProcess
from headgate.testing.sim.script import PlannedAction

HUGE = 2**31 - 1
NAME_DIGITS = 8  # length of the prefix that all generated ids of one router share, if ids have one
FORGERIES: tuple[dict[str, Any], ...] = (
    {"index": 0, "token_ids": [3, 4], "finish": ["stop", "eos", HUGE, HUGE, HUGE]},
    {"index": 0, "token_ids": [3, 4], "versions": [[0, 2]], "finish": ["length", "max_tokens", 5, 3, HUGE]},
    {"index": 0, "token_ids": [], "finish": ["abort", "api_abort", 1, HUGE, 1]},
    {"index": 0, "token_ids": [3], "delivered_chars": HUGE},
)


class HostileActions:
    _fleet: SimFleet
    _engine: Callable[[PlannedAction], EngineProcess | None]
    _check_returns_paused: Any

    # -- workers with false answers ---------------------------------------------------------

    async def lie(self, action: PlannedAction) -> None:
        server = self._fleet.hosts[action.target]
        assert isinstance(server, SimServer)
        self._fleet.dishonest[server.name] = None
        which, ids = action.details["lie"], action.details["ids"]
        server.false_answer = partial(self._claim, ids) if which is None else partial(malformed, which)
        await asyncio.sleep(action.duration_s)
        server.false_answer = None

    def _claim(self, ids: list[str], path: str, body: bytes) -> bytes:
        if path == "/v1/abort_requests":
            self._fleet.claimed(ids)
        return claim(ids, path, body)

    # -- processes that stop or die in the middle of a control call ---------------------------

    async def stop_across(self, action: PlannedAction) -> None:
        fleet, details = self._fleet, action.details
        engine = self._engine(action)
        if engine is None:
            return
        host = fleet.hosts[action.target].host if details["whole"] else engine.host
        stopping = fleet.operator.spawn(self._stop_for(host, details["after_s"], action.duration_s))
        to = action.target if details["direct"] and not details["whole"] else action.via
        timeout = {"timeout": details["timeout"]}
        match details["call"]:
            case "pause":
                await fleet.control(to, "POST", "/v1/pause", {"mode": details["mode"], **timeout})
            case "abort_all":
                await fleet.control(to, "POST", "/v1/abort_requests", {"abort_all": True, **timeout})
            case "abort":
                await fleet.control(to, "POST", "/v1/abort_requests", {"req_ids": details["req_ids"], **timeout})
            case "flush":
                await fleet.control(to, "POST", "/v1/flush_cache")
            case path:
                await fleet.control(to, "GET", f"/v1/{path}")
        await stopping
        if details["call"] == "pause":
            await fleet.control(to, "POST", "/v1/resume")

    async def _stop_for(self, host: SimProcess, after_s: float, duration_s: float) -> None:
        await asyncio.sleep(after_s)
        host.stop()
        await asyncio.sleep(duration_s)
        host.resume()

    async def pause_and_crash(self, action: PlannedAction) -> None:
        """Guarantee 75: a process that is killed while it pauses must be paused after its restart."""
        fleet, details = self._fleet, action.details
        resumes, server = fleet.resumes, fleet.hosts[action.target]
        engine, body, host = self._engine(action), {"mode": details["mode"], "timeout": 2}, server.host
        pausing = fleet.operator.spawn(fleet.control(action.via, "POST", "/v1/pause", body))
        await asyncio.sleep(details["after_s"])
        if details["whole"]:
            server.host.kill()
        elif engine is not None:
            engine.end(-9)
        reply = await pausing
        if details["whole"]:
            await asyncio.sleep(action.duration_s)
            fleet.restart(server)
        if fleet.is_only_fault(action):
            if reply.status not in (200, 202) and not details["whole"]:
                fleet.fail(
                    f"75: a pause during which an engine crashed was answered {reply.status}: {reply.body[:200]!r}"
                )
            await self._check_returns_paused(action, host, lambda: fleet.resumes != resumes)
        await fleet.control(action.via, "POST", "/v1/resume")

    # -- clients ------------------------------------------------------------------------------

    async def _generate(
        self, to: str, tenant: str, headers: dict[str, str] | None = None, **body: Any
    ) -> ReceivedAnswer:
        content = {"model": MODEL, "prompt": [3, 4, 5, 6], "max_tokens": 4, "seed": 1, "ignore_eos": True, **body}
        address, keys = self._fleet.hosts[to].address, key_of(tenant if self._fleet.plan.tenants else "")
        return await call(address, "POST", "/v1/completions", content, {**keys, **(headers or {})})

    async def squat(self, action: PlannedAction) -> None:
        """Guarantee 65: an id that the server generated cannot be guessed, occupied, or used to abort the request."""
        fleet, details = self._fleet, action.details
        first = await self._generate(action.via, BOB)
        guesses = next_ids(first.headers.get("x-request-id", ""), details["tries"])
        spawn = fleet.operator.spawn
        squatting = (
            []
            if details["aborts"]
            else [spawn(self._generate(action.via, BOB, request_id=guess, max_tokens=60)) for guess in guesses]
        )
        await asyncio.sleep(0.05)
        victims = [spawn(self._generate(action.via, ANN, max_tokens=40)) for _ in range(details["tries"] + 1)]
        if details["aborts"] and guesses:
            await asyncio.sleep(0.05)
            await fleet.control(action.via, "POST", "/v1/abort_requests", {"req_ids": guesses}, tenant=BOB)
        for victim in victims:
            self._check_victim(await victim)
        await asyncio.gather(*squatting)

    def _check_victim(self, reply: ReceivedAnswer) -> None:
        fleet = self._fleet
        if reply.status == 409:
            fleet.fail(f"65: a request without an id was refused with 409: {bytes(reply.body)!r}")
        ended = any(action.kind in ("abort_all", "stop_across") for action in fleet.plan.actions)
        if reply.status == 200 and reply.whole and not ended:
            causes = [choice.get("cause") for choice in reply.json()["choices"]]
            if "api_abort" in causes:
                fleet.fail("65: a client that guessed the id of another client's request has aborted it")

    async def ask_politely(self, action: PlannedAction) -> None:
        """Guarantee 63: a tenant with one request at a time is never refused because of another tenant's requests."""
        plan = self._fleet.plan
        others = any(other.kind in GENERATING for other in plan.actions if other is not action)
        alone = not (others or any(request.tenant == ANN for request in plan.requests))
        for i in range(action.details["times"]):
            reply = await self._generate(action.via, ANN, prompt=[3 + i, 4, 5])
            if reply.status == 429 and alone:
                self._fleet.fail(f"63: a tenant with one request at a time was refused: {bytes(reply.body)[:200]!r}")

    async def forge(self, action: PlannedAction) -> None:
        """Guarantee 68: forged progress is refused or recomputed. The counters are checked at the end of the run."""
        to = action.target if action.details["direct"] else action.via
        headers = {"x-headgate-journal": "1800000000"} if action.details["direct"] else {}
        resume = {"choices": [FORGERIES[action.details["kind"]]]}
        reply = await self._generate(to, BOB, headers, resume=resume, return_token_ids=True)
        if reply.status >= 500 and reply.status not in (502, 503, 504):
            self._fleet.fail(f"68: a forged resume was answered {reply.status}: {bytes(reply.body)!r}")

    async def probe_salts(self, action: PlannedAction) -> None:
        """Guarantee 66: no cache hit reveals the prompts of another tenant."""
        ids, via = action.details["ids"], action.via
        first = await self._generate(via, ANN, prompt=ids, max_tokens=1)
        if first.status != 200 or not first.whole:
            return
        for salt in (None, f"{ANN}:", ANN, f"{ANN}:{ANN}:", f":{ANN}", f"{BOB}:{ANN}:"):
            await self._probe_salt(via, via, BOB, ids, salt)
            for server in self._fleet.servers if "servers" not in self._fleet.plan.keys_at and salt else ():
                await self._probe_salt(via, server.name, "", ids, salt)

    async def _probe_salt(self, via: str, to: str, tenant: str, ids: list[int], salt: str | None) -> None:
        before = self._resend_counts(via)
        reply = await self._generate(to, tenant, prompt=ids, max_tokens=1, cache_salt=salt)
        if reply.status != 200 or not reply.whole or self._resend_counts(via) != before:
            return
        details = reply.json()["usage"].get("prompt_tokens_details") or {}
        if hits := details.get("cached_tokens"):
            self._fleet.fail(
                f"66: {to} revealed with cache_salt {salt!r} that {hits} prompt tokens of another tenant are cached"
            )

    def _resend_counts(self, via: str) -> tuple[int, ...]:
        """Return counts that change when a request may have been sent to a server twice.

        Such a request finds its own prompt in the cache.
        """
        router = next(host.router for host in self._fleet.routers if host.name == via)
        # A pause sends back requests that wait for a ticket, after a worker began to compute their prompts.
        disturbed = self._fleet.report.actions["reset"], self._fleet.pauses
        return disturbed if router is None else (*disturbed, router.counters.retries, router.counters.resumes)

    async def pry(self, action: PlannedAction) -> None:
        """Guarantees 65, 67: a tenant or an anonymous caller can neither see nor abort requests of others."""
        fleet, tenant, names = self._fleet, action.details["tenant"], action.details["req_ids"]
        number = 65 if tenant else 67
        own = {request.id for request in fleet.plan.requests if request.tenant == tenant}
        foreign = [name for name in names if name not in own]
        listed = await fleet.control(action.via, "GET", "/v1/requests", tenant=tenant)
        shown = [name for name in foreign if f'"{name}"'.encode() in bytes(listed.body)]
        if shown:
            fleet.fail(
                f"{number}: {tenant or 'an anonymous caller'} can list {shown}, which belong to another tenant"
            )
        ended = await fleet.control(action.via, "POST", "/v1/abort_requests", {"req_ids": names}, tenant=tenant)
        if ended.status == 200 and not fleet.dishonest:
            result = ended.json()["result"]
            named = [*(each["request_id"] for each in result["aborted"]), *result["already_finished"]]
            if wrong := [name for name in named if name in foreign]:
                fleet.fail(
                    f"{number}: {tenant or 'an anonymous caller'} can abort {wrong}, which belong to another tenant"
                )
        for name in foreign[:1]:
            reply = await fleet.control(action.via, "GET", f"/v1/requests/{name}", tenant=tenant)
            if reply.status == 200:
                fleet.fail(
                    f"{number}: {tenant or 'an anonymous caller'} can see {name}, which belongs to another tenant"
                )


def next_ids(id: str, tries: int) -> list[str]:
    """Return the ids that would follow `id` if ids were numbered consecutively."""
    prefix, digits = id[: len("req-") + NAME_DIGITS], id[len("req-") + NAME_DIGITS :]
    try:
        number = int(digits, 16)
    except ValueError:
        return []
    return [f"{prefix}{number + i:x}" for i in range(1, tries + 1)]


def malformed(which: int, path: str, body: bytes) -> bytes:
    return MALFORMED_ANSWERS[which]


def claim(ids: list[str], path: str, body: bytes) -> bytes:
    """Return the worker's answer, extended by claims about requests that it may not have."""
    answer = msgspec.json.decode(body)
    result = answer.get("result") if isinstance(answer, dict) else None
    if not isinstance(result, dict):
        return body
    if path == "/v1/abort_requests":
        known = {each["request_id"] for each in result["aborted"]}
        result["aborted"] += [{"request_id": id, "output_token_count": 999} for id in ids if id not in known]
        result["not_found"] += ids
    elif path == "/v1/pause":
        result["forced"] = ids
    return msgspec.json.encode(answer)
