"""guidellm, a load generator: it streams by default, and requests the usage in every chunk."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.frameworks.clients.checks import MODEL, Servers, ended, given, in_flight, run_checks, wait_until

PROMPT_TOKENS, OUTPUT_TOKENS = 32, 16
DEADLINE_S = 300


def benchmark(servers: Servers, constraint: str, output_tokens: int, backend: str = "") -> dict[str, Any]:
    """The report of one benchmark with two concurrent requests."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.json")
        options = {
            "--backend": f"kind=openai_http,target={servers.url},model={MODEL}{backend}",
            "--profile": "kind=concurrent,streams=2",
            "--constraint": constraint,
            "--tokenizer": f"kind=hf_auto,model={servers.model}",
            "--data": f"kind=synthetic_text,prompt_tokens={PROMPT_TOKENS},output_tokens={output_tokens}",
            "--output": f"kind=json,path={report}",
        }
        command = [str(Path(sys.executable).with_name("guidellm")), "run", "--disable-console"]
        arguments = [part for option in options.items() for part in option]
        subprocess.run([*command, *arguments], check=True, stdout=sys.stderr, timeout=DEADLINE_S)
        (result,) = json.loads(report.read_text())["benchmarks"]
    return dict(result["metrics"])


def counts_what_the_server_counts(servers: Servers, backend: str) -> None:
    before = sum(ended(servers.url).values())
    metrics = benchmark(servers, "kind=max_requests,count=6", OUTPUT_TOKENS, backend)
    assert metrics["request_totals"] == {"successful": 6, "errored": 0, "incomplete": 0, "total": 6}
    assert metrics["output_token_count"]["successful"]["total_sum"] == 6 * OUTPUT_TOKENS
    assert sum(ended(servers.url).values()) == before + 6


def streams_with_the_usage_in_every_chunk(servers: Servers) -> None:
    counts_what_the_server_counts(servers, "")


def answers_without_streams(servers: Servers) -> None:
    counts_what_the_server_counts(servers, ",stream=false")


def streams_text_completions(servers: Servers) -> None:
    counts_what_the_server_counts(servers, ",request_format=/v1/completions")


def requests_that_are_cut_off_leave_the_server(servers: Servers) -> None:
    before = ended(servers.url).get("client_disconnect", 0)
    benchmark(servers, "kind=max_duration,seconds=3", 20000)
    wait_until(lambda: not in_flight(servers.url), "no request is left on the server", 15)
    assert ended(servers.url)["client_disconnect"] == before + 2


CHECKS = (
    streams_with_the_usage_in_every_chunk,
    answers_without_streams,
    streams_text_completions,
    requests_that_are_cut_off_leave_the_server,
)

if __name__ == "__main__":
    sys.exit(run_checks("guidellm", CHECKS, given()))
