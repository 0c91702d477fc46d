"""Real servers behind a real router, killed and stopped while they answer: clients do not notice.

Guarantees 36, 45 and 56.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from headgate.testing.tiny import tiny_model
from tests.api.clients import Missed, unless_missed
from tests.api.serving import clean_environment, command, wait_until
from tests.api.test_journal_live import NUMBERS, TOOL, add_up
from tests.api.test_moved import rounded
from tests.ports import own_port

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
START_S = 90.0


class Process:
    """A headgate command on a port that it keeps when it is restarted."""

    def __init__(self, *arguments: object, log: Path) -> None:
        self.port = own_port()
        self._command = command(*arguments, "--port", self.port, "--log-level", "info")
        self._log = log
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(
                self._command, stdout=log, stderr=log, env=clean_environment(OMP_NUM_THREADS="1")
            )

    def signal(self, number: int) -> None:
        assert self.process is not None
        os.kill(self.process.pid, number)

    def kill(self) -> None:
        if self.process is not None:
            self.signal(signal.SIGKILL)
            self.process.wait(60)
            self.process = None

    def wait_until_ready(self) -> None:
        wait_until(self._ready, START_S)

    def _ready(self) -> bool:
        assert self.process is not None and self.process.poll() is None, self._log.read_text()[-2000:]
        with suppress(httpx.HTTPError):
            return httpx.get(f"{self.url}/ready", timeout=10, trust_env=False).status_code == 200
        return False


class RealFleet:
    def __init__(self, folder: Path, servers: int, *options: str, architecture: str = "llama") -> None:
        model = tiny_model(folder / "tiny", architecture, max_position_embeddings=16384)
        serve = ("serve", model, "--kv-blocks", 2048, *options)
        self.servers = [Process(*serve, log=folder / f"server{i}.log") for i in range(servers)]
        urls = [server.url for server in self.servers]
        self.router = Process("route", *urls, log=folder / "router.log")

    def start(self) -> None:
        for process in self.servers:
            process.start()
        for process in self.servers:
            process.wait_until_ready()
        self.router.start()
        self.router.wait_until_ready()
        wait_until(lambda: set(self.states()) == {"ready"}, START_S)

    def states(self) -> list[str]:
        answer = httpx.get(f"{self.router.url}/v1/workers", timeout=60, trust_env=False)
        return [worker["state"] for worker in answer.json()["workers"]]

    def resumes(self) -> float:
        """The number of answers resumed so far."""
        told = httpx.get(f"{self.router.url}/metrics", timeout=60, trust_env=False).text
        return float(re.findall(r"^headgate:router_resumes_total (\S+)$", told, re.MULTILINE)[0])

    def close(self) -> None:
        for process in (self.router, *self.servers):
            if process.process is not None:
                process.signal(signal.SIGCONT)
            process.kill()


@contextmanager
def real_fleet(folder: Path, servers: int, *options: str, architecture: str = "llama") -> Iterator[RealFleet]:
    fleet = RealFleet(folder, servers, *options, architecture=architecture)
    try:
        fleet.start()
        yield fleet
    finally:
        fleet.close()


# ------------------------------------------------------------------------------------------------------------ streams


def requests(count: int, tokens: int) -> list[tuple[str, dict[str, Any]]]:
    """Return requests of every kind, each with its own seed."""
    chat: dict[str, Any] = {"messages": [{"role": "user", "content": "naïve 😀 文字"}], "temperature": 1.0}
    text: dict[str, Any] = {"prompt": "go on", "ignore_eos": True}
    usage = {"stream_options": {"include_usage": True}}
    schema = {"type": "json_schema", "json_schema": {"name": "many", "schema": NUMBERS}}
    kinds: list[tuple[str, dict[str, Any]]] = [
        (CHAT, chat | usage | {"stream": True, "ignore_eos": True}),
        (COMPLETIONS, text | {"stream": True, "n": 2, "return_token_ids": True}),
        (CHAT, chat | {"stream": True, "tools": [TOOL], "tool_choice": "required"}),
        (COMPLETIONS, text | {"stream": False}),
        (CHAT, chat | {"stream": True, "response_format": schema}),
        (COMPLETIONS, text | usage | {"stream": True, "logprobs": 2}),
        (CHAT, chat | {"stream": False, "n": 2, "ignore_eos": True, "logprobs": True, "top_logprobs": 1}),
        (COMPLETIONS, text | usage | {"stream": True, "stop": ["zq", "E7", "qq"]}),
        (COMPLETIONS, text | {"stream": False, "prompt_logprobs": 2}),
    ]
    return [
        (path, body | {"seed": seed, "max_tokens": tokens})
        for seed in range(count)
        for path, body in [kinds[seed % len(kinds)]]
    ]


class Asking:
    """Sends all requests at once, and records their progress."""

    def __init__(self, url: str, asked: list[tuple[str, dict[str, Any]]], salt: str) -> None:
        self._url, self._asked, self._salt = url, asked, salt
        self.events = [0] * len(asked)
        self.longest_s = 0.0  # longest silence of a stream

    async def all(self) -> list[Any]:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=self._url, timeout=100, limits=limits, trust_env=False) as client:
            return await asyncio.gather(*(self._one(client, i) for i in range(len(self._asked))))

    async def _one(self, client: httpx.AsyncClient, i: int) -> Any:
        path, body = self._asked[i]
        body = body | {"cache_salt": f"{self._salt}{i}"}
        if not body["stream"]:
            response = await client.post(path, json=body)
            assert response.status_code == 200, response.text
            self.events[i] += 1
            return told_whole(response.json())
        lines, last_s = [], time.monotonic()
        async with client.stream("POST", path, json=body) as response:
            assert response.status_code == 200, await response.aread()
            async for line in response.aiter_lines():
                if line.startswith("data: "):
                    self.events[i] += 1
                    self.longest_s = max(self.longest_s, time.monotonic() - last_s)
                    last_s = time.monotonic()
                    lines.append(line[6:])
        return told_in_events(lines)


def told_whole(answer: dict[str, Any]) -> Any:
    usage = answer["usage"]
    return rounded([answer["choices"], usage["prompt_tokens"], usage["completion_tokens"]])


def told_in_events(lines: list[str]) -> Any:
    """Return the content of all events of an answer; check that it has one id, one end, and no error."""
    assert lines[-1] == "[DONE]" and lines.count("[DONE]") == 1, lines[-3:]
    choices: dict[int, Any] = {}
    names, usages = set(), []
    for event in map(json.loads, lines[:-1]):
        assert "error" not in event, event
        names.add((event["id"], event["created"]))
        usages += [event["usage"]["completion_tokens"]] if event.get("usage") else []
        for choice in event["choices"]:
            add_up(choices.setdefault(choice.pop("index"), {}), choice)
    assert len(names) == 1
    for choice in choices.values():
        _without_own_ids(choice)
    return rounded([choices, usages])


def _without_own_ids(choice: dict[str, Any]) -> None:
    """Remove ids of tool calls, which derive from the request's id and so differ between two runs."""
    for call in choice.get("delta", {}).get("tool_calls", {}).values():
        assert len(call.pop("id")) == 1


