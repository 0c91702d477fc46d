"""The journal as the router reads it: the result does not depend on how its bytes are split."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from headgate.contract.journal import released, released_tokens, safe_end
from headgate.router.exchange.journal import Journal, splice
from tests.journal import blocks, resume_of

ids = st.integers(0, 2**31)


@st.composite
def answers(draw: Any) -> bytes:
    """Draw an answer with a journal and up to three choices, with everything that may occur between its lines."""
    chars = [0, 0, 0]
    out = b""
    for _ in range(draw(st.integers(0, 25))):
        index, kind = draw(st.integers(0, 2)), draw(st.integers(0, 5))
        if kind == 0:
            out += b": keep-alive\n\n"
            continue
        chars[index] += draw(st.integers(0, 9))
        tokens = ",".join(map(str, draw(st.lists(ids, min_size=1, max_size=4))))
        out += f":j {index} {draw(st.integers(0, 2))} {chars[index]} {tokens}\n".encode()
        if kind == 1:
            out += f":f {index} length max_tokens 5 0 {draw(ids)}\n".encode()
            out += b':+\ndata: {"one":1}\n\n'
        text = draw(st.text(max_size=8)) + draw(st.sampled_from(("", ":m x", "\n:j 0 1 2 3\n", ":+\n", "\n\n")))
        out += b"data: %b\n\n" % json.dumps({"text": text}).encode() if kind < 4 else b"\n"
    return out


@given(answers(), st.booleans(), st.lists(st.integers(0, 4000), max_size=12), st.sampled_from((1, 100, 16384)))
def test_36_any_cut_into_pieces_gives_the_same_resume_field(
    answer: bytes, stream: bool, cuts: list[int], kept: int
) -> None:
    journal, tail, passed = Journal(), b"", b""
    before, Journal.KEPT_BYTES = Journal.KEPT_BYTES, kept
    try:
        edges = [0, *sorted(min(cut, len(answer)) for cut in cuts), len(answer)]
        for start, end in pairwise(edges):
            tail += answer[start:end]
            safe = safe_end(tail)
            journal.feed(tail[:safe])
            passed, tail = passed + tail[:safe], tail[safe:]
        told = json.loads(journal.resume(streamed=stream))
    finally:
        Journal.KEPT_BYTES = before
    assert passed == b"".join(blocks(answer))  # complete blocks, and all of them
    wanted = resume_of(blocks(answer), stream=stream)
    assert by_index(told) == by_index(wanted)


def by_index(resume: dict[str, Any]) -> dict[int, Any]:
    """Merge the version spans of each choice, because a span may be in several pieces."""
    told = {}
    for choice in resume["choices"]:
        versions = [version for version, count in choice.pop("versions") for _ in range(count)]
        told[choice["index"]] = choice | {"versions": versions}
    return told


@given(st.integers(0, 300))
def test_36_an_answer_cut_short_anywhere_is_known_up_to_its_last_whole_block(end: int) -> None:
    answer = b":j 0 1 2 5,6\ndata: {}\n\n:j 0 1 4 7\n:f 0 stop eos 1 0 3\n:+\ndata: a\n\ndata: b\n\n:j 1 1 0 9\n\n"
    cut = answer[:end]
    whole = cut[: safe_end(cut)]
    assert whole == b"".join(blocks(cut))


def test_memory_of_a_long_answer_is_its_tokens_and_not_its_bytes():
    journal = Journal()
    for i in range(10_000):
        journal.feed(b":j 0 1 %d %d\ndata: %b\n\n" % (i, i, b"x" * 500))
    assert journal._size <= Journal.KEPT_BYTES + 1000
    assert journal.tokens == 10_000 and len(journal.choices[0].versions) == 1


def test_one_more_field_is_spliced_into_any_object():
    for body in (b"{}", b' {"a": 1} \n', b'{"a": {"b": "}"}}', b"{ }"):
        assert json.loads(splice(body, "x", b"[1]")) == json.loads(body) | {"x": [1]}


def test_a_withheld_end_reads_as_an_ordinary_one_once_it_is_shown():
    withheld = b':m data: {"a":1}\n:m \n\n:e 503\n:m data: [DONE]\n:m \n\n'
    assert released(withheld) == b'data: {"a":1}\n\n:e 503\ndata: [DONE]\n\n'


def test_5_withheld_tokens_are_not_shown_and_can_be_counted():
    withheld = b':m :j 0 1 4 7,8\n:m data: {"a":":j 0 1 9 9"}\n:m \n\n:m data: [DONE]\n:m \n\n'
    assert released(withheld) == b'data: {"a":":j 0 1 9 9"}\n\ndata: [DONE]\n\n'
    journal = Journal()
    journal.feed(b":j 0 1 2 5\ndata: x\n\n")
    journal.feed(released_tokens(withheld))
    assert list(journal.choices[0].tokens) == [5, 7, 8]
