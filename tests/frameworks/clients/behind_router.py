"""Checks of any router in front of two Headgate servers; answers must equal those of a server that is asked directly."""

from __future__ import annotations

import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tests.frameworks.clients.checks import (
    MODEL,
    TIMEOUT_S,
    Servers,
    ask,
    ended,
    free_port,
    in_flight,
    refusal,
    stream,
    wait_until,
)

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
GREEDY: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_tokens": 16}
ENDLESS = {"max_tokens": 20000, "ignore_eos": True}  # a minute of work: only an abort ends it within a check


def said(text: str) -> dict[str, Any]:
    return GREEDY | {"messages": [{"role": "user", "content": text}]}


@contextmanager
def routing(module: str, servers: Servers) -> Iterator[str]:
    """Start the router of `module` in front of both servers; yields its address."""
    port, metrics = free_port(), free_port()
    where = ["--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(metrics)]
    policy = ["--policy", "cache_aware", "--worker-urls", *servers.urls]
    process = subprocess.Popen([sys.executable, "-m", module, *where, *policy], stdout=sys.stderr)
    try:
        url = f"http://127.0.0.1:{port}"
        wait_until(lambda: process.poll() is not None or healthy(url), f"{module} becomes healthy")
        assert process.poll() is None, f"{module} ended with {process.returncode}"
        yield url
    finally:
        process.terminate()
        process.wait(TIMEOUT_S)


def healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/v1/models", timeout=5) as answer:
            return answer.status == 200
    except (urllib.error.URLError, OSError):
        return False


# ---------------------------------------------------------------------------------------------------------- the checks


def chat_answers_as_the_server_does(router: str, servers: Servers) -> None:
    direct, routed = (ask(url + CHAT, said("Hello")) for url in (servers.url, router))
    assert routed["choices"][0]["message"] == direct["choices"][0]["message"]
    assert routed["usage"]["completion_tokens"] == direct["usage"]["completion_tokens"]


def completions_answer_as_the_server_does(router: str, servers: Servers) -> None:
    direct, routed = (ask(url + COMPLETIONS, GREEDY | {"prompt": "Hello"}) for url in (servers.url, router))
    assert routed["choices"][0]["text"] == direct["choices"][0]["text"]


def a_streamed_chat_is_the_whole_answer_in_parts(router: str, servers: Servers) -> None:
    body = said("Hello") | {"max_tokens": 100, "ignore_eos": True}
    whole = ask(servers.url + CHAT, body)["choices"][0]
    with stream(router + CHAT, body) as events:
        choices = [each["choices"][0] for each in events if each["choices"]]
    assert "".join(each["delta"].get("content") or "" for each in choices) == whole["message"]["content"]
    assert choices[-1]["finish_reason"] == whole["finish_reason"]


def a_streamed_completion_is_the_whole_answer_in_parts(router: str, servers: Servers) -> None:
    body = GREEDY | {"prompt": "Hello", "stream_options": {"include_usage": True}}
    whole = ask(servers.url + COMPLETIONS, GREEDY | {"prompt": "Hello"})
    with stream(router + COMPLETIONS, body) as read:
        events = list(read)
    texts = [each["choices"][0]["text"] for each in events if each["choices"]]
    assert "".join(texts) == whole["choices"][0]["text"]
    assert events[-1]["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]


def a_refusal_reaches_the_client(router: str, servers: Servers) -> None:
    refused = refusal(router + CHAT, said("Hello") | {"temperature": -1})
    assert " 400 " in refused and "temperature" in refused, refused


def a_client_that_leaves_a_stream_ends_its_request(router: str, servers: Servers) -> None:
    before = disconnects(servers)
    with stream(router + CHAT, said("Hello") | ENDLESS) as events:
        for _ in range(5):
            next(events)
        assert sum(len(in_flight(url)) for url in servers.urls) == 1
    wait_until(lambda: disconnects(servers) == before + 1, "the server notices that the client has left", 15)
    assert not any(in_flight(url) for url in servers.urls)


def a_client_that_leaves_before_its_answer_ends_its_request(router: str, servers: Servers) -> None:
    before = disconnects(servers)
    try:
        ask(router + COMPLETIONS, GREEDY | ENDLESS | {"prompt": "Hello"}, timeout_s=2)
    except TimeoutError:
        pass
    else:
        raise AssertionError("the answer was complete before the client left")
    wait_until(lambda: disconnects(servers) == before + 1, "the server notices that the client has left", 15)
    assert not any(in_flight(url) for url in servers.urls)


def a_second_turn_goes_to_the_server_of_the_first(router: str, servers: Servers) -> None:
    red, blue = ("red " * 100, "blue " * 100)
    # The first conversation is still being answered, so the second one goes to the other server.
    with stream(router + COMPLETIONS, GREEDY | ENDLESS | {"prompt": red}) as events:
        next(events)
        (busy,) = (url for url in servers.urls if in_flight(url))
        idle = answering(router, servers, blue)
    assert idle != busy
    wait_until(lambda: not in_flight(busy), "the server notices that the client has left", 15)
    answered = [answering(router, servers, turn + "and now?") for turn in (red, blue, blue, red)]
    assert answered == [busy, idle, idle, busy], f"{answered}, but the first turns went to {[busy, idle]}"


CHECKS = (
    chat_answers_as_the_server_does,
    completions_answer_as_the_server_does,
    a_streamed_chat_is_the_whole_answer_in_parts,
    a_streamed_completion_is_the_whole_answer_in_parts,
    a_refusal_reaches_the_client,
    a_client_that_leaves_a_stream_ends_its_request,
    a_client_that_leaves_before_its_answer_ends_its_request,
    a_second_turn_goes_to_the_server_of_the_first,
)


def disconnects(servers: Servers) -> int:
    return sum(ended(url).get("client_disconnect", 0) for url in servers.urls)


def answering(router: str, servers: Servers, prompt: str) -> str:
    """Return the server that answers this prompt."""
    before = {url: sum(ended(url).values()) for url in servers.urls}
    ask(router + COMPLETIONS, GREEDY | {"prompt": prompt})
    (server,) = (url for url in servers.urls if sum(ended(url).values()) > before[url])
    return server
