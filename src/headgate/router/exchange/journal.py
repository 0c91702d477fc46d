"""The progress of an answer, read from the comments that a worker writes between its events.

Comments are stored unparsed. They are parsed when there are many of them, or when another worker must resume the
answer. `contract/journal.py` defines their lines.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import groupby
from operator import itemgetter
from types import MappingProxyType
from typing import ClassVar, Final

import msgspec

from headgate.contract.journal import CACHED_LINES, FINISH, FINISH_LINES, PROMPT_LINES, TOKENS_LINES

NO_ENDS: Final[Mapping[int, str]] = MappingProxyType({})


@dataclass(slots=True)
class ChoiceProgress:
    """The progress of one choice."""

    tokens: array[int] = field(default_factory=lambda: array("I"))
    versions: list[list[int]] = field(default_factory=list)  # [version, count] spans
    chars: int = 0
    finish: list[object] | None = None  # reason, cause, prompt, cached and output tokens

    def add(self, version: int, chars: int, ids: bytes) -> None:
        new = array("I", map(int, ids.split(b","))) if ids else array("I")
        self.tokens += new
        self.chars = chars
        if not new:
            return
        if self.versions and self.versions[-1][0] == version:
            self.versions[-1][1] += len(new)
        else:
            self.versions.append([version, len(new)])


class Journal(msgspec.Struct, eq=False):  # created per request; cheaper than a class with `__init__`
    # Most bytes stored unparsed; when there are more, they are parsed and discarded.
    KEPT_BYTES: ClassVar = 16 * 2**10

    raw: list[bytes] = []  # events that are not parsed yet
    _choices: dict[int, ChoiceProgress] = {}
    _size: int = 0  # of `raw`, in bytes
    _unreadable: bool = False
    _prompt: int = 0

    def feed(self, events: bytes) -> None:
        """Add events, which must be whole, as the worker sent them."""
        self.raw.append(events)
        self._size += len(events)
        if self._size > self.KEPT_BYTES:
            self.read()

    def read(self) -> None:
        if not self.raw:
            return
        raw, self._size = b"\n" + b"".join(self.raw), 0
        self.raw.clear()
        try:
            self._parse(raw)
        except (ValueError, OverflowError):  # numbers that no Headgate server writes
            self._unreadable = True

    def _parse(self, raw: bytes) -> None:
        if not self._choices and (prompt := PROMPT_LINES.search(raw)):  # this line precedes the first tokens
            self._prompt = int(prompt[1])
        for (index, version), lines in groupby(TOKENS_LINES.findall(raw), itemgetter(0, 1)):
            *_, chars, ids = zip(*lines, strict=True)
            self._progress(int(index)).add(int(version), int(chars[-1]), b",".join(filter(None, ids)))
        for finished, reason, cause, *counts in FINISH_LINES.findall(raw):
            self._progress(int(finished)).finish = [reason.decode(), cause.decode(), *map(int, counts)]

    def end(self, choices: int, cause: str) -> None:
        """Mark unfinished choices as ended. The prompt length stays 0; only a worker knows it."""
        self.read()
        for choice in map(self._progress, range(choices)):
            choice.finish = choice.finish or ["abort", cause, 0, 0, len(choice.tokens)]

    def _progress(self, index: int) -> ChoiceProgress:
        choice = self._choices.get(index)
        if choice is None:
            choice = self._choices[index] = ChoiceProgress()
        return choice

    @property
    def unreadable(self) -> bool:
        """Whether the journal is invalid, so that no worker can resume the answer."""
        self.read()
        return self._unreadable

    @property
    def prompt(self) -> int:
        """Prompt tokens; 0 until a worker has sent its first tokens."""
        self.read()
        return self._prompt

    def emptied(self) -> Journal:
        """Return a copy for a client that receives no part of the answer."""
        journal = Journal()
        journal._prompt = self.prompt
        return journal

    @property
    def choices(self) -> dict[int, ChoiceProgress]:
        self.read()
        return self._choices

    @property
    def tokens(self) -> int:
        return sum(len(choice.tokens) for choice in self.choices.values())

    @property
    def extent(self) -> tuple[int, int, int]:
        """Totals over all choices: tokens, characters, ended choices."""
        choices = self.choices.values()
        return self.tokens, sum(each.chars for each in choices), sum(each.finish is not None for each in choices)

    def cached(self, choices: int) -> tuple[int, int] | None:
        """Return (prompt tokens, cached prompt tokens) if the worker has reported them, else None."""
        if choices > 1 or 0 in self._choices:
            ends = [choice.finish for choice in self.choices.values() if choice.finish is not None]
            return min(((int(str(finish[2])), int(str(finish[3]))) for finish in ends), default=None)
        tail = b"\n" + b"".join(self.raw[-3:])
        found = CACHED_LINES.search(tail, tail.find(b"\n" + FINISH))
        return None if found is None else (int(found[1]), int(found[2]))

    def resume(self, *, streamed: bool, ends: Mapping[int, str] = NO_ENDS) -> bytes:
        """Return the `resume` field of a request to another worker. `ends` are choices that must end, and why."""
        choices = self.choices | {index: ChoiceProgress() for index in ends if index not in self.choices}
        return msgspec.json.encode(
            {
                "choices": [
                    {
                        "index": index,
                        "token_ids": list(choice.tokens),
                        "versions": choice.versions,
                        "delivered_chars": choice.chars if streamed else 0,
                        "finish": choice.finish,
                        **({"end": ends[index]} if index in ends and choice.finish is None else {}),
                    }
                    for index, choice in sorted(choices.items())
                ]
            }
        )


def splice(body: bytes, name: str, value: bytes) -> bytes:
    """Return the JSON object `body` with one more field."""
    body = body.rstrip()
    assert body.endswith(b"}")
    comma = b"" if body[:-1].rstrip().endswith(b"{") else b","
    return b'%b%b"%b":%b}' % (body[:-1], comma, name.encode(), value)
