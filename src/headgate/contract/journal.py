"""The journal codec. A server writes a journal into a streamed answer so that another server can continue the answer.

Journal lines are SSE comments between the events of an answer, which clients skip:

    :p TOKENS                          total length of the prompts; once, before the first tokens
    :j INDEX VERSION CHARS ID,ID,...   tokens of a choice, and how many of its characters the client has after this block
    :f INDEX REASON CAUSE PROMPT_TOKENS CACHED_TOKENS OUTPUT_TOKENS   a choice has ended
    :e STATUS                          the answer has failed; the HTTP status, had it failed before the first byte
    :m LINE                            withheld: released to the client if no server continues, or a journal line about it
    :+                                 this block is incomplete without the next one

A block ends with an empty line. Readers forward complete blocks and drop an incomplete one.
`encode` and `decode` define the grammar. The functions and patterns below them are the same grammar for readers and writers
that handle every token and build no values; `router/data_path/fast_path.c` has its own copy, whose constants a test
compares with these. docs/decisions/0006-the-journal.md gives the reasons.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Final

import msgspec

HEADER: Final = "X-Headgate-Journal"  # request: asks for a journal, with the request's time; response: announces one
RAW_HEADER: Final = HEADER.lower().encode()

# Line prefixes.
PROMPT: Final = b":p "
TOKENS: Final = b":j "
FINISH: Final = b":f "
FAILURE: Final = b":e "
WITHHELD: Final = b":m "
BOUND: Final = b":+\n"
DATA: Final = b"data: "  # an event of the answer
DONE: Final = b"[DONE]"
MESSAGE_STOP: Final = b"event: message_stop\n"  # the first line of the last event, in streams of the Messages API
GAP: Final = b"\n\n"

# The most digits of a number that the fast readers accept. Longer numbers are left to the slower readers.
VERSION_DIGITS: Final = 18
COUNT_DIGITS: Final = 12
ID_DIGITS: Final = 9

# Causes with which a server ends a choice that another server may continue. Such an end is withheld from the client.
MOVABLE_CAUSES: Final = frozenset(("pause", "shutdown", "preempted", "transfer_failed", "engine_lost", "superseded"))
RESCHEDULED: Final = "pd_reschedule"  # the finish reason of a choice for which the server had no room


def is_movable(reason: str, cause: str) -> bool:
    return reason == RESCHEDULED or (reason == "abort" and cause in MOVABLE_CAUSES)


# ------------------------------------------------------------------------------------------------------------- values


class PromptLine(msgspec.Struct, frozen=True):
    tokens: int


class TokensLine(msgspec.Struct, frozen=True):
    index: int
    version: int
    chars: int
    ids: tuple[int, ...]


class FinishLine(msgspec.Struct, frozen=True):
    index: int
    reason: str
    cause: str
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int


class FailureLine(msgspec.Struct, frozen=True):
    status: int


class BoundLine(msgspec.Struct, frozen=True):
    pass


class TextLine(msgspec.Struct, frozen=True):
    """Any other line: part of an event, or a comment."""

    text: bytes


class WithheldLine(msgspec.Struct, frozen=True):
    line: TokensLine | FinishLine | TextLine


Line = PromptLine | TokensLine | FinishLine | FailureLine | BoundLine | TextLine | WithheldLine
Block = tuple[Line, ...]


def encode(blocks: Iterable[Block]) -> bytes:
    return b"".join(b"".join(map(encode_line, block)) + b"\n" for block in blocks)


def encode_line(line: Line) -> bytes:
    match line:
        case PromptLine(tokens):
            return prompt_line(tokens)
        case TokensLine(index, version, chars, ids):
            return tokens_line(index, version, chars, ids)
        case FinishLine(index, reason, cause, prompt, cached, output):
            return finish_line(index, reason, cause, prompt, cached, output)
        case FailureLine(status):
            return failure_line(status)
        case BoundLine():
            return BOUND
        case WithheldLine(kept):
            return WITHHELD + encode_line(kept)
        case TextLine(text):
            return text + b"\n"


def decode(data: bytes) -> list[Block]:
    """The complete blocks in `data`. Raises ValueError for numbers that no server writes."""
    return [tuple(map(decode_line, block.split(b"\n"))) for block in data.split(GAP)[:-1]]


def decode_line(line: bytes) -> Line:
    if found := _TOKENS.fullmatch(line):
        index, version, chars, ids = found.groups()
        return TokensLine(int(index), int(version), int(chars), tuple(map(int, ids.split(b","))) if ids else ())
    if found := _FINISH.fullmatch(line):
        index, reason, cause, *counts = found.groups()
        return FinishLine(int(index), reason.decode(), cause.decode(), *map(int, counts))
    if found := _PROMPT.fullmatch(line):
        return PromptLine(int(found[1]))
    if found := _FAILURE.fullmatch(line):
        return FailureLine(int(found[1]))
    if line + b"\n" == BOUND:
        return BoundLine()
    if line.startswith(WITHHELD):
        kept = decode_line(line.removeprefix(WITHHELD))
        return WithheldLine(kept) if isinstance(kept, TokensLine | FinishLine | TextLine) else TextLine(line)
    return TextLine(line)


# ------------------------------------------------------------------------------------------------------------ writing


def prompt_line(tokens: int) -> bytes:
    return b":p %d\n" % tokens


def tokens_line(index: int, version: int, chars: int, ids: Iterable[int]) -> bytes:
    return b":j %d %d %d %b\n" % (index, version, chars, ",".join(map(str, ids)).encode())


def token_lines(index: int, versions: Sequence[int], ids: Sequence[int], chars: int) -> bytes:
    """One line per run of tokens with the same weight version. Almost always there is one token."""
    assert len(versions) == len(ids)
    if len(ids) == 1:
        return b":j %d %d %d %d\n" % (index, versions[0], chars, ids[0])
    lines, start = b"", 0
    for end in range(1, len(ids) + 1):
        if end == len(ids) or versions[end] != versions[start]:
            lines += tokens_line(index, versions[start], chars, ids[start:end])
            start = end
    return lines


def finish_line(index: int, reason: str, cause: str, prompt: int, cached: int, output: int) -> bytes:
    return b":f %d %b %b %d %d %d\n" % (index, reason.encode(), cause.encode(), prompt, cached, output)


def failure_line(status: int) -> bytes:
    return b":e %d\n" % status


def bind(events: bytes) -> bytes:
    """Several events as one unit, because the position of the client between them would be unknown."""
    if events.count(GAP) < 2:
        return events
    *firsts, last, _ = events.split(GAP)
    return b"".join([BOUND + first + GAP for first in firsts]) + last + GAP


def withhold(event: bytes) -> bytes:
    """`event` as a block that clients skip. `released` is the inverse."""
    return b"".join([WITHHELD + line + b"\n" for line in event.split(b"\n")[:-1]]) + b"\n"


# ------------------------------------------------------------------------------------------------------------ reading

_TOKENS = re.compile(rb":j (\d+) (-?\d+) (\d+) ([\d,]*)")
_FINISH = re.compile(rb":f (\d+) (\w+) (\w+) (\d+) (\d+) (\d+)")
_PROMPT = re.compile(rb":p (\d{1,%d})" % COUNT_DIGITS)
_FAILURE = re.compile(rb":e ([45]\d\d)")

# For searches in a large buffer that begins with a line break. A literal "\n" is found many times faster than `^`.
TOKENS_LINES = re.compile(rb"\n%b(?=\r?\n)" % _TOKENS.pattern)
FINISH_LINES = re.compile(rb"\n%b(?=\r?\n)" % _FINISH.pattern)
PROMPT_LINES = re.compile(rb"\n%b(?=\r?\n)" % _PROMPT.pattern)
CACHED_LINES = re.compile(rb"\n:f \d+ \w+ \w+ (\d{1,%d}) (\d{1,%d}) \d+(?=\r?\n)" % (COUNT_DIGITS, COUNT_DIGITS))

# Lines of the first choice in the exact form that servers write, for the reader of complete answers.
PLAIN_PROMPT = re.compile(rb":p \d{1,%d}" % COUNT_DIGITS)
PLAIN_TOKENS = re.compile(
    rb":j 0 (\d{1,%d}) \d{1,%d} (?:\d{1,%d}(?:,\d{1,%d})*)?" % (VERSION_DIGITS, COUNT_DIGITS, ID_DIGITS, ID_DIGITS)
)
PLAIN_FINISH = re.compile(
    rb":f 0 \w+ \w+ (\d{1,%d}) (\d{1,%d}) \d{1,%d}" % (COUNT_DIGITS, COUNT_DIGITS, COUNT_DIGITS)
)

_FIRST_VERSION = re.compile(rb"(?::p \d+\n)?:j \d+ (\d{1,%d}) " % VERSION_DIGITS)
_LATER_VERSION = re.compile(rb"\n:j \d+ (\d{1,%d}) " % VERSION_DIGITS)
_FAILED = re.compile(rb"^%b$" % _FAILURE.pattern, re.MULTILINE)
_WITHHELD_END = re.compile(rb"^:m :f \d+ (\w+) (\w+) ", re.MULTILINE)


def are_plain(events: bytes) -> bool:
    """Whether the last block is complete, and no block is bound to the next one or withheld."""
    return events[-2:] == GAP and BOUND not in events and WITHHELD not in events


def safe_end(data: bytes) -> int:
    """The end of the last complete block that is not bound to the next one."""
    end = len(data)
    while (gap := data.rfind(GAP, 0, end)) >= 0:
        start = max(data.rfind(GAP, 0, gap), 0)
        if BOUND not in data[start:gap]:
            return gap + 2
        end = gap
    return 0


def first_version(events: bytes) -> int | None:
    """The version of the weights that generated the first tokens."""
    first = _FIRST_VERSION.match(events) or _LATER_VERSION.search(events)
    return None if first is None else int(first[1])


def failed_with(events: bytes) -> int | None:
    """The status in the failure line, if there is one."""
    failed = _FAILED.search(events) if FAILURE in events else None  # far faster than matching every line
    return None if failed is None else int(failed[1])


def last_data(events: bytes) -> bytes | None:
    """The data of the last event."""
    start = events.rfind(b"\n" + DATA) + 1
    if not start and not events.startswith(DATA):
        return None
    return events[start + len(DATA) : events.index(b"\n", start)]


def split_withheld(events: bytes) -> tuple[bytes, list[bytes]]:
    """Split complete blocks into those for the client and those with withheld lines."""
    shown: list[bytes] = []
    withheld: list[bytes] = []
    for block in events.split(GAP)[:-1]:
        has_withheld = block.startswith(WITHHELD) or b"\n" + WITHHELD in block
        (withheld if has_withheld else shown).append(block + GAP)
    return b"".join(shown), withheld


def withheld_ends(ending: bytes) -> list[tuple[str, str]]:
    """The finish reason and cause of each choice that a server has ended and another one may continue."""
    return [(reason.decode(), cause.decode()) for reason, cause in _WITHHELD_END.findall(ending)]


def released(ending: bytes) -> bytes:
    """Withheld blocks in the form that the client receives when no server continues."""
    lines = [line for line in ending.splitlines(keepends=True) if line.startswith((WITHHELD, FAILURE))]
    journal = WITHHELD + TOKENS, WITHHELD + FINISH
    return b"".join([line.removeprefix(WITHHELD) for line in lines if not line.startswith(journal)])


def released_tokens(ending: bytes) -> bytes:
    """The journal lines of the tokens that the client receives when withheld blocks are released."""
    lines = ending.splitlines(keepends=True)
    return b"".join([line.removeprefix(WITHHELD) for line in lines if line.startswith(WITHHELD + TOKENS)])
