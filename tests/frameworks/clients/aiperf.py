"""aiperf, a load generator that can request the usage in every chunk, and can leave requests before their end."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.frameworks.clients.checks import MODEL, Servers, ended, given, in_flight, run_checks, wait_until

REQUESTS, OUTPUT_TOKENS = 6, 16
DEADLINE_S = 300


def profile(servers: Servers, folder: str, output_tokens: int, *more: str) -> subprocess.CompletedProcess[bytes]:
    where = ["--url", servers.url, "--model", MODEL, "--tokenizer", str(servers.model), "--ui", "none"]
    sizes = ["--isl", "32", "--osl", str(output_tokens), "--extra-inputs", "ignore_eos:true", "--concurrency", "2"]
    command = [str(Path(sys.executable).with_name("aiperf")), "profile", "--endpoint-type", "chat", *where, *sizes]
    command += ["--request-count", str(REQUESTS), "--output-artifact-dir", folder, *more]
    return subprocess.run(command, stdout=sys.stderr, timeout=DEADLINE_S)


def measured(servers: Servers, *more: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        assert profile(servers, folder, OUTPUT_TOKENS, *more).returncode == 0
        return dict(json.loads(Path(folder, "profile_export_aiperf.json").read_text()))


def expect_all(report: dict[str, Any]) -> None:
    assert report["request_count"]["avg"] == REQUESTS and not report["error_summary"]


def streams_with_the_usage_in_every_chunk(servers: Servers) -> None:
    report = measured(servers, "--streaming", "--per-chunk-usage", "--use-server-token-count")
    expect_all(report)
    assert report["total_usage_completion_tokens"]["avg"] == REQUESTS * OUTPUT_TOKENS


def answers_without_streams(servers: Servers) -> None:
    report = measured(servers, "--use-server-token-count")
    expect_all(report)
    assert report["total_usage_completion_tokens"]["avg"] == REQUESTS * OUTPUT_TOKENS


def cancelled_requests_leave_the_server(servers: Servers) -> None:
    before = ended(servers.url)
    cancel = ("--request-cancellation-rate", "100", "--request-cancellation-delay", "0.5", "--streaming")
    with tempfile.TemporaryDirectory() as folder:
        profile(servers, folder, 20000, *cancel)  # non-zero, because no request succeeds
        records = [json.loads(line) for line in Path(folder, "profile_export.jsonl").read_text().splitlines()]
    assert [each["metadata"]["was_cancelled"] for each in records] == [True] * REQUESTS
    wait_until(lambda: not in_flight(servers.url), "no request is left on the server", 15)
    after = ended(servers.url)
    assert after["client_disconnect"] == before.get("client_disconnect", 0) + REQUESTS


CHECKS = (streams_with_the_usage_in_every_chunk, answers_without_streams, cancelled_requests_leave_the_server)

if __name__ == "__main__":
    sys.exit(run_checks("aiperf", CHECKS, given()))
