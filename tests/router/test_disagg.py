"""Prefill/decode disaggregation behind a router, with failures of every part at every stage."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import pytest

from headgate.router.fleet.policy import Ring
from headgate.testing.tiny import tiny_model
from tests.api.clients import Missed
from tests.api.live import eventually
from tests.api.serving import metric_values, wait_until
from tests.router.pd import (
    CALL_S,
    CHAT,
    COMPLETIONS,
    HURRIED,
    THRESHOLD,
    TICKET,
    Asked,
    Call,
    PdFleet,
    Server,
    ask,
    dumped,
    pd_fleet,
    random_requests,
)
from tests.router.test_up import up, workers

BLOCKS = ("--kv-blocks", 1024)


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PdFleet]:
    """A fleet that detects faults quickly."""
    hurried: dict[str, Any] = HURRIED | {"kv_times": "8,2,10", "patience_s": 4.0}
    with pd_fleet(tmp_path_factory.mktemp("pd"), *BLOCKS, decoders=[BLOCKS], **hurried) as fleet:
        yield fleet


@pytest.fixture(scope="module")
def patient(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PdFleet]:
    with pd_fleet(tmp_path_factory.mktemp("patient"), *BLOCKS, decoders=[BLOCKS]) as fleet:
        yield fleet


def unequal(fleet: PdFleet, seed: int, count: int) -> list[int]:
    """Return the requests that two servers answer differently from one."""
    asked = random_requests(seed, count)
    with ThreadPoolExecutor(6) as pool:
        wanted = list(pool.map(lambda i: fleet.alone(asked[i], f"alone {seed} {i}"), range(count)))
        got = list(pool.map(lambda i: fleet.ask(asked[i], f"shared {seed}"), range(count)))
    return [i for i in range(count) if got[i] != wanted[i]]


@pytest.mark.timeout(300)
def test_36_prefill_and_decode_servers_answer_like_one_server(patient: PdFleet):
    before, sent = patient.d.metric("kv_transfers"), patient.p.metric("kv_transfer_bytes", direction="sent")
    assert unequal(patient, 1, 60) == []
    assert patient.d.metric("kv_transfers") - before > 20
    assert patient.p.metric("kv_transfer_bytes", direction="sent") - sent > 20 * 8 * 32 * 512
    assert patient.d.metric("kv_transfers_lost") == 0 and patient.router.router.counters.prefills_lost == 0
    patient.assert_home()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_36_prefill_and_decode_servers_answer_like_one_server_five_hundred_times(patient: PdFleet):
    assert {seed: unequal(patient, seed, 100) for seed in range(2, 7)} == {seed: [] for seed in range(2, 7)}
    patient.assert_home()


# ---------------------------------------------------------------------------------------------- placement of prefills


def moved(fleet: PdFleet, asked: Asked, salt: str) -> float:
    """Send one request and check its answer; returns how many prompts were fetched for it."""
    before = fleet.d.metric("kv_transfers")
    assert fleet.ask(asked, salt) == fleet.alone(asked)
    return fleet.d.metric("kv_transfers") - before


def completion(length: int, **more: Any) -> Asked:
    return COMPLETIONS, {"prompt": "x" * length, "max_tokens": 4, "ignore_eos": True, "seed": 1} | more


def test_a_prompt_below_the_threshold_is_computed_by_the_decode_worker(patient: PdFleet):
    size = 4 * THRESHOLD
    assert moved(patient, completion(size - 8), "short") == 0
    assert moved(patient, completion(size + 8), "long") == 1


def test_a_prompt_in_the_decode_workers_cache_is_not_prefilled_elsewhere(patient: PdFleet):
    assert [moved(patient, completion(2000), "known") for _ in range(3)] == [1, 0, 0]
    assert moved(patient, completion(0, prompt="x" * 2000 + "y" * 2000), "known") == 1


def test_a_prompt_in_the_prefill_workers_cache_is_fetched_from_there(patient: PdFleet):
    patient.p.post(COMPLETIONS, completion(2000)[1] | {"cache_salt": "theirs"})
    before = patient.p.metric("prefix_cache_hits")
    assert moved(patient, completion(2000), "theirs") == 1
    assert patient.p.metric("prefix_cache_hits") > before


@pytest.mark.parametrize(
    "more",
    [{"echo": True, "logprobs": 1}, {"prompt_logprobs": 1}, {"n": 2}, {"prompt": ["y" * 2000, "z" * 2000]}],
    ids=["echoed logprobs", "prompt logprobs", "two choices", "two prompts"],
)
def test_what_cannot_be_split_is_answered_by_one_server(patient: PdFleet, more: dict[str, Any]):
    assert moved(patient, completion(2000, **more), str(sorted(more))) == 0
    patient.assert_home()


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/generate", {"text": "x" * 2000, "sampling_params": {"max_new_tokens": 4}}),
        ("/inference/v1/generate", {"token_ids": [65] * 2000, "sampling_params": {"max_tokens": 4}}),
        ("/tokenize", {"prompt": "x" * 2000}),
    ],
)
def test_compatible_apis_are_answered_by_one_server_without_prefill_elsewhere(patient: PdFleet, path: str, body: Any):
    asked: list[bytes] = []
    patient.p.line.to_server = lambda data, _: (asked.append(data), data)[1]
    try:
        assert patient.router.post(path, body).status_code == 200
    finally:
        patient.p.line.heal()
        patient.watch_tickets()
    assert b"export_kv" not in b"".join(asked)


def test_responses_are_split_too(patient: PdFleet):
    body = {"input": "x" * 2000, "max_output_tokens": 16, "temperature": 0}
    before = patient.d.metric("kv_transfers")
    told = [post("/v1/responses", body) for post in (patient.router.post, patient.d.post)]
    assert told[0].json()["output"][0]["content"] == told[1]["output"][0]["content"]
    assert patient.d.metric("kv_transfers") == before + 1


def test_messages_are_split_too(patient: PdFleet):
    body = {"messages": [{"role": "user", "content": "y" * 2000}], "max_tokens": 16, "temperature": 0}
    before = patient.d.metric("kv_transfers")
    told = [post("/v1/messages", body) for post in (patient.router.post, patient.d.post)]
    assert told[0].json()["content"] == told[1]["content"]
    assert patient.d.metric("kv_transfers") == before + 1


# ---------------------------------------------------------------------------------------------- faults at every stage

TIMES = count()
LONG, MIDDLE = 9000, 3000  # prompt tokens: seconds of work and megabytes of KV


def question(length: int, tokens: int, *, stream: bool) -> Asked:
    prompt = "".join(random.Random(length).choices("abcdefghij ", k=length))
    usage = {"stream_options": {"include_usage": True}} if stream else {}
    body = {"prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "seed": 3, "stream": stream}
    return COMPLETIONS, body | usage


@dataclass(frozen=True)
class Case:
    fault: str
    who: str  # P or D; either for what happens to the request itself
    stage: str
    stream: bool = True

    def __str__(self) -> str:
        return f"{self.fault}-{self.who}-{self.stage}-{'stream' if self.stream else 'whole'}"

    @property
    def asked(self) -> Asked:
        length = LONG if self.stage == "prefill" else MIDDLE
        return question(length, 1000 if self.stage in ("first", "decoding") else 60, stream=self.stream)


class Trial:
    """One request, with one fault at one stage."""

    def __init__(self, fleet: PdFleet, case: Case) -> None:
        self.fleet, self.case = fleet, case
        self.id = f"trial-{next(TIMES)}"
        self.victim = fleet.p if case.who == "P" else fleet.d
        self.call: Call | None = None
        self.happened = threading.Event()
        self._acting: list[threading.Thread] = []
        self._failed: list[BaseException] = []

    def run(self) -> Call:
        self._arm()
        self.call = Call(self.fleet.router.url, self.case.asked, self.id, self.id, self._heard)
        self.call.wait()
        for thread in self._acting:
            thread.join(60)
        assert not self._failed, self._failed
        if not self.happened.is_set():
            raise Missed
        return self.call

    # -- when ---------------------------------------------------------------------

    def _arm(self) -> None:
        fleet = self.fleet
        match self.case.stage:
            case "before":
                self._act()
            case "ticket":
                fleet.watch_tickets(self._act)
            case "asked":
                fleet.d.line.to_server = self._when(lambda data, _: TICKET in data)
            case "prefill":
                fleet.kv.to_server = self._when(lambda *_: True)
            case "transfer":
                fleet.kv.to_client = self._when(lambda data, offset: offset + len(data) > 200_000)

    def _when(self, it_is_time: Callable[[bytes, int], bool]) -> Callable[[bytes, int], bytes]:
        def hook(data: bytes, offset: int) -> bytes:
            if not self.happened.is_set() and it_is_time(data, offset):
                self._act()
            return data

        return hook

    def _heard(self, events: int) -> None:
        if events == {"first": 1, "decoding": 3}.get(self.case.stage) and not self.happened.is_set():
            self._act()

    # -- what ---------------------------------------------------------------------

    def _act(self) -> None:
        """Inject the fault, in another thread, because it may take long and may wait for the held line."""
        self.happened.set()
        thread = threading.Thread(target=self._fault, daemon=True)
        self._acting.append(thread)
        thread.start()
        at_once = self.case.fault in ("kill", "engine", "stop", "cut", "corrupt", "stall", "slow")
        thread.join(60 if at_once or self.case.stage == "before" else 1.0)

    def _fault(self) -> None:
        try:
            getattr(self, f"_{self.case.fault}")()
        except BaseException as error:
            self._failed.append(error)

    def _kill(self) -> None:
        self.victim.kill_all()

    def _engine(self) -> None:
        os.kill(self.victim.engine(), signal.SIGKILL)

    def _stop(self) -> None:
        self.victim.stop_all()

    def _pause(self) -> None:
        self.victim.post("/v1/pause", {"mode": "abort", "timeout": 10})

    def _freeze(self) -> None:
        """Pause with mode freeze. D is resumed, because its clients wait for it; P is not."""
        self.victim.post("/v1/pause", {"mode": "freeze", "new_requests": "queue", "timeout": 10})
        if self.case.who == "D":
            time.sleep(0.5)
            self.victim.post("/v1/resume", {})

    def _weights(self) -> None:
        self.victim.update_weights(self.fleet.other_weights)

    def _abort(self) -> None:
        body = {"req_ids": [self.id], "timeout": 10}
        result = self.fleet.router.post("/v1/abort_requests", body).json()["result"]
        assert [each["request_id"] for each in result["aborted"]] == [self.id], result

    def _leave(self) -> None:
        wait_until(lambda: self.call is not None)  # the request can be in flight before the reference to it is set
        assert self.call is not None
        self.call.leave()

    def _cut(self) -> None:
        self.fleet.kv.sever()

    def _corrupt(self) -> None:
        """Change every later byte of KV."""
        self.fleet.kv.to_client = lambda data, _: bytes(byte ^ 0x40 for byte in data)

    def _stall(self) -> None:
        """Let nothing pass, without closing the connection."""
        self.fleet.kv.to_client = lambda *_: (self.fleet.over.wait(CALL_S), None)[1]

    def _slow(self) -> None:
        self.fleet.kv.to_client = lambda data, _: (time.sleep(0.005), data)[1]


WANTED: dict[tuple[int, str], Any] = {}  # answers of a single server


def wanted(fleet: PdFleet, asked: Asked) -> Any:
    key = id(fleet), dumped(asked)
    if key not in WANTED:
        WANTED[key] = fleet.alone(asked)
    return WANTED[key]


def try_it(fleet: PdFleet, case: Case) -> None:
    """Repeat the case if its stage was not reached: on a busy machine a server may be marked down first."""
    for _ in range(5):
        try:
            return try_once(fleet, case)
        except Missed:
            pass
    raise AssertionError("nothing happened, five times")


def try_once(fleet: PdFleet, case: Case) -> None:
    right, lost = wanted(fleet, case.asked), fleet.d.metric("kv_transfers_lost")
    try:
        call = Trial(fleet, case).run()
        if case in FELT:
            assert fleet.d.metric("kv_transfers_lost") == lost + 1
        if case.fault == "abort":
            check_part(call, right, stream=case.stream)
        elif case.fault != "leave":
            assert call.told() == right
        fleet.assert_home()
    finally:
        fleet.repair()
    fleet.assert_home()


def check_part(call: Call, right: Any, *, stream: bool) -> None:
    """Check that the answer is a prefix of the correct one and ends with an error."""
    choice, whole = call.told()[0][0], right[0][0]
    assert choice["finish_reason"] == (["abort"] if stream else "abort"), choice
    # A partial character at the very end appears as a replacement character.
    text = choice["text"].rstrip("\ufffd")
    assert whole["text"].startswith(text) and len(text) < len(whole["text"])


# After these, D must have computed the prompt itself. All KV in flight may have left P before the fault.
FELT = {Case(fault, "P", "prefill") for fault in ("kill", "engine", "stop", "pause", "freeze")}
FELT |= {Case(fault, "P", "transfer") for fault in ("cut", "corrupt", "stall")}

FAST = [
    Case("kill", "P", "ticket"),
    Case("stop", "P", "before", stream=False),
    Case("corrupt", "P", "transfer"),
    Case("freeze", "P", "prefill"),
    Case("kill", "D", "transfer"),
    Case("pause", "D", "decoding"),
    Case("abort", "D", "prefill"),
    Case("leave", "D", "transfer"),
]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("case", FAST, ids=str)
def test_36_37_38_39_whatever_breaks_the_client_gets_its_answer_and_nothing_leaks(fleet: PdFleet, case: Case):
    try_it(fleet, case)


EARLY, LATE = ("before", "ticket", "asked", "prefill", "transfer"), ("first", "decoding")
MATRIX = [
    *(Case(f, w, s) for f in ("kill", "engine", "stop", "pause", "freeze") for w in "PD" for s in EARLY + LATE),
    *(Case(f, w, s, stream=False) for f in ("kill", "pause") for w in "PD" for s in EARLY),
    *(Case(f, "D", s) for f in ("abort", "leave") for s in (*EARLY[1:], *LATE)),
    *(Case(f, "D", s, stream=False) for f in ("abort", "leave") for s in EARLY[1:]),
    *(Case(f, "P", s) for f in ("cut", "corrupt", "stall", "slow") for s in ("prefill", "transfer")),
    *(Case("weights", "P", s) for s in ("before", "prefill", "transfer", "decoding")),
]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("case", [case for case in MATRIX if case not in FAST], ids=str)
def test_36_37_38_39_the_whole_matrix(fleet: PdFleet, case: Case):
    try_it(fleet, case)


BEGINNING = 8000  # bytes of a stream


@pytest.mark.timeout(300)
def test_when_no_engine_is_left_the_client_gets_the_partial_answer_and_one_error(fleet: PdFleet):
    asked = question(MIDDLE, 1000, stream=True)
    right = wanted(fleet, asked)

    killed = threading.Event()

    def held(data: bytes, offset: int) -> bytes | None:
        """Hold the end of the stream until all servers are killed; no other piece is as long."""
        if offset + len(data) <= BEGINNING:
            return data
        if offset < BEGINNING:
            return data[: BEGINNING - offset]
        killed.wait(CALL_S)
        return None

    def kill(events: int) -> None:
        if events == 3:
            for server in fleet.servers:
                server.kill_all()
            killed.set()

    fleet.d.line.to_client = held
    try:
        call = Call(fleet.router.url, asked, "none", "none", kill)
        call.wait()
        *events, last = map(json.loads, call.lines)
        assert last["error"]["code"] in ("worker_lost", "no_worker"), last
        text = "".join(choice["text"] for event in events for choice in event["choices"])
        assert text and right[0][0]["text"].startswith(text)
        fleet.assert_home()
    finally:
        killed.set()
        fleet.repair()


@pytest.mark.timeout(300)
def test_49_a_retry_after_the_loss_of_the_decode_worker_is_answered_by_the_prefill_worker(fleet: PdFleet):
    """The prefill worker computed the prompt under the same key, and must not take the retry for that request."""
    path, body = question(MIDDLE, 8, stream=False)
    body = body | {"cache_salt": "keyed"}
    try:
        told = [fleet.router.post(path, body, headers={"Idempotency-Key": "once"}).json()["choices"]]
        fleet.d.kill_all()
        told.append(fleet.router.post(path, body, headers={"Idempotency-Key": "once"}).json()["choices"])
    finally:
        fleet.repair()
    assert told[0] == told[1]


# ---------------------------------------------------------------------------------------------- no room for an answer

SMALL = ("--kv-blocks", 32, "--max-context", 1000, "--on-preempt", "reschedule", "--drain-timeout", 0)
PREFILLER = ("--kv-blocks", 64, "--max-context", 1000)
PROMPT, ANSWER = 300, 600


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PdFleet]:
    """A fleet with two decode servers that return answers for rescheduling when they run out of KV blocks."""
    config: dict[str, Any] = {"decode_policy": "session", "preempt_retry_count": 1, "patience_s": 60.0}
    folder = tmp_path_factory.mktemp("narrow")
    with pd_fleet(folder, *PREFILLER, decoders=[SMALL, SMALL], layers=8, **config) as fleet:
        yield fleet


@contextmanager
def only(fleet: PdFleet, server: Server) -> Iterator[None]:
    """Remove all other decode servers from the fleet inside the context."""
    others = [d for d in fleet.decoders if d is not server]
    for other in others:
        other.post("/v1/pause", {"mode": "abort", "timeout": 10})
    fleet.router.wait_for(paused=len(others))
    try:
        yield
    finally:
        for other in others:
            other.post("/v1/resume", {})
        fleet.router.wait_for(ready=len(fleet.servers))


class Crowd:
    """Makes `server` run out of KV in `attempts` attempts of the request under test, with a rival of higher priority.

    The server is stopped until it has both requests, so that neither can finish before the other has begun. Probes
    wait for that time, so that the router does not notice the stop.
    """

    def __init__(self, server: Server, attempts: int) -> None:
        self.attempts = 0
        self._server, self._most = server, attempts
        self._others: list[socket.socket] = []
        self._goes_on = threading.Event()
        self._goes_on.set()
        server.line.to_server = self._asked

    def _asked(self, data: bytes, offset: int) -> bytes:
        if data.startswith(b"GET /v1/loads"):
            self._goes_on.wait(60)
        if data.startswith(b"POST /v1/c"):
            self._disperse()
            self.attempts += 1
            if self.attempts <= self._most:
                self._gather()
        return data

    def _gather(self) -> None:
        self._goes_on.clear()
        self._server.post("/v1/pause", {"mode": "freeze", "new_requests": "queue", "timeout": 30})
        self._others.append(socket.create_connection(("127.0.0.1", self._server.port), 60))
        self._others[-1].sendall(self._request())
        self._wait_for("waiting", 1)
        threading.Thread(target=self._go_on, daemon=True).start()

    def _go_on(self) -> None:
        self._wait_for("waiting", 2)
        self._server.post("/v1/resume", {})
        self._goes_on.set()

    def _wait_for(self, phase: str, count: int) -> None:
        wait_until(lambda: self._server.metric(f"num_requests_{phase}") == count, 60)

    def _request(self) -> bytes:
        body = {"prompt": "0123" * 25, "max_tokens": 800, "ignore_eos": True, "priority": -10}
        content = json.dumps(body | {"cache_salt": f"crowd {self.attempts}"}).encode()
        return b"POST /v1/completions HTTP/1.0\r\ncontent-length: %d\r\n\r\n" % len(content) + content

    def _disperse(self) -> None:
        while self._others:
            self._others.pop().close()
        self._wait_for("running", 0)

    def leave(self) -> None:
        self._goes_on.set()
        self._server.line.heal()
        self._disperse()


def session_of(fleet: PdFleet, server: Server) -> str:
    """Return a session that is placed on this server, whatever other servers there are."""
    workers = [worker for worker in fleet.router.router.fleet if worker.role == "decode"]
    ring = Ring(workers)
    names = (f"session {number}" for number in count())
    members = frozenset(workers)
    return next(name for name in names if str(server.line.port) in ring.find(json.dumps(name).encode(), members).url)


def long_answer(kind: str, *, stream: bool) -> Asked:
    text = "".join(random.Random(7).choices("abcdefghij ", k=PROMPT))
    body: dict[str, Any] = {"max_tokens": ANSWER, "ignore_eos": True, "seed": 5, "stream": stream}
    body |= {"return_token_ids": True} | ({"stream_options": {"include_usage": True}} if stream else {})
    if kind == "chat":
        return CHAT, body | {"messages": [{"role": "user", "content": text}]}
    return COMPLETIONS, body | {"prompt": text}


KINDS = pytest.mark.parametrize(
    ("kind", "stream"),
    [
        ("chat", True),
        pytest.param("chat", False, marks=pytest.mark.slow),
        pytest.param("completions", True, marks=pytest.mark.slow),
        ("completions", False),
    ],
)


def rescheduled(fleet: PdFleet) -> list[float]:
    return [d.metric("rescheduled") for d in fleet.decoders]


def ask_crowded(fleet: PdFleet, asked: Asked, attempts: int) -> tuple[Call, int]:
    """Return the answer if the first decode server runs out of KV in this many attempts, and the attempts there."""
    id = f"crowded-{next(TIMES)}"
    path, body = asked
    crowd = Crowd(fleet.d, attempts)
    try:
        call = Call(fleet.router.url, (path, body | {"user": session_of(fleet, fleet.d)}), id, id)
        call.wait()
    finally:
        crowd.leave()
    return call, crowd.attempts


@pytest.mark.timeout(300)
@KINDS
def test_35_36_an_answer_without_room_for_its_kv_resumes_elsewhere(narrow: PdFleet, kind: str, stream: bool):
    asked = long_answer(kind, stream=stream)
    before = rescheduled(narrow)
    call, attempts = ask_crowded(narrow, asked, attempts=99)
    assert call.told() == ask(narrow.p.url, asked, "alone")
    assert attempts == 1, "it returned to the server without room"
    assert rescheduled(narrow)[0] > before[0] and rescheduled(narrow)[1] == before[1]
    narrow.assert_home()


@pytest.mark.timeout(300)
@KINDS
def test_35_36_a_rescheduled_answer_returns_to_the_only_worker_and_is_correct(
    narrow: PdFleet, kind: str, stream: bool
):
    asked = long_answer(kind, stream=stream)
    with only(narrow, narrow.d):
        call, attempts = ask_crowded(narrow, asked, attempts=1)
    assert call.told() == ask(narrow.p.url, asked, "alone")
    assert attempts == 2
    narrow.assert_home()


@pytest.mark.timeout(300)
@KINDS
def test_35_74_a_single_decode_server_recomputes_an_answer_without_room_for_its_kv(
    narrow: PdFleet, kind: str, stream: bool
):
    asked = long_answer(kind, stream=stream)
    with only(narrow, narrow.d):
        call, attempts = ask_crowded(narrow, asked, attempts=99)
    assert call.told() == ask(narrow.p.url, asked, "alone")
    assert attempts == 2  # preempt_retry_count + 1
    narrow.assert_home()


@pytest.mark.timeout(300)
def test_36_streams_of_a_decode_worker_that_shuts_down_resume_at_another(narrow: PdFleet):
    path, body = long_answer("chat", stream=True)
    id = f"stopped-{next(TIMES)}"

    def stop(events: int) -> None:
        if events == 3:  # tokens that arrive together share an event
            narrow.d.signal(signal.SIGTERM)

    try:
        asked = path, body | {"user": session_of(narrow, narrow.d)}
        call = Call(narrow.router.url, asked, id, id, stop)
        assert call.told() == ask(narrow.p.url, (path, body), "alone")
        assert narrow.d.process is not None and narrow.d.process.wait(60) == 0
    finally:
        narrow.repair()
    narrow.assert_home()


# ----------------------------------------------------------------------------------------------- no room for a prompt


@contextmanager
def exports(server: Server, number: int, length: int) -> Iterator[None]:
    """Let `server` compute and lease this many prompts, which are not fetched, inside the context."""
    with ExitStack() as stack:
        http = stack.enter_context(httpx.Client(base_url=server.url, timeout=60, trust_env=False))
        kept = []  # a garbage-collected generator closes its stream
        for index in range(number):
            body = {"prompt": f"{index}" * length, "export_kv": True, "cache_salt": "kept"}
            kept.append(stack.enter_context(http.stream("POST", COMPLETIONS, json=body)).iter_lines())
            assert "kv_ticket" in next(kept[-1])
        yield


@contextmanager
def tickets_within(fleet: PdFleet, timeout_s: float) -> Iterator[None]:
    config = fleet.router.router.config
    usual_s = config.ticket_timeout_s
    object.__setattr__(config, "ticket_timeout_s", timeout_s)
    try:
        yield
    finally:
        object.__setattr__(config, "ticket_timeout_s", usual_s)


@pytest.mark.timeout(300)
def test_30_32_a_prefill_worker_without_room_is_not_waited_for_and_computes_nothing_later(narrow: PdFleet):
    asked = long_answer("completions", stream=True)
    lost, waits = narrow.router.router.counters.prefills_lost, []

    def look(events: int) -> None:
        if events == 1:
            waits.append(eventually(lambda: narrow.p.metric("num_requests_waiting") == 0, 30.0))

    right = ask(narrow.p.url, asked, "alone")
    with exports(narrow.p, 3, 600), tickets_within(narrow, 3.0):
        wait_until(lambda: narrow.p.metric("kv_blocks_leased") > 50)
        assert narrow.ask(asked, "no room at P", look) == right
        assert waits == [True] and narrow.router.router.counters.prefills_lost == lost + 1
        assert narrow.p.metric("kv_leases") == 3
    narrow.assert_home()


@pytest.mark.timeout(300)
def test_30_kv_is_kept_for_a_decode_worker_that_has_no_room_yet(narrow: PdFleet):
    asked = long_answer("completions", stream=False)
    right, before = ask(narrow.p.url, asked, "alone"), narrow.d.metric("kv_transfers")
    with only(narrow, narrow.d), ExitStack() as others, ThreadPoolExecutor(1) as pool:
        others.enter_context(exports(narrow.d, 2, 450))
        answer = pool.submit(narrow.ask, asked, "no room at D")
        wait_until(lambda: narrow.d.metric("num_requests_waiting") == 1)
        wait_until(lambda: narrow.p.metric("kv_leases") == 1)
        others.close()
        assert answer.result(60) == right
    assert narrow.d.metric("kv_transfers") == before + 1
    narrow.assert_home()


@pytest.mark.timeout(300)
def test_up_with_prefill_and_decode_servers_moves_kv_between_them(tmp_path: Path):
    model = tiny_model(tmp_path / "tiny")
    prompt = random.Random(0).choices(range(256), k=300)
    body = {"prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    with up(model, "--prefill", 1, "--decode", 1) as fleet, fleet.client() as http:
        decoder, prefiller = workers(http)
        answer = http.post(COMPLETIONS, json=body).json()
        alone = httpx.post(
            f"{prefiller['url']}{COMPLETIONS}", json=body | {"cache_salt": "alone"}, timeout=60, trust_env=False
        )
        assert answer["choices"] == alone.json()["choices"]
        page = metric_values(httpx.get(f"{decoder['url']}/metrics", timeout=60, trust_env=False).text)
        assert page['headgate:kv_transfers_total{engine="0"}'] == 1
