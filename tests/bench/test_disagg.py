"""`headgate bench disagg` on a real server with a tiny model."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from headgate import cli
from headgate.testing.tiny import tiny_model
from tests.api.live import LiveServer, live_server


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    model = tiny_model(tmp_path_factory.mktemp("tiny"), max_position_embeddings=16384)
    with live_server(model, device="cpu", kv_blocks=2048, max_running=8) as server:
        yield server


def test_streams_wait_while_their_engine_computes_long_prompts(server: LiveServer, tmp_path, capsys):
    saved = tmp_path / "disagg.json"
    options = [
        "--streams",
        "2",
        "--max-tokens",
        "300",
        "--prompts",
        "4",
        "--prompt-words",
        "1500",
        "--interval",
        "0.2",
    ]
    assert cli.main(["bench", "disagg", server.url, *options, "--json", str(saved)], {}) == 0
    report = json.loads(saved.read_text())
    assert report["long"]["requests"] == 4 and report["prompt_tokens"] > 5000
    assert report["alone"]["requests"] == 2 and report["beside"]["requests"] >= 2
    # One engine does both, and a step with part of a prompt takes far longer than one without.
    assert report["beside"]["between_tokens_ms"]["max"] > 3 * report["alone"]["between_tokens_ms"]["p50"]
    printed = capsys.readouterr().out
    assert "between tokens, beside long prompts" in printed and "errors" not in printed


def test_prompts_that_are_too_long_are_reported_in_one_sentence(server: LiveServer, capsys):
    options = ["--streams", "1", "--max-tokens", "4", "--prompts", "1", "--prompt-words", "9000", "--interval", "0"]
    assert cli.main(["bench", "disagg", server.url, *options], {}) == cli.FAILED
    errors = capsys.readouterr().err
    assert "context_length_exceeded" in errors and errors.count("\n") == 1


def test_numbers_below_one_are_refused(capsys):
    assert cli.main(["bench", "disagg", "--streams", "0"], {}) == cli.WRONG_USE
    assert "streams must be at least 1" in capsys.readouterr().err
