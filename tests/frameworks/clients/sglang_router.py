"""Checks of servers behind SGLang's router, which re-serialises every request with SGLang's own fields."""

from __future__ import annotations

import sys

from tests.frameworks.clients.behind_router import CHECKS, routing
from tests.frameworks.clients.checks import Servers, ask, given, run_checks, stream

GENERATE = {"text": "Hello", "sampling_params": {"temperature": 0, "max_new_tokens": 16}, "return_logprob": True}


def generate_answers_as_the_server_does(router: str, servers: Servers) -> None:
    direct, routed = (ask(f"{url}/generate", GENERATE) for url in (servers.url, router))
    assert routed["output_ids"] == direct["output_ids"]
    assert len(routed["meta_info"]["output_token_logprobs"]) == len(direct["output_ids"])


def a_stream_of_generate_ends_with_the_whole_text(router: str, servers: Servers) -> None:
    with stream(f"{router}/generate", GENERATE) as events:
        *_, last = events
    assert last["text"] == ask(f"{servers.url}/generate", GENERATE)["text"]


if __name__ == "__main__":
    with routing("sglang_router.launch_router", given()) as url:
        checks = (*CHECKS, generate_answers_as_the_server_does, a_stream_of_generate_ends_with_the_whole_text)
        status = run_checks("sglang-router", checks, url, given())
    sys.exit(status)
