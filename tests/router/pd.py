"""A prefill server and decode servers, each a process, behind a real router, with a proxy for each connection.

The router reaches each server through a proxy, called `Line`. KV also passes through a line: the line in front of the
prefill server writes the address of another line into every ticket. A hook on a line sees bytes before they pass, so
that a test can act at that moment.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import socket
import string
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx

from headgate.testing.tiny import tiny_model
from tests.api.serving import clean_environment, metric_values, wait_until
from tests.router.fleets import LiveRouter, live_router
from tests.router.test_kill import CHAT, COMPLETIONS, NUMBERS, TOOL, Process, told_in_events, told_whole

Hook = Callable[[bytes, int], bytes | None]  # (data, offset) -> what passes; None cuts the line
Asked = tuple[str, dict[str, Any]]

ADDRESS = re.compile(rb'"address":"127\.0\.0\.1:(\d{5})"')
TICKET = b'"kv_ticket":'
THRESHOLD = 64  # estimated prompt tokens from which on a prompt is computed by the prefill server
CONTEXT = 32768
CALL_S = 60.0  # timeout for the end of an answer
HELD_METRICS = ("num_requests_running", "num_requests_waiting", "kv_blocks_held", "kv_leases", "kv_blocks_leased")


def ignored(events: int) -> None:
    pass


def unchanged(data: bytes, offset: int) -> bytes:
    return data


class Line:
    """A port that forwards to another port of this machine until it is cut."""

    def __init__(self, port: int = 0) -> None:
        self.target = port
        self.to_server: Hook = unchanged
        self.to_client: Hook = unchanged
        self._server = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.port: int = self._server.getsockname()[1]
        self._open: set[socket.socket] = set()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._server.accept()
                threading.Thread(target=self._connect, args=(near,), daemon=True).start()

    def _connect(self, near: socket.socket) -> None:
        try:
            far = socket.create_connection(("127.0.0.1", self.target), timeout=60)
        except OSError:
            near.close()
            return
        far.settimeout(None)
        self._open |= {near, far}
        back = threading.Thread(target=self._forward, args=(far, near, False), daemon=True)
        back.start()
        self._forward(near, far, True)
        back.join(60)
        self._open -= {near, far}
        near.close()
        far.close()

    def _forward(self, source: socket.socket, sink: socket.socket, forth: bool) -> None:
        offset = 0
        with suppress(OSError):
            while data := source.recv(65536):
                passed = (self.to_server if forth else self.to_client)(data, offset)
                if passed is None:
                    break
                offset += len(data)
                sink.sendall(passed)
        for sock in (source, sink):
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def sever(self) -> None:
        for sock in list(self._open):
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def heal(self) -> None:
        self.to_server = self.to_client = unchanged

    def close(self) -> None:
        self.sever()
        with suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()


class Server(Process):
    """`headgate serve` and its engine, which are stopped and killed together."""

    def __init__(self, name: str, model: Path, folder: Path, *flags: object) -> None:
        super().__init__("serve", model, *flags, log=folder / f"{name}.log")
        self.name = name
        self.line = Line(self.port)
        self._stopped: list[int] = []

    def start(self) -> None:
        with self._log.open("ab") as log:
            environment = clean_environment(OMP_NUM_THREADS="1")
            self.process = subprocess.Popen(self._command, stdout=log, stderr=log, env=environment)

    def pids(self) -> list[int]:
        assert self.process is not None
        pid = self.process.pid
        return [pid, *map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())]

    def engine(self) -> int:
        return next(pid for pid in self.pids() if "engine-" in Path(f"/proc/{pid}/cmdline").read_text())

    def kill_all(self) -> None:
        for pid in self.pids():
            os.kill(pid, signal.SIGKILL)
        self.kill()

    def stop_all(self) -> None:
        self._stopped = self.pids()
        for pid in self._stopped:
            os.kill(pid, signal.SIGSTOP)

    def repair(self) -> None:
        for pid in self._stopped:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        self._stopped = []
        self.line.heal()
        if self.process is not None and self.process.poll() is not None:
            self.process = None
        if self.process is None:
            self.start()
        wait_until(self._answers, 180)
        if self.metric("weight_version"):
            self.kill_all()  # a restarted server has its original weights
            self.start()
            wait_until(self._answers, 180)
        if self.is_paused():
            self.post("/v1/resume", {})
        self.wait_until_ready()

    def _answers(self) -> bool:
        assert self.process is not None and self.process.poll() is None, self._log.read_text()[-2000:]
        with suppress(httpx.HTTPError):
            return httpx.get(f"{self.url}/v1/is_paused", timeout=10, trust_env=False).status_code == 200
        return False

    def close(self) -> None:
        for pid in self._stopped:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        if self.process is not None:
            self.kill_all()
        self.line.close()

    # -- over HTTP ------------------------------------------------------------------

    def post(self, path: str, body: Any, timeout_s: float = 60) -> Any:
        answer = httpx.post(f"{self.url}{path}", json=body, timeout=timeout_s, trust_env=False)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def update_weights(self, model: Path) -> None:
        self.post("/v1/pause", {"mode": "freeze", "new_requests": "queue", "timeout": 10})
        self.post("/v1/update_weights", {"path": str(model), "version": 1})
        self.post("/v1/resume", {})

    def is_paused(self) -> bool:
        answer = httpx.get(f"{self.url}/v1/is_paused", timeout=60, trust_env=False).json()
        return bool(answer["result"]["state"] != "running")

    def metric(self, name: str, **labels: str) -> float:
        page = wait_until(self._page)
        wanted = {f'{key}="{value}"' for key, value in labels.items()}
        names = (f"headgate:{name}", f"headgate:{name}_total")
        return sum(v for key, v in page.items() if key.partition("{")[0] in names and all(w in key for w in wanted))

    def _page(self) -> dict[str, float] | None:
        """Return the server's metrics; None if its engine does not answer, so that its numbers are unknown."""
        page = metric_values(httpx.get(f"{self.url}/metrics", timeout=60, trust_env=False).text)
        return page if page['headgate:engine_up{engine="0"}'] else None

    def is_home(self) -> bool:
        return not any(self.metric(name) for name in HELD_METRICS)