async def undisturbed(fleet: RealFleet, asked: list[tuple[str, dict[str, Any]]]) -> list[Any]:
    return await Asking(fleet.servers[0].url, asked, "alone").all()


def differences(got: list[Any], wanted: list[Any]) -> list[int]:
    return [i for i, (one, other) in enumerate(zip(got, wanted, strict=True)) if one != other]


# -------------------------------------------------------------------------------------------------------------- tests


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealFleet]:
    with real_fleet(tmp_path_factory.mktemp("pair"), 2) as fleet:
        yield fleet


@pytest.mark.timeout(300)
def test_36_56_when_a_server_is_killed_every_client_gets_what_an_undisturbed_run_gives(pair: RealFleet):
    async def main(longer: int) -> None:
        asked = requests(16, 1000 * longer)  # far more than the buffers between a server and a slow reader hold
        wanted, before = await undisturbed(pair, asked), pair.resumes()
        asking = Asking(pair.router.url, asked, f"killed {longer}")
        answering = asyncio.create_task(asking.all())
        while sum(count > 5 for count in asking.events) < 8 and not answering.done():
            await asyncio.sleep(0.01)
        pair.servers[1].kill()
        try:
            assert differences(await answering, wanted) == []
        finally:
            pair.servers[1].start()
            pair.servers[1].wait_until_ready()
        if pair.resumes() == before:
            raise Missed

    unless_missed(main)


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_50_streams_of_a_stopped_server_resume_elsewhere_within_seconds(pair: RealFleet):
    wait_until(lambda: set(pair.states()) == {"ready"}, 60)
    asked = [request for request in requests(24, 1200) if request[1]["stream"]][:12]

    async def main() -> None:
        wanted = await undisturbed(pair, asked)
        asking = Asking(pair.router.url, asked, "stopped")
        async with asyncio.timeout(90):
            answering = asyncio.create_task(asking.all())
            while sum(count > 5 for count in asking.events) < 8:
                await asyncio.sleep(0.01)
            before = pair.resumes()
            pair.servers[1].signal(signal.SIGSTOP)
            assert differences(await answering, wanted) == []
        assert pair.resumes() > before
        assert 2 < asking.longest_s < 40  # it was silent, but not for long

    try:
        asyncio.run(main())
    finally:
        pair.servers[1].signal(signal.SIGCONT)


