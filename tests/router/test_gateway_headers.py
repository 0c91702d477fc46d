"""Headers of gateways and tracers, on a server and through a router: load reports and the client's trace."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import count
from typing import Any

import httpx
import pytest

from headgate.router.data_path.upstream import Pool
from headgate.testing.tiny import tiny_model
from tests.api.live import LiveServer, live_server
from tests.api.serving import metric_values, wait_until
from tests.router.fleets import LiveRouter, live_router

ENGINE = {"device": "cpu", "dtype": "float32", "max_context": 512, "kv_blocks": 64, "block_size": 16}
CHAT = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4, "temperature": 0}
TOKENS = {"token_ids": [1, 2, 3], "sampling_params": {"max_tokens": 4, "temperature": 0}}
CALLS = [
    ("/v1/chat/completions", CHAT),
    ("/v1/completions", {"prompt": "hello", "max_tokens": 4}),
    ("/v1/responses", {"input": "hello", "max_output_tokens": 4}),
    ("/v1/messages", {"messages": CHAT["messages"], "max_tokens": 4}),
    ("/inference/v1/generate", TOKENS),
]
FORMAT, REPORT = "endpoint-load-metrics-format", "endpoint-load-metrics"
TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = f"00-{TRACE}-b7ad6b7169203331-01"


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[LiveServer]:
    with live_server(tiny_model(tmp_path_factory.mktemp("model")), count=2, **ENGINE) as server:
        yield server


@pytest.fixture(scope="module")
def router(server) -> Iterator[LiveRouter]:
    with live_router(server.url) as router:
        yield router


@pytest.fixture(params=["server", "router"])
def target(request) -> LiveServer | LiveRouter:
    return request.getfixturevalue(request.param)


def post(target: LiveServer | LiveRouter, path: str, body: Any, **headers: str) -> httpx.Response:
    response = target.post(path, body, headers=headers)
    assert response.status_code == 200, response.text
    return response


def reported(target: LiveServer | LiveRouter, path: str, body: Any, **headers: str) -> httpx.Response:
    """Return an answer whose load report covers all engines. Late engines are missing, so it repeats the call."""
    return wait_until(lambda: REPORT in (response := post(target, path, body, **headers)).headers and response)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "body"), CALLS, ids=[path for path, _ in CALLS])
def test_an_answer_reports_the_load_if_the_client_requests_it(target, path, body, stream):
    body = body | {"stream": stream}
    answer = reported(target, path, body, **{FORMAT: "JSON"})
    kind, _, report = answer.headers[REPORT].partition(" ")
    assert kind == "JSON"
    metrics = json.loads(report)["named_metrics"]
    assert set(metrics) == {"kv_cache_usage_perc", "num_requests_waiting"}
    assert 0 <= metrics["kv_cache_usage_perc"] <= 1 and metrics["num_requests_waiting"] == 0
    text = reported(target, path, body, **{FORMAT: "TEXT"}).headers[REPORT]
    assert text.startswith("TEXT named_metrics.kv_cache_usage_perc=")
    plain = post(target, path, body)
    assert REPORT not in plain.headers and len(plain.text) > 10
    if not stream:
        assert set(plain.json()) == set(answer.json())


@pytest.mark.parametrize("stream", [False, True])
def test_tools_that_the_chat_template_ignores_are_reported(target, stream):
    tool = {"type": "function", "function": {"name": "look"}}
    answer = post(target, CALLS[0][0], CHAT | {"tools": [tool], "stream": stream})
    assert answer.headers["x-headgate-warning"] == "the chat template of this model ignores tools"
    assert "x-headgate-warning" not in post(target, CALLS[0][0], CHAT | {"stream": stream}).headers


def test_an_unknown_format_is_answered_without_a_report(target):
    assert REPORT not in post(target, *CALLS[0], **{FORMAT: "protobuf"}).headers


def test_the_report_counts_all_engines_and_agrees_with_the_metrics(server):
    """While one engine is stopped, the load of the other is reported."""
    with server.http as http:
        page = wait_until(lambda: "vllm:kv_cache_usage_perc{" in (text := http.get("/metrics").text) and text)
        assert (
            metric_values(page)['vllm:cache_config_info{block_size="16",model_name="tiny",num_gpu_blocks="128"}'] == 1
        )
    with server.stopped(1):
        assert reported(server, *CALLS[0], **{FORMAT: "JSON"})


def test_a_replayed_answer_has_no_load_report(server):
    keys = (f"load {i}" for i in count())

    def first() -> str | None:
        key = next(keys)
        response = post(server, *CALLS[0], **{FORMAT: "JSON", "Idempotency-Key": key})
        return key if REPORT in response.headers else None

    again = post(server, *CALLS[0], **{FORMAT: "JSON", "Idempotency-Key": wait_until(first)})
    assert again.headers["idempotent-replayed"] == "true" and REPORT not in again.headers


def test_heads_that_differ_in_every_answer_are_not_remembered():
    """Such heads would displace those by which the router recognises most answers."""
    pool, headers = Pool("http://127.0.0.1:9", 1.0), [(b"transfer-encoding", b"chunked")]
    pool.remember(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n", headers)
    assert len(pool.heads) == 1
    load = REPORT.encode(), b"TEXT named_metrics.num_requests_waiting=0.0"
    head = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n%b: %b\r\n\r\n0\r\n\r\n" % load
    pool.remember(head, [*headers, load])
    assert len(pool.heads) == 1


# ------------------------------------------------------------------------------------------------------------- traces


@pytest.mark.parametrize(("path", "body"), CALLS, ids=[path for path, _ in CALLS])
def test_the_usage_record_names_the_trace_of_the_client(server, target, path, body):
    id = f"{type(target).__name__}{path}"
    post(target, path, body, **{"X-Request-Id": id, "traceparent": PARENT, "tracestate": "vendor=a"})
    with server.http as http:
        usage = wait_until(lambda: http.get("/v1/requests/" + id.replace("/", "%2F")).json().get("usage"))
    assert (usage["traceparent"], usage["tracestate"]) == (PARENT, "vendor=a")


def test_an_invalid_trace_is_ignored(server, target):
    id = f"invalid {type(target).__name__}".replace(" ", "-")
    post(target, *CALLS[0], **{"X-Request-Id": id, "traceparent": "00-zz", "tracestate": "vendor=a"})
    with server.http as http:
        usage = wait_until(lambda: http.get(f"/v1/requests/{id}").json().get("usage"))
    assert (usage["traceparent"], usage["tracestate"]) == ("", "")
