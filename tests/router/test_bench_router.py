"""`headgate bench router` on a real router in front of real servers with a tiny model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from headgate import cli
from headgate.bench.client import TimedRequest
from headgate.bench.router import _added, placement_of
from tests.api.live import LiveServer
from tests.router.fleets import live_router

FEW = ["--conversations", "4", "--turns", "3", "--system-prompts", "2", "--rounds", "2"]
FEW += ["--concurrency", "2", "--think", "0", "--ignore-eos"]


def test_the_report_has_placement_cache_hits_and_router_overhead(
    servers: list[LiveServer], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    saved = [tmp_path / "one.json", tmp_path / "two.json"]
    urls = [server.url for server in servers]
    with live_router(*urls) as router:
        assert cli.main(["bench", "router", router.url, *FEW, "--json", str(saved[0])], {}) == 0
    with live_router(*urls, policy="round_robin") as router:
        direct = ["--direct", urls[0]]
        assert cli.main(["bench", "router", router.url, *FEW, *direct, "--json", str(saved[1])], {}) == 0
    told = capsys.readouterr().out
    assert "turns at the worker of the previous turn" in told and "100.0%" in told
    ours, turns = (json.loads(path.read_text()) for path in saved)
    placement = ours["placement"]
    assert placement["at_home"] == 1.0 and sum(placement["workers"].values()) == placement["requests"] == 12
    assert set(placement["workers"]) <= set(urls)
    assert placement["cached_share"] > 0.5 and placement["cached_share"] > turns["placement"]["cached_share"]
    assert turns["placement"]["busiest_over_mean"] == 1.0
    for report in (ours, turns):
        for reading in (report["router"], report["direct"]):
            assert reading["first_token_ms"]["p50"] > 0 and reading["requests_per_s"] > 0
        assert report["errors"] == {} and {"first_token_ms", "end_to_end_ms"} <= set(report["added"])
    assert cli.main(["bench", "compare", *map(str, saved)], {}) == 0
    assert "placement at home" in capsys.readouterr().out


def test_without_a_direct_run_no_overhead_is_reported(servers: list[LiveServer], capsys: pytest.CaptureFixture[str]):
    assert cli.main(["bench", "router", servers[0].url, *FEW], {}) == 0
    lines = capsys.readouterr().out.splitlines()
    assert next(line for line in lines if line.startswith("first token")).split()[-1] == "-"
    assert next(line for line in lines if line.startswith("turns at")).split()[-1] == "-"


def test_numbers_below_one_are_refused(capsys: pytest.CaptureFixture[str]):
    assert cli.main(["bench", "router", "--turns", "0"], {}) == cli.WRONG_USE
    assert "turns must be at least 1" in capsys.readouterr().err


def test_router_overhead_is_computed_from_pairs_of_runs():
    slow, quick = TimedRequest(total_s=9.0, first_token_s=8.5), TimedRequest(total_s=8.9, first_token_s=8.4)
    calm, calmer = TimedRequest(total_s=0.3, first_token_s=0.2), TimedRequest(total_s=0.2, first_token_s=0.1)
    lost = TimedRequest(error="timeout", total_s=99.0)
    added = _added([(slow, quick), (calm, calmer), (calm, lost), (calm, None)])
    assert {name: round(value) for name, value in added.items()} == {"first_token_ms": 100, "end_to_end_ms": 100}


def talk(*workers: str, cached: int = 0) -> list[TimedRequest]:
    return [TimedRequest(worker=worker, prompt_tokens=10, cached_tokens=cached) for worker in workers]


def test_placement_counts_all_turns_but_the_first():
    placement = placement_of([talk("a", "a", "b"), talk("b", "b", cached=5), talk("a")])
    assert placement.at_home == 2 / 3
    assert placement.workers == {"a": 3, "b": 3} and placement.busiest_over_mean == 1.0
    assert placement.cached_share == 10 / 60
    lost = placement_of([[TimedRequest(error="timeout"), *talk("c")]])
    assert lost.requests == 1 and lost.at_home == 0.0, "no worker had the previous turn"
