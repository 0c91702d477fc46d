"""`headgate bench prefix` on a real server with a tiny model."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from headgate import cli
from headgate.testing.tiny import tiny_model
from tests.api.live import LiveServer, live_server


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[LiveServer]:
    model = tiny_model(tmp_path_factory.mktemp("tiny"), max_position_embeddings=8192)
    with live_server(model, device="cpu", kv_blocks=1024, max_running=8) as server:
        yield server


def test_a_repeated_prefix_is_cached_and_a_new_one_is_not(server, tmp_path, capsys):
    saved = tmp_path / "prefix.json"
    options = ["--rounds", "2", "--warm", "2", "--prefix-words", "200", "--json", str(saved)]
    assert cli.main(["bench", "prefix", server.url, *options], {}) == 0
    report = json.loads(saved.read_text())
    assert report["cold"]["cached_share"] < 0.05 and report["warm"]["cached_share"] > 0.8
    assert report["cold"]["first_token_ms"]["p50"] > 0
    assert "times as soon" in capsys.readouterr().out


def test_the_second_run_is_as_cold_as_the_first(server, tmp_path):
    saved = tmp_path / "prefix.json"
    for _ in range(2):
        options = ["--rounds", "1", "--warm", "1", "--prefix-words", "200", "--json", str(saved)]
        cli.main(["bench", "prefix", server.url, *options], {})
    assert json.loads(saved.read_text())["cold"]["cached_share"] < 0.05


@pytest.mark.parametrize(("dataset", "least"), [("random", 0.0), ("shared-prefix:2:100", 0.5), ("multi-turn:3", 0.3)])
def test_the_cached_share_depends_on_the_dataset(server, dataset, least, tmp_path, capsys):
    saved = tmp_path / "serve.json"
    options = ["--api", "completions", "--requests", "12", "--concurrency", "2", "--prompt-words", "20"]
    options += ["--max-tokens", "8", "--ignore-eos", "--dataset", dataset, "--json", str(saved)]
    assert cli.main(["bench", "serve", server.url, *options], {}) == 0
    summary = json.loads(saved.read_text())["summary"]
    assert summary["completed"] == 12
    assert summary["cached_share"] >= least and (dataset != "random" or summary["cached_share"] < 0.2)
    assert "cached prompt tokens" in capsys.readouterr().out


def test_a_refusal_of_the_server_is_reported_in_one_sentence(server, capsys):
    assert cli.main(["bench", "prefix", server.url, "--prefix-words", "3000"], {}) == cli.FAILED
    errors = capsys.readouterr().err
    assert "context_length_exceeded" in errors and errors.count("\n") == 1


def test_numbers_below_one_are_refused(capsys):
    assert cli.main(["bench", "prefix", "--rounds", "0"], {}) == cli.WRONG_USE
    assert "rounds must be at least 1" in capsys.readouterr().err
