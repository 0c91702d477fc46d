"""The journal's codec: decoding reverses encoding, and the readers and writers of single lines agree with it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate.contract import journal
from headgate.contract.journal import (
    Block,
    BoundLine,
    FailureLine,
    FinishLine,
    PromptLine,
    TextLine,
    TokensLine,
    WithheldLine,
    decode,
    encode,
)
from headgate.protocol.output import Cause, FinishReason
from headgate.router.exchange.journal import Journal

C = Path(journal.__file__).parents[1] / "router/data_path/fast_path.c"

counts = st.integers(0, 10**journal.COUNT_DIGITS - 1)
choices = st.integers(0, 3)
tokens = st.builds(
    TokensLine,
    choices,
    st.integers(0, 10**journal.VERSION_DIGITS - 1),
    counts,
    st.lists(st.integers(0, 2**32 - 1), max_size=4).map(tuple),
)
words = [st.sampled_from(kind.__args__) for kind in (FinishReason, Cause)]
finishes = st.builds(FinishLine, choices, *words, counts, counts, counts)
texts = st.sampled_from([":m x", "\n:j 0 1 2 3\n", ":+\n", "\n\n", ":e 503", "é"])
events = texts.map(lambda text: TextLine(b"data: " + json.dumps({"text": text}).encode()))
comments = st.just(TextLine(b": keep-alive"))
withheld = st.builds(WithheldLine, st.one_of(tokens, finishes, events, st.just(TextLine(b""))))
lines = st.one_of(
    st.builds(PromptLine, counts),
    tokens,
    finishes,
    st.builds(FailureLine, st.integers(400, 599)),
    st.just(BoundLine()),
    events,
    comments,
    withheld,
)
blocks = st.lists(st.lists(lines, min_size=1, max_size=5).map(tuple), max_size=6)


@given(blocks)
def test_encoded_blocks_are_decoded_unchanged(written: list[Block]):
    assert decode(encode(written)) == written


@given(blocks, st.integers(0, 200))
def test_an_incomplete_block_is_not_decoded(written: list[Block], cut: int):
    data = encode(written)
    received = data[: max(len(data) - cut, 0)]
    assert decode(received) == written[: received.count(b"\n\n")]


@given(blocks)
def test_a_router_reads_what_the_codec_reads(written: list[Block]):
    read = Journal()
    read.feed(encode(written))
    lines = [line for block in decode(encode(written)) for line in block]
    made = [line for line in lines if isinstance(line, TokensLine)]
    ends = {line.index: line for line in lines if isinstance(line, FinishLine)}
    assert set(read.choices) == {line.index for line in made} | set(ends)
    for index, choice in read.choices.items():
        mine = [line for line in made if line.index == index]
        assert list(choice.tokens) == [id for line in mine for id in line.ids]
        assert [v for v, n in choice.versions for _ in range(n)] == [line.version for line in mine for _ in line.ids]
        assert choice.chars == (mine[-1].chars if mine else 0)
        end = ends.get(index)
        wanted = end and [end.reason, end.cause, end.prompt_tokens, end.cached_tokens, end.output_tokens]
        assert choice.finish == wanted


@given(choices, st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2**32 - 1)), max_size=6), counts)
def test_tokens_are_written_with_a_line_for_each_version_in_a_row(
    index: int, made: list[tuple[int, int]], chars: int
):
    versions, ids = [version for version, _ in made], [id for _, id in made]
    written = journal.token_lines(index, versions, ids, chars)
    read = [line for block in decode(written + b"\n") for line in block if isinstance(line, TokensLine)]
    assert [(line.version, id) for line in read for id in line.ids] == made
    assert all((line.index, line.chars) == (index, chars) for line in read)
    assert len(read) == sum(i == 0 or versions[i - 1] != version for i, version in enumerate(versions))


@given(st.lists(events, min_size=1, max_size=4), tokens, finishes)
def test_withheld_events_are_released_unchanged(told: list[TextLine], unsent: TokensLine, end: FinishLine):
    event = encode([(line,) for line in told])
    block = journal.withhold(encode([(unsent, end)])[:-1] + event)
    assert all(isinstance(line, WithheldLine) for line in decode(block)[0])
    assert journal.split_withheld(block) == (b"", [block])
    assert journal.released(block) == event
    assert journal.released_tokens(block) == journal.encode_line(unsent)
    assert journal.withheld_ends(block) == [(end.reason, end.cause)]


@given(st.lists(events, min_size=1, max_size=4))
def test_bound_events_are_sent_together_or_not_at_all(told: list[TextLine]):
    data = journal.bind(encode([(line,) for line in told]))
    assert [line for block in decode(data) for line in block if line != BoundLine()] == told
    safe = {journal.safe_end(data[:end]) for end in range(len(data) + 1)}
    assert safe <= {0, len(data)}


@pytest.mark.parametrize(
    ("reason", "cause"), [("abort", "pause"), ("abort", "transfer_failed"), ("pd_reschedule", "")]
)
def test_an_involuntary_end_may_be_resumed_elsewhere(reason: str, cause: str):
    assert journal.is_movable(reason, cause)
    assert not journal.is_movable("abort", "api_abort") and not journal.is_movable("stop", cause)


def test_the_compiled_reader_has_the_same_constants():
    defined = dict(re.findall(r"^#define JOURNAL_(\w+) (.+)$", C.read_text(), re.MULTILINE))
    assert len(defined) == 13
    for name, value in defined.items():
        assert getattr(journal, name) == (json.loads(value).encode() if value.startswith('"') else int(value)), name


def test_the_compiled_reader_defines_no_other_marks():
    code = re.sub(r"^#define JOURNAL.*$|//.*$", "", C.read_text(), flags=re.MULTILINE)
    assert not re.findall(r'":[a-z+]|"data: |\[DONE\]', code)