class PdFleet:
    """The prefill server P, the decode server D and any others. `kv` is the line between D and P."""

    def __init__(self, router: LiveRouter, p: Server, decoders: list[Server], kv: Line, model: Path) -> None:
        self.router, self.p, self.d, self.decoders, self.kv, self.model = router, p, decoders[0], decoders, kv, model
        self.other_weights = tiny_model(
            model.parent / "other", seed=1, **json.loads((model / "config.json").read_text())
        )
        self.over = threading.Event()  # set to release hooks that wait

    @property
    def servers(self) -> list[Server]:
        return [self.p, *self.decoders]

    def watch_tickets(self, act: Callable[[], None] = lambda: None) -> None:
        """Route KV over the line, and call `act` once, when a ticket is about to reach the router."""
        acts = iter([act])

        def readdressed(data: bytes, offset: int) -> bytes:
            if found := ADDRESS.search(data):
                self.kv.target = int(found[1])
                assert self.kv.port >= 10000  # same number of digits, because the chunk's length was sent already
                data = data.replace(found[0], b'"address":"127.0.0.1:%d"' % self.kv.port)
                next(acts, lambda: None)()
            return data

        self.p.line.to_client = readdressed

    def repair(self) -> None:
        self.over.set()
        self.over = threading.Event()
        self.kv.heal()
        for server in self.servers:
            server.repair()
        self.watch_tickets()
        self.router.do(self._forgive)
        self.router.wait_for(ready=len(self.servers))

    def _forgive(self) -> None:
        """Reset the failure counts; otherwise a worker that fails in several cases would stay down ever longer."""
        for worker in self.router.router.fleet:
            worker.trips, worker.open_until_s = 0, 0.0

    def assert_home(self) -> None:
        """Check that running servers and the router have released everything."""
        router = self.router.router

        def at_rest() -> bool:
            loads = [(worker.in_flight, worker.pending_tokens) for worker in router.fleet]
            return not router.live and set(loads) == {(0, 0)} and not router.admission.in_flight

        wait_until(at_rest, 60)
        assert router.fleet.double_releases == 0
        for server in self.servers:
            if server.process is not None and not server._stopped:
                wait_until(server.is_home, 60)

    # -- asking ---------------------------------------------------------------------

    def ask(self, asked: Asked, salt: str, on_event: Callable[[int], None] = ignored) -> Any:
        return ask(self.router.url, asked, salt, on_event)

    def alone(self, asked: Asked, salt: str = "alone") -> Any:
        """Return the answer of a single server, which computes both prompt and answer."""
        return ask(self.d.url, asked, salt)


