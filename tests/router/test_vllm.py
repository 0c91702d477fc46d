"""A real vLLM and a headgate server behind one router. `HEADGATE_VLLM` names the Python of vLLM's environment.

HEADGATE_VLLM=/path/to/python python -m pytest tests/router/test_vllm.py
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from headgate.client import Fleet
from headgate.listening import take_port
from headgate.router.fleet.worker import Worker
from headgate.testing.tiny import tiny_model
from tests.api.live import LiveServer, live_server
from tests.api.serving import metric_values, wait_until
from tests.router.fleets import LiveRouter, live_router

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(1800)]

START_S = 1200.0
MODEL = "tiny"  # the model name, which the headgate server in a thread has too
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
LONG = {"model": MODEL, "prompt": "hello", "max_tokens": 3000, "temperature": 0, "ignore_eos": True, "stream": True}
SYSTEM = "You keep the gates of a long canal, and you answer in few words. " * 8


@dataclass
class Vllm:
    url: str
    process: subprocess.Popen[bytes]

    def get(self, path: str) -> httpx.Response:
        return httpx.get(self.url + path, timeout=30, trust_env=False)

    def running(self) -> float:
        values = metric_values(self.get("/metrics").text)
        return sum(value for name, value in values.items() if name.startswith("vllm:num_requests_running{"))


@contextmanager
def vllm(python: str, model: Path) -> Iterator[Vllm]:
    with take_port("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
    command = [
        *(python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--served-model-name", MODEL),
        *("--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", "--enforce-eager"),
        *("--max-model-len", "4096", "--max-num-seqs", "8", "--block-size", "32", "--enable-prompt-tokens-details"),
    ]
    own = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    with (model / "vllm.log").open("wb") as log:
        process = subprocess.Popen(
            command,
            env=os.environ | own | {"VLLM_SERVER_DEV_MODE": "1"},  # for /pause and similar calls
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    server = Vllm(f"http://127.0.0.1:{port}", process)
    try:
        wait_until(lambda: _answers(server, model / "vllm.log"), START_S)
        yield server
    finally:
        _kill(process)


def _answers(server: Vllm, log: Path) -> bool:
    assert server.process.poll() is None, log.read_text(errors="replace")[-3000:]
    try:
        return server.get("/health").status_code == 200
    except httpx.TransportError:
        return False


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill vLLM together with its engine, a separate process in the same session."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(30)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # vLLM's CPU attention needs a head size of 32 or more.
    shape = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
    return tiny_model(tmp_path_factory.mktemp("beside") / "tiny", max_position_embeddings=8192, **shape)


@pytest.fixture(scope="module")
def theirs(model: Path) -> Iterator[Vllm]:
    with vllm(os.environ["HEADGATE_VLLM"], model) as server:
        yield server


@pytest.fixture(scope="module")
def ours(model: Path) -> Iterator[LiveServer]:
    with live_server(model, device="cpu", kv_blocks=1024, max_running=8) as server:
        yield server


@pytest.fixture
def router(ours: LiveServer, theirs: Vllm) -> Iterator[LiveRouter]:
    with live_router(ours.url, theirs.url, policy="round_robin") as router:
        yield router


def worker_of(router: LiveRouter, server: Vllm | LiveServer) -> Worker:
    return router.router.fleet.find(server.url)


def answers_from(router: LiveRouter, url: str, path: str, body: dict[str, Any]) -> httpx.Response:
    """Return an answer of that worker; each of the two workers gets every second request."""
    for _ in range(2):
        answer = router.post(path, body)
        if answer.headers["x-headgate-worker"] == url:
            return answer
    raise AssertionError(f"{url} does not get its turn")


# --------------------------------------------------------------------------------------------------------------------


def test_vllm_is_recognised_and_reported_healthy(router: LiveRouter, theirs: Vllm):
    kinds = {
        worker["url"]: (worker["kind"], worker["state"]) for worker in router.get("/v1/workers").json()["workers"]
    }
    assert sorted(kinds.values()) == [("headgate", "ready"), ("vllm", "ready")]
    assert kinds[theirs.url] == ("vllm", "ready")
    assert [model["id"] for model in router.get("/v1/models").json()["data"]] == [MODEL]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("stream", [False, True])
def test_headgate_and_vllm_answer_under_one_address(
    router: LiveRouter, ours: LiveServer, theirs: Vllm, path: str, stream: bool
):
    asked = {"messages": [{"role": "user", "content": "hello"}]} if path == CHAT else {"prompt": "hello"}
    body = {"model": MODEL, "max_tokens": 8, "temperature": 0, "ignore_eos": True, "stream": stream, **asked}
    for server in (ours, theirs):
        answer = answers_from(router, server.url, path, body)
        assert answer.status_code == 200
        if stream:
            assert answer.text.endswith("data: [DONE]\n\n")
        else:
            assert answer.json()["usage"]["completion_tokens"] == 8
    refused = answers_from(router, theirs.url, path, body | {"max_tokens": -1})
    assert refused.status_code == 400, "its own error, passed on"


def test_12_a_disconnect_of_the_client_reaches_vllm(router: LiveRouter, theirs: Vllm):
    for _ in range(2):  # one of them is vLLM's
        with router.client() as http, http.stream("POST", COMPLETIONS, json=LONG) as answer:
            lines = answer.iter_lines()  # a reference, because the answer is closed with its iterator
            next(lines)
            if answer.headers["x-headgate-worker"] == theirs.url:
                wait_until(lambda: theirs.running() == 1, 30)
    wait_until(lambda: theirs.running() == 0, 30)
    wait_until(lambda: worker_of(router, theirs).in_flight == 0)


def test_an_abort_by_id_is_reported_and_reaches_vllm(router: LiveRouter, theirs: Vllm):
    with ThreadPoolExecutor(2) as threads:
        asked = [threads.submit(router.post, COMPLETIONS, LONG | {"request_id": id}) for id in ("a", "b")]
        wait_until(lambda: theirs.running() == 1, 30)
        told = Fleet(router.url).abort("a", "b", "nobody")
        assert set(told.aborted) == {"a", "b"} and told.not_found == ["nobody"]
        for each in asked:
            assert '"finish_reason":"abort"' in each.result(30).text
    wait_until(lambda: theirs.running() == 0, 30)


def test_cache_hits_of_vllm_are_counted(ours: LiveServer, theirs: Vllm):
    with live_router(theirs.url) as router:
        messages = [{"role": "system", "content": SYSTEM}]
        for turn in range(4):
            messages.append({"role": "user", "content": f"turn {turn}"})
            body = {"model": MODEL, "messages": messages, "max_tokens": 4, "stream": turn % 2 == 0}
            answer = router.post(CHAT, body | ({"stream_options": {"include_usage": True}} if turn % 2 == 0 else {}))
            assert answer.status_code == 200
            messages.append({"role": "assistant", "content": "so"})
        worker = worker_of(router, theirs)
        assert worker.prompt_tokens > 4 * 500
        assert worker.cached_tokens > 0.6 * worker.prompt_tokens
        assert worker.expected_tokens > 0.6 * worker.prompt_tokens


def test_36_an_answer_of_headgate_resumes_only_at_headgate(router: LiveRouter, ours: LiveServer, theirs: Vllm):
    with ThreadPoolExecutor(2) as threads:
        asked = [
            threads.submit(router.post, COMPLETIONS, LONG | {"request_id": f"go{i}", "max_tokens": 800})
            for i in range(2)
        ]
        wait_until(lambda: all(f"go{i}" in router.router.live for i in range(2)))
        live = [router.router.live[f"go{i}"] for i in range(2)]
        wait_until(lambda: any(e.worker is worker_of(router, ours) and e.journal.tokens > 20 for e in live), 30)
        (mine,) = [e for e in live if e.worker is worker_of(router, ours)]
        router.do(lambda: mine.attempt.fail("a test"))
        answer = asked[live.index(mine)].result(120)
        assert answer.text.endswith("data: [DONE]\n\n") and '"finish_reason":"length"' in answer.text
        assert router.router.counters.resumes >= 1
        Fleet(router.url).abort(f"go{1 - live.index(mine)}")


def test_29_a_headgate_pause_names_vllm_and_a_vllm_pause_holds_both(
    router: LiveRouter, ours: LiveServer, theirs: Vllm
):
    paused = router.post("/v1/pause", {"mode": "abort"})
    assert paused.status_code == 502 and paused.json()["error"]["code"] == "partial"
    assert worker_of(router, theirs).name in paused.json()["error"]["message"]
    router.post("/v1/resume")
    wait_until(lambda: set(router.states().values()) == {"ready"})
    assert router.post("/pause?mode=keep").status_code == 200
    assert theirs.get("/is_paused").json() == {"is_paused": True}
    assert Fleet(ours.url).state().is_paused
    assert router.post("/resume").status_code == 200
    assert theirs.get("/is_paused").json() == {"is_paused": False}
    assert router.post(COMPLETIONS, {"model": MODEL, "prompt": "x", "max_tokens": 2}).status_code == 200


def test_45_a_failure_of_vllm_is_one_clear_error_in_mid_answer_and_invisible_before_it(
    router: LiveRouter, ours: LiveServer, theirs: Vllm
):
    """The last test, because vLLM does not come back."""
    with router.client() as http:
        for _ in range(2):
            with http.stream("POST", COMPLETIONS, json=LONG) as answer:
                if answer.headers["x-headgate-worker"] != theirs.url:
                    continue
                lines = answer.iter_lines()
                next(lines)
                _kill(theirs.process)
                events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
                assert events[-1]["error"]["code"] == "worker_lost"
    for _ in range(6):
        answer = router.post(COMPLETIONS, {"model": MODEL, "prompt": "x", "max_tokens": 2})
        assert (answer.status_code, answer.headers["x-headgate-worker"]) == (200, ours.url)
    wait_until(lambda: worker_of(router, theirs).state == "down", 30)
    assert router.get("/health").json()["status"] == "degraded"
