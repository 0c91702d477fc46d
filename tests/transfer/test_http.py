"""Prefill on one server, decode on another, over HTTP: `export_kv` and `kv_ticket`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from headgate.testing.tiny import tiny_model
from tests.api.live import LiveServer, eventually, live_server

ENGINE = {"device": "cpu", "dtype": "float32", "max_context": 512, "kv_blocks": 64, "block_size": 16}
TEXT = (
    "The quick brown fox jumps over the lazy dog, and then it does so again and again, until nobody looks any more. "
)
CHAT = {"messages": [{"role": "user", "content": TEXT}], "max_tokens": 12, "temperature": 0}
COMPLETION = {"prompt": TEXT, "max_tokens": 12, "temperature": 1, "seed": 5, "ignore_eos": True}


@pytest.fixture(scope="module")
def served(tmp_path_factory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("served"))


@pytest.fixture(scope="module")
def both(served) -> Iterator[tuple[LiveServer, LiveServer]]:
    with live_server(served, **ENGINE) as p, live_server(served, **ENGINE) as d:
        yield p, d


class Export:
    def __init__(self, response: httpx.Response) -> None:
        assert response.status_code == 200, response.read()
        self._lines = response.iter_lines()

    def next(self) -> Any:
        for line in self._lines:
            if line.startswith("data: "):
                data = line.removeprefix("data: ")
                return data if data == "[DONE]" else json.loads(data)
        raise AssertionError("the stream ended")


@contextmanager
def exporting(p: LiveServer, path: str, body: dict[str, Any], **options: Any) -> Iterator[Export]:
    with p.http as http, http.stream("POST", path, json=body | {"export_kv": True}, **options) as response:
        yield Export(response)


def released(*servers: LiveServer) -> bool:
    def is_released(server: LiveServer) -> bool:
        status = server.status()
        return not (status.held_blocks or status.leases or status.running or status.waiting)

    return all(eventually(lambda server=server: is_released(server)) for server in servers)


@pytest.mark.parametrize(
    ("path", "body"), [("/v1/chat/completions", CHAT), ("/v1/completions", COMPLETION)], ids=["chat", "completions"]
)
@pytest.mark.parametrize("stream", [False, True])
def test_36_an_answer_through_two_servers_equals_that_of_one(both, path, body, stream):
    p, d = both
    salted = body | {"cache_salt": f"{path} {stream}"}
    alone = p.post(path, body | {"cache_salt": "alone"}).json()["choices"]
    before = d.status().transfers
    with exporting(p, path, salted) as export:
        ticket = export.next()["kv_ticket"]
        if stream:
            events = [json.loads(event) for event in d.events(path, salted | {"kv_ticket": ticket})[:-1]]
            pieces = [event["choices"][0] for event in events]
            text = "".join(piece.get("text", piece.get("delta", {}).get("content", "")) for piece in pieces)
            assert text == (alone[0].get("text") or alone[0]["message"]["content"])
        else:
            assert d.post(path, salted | {"kv_ticket": ticket}).json()["choices"] == alone
        end = export.next()["kv_export"]
        assert (end["state"], end["cause"]) == ("fetched", "exported") and end["prompt_tokens"] > 100
        assert export.next() == "[DONE]"
    assert d.status().transfers == before + 1
    assert released(p, d)


def test_38_a_client_that_disconnects_releases_the_kv(both):
    p, d = both
    body = COMPLETION | {"cache_salt": "hung up"}
    with exporting(p, "/v1/completions", body) as export:
        ticket = export.next()["kv_ticket"]
        assert eventually(lambda: p.status().leases == 1 and p.status().leased_blocks > 0)
    assert released(p)
    lost = d.status().transfers_lost
    answer = d.post("/v1/completions", body | {"kv_ticket": ticket}).json()["choices"][0]
    assert answer["text"] == p.post("/v1/completions", COMPLETION).json()["choices"][0]["text"]
    assert d.status().transfers_lost == lost + 1 and released(d)


def test_an_export_can_be_aborted_by_its_name(both):
    p, _ = both
    with exporting(p, "/v1/completions", COMPLETION | {"request_id": "kv", "cache_salt": "named"}) as export:
        export.next()
        assert p.post("/v1/abort_requests", {"req_ids": ["kv"]}).json()["result"]["aborted"][0]["request_id"] == "kv"
        end = export.next()["kv_export"]
        assert (end["state"], end["cause"]) == ("dropped", "api_abort")
        assert end["error"]["code"] == "pd_error" and end["error"]["message"].startswith("PD Error")
    assert released(p)


def test_a_prompt_shorter_than_a_block_has_no_ticket(both):
    p, _ = both
    with exporting(p, "/v1/completions", {"prompt": "short"}) as export:
        assert export.next()["kv_export"]["state"] == "empty"
        assert export.next() == "[DONE]"


GOOD = {
    "address": "127.0.0.1:9",
    "lease": "0" * 16,
    "generation": "0" * 16,
    "tokens": 16,
    "version": 0,
    "key": "0" * 32,
}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"kv_ticket": GOOD | {"lease": "no"}}, "kv_ticket.lease"),
        ({"kv_ticket": {"lease": "0" * 16}}, "kv_ticket.address"),
        ({"kv_ticket": "text"}, "kv_ticket"),
        ({"kv_ticket": GOOD, "export_kv": True}, "kv_ticket"),
        ({"kv_ticket": GOOD, "n": 2}, "kv_ticket"),
        ({"export_kv": True, "n": 2}, "export_kv"),
    ],
)
def test_a_ticket_that_cannot_be_read_is_refused(both, fields, param):
    answer = both[1].post("/v1/completions", COMPLETION | fields)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == param, answer.text


def test_39_a_ticket_that_cannot_be_used_is_a_local_prefill(both):
    d = both[1]
    plain = d.post("/v1/completions", COMPLETION).json()["choices"]
    assert d.post("/v1/completions", COMPLETION | {"kv_ticket": GOOD}).json()["choices"] == plain


def page_with(server: LiveServer, *lines: str) -> str:
    """Return a metrics page once it contains these lines; a page lacks engines that do not answer at once."""
    pages: list[str] = []

    def found() -> bool:
        with server.http as http:
            pages.append(http.get("/metrics").text)
        return all(line in pages[-1] for line in lines)

    assert eventually(found), pages[-1]
    return pages[-1]


def test_transferred_bytes_appear_in_the_metrics(both):
    p, d = both
    with exporting(p, "/v1/completions", COMPLETION | {"cache_salt": "metrics"}) as export:
        ticket = export.next()["kv_ticket"]
        page_with(p, 'headgate:kv_leases{engine="0"} 1.0', 'headgate:kv_blocks_leased{engine="0"} 6.0')
        d.post("/v1/completions", COMPLETION | {"cache_salt": "metrics", "kv_ticket": ticket})
        export.next()
    page = page_with(d, 'headgate:kv_fetches{engine="0"} 0.0')
    (size,) = (line for line in page.splitlines() if 'kv_transfer_bytes_total{direction="received"' in line)
    assert float(size.split()[-1]) > 6 * 16 * 2 * 2 * 16 * 4 * 2


def test_30_34_a_request_returned_for_lack_of_room_carries_its_ids_and_no_text(served):
    """Two answers that do not fit together: one continues, the other is returned."""
    small = ENGINE | {"kv_blocks": 8, "max_context": 128, "on_preempt": "reschedule"}
    body = {"prompt": "0123456789abcdef" * 2, "max_tokens": 64, "ignore_eos": True, "seed": 1, "n": 2}
    with live_server(served, **small) as server:
        choices = server.post("/v1/completions", body).json()["choices"]
        (kept,) = (choice for choice in choices if choice["finish_reason"] == "length")
        (moved,) = (choice for choice in choices if choice["finish_reason"] == "pd_reschedule")
        assert kept["text"] and moved["text"] == "" and moved["cause"] == "preempted"
        assert 0 < len(moved["generated_token_ids"]) < 64
        strict = server.post("/v1/completions", body, headers={"X-OpenAI-Strict": "true"}).json()
        assert strict["error"]["code"] == "pd_error" and strict["error"]["message"].startswith("PD Error")
        one = body | {"n": 1, "seed": 1 + moved["index"], "generated_token_ids": moved["generated_token_ids"]}
        whole = server.post("/v1/completions", body | {"n": 1, "seed": 1 + moved["index"]}).json()["choices"][0]
        assert server.post("/v1/completions", one).json()["choices"][0]["text"] == whole["text"]
        events = server.events("/v1/completions", body | {"return_token_ids": True})
        parts = [choice for event in events[:-1] for choice in json.loads(event)["choices"]]
        (last,) = (part for part in parts if part["finish_reason"] == "pd_reschedule")
        ids = [id for part in parts if part["index"] == last["index"] for id in part["completion_token_ids"]]
        assert last["generated_token_ids"] == ids  # deltas add up to all ids
        assert server.status().rescheduled == 3 and released(server)
