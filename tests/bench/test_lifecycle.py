"""`headgate bench lifecycle` on a tiny model: every figure is reported, and no request is left running."""

from __future__ import annotations

import json
from pathlib import Path

from headgate import cli
from headgate.testing.tiny import tiny_model
from tests.api.live import live_server
from tests.api.serving import wait_until


def test_aborts_disconnects_and_pauses_are_timed(tmp_path: Path, capsys):
    model = tiny_model(tmp_path / "tiny", max_position_embeddings=8192)
    with live_server(model, device="cpu", kv_blocks=1024, max_running=8) as server:
        saved = tmp_path / "lifecycle.json"
        options = ["--concurrency", "4", "--rounds", "3", "--max-tokens", "7500", "--json", str(saved)]
        assert cli.main(["bench", "lifecycle", server.url, *options], {}) == 0
        # The blocks of clients that just disconnected are released when the running step has finished.
        wait_until(lambda: not (server.status().running or server.status().held_blocks))
        assert server.status().state == "running"
    (report,) = json.loads(saved.read_text())
    for name in ("step_ms", "abort_ms", "disconnect_ms", "pause_abort_ms", "pause_freeze_ms"):
        assert 0 < report[name]["p50"] <= report[name]["p99"] < 60_000, name
    assert "pause (freeze)" in capsys.readouterr().out