def ask(url: str, asked: Asked, salt: str, on_event: Callable[[int], None] = ignored) -> Any:
    """Send a request and return the content of the answer. `on_event` is called with the number of events so far."""
    path, body = asked
    body = body | {"cache_salt": salt}
    with httpx.Client(base_url=url, timeout=90, trust_env=False) as http:
        if not body.get("stream"):
            response = http.post(path, json=body)
            assert response.status_code == 200, response.text
            return told_whole(_without_call_ids(response.json()))
        lines = []
        with http.stream("POST", path, json=body) as response:
            assert response.status_code == 200, response.read()
            for line in response.iter_lines():
                if line.startswith("data: "):
                    lines.append(line[6:])
                    on_event(len(lines))
        return told_in_events(lines)


class Call:
    """A request in its own thread, over one socket, so that its client can disconnect at any moment."""

    def __init__(self, url: str, asked: Asked, salt: str, id: str, on_event: Callable[[int], None] = ignored) -> None:
        path, body = asked
        content = json.dumps(body | {"cache_salt": salt, "request_id": id}).encode()
        host, port = url.removeprefix("http://").split(":")
        self._sock = socket.create_connection((host, int(port)), timeout=CALL_S)
        self._stream, self._on_event = bool(body.get("stream")), on_event
        self._answer, self._events = b"", 0
        self._failed: BaseException | None = None
        head = f"POST {path} HTTP/1.0\r\nhost: x\r\ncontent-length: {len(content)}\r\n\r\n"
        self._sock.sendall(head.encode() + content)
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        try:
            while data := self._sock.recv(65536):
                self._answer += data
                come = self._answer.count(b"\ndata: {")
                while self._events < come:
                    self._events += 1
                    self._on_event(self._events)
        except OSError as error:
            self._failed = error

    def leave(self) -> None:
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def wait(self) -> None:
        self._thread.join(CALL_S)
        assert not self._thread.is_alive(), f"no end within {CALL_S} s: {self._answer[-300:]!r}"
        self._sock.close()

    @property
    def status(self) -> int:
        return int(self._answer[9:12])

    @property
    def body(self) -> str:
        return self._answer.partition(b"\r\n\r\n")[2].decode()

    @property
    def lines(self) -> list[str]:
        """Return the decoded events of the answer."""
        return [line[6:] for line in self.body.splitlines() if line.startswith("data: ")]

    def told(self) -> Any:
        """Return the content of the whole answer."""
        self.wait()
        assert self._failed is None and self.status == 200, (self._failed, self._answer[-500:])
        return told_in_events(self.lines) if self._stream else told_whole(_without_call_ids(json.loads(self.body)))


def _without_call_ids(answer: dict[str, Any]) -> dict[str, Any]:
    """Remove ids of tool calls, which derive from the request's id and so differ between two runs."""
    for choice in answer["choices"]:
        for call in (choice.get("message") or {}).get("tool_calls") or ():
            assert call.pop("id")
    return answer


PATIENT = {"ticket_timeout_s": 60.0, "silence_s": 60.0, "probe_timeout_s": 30.0}  # and "60,60,60" for KV
HURRIED = {"ticket_timeout_s": 3.0, "silence_s": 2.0, "probe_timeout_s": 1.0}  # and "8,2,10"


