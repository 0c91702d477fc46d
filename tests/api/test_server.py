"""The server as a process, with a tiny model: probes, limits, keys, engine failures and shutdown."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import pytest

from headgate.api.control.health import PING_TIMEOUT_S
from headgate.testing.tiny import tiny_model
from tests.api.serving import Served, clean_environment, command, events, metric_values, serving, wait_until

LONG = 15000  # tokens: many seconds of work, so that a test can act meanwhile


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model") / "tiny", max_position_embeddings=16384)


@pytest.fixture(scope="module")
def pair(model) -> Iterator[Served]:
    """Two engines behind one API."""
    with serving(model, "--replicas", 2, "--kv-blocks", 2048) as served:
        yield served


@pytest.fixture(scope="module")
def guarded(model, tmp_path_factory) -> Iterator[Served]:
    """A server with keys, whose only engine runs one answer at a time and has no queue."""
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text("alice:key-of-alice\nbob:key-of-bob\n")
    arguments = ("--api-keys", keys, "--max-running", 1, "--max-queue", 0, "--kv-blocks", 1024)
    with serving(model, *arguments, HEADGATE_ADMIN_KEY="key-of-root") as served:
        yield served


def ask(prompt: str = "hello", max_tokens: int = 8, **more: object) -> dict[str, object]:
    return {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, **more}


@contextmanager
def streaming(client: httpx.Client, body: dict[str, object]) -> Iterator[Iterator[dict]]:
    """Yield a stream whose first event has arrived."""
    with client.stream("POST", "/v1/completions", json=body | {"stream": True, "return_token_ids": True}) as response:
        assert response.status_code == 200, response.read()
        stream = events(response)
        first = next(stream)
        yield _chain(first, stream)


def _chain(first: dict, rest: Iterator[dict]) -> Iterator[dict]:
    yield first
    yield from rest


def tokens_of(stream: Iterator[dict]) -> tuple[list[int], dict]:
    """All tokens of a stream, and its last choice."""
    tokens: list[int] = []
    last: dict = {}
    for event in stream:
        assert "error" not in event, event
        for choice in event["choices"]:
            tokens += choice.get("completion_token_ids") or choice.get("token_ids") or []
            last = choice if choice["finish_reason"] else last
    return tokens, last


def error_of(response: httpx.Response) -> dict:
    body = response.json()
    assert set(body) == {"error"} and set(body["error"]) == {"message", "type", "param", "code"}
    return body["error"]


# ----------------------------------------------------------------------------------------------- probes and paths


def test_the_machine_readable_ready_line_describes_the_server(pair):
    assert pair.ready["model"] == "tiny" and pair.ready["dtype"] == "float32"
    assert pair.ready["kv_blocks"] == 2048 and pair.ready["max_context"] == 16384 and pair.ready["replicas"] == 2


def test_probes_are_green(pair):
    with pair.client() as client:
        assert client.get("/live").status_code == 200
        wait_until(lambda: client.get("/ready").json()["ready"] is True)
        green = wait_until(lambda: (h := client.get("/health").json())["status"] == "ok" and h)
    assert [engine["state"] for engine in green["engines"]] == ["ok", "ok"]


def test_unknown_paths_get_404_and_wrong_methods_405_in_openais_format(pair):
    with pair.client() as client:
        missing, wrong = client.get("/v2/nothing"), client.delete("/v1/chat/completions")
    assert missing.status_code == 404 and error_of(missing)["code"] == "not_found"
    assert wrong.status_code == 405 and error_of(wrong)["code"] == "method_not_allowed"
    assert wrong.headers["allow"] == "POST"


def test_a_request_keeps_its_own_id_or_gets_a_generated_one(pair):
    with pair.client() as client:
        assert client.get("/live", headers={"X-Request-Id": "mine-1"}).headers["x-request-id"] == "mine-1"
        assert client.get("/live").headers["x-request-id"].startswith("req-")
        bad = client.get("/live", headers={"X-Request-Id": "x" * 300})
    assert bad.status_code == 400 and error_of(bad)["param"] == "X-Request-Id"


def test_a_body_beyond_the_limit_gets_413_with_or_without_a_declared_length(pair):
    piece = b"x" * 2**20
    assert answer_to(pair, b"Content-Length: 1073741824\r\n\r\n").startswith(b"HTTP/1.1 413 ")
    chunks = b"".join(b"100000\r\n%b\r\n" % piece for _ in range(33))
    answer = answer_to(pair, b"Transfer-Encoding: chunked\r\n\r\n" + chunks)
    assert answer.startswith(b"HTTP/1.1 413 ") and b'"body_too_large"' in answer
    with pair.client() as client:
        assert client.get("/live").status_code == 200


def answer_to(served: Served, rest: bytes) -> bytes:
    url = httpx.URL(served.url)
    with socket.create_connection((url.host, url.port), timeout=60) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n" + rest)
        answer = b""
        while not answer.endswith(b"}}"):
            answer += connection.recv(65536)
        return answer


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"null", b"\xff\xfe", b'{"prompt": NaN}', b'{"prompt": 1e999}'])
def test_an_invalid_body_is_a_client_error(pair, body):
    with pair.client() as client:
        response = client.post("/v1/completions", content=body)
    assert response.status_code in (400, 422) and error_of(response)["type"] == "invalid_request_error"


def test_every_refusal_is_counted_once(pair, guarded):
    def refused(client: httpx.Client) -> dict[str, float]:
        values = metric_values(client.get("/metrics").text)
        name = 'headgate:requests_refused_total{code="'
        return {key.removeprefix(name)[:-2]: value for key, value in values.items() if key.startswith(name)}

    with pair.client() as client, guarded.client() as nobody:
        before, before_guarded = refused(client), refused(nobody)
        client.get("/v2/nothing")
        client.post("/v1/completions", content=b"{")
        client.post("/v1/completions", json=ask(max_tokens=100_000))  # an engine refuses it, and the ledger counts it
        answer_to(pair, b"Content-Length: 1073741824\r\n\r\n")
        nobody.post("/v1/completions", json=ask())
        after, after_guarded = refused(client), refused(nobody)
    for code in ("not_found", "invalid_json", "context_length_exceeded", "body_too_large"):
        assert after[code] - before.get(code, 0) == 1, code
    assert after_guarded["missing_api_key"] - before_guarded.get("missing_api_key", 0) == 1


def test_a_duplicate_of_a_live_id_is_409(pair):
    with pair.client() as client, streaming(client, ask(max_tokens=LONG, request_id="twice")):
        assert (
            error_of(client.post("/v1/completions", json=ask(request_id="twice")))["code"] == "duplicate_request_id"
        )


def looked(client: httpx.Client) -> dict[str, float]:
    """Return the metrics once both engines have answered the scrape; late engines are missing from a page."""

    def whole() -> dict[str, float] | None:
        values = metric_values(client.get("/metrics").text)
        return values if all(values[f'headgate:engine_up{{engine="{i}"}}'] for i in (0, 1)) else None

    return wait_until(whole)


def test_metrics_add_up(pair):
    def total(values: dict[str, float], name: str) -> float:
        return sum(value for key, value in values.items() if key.startswith(name + "{"))

    with pair.client() as client:
        # Requests of earlier tests have ended.
        before = wait_until(lambda: (v := looked(client))["headgate:num_requests_in_flight"] == 0 and v)
        usages = [client.post("/v1/completions", json=ask(f"{i} hello", n=2)).json()["usage"] for i in range(3)]
        with streaming(client, ask(max_tokens=LONG)):
            pass  # the client disconnects
        after = wait_until(lambda: (v := looked(client))["headgate:num_requests_in_flight"] == 0 and v)
        names = [f"headgate:{name}" for name in ("num_requests_running", "num_requests_waiting", "kv_blocks_held")]
        idle = wait_until(lambda: not any(total(v := looked(client), name) for name in names) and v)

    def grown(name: str) -> float:
        return after.get(name, 0) - before.get(name, 0)

    assert grown('headgate:requests_total{cause="max_tokens",finish_reason="length"}') == 3
    assert grown('headgate:requests_total{cause="client_disconnect",finish_reason="abort"}') == 1
    assert grown('headgate:aborts_total{cause="client_disconnect"}') == 1
    assert grown("headgate:e2e_request_latency_seconds_count") == 4
    assert grown("headgate:time_to_first_token_seconds_count") == 4
    assert grown('headgate:tokens_total{kind="output"}') >= sum(usage["completion_tokens"] for usage in usages)
    looked_up = total(idle, "headgate:prefix_cache_queries_total") - total(
        before, "headgate:prefix_cache_queries_total"
    )
    assert grown('headgate:tokens_total{kind="prompt"}') == looked_up


# ---------------------------------------------------------------------------------------------- engines in trouble


RED = {"ok", "wedged"}


def states(health: httpx.Response) -> set[str]:
    return {engine["state"] for engine in health.json()["engines"]}


def test_a_stopped_engine_makes_health_fail_within_5_s_and_recover(pair):
    """Guarantee 50. The 5 s are measured by the server, because this machine may not schedule the test."""
    assert PING_TIMEOUT_S < 5
    pid = pair.engine_pids()[0]
    with pair.client() as client:
        os.kill(pid, signal.SIGSTOP)
        try:
            red = wait_until(lambda: (r := client.get("/health")).status_code == 503 and states(r) == RED and r)
            assert int(red.headers["retry-after"]) >= 1
            assert client.get("/live").status_code == 200
            values = metric_values(client.get("/metrics").text)
            assert values['headgate:engine_up{engine="0"}'] == 0
        finally:
            os.kill(pid, signal.SIGCONT)
        wait_until(lambda: client.get("/health").status_code == 200)


def test_a_stream_whose_engine_is_killed_continues_on_the_other_one(pair):
    with pair.client() as client:
        for count in (1500, 4500, 12000):  # longer if it ended before its engine could be killed
            with streaming(client, ask("a long story", count)) as stream:
                expected, _ = tokens_of(stream)
            assert len(expected) == count
            with streaming(client, ask("a long story", count)) as stream:
                values = looked(client)
                busy = [i for i in (0, 1) if values[f'headgate:num_requests_running{{engine="{i}"}}']]
                for engine in busy:
                    os.kill(pair.engine_pids()[engine], signal.SIGKILL)
                tokens, last = tokens_of(stream)
            assert tokens == expected and last["finish_reason"] == "length"
            wait_until(lambda: client.get("/ready").status_code == 200)
            wait_until(lambda: client.get("/health").json()["status"] == "ok")
            if any("continues in another" in message for message in pair.messages()):
                return
    pytest.fail("it went on nowhere else")


# ---------------------------------------------------------------------------------------------------- keys, limits


def test_keys_allow_what_they_should(guarded):
    clients = map(guarded.client, (None, "wrong", "key-of-alice", "key-of-root"))
    with ExitStack() as stack:
        nobody, stranger, alice, admin = map(stack.enter_context, clients)
        assert nobody.get("/health").status_code == nobody.get("/metrics").status_code == 200
        refused = nobody.post("/v1/completions", json=ask())
        assert refused.status_code == 401 and error_of(refused)["type"] == "authentication_error"
        assert error_of(stranger.get("/v1/models"))["code"] == "invalid_api_key"
        assert alice.get("/v1/models").status_code == 200
        assert nobody.get("/v1/models", headers={"X-API-Key": "key-of-bob"}).status_code == 200
        assert alice.post("/v1/completions", json=ask()).status_code == 200
        assert alice.post("/v1/pause").status_code == 403
        assert admin.post("/v1/resume").status_code == 200


def test_tenants_do_not_share_cached_prefixes(guarded):
    prompt = "the same words for everyone, long enough to fill more than a block of tokens " * 2

    def cached(key: str) -> int:
        with guarded.client(key) as client:
            usage = client.post("/v1/completions", json=ask(prompt)).json()["usage"]
        return usage["prompt_tokens_details"]["cached_tokens"]

    assert cached("key-of-alice") == 0
    assert cached("key-of-alice") > 0
    assert cached("key-of-bob") == 0


def test_beyond_queue_and_concurrency_is_429_with_a_time_to_retry(guarded):
    with guarded.client("key-of-alice") as client, streaming(client, ask(max_tokens=LONG)):
        full = client.post("/v1/completions", json=ask())
    assert full.status_code == 429 and error_of(full)["code"] == "queue_full"
    assert int(full.headers["retry-after"]) >= 1


def test_keys_do_not_appear_in_logs(guarded):
    assert len(guarded.log) > 10 and "key-of-" not in json.dumps(guarded.log)


# --------------------------------------------------------------------------------------------------------- stopping


def test_sigterm_lets_streams_finish_refuses_new_ones_and_exits_with_0(guarded):
    """The last test with this server."""
    wait_until(lambda: takes(guarded))  # the place of the previous request may not be released yet
    with guarded.client("key-of-alice") as client, streaming(client, ask(max_tokens=1000)) as stream:
        guarded.process.send_signal(signal.SIGTERM)
        wait_until(lambda: any("stopping" in message for message in guarded.messages()))
        wait_until(lambda: refuses(guarded))
        tokens, last = tokens_of(stream)
    assert len(tokens) == 1000 and last["finish_reason"] == "length"
    assert guarded.process.wait(60) == 0
    assert "Traceback" not in json.dumps(guarded.log)


def takes(served: Served) -> bool:
    with served.client("key-of-alice") as client:
        return client.post("/v1/completions", json=ask(max_tokens=1)).status_code == 200


def refuses(served: Served) -> bool:
    try:
        with served.client() as other:
            other.get("/live")
    except httpx.ConnectError:
        return True
    except httpx.TransportError:
        pass  # it was in the listener's backlog when the listener was closed
    return False


def test_the_deadline_of_a_drain_ends_streams_with_partial_answers(pair):
    """The last test with this server; a second signal ends the drain at once."""
    with pair.client() as client, streaming(client, ask(max_tokens=LONG)) as stream:
        pair.process.send_signal(signal.SIGINT)
        wait_until(lambda: any("stopping" in message for message in pair.messages()))
        pair.process.send_signal(signal.SIGINT)
        tokens, last = tokens_of(stream)
    assert 0 < len(tokens) < LONG
    assert (last["finish_reason"], last["cause"]) == ("abort", "shutdown")
    assert pair.process.wait(60) == 0


def test_the_start_up_message_has_a_command_that_works_when_pasted(model):
    process = subprocess.Popen(
        command("serve", model, "--port", 0, "--drain-timeout", 0),
        *(-1, None, None, subprocess.PIPE, subprocess.PIPE),
        text=True,
        env=clean_environment(),
    )
    told: list[str] = []
    draining = threading.Thread(target=lambda: told.extend(process.stderr))
    draining.start()
    try:
        block = []
        for line in process.stdout:
            block.append(line.strip())
            if line.strip().startswith("curl "):
                break
        text = "\n".join(block)
        assert all(word in text for word in ("tiny", "float32", "16384 tokens", "KV cache", "http://127.0.0.1:"))
        answer = subprocess.run(block[-1], shell=True, capture_output=True, text=True, timeout=100)
        assert answer.returncode == 0 and "data: [DONE]" in answer.stdout
    finally:
        process.terminate()
        assert process.wait(60) == 0
        draining.join()
        process.stdout.close()
        process.stderr.close()
    assert "Traceback" not in "".join(told)