@pytest.fixture
def other(pair: RealFleet, tmp_path: Path) -> Iterator[Process]:
    """Another router in front of the same servers."""
    wait_until(lambda: set(pair.states()) == {"ready"}, 60)
    router = Process("route", *(server.url for server in pair.servers), log=tmp_path / "other.log")
    router.start()
    try:
        router.wait_until_ready()
        yield router
    finally:
        router.kill()


@pytest.mark.timeout(180)
def test_2_5_an_abort_through_one_router_ends_a_request_of_another(pair: RealFleet, other: Process):
    async def main() -> None:
        body = {
            "prompt": "go on",
            "max_tokens": 15000,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        async with httpx.AsyncClient(timeout=60, trust_env=False) as client:
            named = {"X-Request-Id": "of-the-other"}
            async with client.stream("POST", other.url + COMPLETIONS, json=body, headers=named) as response:
                lines = response.aiter_lines()
                while not (await anext(lines)).startswith("data: "):
                    pass
                ask = {"req_ids": ["of-the-other", "of-nobody"]}
                answer = (await client.post(f"{pair.router.url}/v1/abort_requests", json=ask)).json()
                rest = [line[6:] async for line in lines if line.startswith("data: ")]
        (aborted,) = answer["result"]["aborted"]
        assert aborted["request_id"] == "of-the-other"
        assert answer["result"]["not_found"] == ["of-nobody"]
        assert rest[-1] == "[DONE]" and not any('"error"' in line for line in rest)
        events = [json.loads(line) for line in rest[:-1]]
        reasons = [
            choice["finish_reason"] for event in events for choice in event["choices"] if choice["finish_reason"]
        ]
        assert reasons == ["abort"]
        assert events[-1]["usage"]["completion_tokens"] == aborted["output_token_count"] < 15000

    asyncio.run(main())


@pytest.mark.timeout(180)
def test_killing_a_router_ends_no_requests_of_another_router(pair: RealFleet, other: Process):
    asked = requests(8, 250)

    async def main() -> None:
        wanted = await undisturbed(pair, asked)
        mine, theirs = Asking(pair.router.url, asked, "mine"), Asking(other.url, requests(8, 12000), "theirs")
        async with asyncio.timeout(90):
            answering, dying = asyncio.create_task(mine.all()), asyncio.create_task(theirs.all())
            while min(max(mine.events), max(theirs.events)) < 5:
                await asyncio.sleep(0.01)
            other.kill()
            with pytest.raises(httpx.HTTPError):
                await dying
            assert differences(await answering, wanted) == []
        # Its requests were aborted at the servers, which are idle.
        for server in pair.servers:
            wait_until(lambda url=server.url: running(url) == 0)

    asyncio.run(main())


def running(url: str) -> int:
    loads = httpx.get(f"{url}/v1/loads", timeout=60, trust_env=False).json()["loads"]
    return sum(load["num_running_reqs"] + load["num_waiting_reqs"] for load in loads)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_36_56_with_servers_killed_at_random_every_client_gets_what_an_undisturbed_run_gives(tmp_path: Path):
    asked, rng = requests(64, 600), random.Random(0)

    killed: list[str] = []

    async def kill_some(fleet: RealFleet) -> None:
        while True:
            victim = rng.choice(fleet.servers)
            victim.kill()
            killed.append(victim.url)
            await asyncio.sleep(0.5)
            victim.start()
            await asyncio.to_thread(victim.wait_until_ready)
            await asyncio.sleep(rng.uniform(0.5, 2.0))

    async def main(fleet: RealFleet) -> None:
        wanted = await undisturbed(fleet, asked)
        for salt in ("a", "b", "c"):
            asking = Asking(fleet.router.url, asked, salt)
            async with asyncio.timeout(150):
                answering = asyncio.create_task(asking.all())
                while sum(count > 5 for count in asking.events) < 20:
                    await asyncio.sleep(0.01)
                killing = asyncio.create_task(kill_some(fleet))
                try:
                    assert differences(await answering, wanted) == []
                finally:
                    killing.cancel()
                    await asyncio.gather(killing, return_exceptions=True)
            for server in fleet.servers:
                if server.process is None:
                    server.start()
                await asyncio.to_thread(server.wait_until_ready)

    with real_fleet(tmp_path, 4) as fleet:
        asyncio.run(main(fleet))
        assert len(killed) >= 3 and fleet.resumes() > 10