@contextmanager
def pd_fleet(
    folder: Path,
    *flags: object,
    decoders: list[tuple[object, ...]],
    kv_times: str = "60,60,60",
    layers: int = 2,
    **config: Any,
) -> Iterator[PdFleet]:
    """A prefill server, a decode server for each list of flags, and a router in this process.

    Timeouts tolerate a machine that does not run a process for seconds, unless faults must be detected quickly.
    """
    times = ("--kv-times", kv_times)
    model = tiny_model(folder / "tiny", max_position_embeddings=CONTEXT, num_hidden_layers=layers)
    with ExitStack() as stack:
        p = Server("p", model, folder, *times, *flags)
        ds = [Server(f"d{i}", model, folder, *times, *own) for i, own in enumerate(decoders)]
        for server in (p, *ds):
            stack.callback(server.close)
            server.start()
        for server in (p, *ds):
            server.wait_until_ready()
        kv = Line()
        stack.callback(kv.close)
        urls = [f"http://127.0.0.1:{p.line.port}=prefill"]
        urls += [f"http://127.0.0.1:{d.line.port}=decode" for d in ds]
        settings = {"disaggregate_tokens": THRESHOLD} | PATIENT | config
        router = stack.enter_context(live_router(*urls, **settings))
        fleet = PdFleet(router, p, ds, kv, model)
        fleet.watch_tickets()
        yield fleet


# ------------------------------------------------------------------------------------------------------ what is asked


def words(rng: random.Random, length: int) -> str:
    return "".join(rng.choices(string.ascii_lowercase + "     .,0123456789", k=length))


def prompt_lengths(rng: random.Random) -> int:
    """Draw a prompt length near a block boundary or the threshold, or more than one step computes."""
    near = rng.choice((0, -1, 1, 2, -2))
    match rng.randrange(8):
        case 0 | 1 | 2:
            return 32 * rng.randint(8, 40) + near
        case 3 | 4:
            return THRESHOLD * 4 + near
        case 5:
            return rng.randint(1, 200)
        case 6:
            return rng.randint(3000, 6000)
    return rng.randint(300, 2000)


def random_requests(seed: int, count: int) -> list[Asked]:
    """Return requests of every kind. A third of them share a prefix with another one."""
    rng = random.Random(seed)
    prefixes = [words(rng, length) for length in (32 * 12, 32 * 20 + 5, 1500)]
    asked = []
    for number in range(count):
        text = words(rng, prompt_lengths(rng))
        if rng.random() < 0.35:
            text = rng.choice(prefixes) + text[: rng.choice((1, 31, 32, 33, 400))]
        asked.append(_request(rng, text, number))
    return asked


def _request(rng: random.Random, text: str, number: int) -> Asked:
    body: dict[str, Any] = {"max_tokens": rng.choice((1, 2, 16, 40)), "stream": rng.random() < 0.6}
    body |= rng.choice(({"temperature": 0}, {"temperature": 1.0, "seed": number, "top_p": 0.9}, {"seed": number}))
    if body["stream"] and rng.random() < 0.5:
        body["stream_options"] = {"include_usage": True}
    if rng.random() < 0.2:
        body["return_token_ids"] = True
    if rng.random() < 0.5:
        return CHAT, {"messages": [{"role": "user", "content": text}]} | body | _chat_extra(rng)
    prompt = list(text.encode()) if rng.random() < 0.2 else text  # token ids of the same length but not the same text
    extra = rng.choice(({}, {"logprobs": 2}, {"stop": ["a", "zq"]}, {"ignore_eos": True}, {"frequency_penalty": 0.7}))
    return COMPLETIONS, {"prompt": prompt} | body | extra


def _chat_extra(rng: random.Random) -> dict[str, Any]:
    schema = {"type": "json_schema", "json_schema": {"name": "many", "schema": NUMBERS}}
    return rng.choice(
        (
            {},
            {"logprobs": True, "top_logprobs": 2},
            {"response_format": schema},
            {"tools": [TOOL], "tool_choice": "required"},
            {"stop": ["e", "77"]},
            {"ignore_eos": True, "repetition_penalty": 1.2},
        )
    )


def dumped(told: Any) -> str:
    return json.dumps(told, sort_keys=True, default=sorted)
