"""Prefill on one server, decode on another, with the requests of vLLM's proxies: `kv_transfer_params`."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from headgate.testing.tiny import tiny_model
from tests.api.live import LiveServer, eventually, live_server
from tests.api.serving import metric_values, wait_until
from tests.router.fleets import live_router
from tests.transfer.test_http import CHAT, COMPLETION, ENGINE, released

TOKENS = {"token_ids": list(range(3, 120)), "sampling_params": {"max_tokens": 12, "temperature": 1.0, "seed": 5}}
CALLS = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": COMPLETION,
    "/inference/v1/generate": TOKENS,
}
# What llm-d's sidecar sends to the prefill server.
PREFILL = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


@pytest.fixture(scope="module")
def served(tmp_path_factory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("served"))


@pytest.fixture(scope="module")
def both(served) -> Iterator[tuple[LiveServer, LiveServer]]:
    with live_server(served, **ENGINE) as p, live_server(served, **ENGINE) as d:
        yield p, d


def one_token(body: dict[str, Any]) -> dict[str, Any]:
    """The prefill request of `body`."""
    short = body | {"kv_transfer_params": PREFILL, "stream": False}
    if "sampling_params" in body:
        return short | {"sampling_params": body["sampling_params"] | {"max_tokens": 1}}
    return short | {"max_tokens": 1}


def prefilled(p: Any, path: str, body: dict[str, Any]) -> dict[str, Any]:
    response = p.post(path, one_token(body))
    assert response.status_code == 200, response.text
    return response.json()


def salted(body: dict[str, Any], name: str) -> dict[str, Any]:
    return body | {"cache_salt": name}


def text_of(events: list[str]) -> str:
    choices = [choice for event in events[:-1] for choice in json.loads(event)["choices"]]
    return "".join(choice.get("text", choice.get("delta", {}).get("content", "")) for choice in choices)


@pytest.mark.parametrize("path", CALLS)
def test_36_an_answer_through_two_servers_equals_that_of_one(both, path):
    p, d = both
    body = salted(CALLS[path], f"two {path}")
    alone = p.post(path, salted(CALLS[path], "alone")).json()["choices"]
    first = prefilled(p, path, body)
    assert first["usage"]["completion_tokens"] == 1
    assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0, "its own computation is no cache hit"
    params = first["kv_transfer_params"]
    assert (params["do_remote_prefill"], params["do_remote_decode"]) == (True, False)
    assert params["remote_engine_id"] == f"{params['remote_host']}:{params['remote_port']}"
    blocks = params["headgate_ticket"]["tokens"] // ENGINE["block_size"]
    assert params["remote_block_ids"] == list(range(blocks)) and blocks > 4
    before = d.status()
    assert d.post(path, body | {"kv_transfer_params": params}).json()["choices"] == alone
    after = d.status()
    assert (after.transfers, after.transfers_lost) == (before.transfers + 1, before.transfers_lost)
    assert after.moved.received_bytes > before.moved.received_bytes
    assert released(p, d) and p.status().leases_expired == 0


def test_36_a_streamed_answer_through_two_servers_equals_that_of_one(both):
    p, d = both
    for path, body in (("/v1/chat/completions", CHAT), ("/v1/completions", COMPLETION)):
        alone = text_of(p.events(path, salted(body, "alone")))
        params = prefilled(p, path, salted(body, f"stream {path}"))["kv_transfer_params"]
        before = d.status().transfers
        assert text_of(d.events(path, salted(body, f"stream {path}") | {"kv_transfer_params": params})) == alone
        assert d.status().transfers == before + 1
    assert released(p, d)


def test_the_kv_is_kept_after_the_answer_and_can_be_aborted(both):
    p, _ = both
    prefilled(p, "/v1/completions", salted(COMPLETION, "kept") | {"request_id": "x"})
    status = p.status()
    assert (status.leases, status.leased_blocks, status.held_blocks) == (1, 6, 6)  # it counts as used (guarantee 30)
    with p.http as http:
        (kept,) = http.get("/v1/requests").json()["data"]
    assert kept["kind"] == "prefill" and kept["request_id"].startswith("x#kv-")
    aborted = p.post("/v1/abort_requests", {"req_ids": [kept["request_id"]]}).json()["result"]["aborted"]
    assert [each["request_id"] for each in aborted] == [kept["request_id"]]
    assert p.status().leases == 0 and released(p)


def test_37_kv_that_is_never_fetched_is_released_when_its_lease_ends(served, both):
    _, d = both
    body = salted(COMPLETION, "never")
    with live_server(served, **ENGINE | {"lease_s": 0.5}) as p:
        params = prefilled(p, "/v1/completions", body)["kv_transfer_params"]
        assert params is not None and released(p)
        assert p.status().leases_expired == 1
        assert eventually(lambda: p.api.ledger.in_flight == 0)
        lost = d.status().transfers_lost
        late = d.post("/v1/completions", body | {"kv_transfer_params": params}).json()["choices"]  # guarantee 39
        assert late == d.post("/v1/completions", salted(COMPLETION, "alone")).json()["choices"]
        assert d.status().transfers_lost == lost + 1 and released(d)


def test_23_a_pause_that_aborts_drops_the_kept_kv(both):
    p, _ = both
    prefilled(p, "/v1/completions", salted(COMPLETION, "paused"))
    assert p.status().leases == 1
    assert p.post("/v1/pause", {"mode": "abort"}).status_code == 200
    status = p.status()
    assert (status.leases, status.held_blocks, status.running) == (0, 0, 0)
    assert p.post("/v1/resume", {}).status_code == 200


def test_38_a_client_that_leaves_during_the_prefill_leaves_nothing_behind(both):
    p, _ = both
    body = one_token(salted(COMPLETION, "left")) | {"max_tokens": 300}
    with p.stopped(), pytest.raises(httpx.ReadTimeout), p.http as http:
        http.post("/v1/completions", json=body, timeout=0.5)
    assert released(p) and eventually(lambda: p.api.ledger.in_flight == 0)
    assert p.status().leases_expired == 0


def test_38_an_aborted_prefill_keeps_no_kv(both):
    p, _ = both
    body = one_token(salted(COMPLETION, "aborted")) | {"max_tokens": 300, "request_id": "a"}

    async def main() -> dict[str, Any]:
        async with httpx.AsyncClient(base_url=p.url, timeout=100) as http:
            with p.stopped():
                asking = asyncio.create_task(http.post("/v1/completions", json=body))
                while ("", "a") not in p.api.ledger.live:
                    await asyncio.sleep(0.01)
                aborting = asyncio.create_task(http.post("/v1/abort_requests", json={"req_ids": ["a"]}))
                while not any(event.event == "end_asked" for event in p.api.ledger.live["", "a"].events):
                    await asyncio.sleep(0.01)
            await aborting
            return (await asking).json()

    answer = asyncio.run(main())
    assert answer["choices"][0]["finish_reason"] == "abort" and answer["kv_transfer_params"] is None
    assert p.status().leases == 0 and released(p)


def test_a_prompt_shorter_than_a_block_has_no_ticket(both):
    p, d = both
    params = prefilled(p, "/v1/completions", {"prompt": "short"})["kv_transfer_params"]
    assert params is None
    assert d.post("/v1/completions", {"prompt": "short", "kv_transfer_params": params}).status_code == 200


@pytest.mark.parametrize("path", CALLS)
def test_several_choices_share_one_transfer(both, path):
    p, d = both
    body = salted(CALLS[path], f"several {path}")
    if "sampling_params" in body:
        body["sampling_params"] = body["sampling_params"] | {"n": 2}
    else:
        body["n"] = 2
    alone = p.post(path, salted(body, "alone")).json()["choices"]
    first = prefilled(p, path, body)
    assert len(first["choices"]) == 2
    before = d.status().transfers
    answer = d.post(path, body | {"kv_transfer_params": first["kv_transfer_params"]}).json()["choices"]
    assert answer == alone and d.status().transfers == before + 1
    assert released(p, d)


def test_39_parameters_of_another_system_are_a_local_prefill(both):
    d = both[1]
    vllm = {"do_remote_prefill": True, "remote_engine_id": "x", "remote_block_ids": [4, 5], "remote_port": 5600}
    plain = d.post("/v1/completions", COMPLETION).json()
    answer = d.post("/v1/completions", COMPLETION | {"kv_transfer_params": vllm}).json()
    assert answer["choices"] == plain["choices"] and "kv_transfer_params" not in answer


@pytest.mark.parametrize("params", [None, {}, {"do_remote_decode": False, "do_remote_prefill": None, "extra": 1}])
@pytest.mark.parametrize("path", CALLS)
def test_parameters_without_effect_are_accepted(both, path, params):
    answer = both[0].post(path, CALLS[path] | {"kv_transfer_params": params})
    assert answer.status_code == 200 and "kv_transfer_params" not in answer.json()


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"kv_transfer_params": "text"}, "kv_transfer_params"),
        ({"kv_transfer_params": {"do_remote_decode": "yes"}}, "kv_transfer_params.do_remote_decode"),
        (
            {"kv_transfer_params": {"do_remote_prefill": True, "headgate_ticket": {"lease": 1}}},
            "kv_transfer_params.headgate_ticket.lease",
        ),
        ({"kv_transfer_params": {"do_remote_prefill": True, "do_remote_decode": True}}, "kv_transfer_params"),
        ({"kv_transfer_params": PREFILL, "stream": True}, "kv_transfer_params.do_remote_decode"),
    ],
)
@pytest.mark.parametrize("path", CALLS)
def test_parameters_that_contradict_are_refused_by_name(both, path, fields, param):
    answer = both[0].post(path, CALLS[path] | fields)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == param, answer.text


def test_a_server_without_transfer_refuses_the_parameters_by_name(served):
    with live_server(served, **ENGINE | {"kv_listen": None}) as server:
        for params in (PREFILL, {"do_remote_prefill": True}):
            error = server.post("/v1/completions", COMPLETION | {"kv_transfer_params": params}).json()["error"]
            assert (error["param"], error["code"]) == ("kv_transfer_params", "unsupported_parameter")
        assert server.post("/v1/completions", COMPLETION | {"kv_transfer_params": {}}).status_code == 200


def test_a_prefill_request_may_pass_through_a_router(both):
    p, d = both
    body = salted(COMPLETION, "routed")
    with live_router(p.url) as router:
        params = prefilled(router, "/v1/completions", body)["kv_transfer_params"]
    before = d.status().transfers
    assert d.post("/v1/completions", body | {"kv_transfer_params": params}).status_code == 200
    assert d.status().transfers == before + 1 and released(p, d)


def test_72_a_prefill_request_and_its_export_are_one_count(both):
    p, _ = both

    def ended() -> float:
        with p.http as http:
            return metric_values(http.get("/metrics").text)[
                'vllm:request_success_total{finished_reason="length",model_name="tiny"}'
            ]

    before = ended()
    prefilled(p, "/v1/completions", salted(COMPLETION, "counted"))
    assert p.post("/v1/abort_requests", {"abort_all": True}).status_code == 200
    assert released(p) and wait_until(lambda: ended() == before + 1)
