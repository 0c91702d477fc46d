"""The fast path of a request, in Python and in C: both do the same, and unusual input takes the general path."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import gc
import json
import random
import weakref
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headgate.compiling import NotCompiled
from headgate.contract.journal import first_version
from headgate.router import server
from headgate.router.data_path import fast_path
from headgate.router.data_path.fast_path import PYTHON, FastPath, answer_head, compiled, request_head
from headgate.router.data_path.outbox import Outbox
from headgate.router.data_path.request_info import RequestInfo, read_request_info
from headgate.router.exchange.attempt import whole_answer
from headgate.router.exchange.journal import Journal
from tests.router.client import Wire, routing
from tests.router.compiled import compiled_fast_path
from tests.router.mock import Asked, Connection, Mock
from tests.router.run import run
from tests.router.test_outbox import Wire as FakeWire
from tests.router.test_outbox import write

CHAT = "/v1/chat/completions"
HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\ncontent-length: %d\r\naccept: */*\r\n\r\n"
ANSWER = b"HTTP/1.1 200 OK\r\nserver: x\r\nx-request-id: %b\r\ntransfer-encoding: chunked\r\n\r\n"


@pytest.fixture(scope="module")
def native() -> FastPath:
    return compiled_fast_path()


def chunked(*parts: bytes) -> bytes:
    return b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"


def damaged(data: bytes, rng: random.Random) -> bytes:
    """The input, possibly damaged."""
    at, how = rng.randrange(len(data)), rng.randrange(5)
    if how == 0:
        return data[:at]
    if how == 1:
        return data[:at] + bytes([rng.choice(b'\r\n:0af \x00\xff"\\{}[],')]) + data[at + 1 :]
    if how == 2:
        return data[:at] + data[at : at + 9] + data[at:]
    return data + data[at:] if how == 3 else data


# -- HTTP ------------------------------------------------------------------------------------------------------------


def test_a_request_with_a_known_head_is_recognised_whatever_its_length(native: FastPath):
    heads = {b"POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\naccept: */*\r\n": "head"}
    for request in (PYTHON.request, native.request):
        for body in (b"", b"{}", b"x" * 70_000):
            assert request(HEAD % len(body) + body, heads, 10**6) == ("head", body)
        assert request(HEAD % 3 + b"abc", heads, 2) is None, "too long"
        assert request(HEAD % 3 + b"ab", heads, 10**6) is None, "incomplete"
        assert request(HEAD % 3 + b"abcd", heads, 10**6) is None, "more data follows"
        assert request(HEAD % 3 + b"abc", {}, 10**6) is None
        assert request((HEAD % 3).replace(b"content-length", b"Content-Length") + b"abc", heads, 10**6) is not None
        assert request((HEAD % 3).replace(b": 3", b":3") + b"abc", heads, 10**6) is None, "left to the parser"
    assert request_head(HEAD % 2 + b"{}") in heads and request_head(HEAD % 2 + b"{") is None


@given(st.integers(0, 2**32), st.binary(max_size=60))
def test_both_implementations_read_requests_alike(native: FastPath, seed: int, body: bytes):
    data, rng = HEAD % len(body) + body, random.Random(seed)
    heads = {key: "head"} if (key := request_head(data)) is not None else {}
    assert native.request(data, heads, 100) == PYTHON.request(data, heads, 100)
    data = damaged(data, rng)
    heads |= {key: "other"} if (key := request_head(data)) is not None else {}
    assert native.request(data, heads, 100) == PYTHON.request(data, heads, 100)


def test_an_answer_with_a_known_head_is_recognised_whatever_its_id(native: FastPath):
    events = b":j 0 0 0 1\n\n", b'data: {"a": 1}\n\n'
    known = ANSWER % b"one" + chunked(*events)
    heads = {answer_head(known, known.index(b"\r\n\r\n")): "head"}
    for answer in (PYTHON.answer, native.answer):
        assert answer(ANSWER % b"another" + chunked(*events), heads) == ("head", b"".join(events))
        assert answer(ANSWER % b"one" + chunked(events[0] + b":m data: x\n\n"), heads) is None, (
            "a line for the router only"
        )
        assert answer(ANSWER % b"one" + chunked(b":+\n\n"), heads) is None, "incomplete without the next line"
        assert answer(ANSWER % b"one" + chunked(b"data: 1\n"), heads) is None, "an incomplete event"
        assert answer(ANSWER % b"one" + chunked(*events)[:-5], heads) is None, "not the last chunk"
        assert answer(ANSWER % b"one" + chunked(), heads) is None, "empty"
        assert answer((ANSWER % b"one").replace(b"200", b"201") + chunked(*events), heads) is None


@given(
    st.integers(0, 2**32), st.lists(st.sampled_from([b":j 0 0 0 1\n\n", b"data: x\n\n", b":m \n\n", b":+\n", b""]))
)
def test_both_implementations_read_answers_alike(native: FastPath, seed: int, parts: list[bytes]):
    rng = random.Random(seed)
    data = ANSWER % rng.choice([b"one", b"", b"two"]) + chunked(*parts)
    if rng.random() < 0.5:
        data = damaged(data, rng)
    heads = {answer_head(data, end): "head"} if (end := data.find(b"\r\n\r\n")) >= 0 else {}
    assert native.answer(data, heads) == PYTHON.answer(data, heads)


def journal_with(**attributes: object) -> Journal:
    """A journal with other class attributes."""
    return cast(Journal, type("Altered", (Journal,), attributes)())


def piped(pipe: Any, chunks: list[bytes], *, kept: int = 100) -> tuple[Any, ...]:
    """The result of sending chunks through a pipe, one turn of the event loop after another."""
    journal, outbox, wire = journal_with(KEPT_BYTES=kept), Outbox(), FakeWire()
    pipe = pipe(journal, outbox, wire)
    taken, written = [], []
    for number, data in enumerate(chunks):
        taken.append(pipe.take(data))
        if number % 3 == 0:
            outbox.flush()
            written.append(len(wire.written))
    outbox.flush()
    assert len(b"".join(journal.raw)) <= kept
    return taken, written, b"".join(wire.written), journal.extent, pipe.heard


CHUNKS = [
    b"%x\r\n%b\r\n" % (len(events), events) for events in (b":j 0 3 9 7,8\n\n", b"data: x\n\n", b"data: y\n\n" * 9)
]


def test_ordinary_events_go_through_a_pipe_and_into_the_journal(native: FastPath):
    async def test() -> None:
        for pipe in (PYTHON.pipe, native.pipe):
            taken, _, written, extent, heard = piped(pipe, CHUNKS * 4)
            assert all(taken) and written == b"".join(CHUNKS * 4) and extent == (8, 9, 0) and heard
            stop = b'event: message_stop\ndata: {"type":"message_stop"}\n\n'
            unusual = [b"data: [DONE]\n\n", stop, b":e 500\ndata: x\n\n", b":m x\n\n", b":+\n\n", b"data: x\n", b""]
            framed = [b"%x\r\n%b\r\n" % (len(events), events) for events in unusual]
            assert piped(pipe, [*framed, b"9\r\ndata: x\n\n", b"9\r\ndata: x\n\n\r\n9", b"0\r\n\r\n"])[2:] == (
                b"",
                (0, 0, 0),
                False,
            )
            assert piped(pipe, [b"09\r\ndata: x\n\n\r\n", b"9\r\ndata: x\n\n\r\n"])[0] == [True, True]

    asyncio.run(test())


def test_a_pipe_writes_at_once_but_after_pending_data_and_never_to_a_closed_connection(native: FastPath):
    async def test() -> None:
        for pipe in (PYTHON.pipe, native.pipe):
            outbox, wire, other = Outbox(), FakeWire(), FakeWire()
            through = pipe(Journal(), outbox, wire)
            write(outbox, other, b"other")
            assert through.take(CHUNKS[0]) and wire.written == [CHUNKS[0]] and other.written == []
            write(outbox, wire, b"before")
            assert through.take(CHUNKS[1]) and len(wire.written) == 1
            await asyncio.sleep(0)
            assert wire.written == [CHUNKS[0], b"before" + CHUNKS[1]]
            wire.abort()
            assert through.take(CHUNKS[2]) and len(wire.written) == 2 and not outbox.writes

    asyncio.run(test())


@given(st.lists(st.tuples(st.sampled_from(CHUNKS), st.integers(0, 2**32)), max_size=12))
def test_both_implementations_of_a_pipe_take_the_same_events(native: FastPath, drawn: list[tuple[bytes, int]]):
    chunks = [damaged(data, random.Random(seed)) if seed % 2 else data for data, seed in drawn]

    async def both() -> list[Any]:
        return [piped(pipe, chunks) for pipe in (PYTHON.pipe, native.pipe)]

    python, c = asyncio.run(both())
    assert python == c


def test_a_pipe_raises_errors(native: FastPath):
    with pytest.raises(AttributeError):
        native.pipe(None, None, None)
    with pytest.raises(TypeError):
        native.pipe(Journal())
    pipe = native.pipe(Journal(), Outbox(), FakeWire(broken=True))
    with pytest.raises(TypeError):
        pipe.take("text")
    with pytest.raises(RuntimeError):
        pipe.take(CHUNKS[0])


class Part:
    """A stand-in for a journal, an outbox or a transport."""

    def __init__(self, **parts: Any) -> None:
        vars(self).update(parts)


def parts(**replaced: Any) -> list[Part]:
    """The arguments of a pipe. A part that is replaced by None is missing."""
    usual: dict[str, Any] = {
        "raw": [],
        "read": lambda: None,
        "KEPT_BYTES": 100,
        "writes": {},
        "write": lambda *_: None,
        "is_closing": lambda: False,
    }
    found = {name: part for name, part in (usual | replaced).items() if part is not None}
    names = ("raw", "read", "KEPT_BYTES"), ("writes", "write"), ("write", "is_closing")
    return [Part(**{name: found[name] for name in own if name in found}) for own in names]


@pytest.mark.parametrize(
    "odd",
    [{name: None} for name in ("raw", "read", "KEPT_BYTES", "writes", "write", "is_closing")]
    + [{"raw": ()}, {"KEPT_BYTES": "x"}, {"KEPT_BYTES": 2**70}, {"writes": []}],
    ids=repr,
)
def test_a_pipe_whose_construction_failed_raises(native: FastPath, odd: dict[str, Any]):
    pipe = native.pipe.__new__(native.pipe)
    for _ in range(3):
        with pytest.raises(ValueError, match="leads nowhere"):
            pipe.take(CHUNKS[0])
        with pytest.raises((AttributeError, TypeError, OverflowError)):
            pipe.__init__(*parts(**odd))
    pipe.__init__(*parts())
    assert pipe.take(CHUNKS[0])


def test_a_pipe_is_initialised_once_and_with_valid_arguments(native: FastPath):
    pipe = native.pipe(*parts())
    with pytest.raises(RuntimeError, match="already"):
        pipe.__init__(*parts())
    assert pipe.take(CHUNKS[0]) and pipe.heard is True
    journal, outbox, transport = parts()
    assert native.pipe(journal=journal, outbox=outbox, transport=transport).take(CHUNKS[0])
    with pytest.raises(TypeError):
        native.pipe(*parts(), odd=1)
    with pytest.raises(TypeError):
        del pipe.heard
    with pytest.raises(TypeError):
        pipe.heard = "yes"
    with pytest.raises(AttributeError):
        pipe.other = 1
    with pytest.raises(TypeError):
        type("Sub", (native.pipe,), {})
    with pytest.raises(TypeError):
        copy.copy(pipe)


def test_a_pipe_that_is_initialised_again_during_use_is_unchanged(native: FastPath):
    tried: list[type[Exception]] = []

    def again(*_: object) -> bool:
        try:
            pipe.__init__(*parts())
        except RuntimeError as error:
            tried.append(type(error))
        gc.collect()
        return False

    pipe = native.pipe(*parts(KEPT_BYTES=0, read=again, write=again, is_closing=again))
    assert pipe.take(CHUNKS[0]) and tried == [RuntimeError] * 3


def test_a_pipe_in_a_cycle_is_collected(native: FastPath):
    journal, outbox, transport = parts()
    transport.pipe = native.pipe(journal, outbox, transport)
    gone = weakref.ref(transport)
    del journal, outbox, transport
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("where", ["read", "write", "is_closing"])
def test_an_error_behind_a_pipe_is_raised_and_leaves_the_pipe_usable(native: FastPath, where: str):
    fails = True

    def fail(*_: object) -> bool:
        if fails:
            raise ZeroDivisionError(where)
        return False

    for pipe in (native.pipe, PYTHON.pipe):
        fails = True
        journal, outbox, transport = parts(KEPT_BYTES=0, **{where: fail})
        if pipe is not native.pipe:
            journal = journal_with(KEPT_BYTES=0, **({"read": fail} if where == "read" else {}))
        made = pipe(journal, outbox, transport)
        with pytest.raises(ZeroDivisionError):
            made.take(CHUNKS[0])
        assert made.heard is False
        fails = False
        assert made.take(CHUNKS[0]) and made.heard is True


def test_keys_whose_comparison_changes_the_index_do_no_harm(native: FastPath):
    """The index is searched by key, and a comparison of keys may run arbitrary code."""

    class Key(int):
        def __hash__(self) -> int:
            return 7

        def __eq__(self, other: object) -> bool:
            keys.clear()
            young.clear()
            old.clear()
            return True

    def renewed(node: tuple[str, ...]) -> tuple[str, ...]:
        keys.clear()
        return (*node, "new")

    for walk in (native.runs, lambda *index: native.renew(*index, renewed)):
        keys, young, old = [Key(n) for n in range(5)], {Key(9): ("a",)}, {Key(8): ("b",)}
        with contextlib.suppress(RuntimeError, KeyError):
            walk(young, old, keys)


# -- whole answers ---------------------------------------------------------------------------------------------------

ANSWER_LINE = b'data: {"a": ":e 500"}\n\n'
LINES = [
    b":p 64\n",
    b":j 0 3 0 1,2\n",
    b":j 0 4 9 7\n",
    b":j 0 4 9 \n",
    b":f 0 stop eos 64 32 9\n",
    b"\n",
    ANSWER_LINE,
]
ODD = [
    b":p\n",
    b":p 1 2\n",
    b":p x\n",
    b":p 1234567890123\n",
    b":j 1 3 0 1\n",
    b":j 00 3 0 1\n",
    b":f 1 stop eos 1 1 1\n",
    b":f 0 stop eos 1 1 1\r\n",
    b": alive\n\n",
    b":e 500\n",
    b":j 0 -1 0 1\n",
    b":j 0 3 0 1,\n",
    b":j 0 3 0 1,,2\n",
    b":j 0 3 0 x\n",
    b":j 0 3 0\n",
    b":j 0 3\n",
    b":j 0 3 0 99999999999\n",
    b":j 0 1234567890123456789 0 1\n",
    b":f 0 stop 1 1 1\n",
    b":f 0 stop eos 1 1\n",
    b":f 0 stop eos 1 1 1 1\n",
    b":f 0 stop  eos 1 1 1\n",
    b":f 0 st-op eos 1 1 1\n",
    b":f 0 stop eos 1234567890123 1 1\n",
    b"x\n",
]
WRITTEN = [LINES[0], LINES[1], LINES[4], ANSWER_LINE]


def long_way(events: bytes) -> tuple[int, int, int, bytes] | None:
    """Return what `Attempt` and `Journal` read in the events; None if these are malformed or incomplete."""
    journal = Journal()
    journal.feed(events)
    answer = whole_answer(events)
    if journal.unreadable or answer is None or answer.status != 200 or list(journal.choices) != [0]:
        return None
    version, cached = first_version(events), journal.cached(1)
    return None if version is None or cached is None else (version, *cached, answer.body)


@pytest.mark.parametrize("odd", ODD)
def test_a_journal_with_one_unusual_line_is_left_to_the_general_path(native: FastPath, odd: bytes):
    for at in range(len(WRITTEN)):
        events = b"".join([*WRITTEN[:at], odd, *WRITTEN[at:]])
        assert native.read_whole(events) is None and PYTHON.read_whole(events) is None
    assert (
        native.read_whole(b"".join(WRITTEN))
        == PYTHON.read_whole(b"".join(WRITTEN))
        == (3, 64, 32, b'{"a": ":e 500"}')
    )


journals = st.one_of(
    st.lists(st.sampled_from([*LINES, *LINES, *LINES, *ODD]), max_size=7),
    st.permutations(WRITTEN).flatmap(
        lambda lines: st.lists(st.sampled_from(LINES)).map(lambda more: [*lines, *more])
    ),
)


@settings(max_examples=400)
@given(journals, st.integers(0, 2**32), st.integers(0, 3))
def test_a_whole_answer_is_what_its_journal_contains(native: FastPath, lines: list[bytes], seed: int, harms: int):
    events, rng = b"".join(lines), random.Random(seed)
    for _ in range(harms):
        events = damaged(events, rng) if events else events
    told = native.read_whole(events)
    assert told == PYTHON.read_whole(events)
    assert told is None or told == long_way(events)


@settings(max_examples=400)
@given(
    st.lists(
        st.sampled_from([b":j ", b":f ", b"data: ", b"0", b"12", b" ", b",", b"\n", b"\r", b"a_Z", b"\xff", b"-"])
    )
)
def test_both_implementations_read_any_journal_alike(native: FastPath, pieces: list[bytes]):
    for events in (b"".join(pieces), b"".join(pieces) + b"\n\n", b"".join([*WRITTEN, *pieces, b"\n\n"])):
        told = native.read_whole(events)
        assert told == PYTHON.read_whole(events)
        assert told is None or told == long_way(events)


def test_both_implementations_read_truncated_input_alike(native: FastPath):
    body = b'{"model": "m", "messages": [{"role": "user", "content": "a \\" b"}], "stream": true}'
    request, events = HEAD % len(body) + body, b"".join(WRITTEN)
    answer = ANSWER % b"one" + chunked(events, events)
    heads = {request_head(request): "head", answer_head(answer, answer.index(b"\r\n\r\n")): "head"}
    for data in (request, answer, events, body, CHUNKS[0]):
        for end in range(len(data) + 1):
            cut = data[:end]
            assert native.request(cut, heads, 1000) == PYTHON.request(cut, heads, 1000)
            assert native.answer(cut, heads) == PYTHON.answer(cut, heads)
            assert native.read_whole(cut) == PYTHON.read_whole(cut)
            assert native.message_end(cut, end) == PYTHON.message_end(cut, end)
            assert (native.peek(cut) is None) == (cut != body)
            assert native.pipe(*parts()).take(cut) == (cut == CHUNKS[0])


# -- JSON ------------------------------------------------------------------------------------------------------------


def the_long_way(body: bytes) -> RequestInfo:
    return read_request_info(CHAT, body, tenant="t", peek=PYTHON.peek)


def asked(native: FastPath, body: bytes) -> RequestInfo | None:
    """Return the facts that `peek` reads from the body; None if it returns none."""
    return None if native.peek(body) is None else read_request_info(CHAT, body, tenant="t", peek=native.peek)


TEXTS = ["", "x", 'a "quoted" one', "\\", '\\"', "}], {", "ümläut", "\n", "x" * 5000]
PROMPTS: list[Any] = [*TEXTS, None, [], [1, 2, 3], [[1, 2], [3]], ["a", "b"], [{"role": "user", "content": "x"}]]
PLAIN = {
    "model": st.sampled_from(["m", "org/model-7b", None]),
    "stream": st.sampled_from([True, False, None]),
    "max_tokens": st.integers(-5, 10**9),
    "stop": st.lists(st.sampled_from(TEXTS), max_size=3),
    "metadata": st.fixed_dictionaries({"model": st.just("not me"), "n": st.just({"deep": [[]]})}),
    "temperature": st.floats(allow_nan=False, allow_infinity=False),
}
SPECIAL = {
    "n": st.integers(1, 3),
    "user": st.sampled_from(TEXTS),
    "request_id": st.just("mine"),
    "tools": st.just([{"type": "function"}]),
    "deadline_ms": st.just(5),
    "logprobs": st.booleans(),
    "prompt_logprobs": st.integers(0, 20),
    "sampling_params": st.just({"logprobs": 1}),
}
NAMES = ("messages", "prompt", "input", "text", "input_ids", "token_ids")


@given(
    st.fixed_dictionaries({}, optional=PLAIN),
    st.fixed_dictionaries({}, optional=SPECIAL) | st.just({}),
    st.dictionaries(st.sampled_from(NAMES), st.sampled_from(PROMPTS), max_size=2),
    st.randoms(use_true_random=False),
    st.sampled_from([{}, {"indent": 1}, {"separators": (",", ":")}, {"ensure_ascii": False}]),
)
def test_peeking_at_a_body_gives_what_decoding_gives(
    native: FastPath, usual: Any, special: Any, prompts: Any, rng: random.Random, style: Any
):
    fields = list((usual | special | prompts).items())
    rng.shuffle(fields)
    body = json.dumps(dict(fields), **style).encode()
    seen = asked(native, body)
    assert seen is None or seen == the_long_way(body)
    (prompt,) = prompts.values() if len(prompts) == 1 else (None,)
    assert (seen is None) == bool(special or not prompt), "ordinary bodies are recognised"


@pytest.mark.parametrize(
    "body",
    [
        b'{"prompt": "x", "prompt": "y"}',
        b'{"prompt": "x", "model": "a", "model": "b"}',
        b'{"prompt": "x", "mod\\u0065l": "a"}',
        b'{"prompt": "x", "model": "\\u0061"}',
        b'{"prompt": "x", "model": 1}',
        b'{"prompt": "x", "stream": 1}',
        b'{"prompt": "x"} x',
        b'{"prompt": "x"',
        b'{"prompt": "x}',
        b'{"prompt": }',
        b'{"prompt"}',
        b'["prompt"]',
        b'{"prompt": [1, 2}, "a": [1]}',
        b'{"prompt": "x", "a": ' + b"[" * 100 + b"]" * 100 + b"}",
        b"{}",
        b"",
        b'{"n\x00": 1, "n": 2, "prompt": "x"}',
    ],
)
def test_unusual_bodies_are_left_to_the_general_path(native: FastPath, body: bytes):
    assert native.peek(body) is None


@given(st.binary(max_size=200) | st.text('{}[]":,\\ntpromelsuf 01', max_size=80).map(str.encode))
def test_peeking_at_arbitrary_bytes_is_safe(native: FastPath, body: bytes):
    seen = native.peek(body)
    assert seen is None or body.count(b'"') >= 2


# -- keys and the index ----------------------------------------------------------------------------------------------


@given(st.integers(0, 3000), st.integers(0, 3000), st.integers(0, 2999), st.integers(-(2**70), 2**70))
def test_different_prompts_have_different_keys(native: FastPath, length: int, size: int, at: int, root: int):
    cuts, size, prompt = (64, 100, 1000, 2000), min(size, length), random.Random(length).randbytes(length)
    other = prompt[:at] + bytes([prompt[at] ^ 1]) + prompt[at + 1 :] if at < len(prompt) else prompt
    for keys, tail in ((PYTHON.cut_keys, PYTHON.tail_key), (native.cut_keys, native.tail_key)):
        one, two = keys(root, prompt, size, cuts), keys(root, other, size, cuts)
        assert len(one) == len(two) == sum(cut <= size for cut in cuts)
        same = [cut <= at or other == prompt for cut in cuts[: len(one)]]
        assert [a == b for a, b in zip(one, two, strict=True)] == same
        assert not set(one) & set(keys(root + 1, prompt, size, cuts))
        ends = {tail(root, prompt, 0, end) for end in range(0, size + 1, 7)}
        assert len(ends) == len(range(0, size + 1, 7)) and not ends & set(one)


@given(
    st.lists(st.sampled_from(['{"role": "', '"content":\n', "}", '"role"', ",{", ", ", " \t", "x" * 9, '"'])),
    st.integers(0, 99),
)
def test_both_implementations_find_the_same_message_ends(native: FastPath, parts: list[str], before: int):
    prompt = "".join(parts).encode()
    assert native.message_end(prompt, before) == PYTHON.message_end(prompt, before)
    end = len(prompt)
    assert native.message_end(prompt, end) == PYTHON.message_end(prompt, end)


@given(st.randoms(use_true_random=False))
def test_both_implementations_walk_and_renew_the_index_alike(native: FastPath, rng: random.Random):
    nodes = [(n,) for n in range(3)]
    young = {key: rng.choice(nodes) for key in range(20) if rng.random() < 0.5}
    old = {key: rng.choice(nodes) for key in range(20) if key not in young and rng.random() < 0.7}
    keys = sorted(rng.sample(range(20), rng.randrange(20)))
    assert native.runs(young, old, keys) == PYTHON.runs(young, old, keys)
    results = []
    for renew in (native.renew, PYTHON.renew):
        mine, given, asked = dict(young), dict(old), []  # type: Any, Any, list[Any]
        renew(mine, given, keys, lambda node, asked=asked: asked.append(node) or (*node, "new"))
        results.append((mine, given, asked))
    assert results[0] == results[1]
    with pytest.raises(ZeroDivisionError):
        native.renew({}, {}, [1], lambda node: 1 // len(node))


def test_wrong_arguments_raise(native: FastPath):
    wrong: list[tuple[Any, ...]] = [
        ("request", b""),
        ("answer", "", {}),
        ("read_whole", None),
        ("peek", memoryview(b"")),
    ]
    wrong += [("cut_keys", 1, b"", 0), ("cut_keys", 1, "x", 0, ()), ("tail_key", 1, b"", "0", 1), ("runs", {}, {})]
    wrong += [("renew", {}, {}, [1]), ("runs", {}, [], []), ("request", b"", {}, "1"), ("cut_keys", [], b"", 0, ())]
    for name, *arguments in wrong:
        with pytest.raises(TypeError):
            getattr(native, name)(*arguments)
    for name, *arguments in [
        ("cut_keys", 1, b"ab", 3, ()),
        ("tail_key", 1, b"ab", 2, 1),
        ("tail_key", 1, b"ab", 0, 3),
    ]:
        with pytest.raises(ValueError, match=name):
            getattr(native, name)(*arguments)


# -- in a router -----------------------------------------------------------------------------------------------------


NAMES_OF_FUNCTIONS = frozenset(field.name for field in fields(FastPath))


def noting(fast_path: FastPath, called: set[str]) -> FastPath:
    """Return the same functions, each of which records its name when it is called."""

    def note(name: str) -> Callable[..., Any]:
        function = getattr(fast_path, name)
        return lambda *arguments: called.add(name) or function(*arguments)

    return FastPath(**{name: note(name) for name in NAMES_OF_FUNCTIONS})


class AtOnce(Connection):
    """Writes a whole answer in one piece, as a server does."""

    async def _answer(self, asked: Asked) -> None:
        if asked.body.get("stream"):
            await super()._answer(asked)
            return
        head = b"content-type: text/event-stream\r\nx-headgate-journal: 1\r\ntransfer-encoding: chunked\r\n\r\n"
        self._write(b"HTTP/1.1 200 OK\r\n" + head + chunked(b"".join(WRITTEN)))
        asked.done = True


def test_a_router_uses_each_function_of_the_fast_path_that_it_was_given():
    called: set[str] = set()

    async def main() -> None:
        fast_path = noting(compiled_fast_path(), called)
        async with (
            Mock(keep_alive_s=60.0, connection=AtOnce) as mock,
            routing(mock, fast_path=fast_path) as (_, url),
        ):
            wire = await Wire.open(url)
            body = {"model": "mock", "messages": [{"role": "user", "content": "x" * 3000}], "max_tokens": 4}
            for stream in (False, False, True):  # only the second answer has a known head
                wire.post(CHAT, body | {"stream": stream})
                assert (await wire.response()).status == 200
                body["messages"].append({"role": "user", "content": "more"})
            wire.close()
        assert called == NAMES_OF_FUNCTIONS

    run(main())


# -- compiling -------------------------------------------------------------------------------------------------------


def test_without_a_compiler_there_is_a_reason_and_no_library(tmp_path: Path):
    missing = compiled("no-such-compiler", tmp_path)
    assert isinstance(missing, NotCompiled) and "no-such-compiler" in missing.reason
    failing = compiled("false", tmp_path)
    assert isinstance(failing, NotCompiled) and "fast_path.c" in failing.reason
    assert not list(tmp_path.rglob("*.so"))


def test_it_is_compiled_once(tmp_path: Path):
    assert isinstance(compiled("cc", tmp_path), FastPath)
    (lock,) = tmp_path.rglob("lock")
    lock.unlink()
    lock.mkdir()  # cannot be opened for writing, as in another user's cache
    assert isinstance(compiled("false", tmp_path), FastPath), "the library exists"


def test_without_a_home_folder_or_its_source_there_is_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    missing = compiled()
    assert isinstance(missing, NotCompiled) and "home" in missing.reason
    monkeypatch.setattr(fast_path, "SOURCE", tmp_path / "fast_path.c")
    missing = compiled("cc", tmp_path)
    assert isinstance(missing, NotCompiled) and "fast_path.c" in missing.reason


def test_a_router_without_it_says_once_what_it_costs_and_what_to_do(caplog, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(server, "compiled", lambda: NotCompiled("there is no compiler 'cc'"))
    monkeypatch.setattr(server, "keep_freed_memory", lambda: None)
    assert server.prepare_process() is PYTHON
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert "twice the CPU time" in record.message and "no compiler 'cc'. To compile it: install gcc" in record.message
