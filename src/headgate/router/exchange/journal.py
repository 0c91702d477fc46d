"""What a client has been told, read from the comments that a worker writes between the events of its answer.

Bytes are kept as they come and read only when there are many of them, or when another worker has to go on;
`contract/journal.py` has the lines.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from itertools import groupby
from operator import itemgetter

import msgspec

from headgate.contract.journal import CACHED_LINES, FINISH, FINISH_LINES, PROMPT_LINES, TOKENS_LINES


@dataclass(slots=True)
class ChoiceProgress:
    """One choice, as far as it has come."""

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


class Journal:
    KEPT_BYTES = 16 * 2**10  # as they came; more is read and thrown away

    _size = 0
    _unreadable = False
    _prompt = 0

    def __init__(self) -> None:
        self.raw: list[bytes] = []  # what is kept as it came
        self._choices: dict[int, ChoiceProgress] = {}

    def feed(self, events: bytes) -> None:
        """Whole events, as the worker sent them."""
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
        except (ValueError, OverflowError):  # numbers that no worker of ours would write
            self._unreadable = True

    def _parse(self, raw: bytes) -> None:
        if not self._choices and (prompt := PROMPT_LINES.search(raw)):  # it comes with the first tokens
            self._prompt = int(prompt[1])
        for (index, version), lines in groupby(TOKENS_LINES.findall(raw), itemgetter(0, 1)):
            *_, chars, ids = zip(*lines, strict=True)
            self._told(int(index)).add(int(version), int(chars[-1]), b",".join(filter(None, ids)))
        for finished, reason, cause, *counts in FINISH_LINES.findall(raw):
            self._told(int(finished)).finish = [reason.decode(), cause.decode(), *map(int, counts)]

    def end(self, choices: int, cause: str) -> None:
        """End what has not ended, where it is. How long the prompt is, only a worker knows."""
        self.read()
        for told in map(self._told, range(choices)):
            told.finish = told.finish or ["abort", cause, 0, 0, len(told.tokens)]

    def _told(self, index: int) -> ChoiceProgress:
        told = self._choices.get(index)
        if told is None:
            told = self._choices[index] = ChoiceProgress()
        return told

    @property
    def unreadable(self) -> bool:
        """Whether the worker wrote what makes no sense: nobody can go on from there."""
        self.read()
        return self._unreadable

    @property
    def prompt(self) -> int:
        """Tokens of the prompt; 0 until a worker has sent the first tokens of its answer."""
        self.read()
        return self._prompt

    def emptied(self) -> Journal:
        """That of an answer of which the client gets nothing."""
        journal = Journal()
        journal._prompt = self.prompt
        return journal

    @property
    def choices(self) -> dict[int, ChoiceProgress]:
        self.read()
        return self._choices

    @property
    def tokens(self) -> int:
        return sum(len(told.tokens) for told in self.choices.values())

    @property
    def extent(self) -> tuple[int, int, int]:
        """How far all choices together have come: tokens, characters, ends."""
        told = self.choices.values()
        return self.tokens, sum(each.chars for each in told), sum(each.finish is not None for each in told)

    def cached(self, choices: int) -> tuple[int, int] | None:
        """Tokens of the prompt, and how many its worker had in its cache, if it has said so."""
        if choices > 1 or 0 in self._choices:
            told = [told.finish for told in self.choices.values() if told.finish is not None]
            return min(((int(str(finish[2])), int(str(finish[3]))) for finish in told), default=None)
        last_words = b"\n" + b"".join(self.raw[-3:])
        found = CACHED_LINES.search(last_words, last_words.find(b"\n" + FINISH))
        return None if found is None else (int(found[1]), int(found[2]))

    def resume(self, *, streamed: bool) -> bytes:
        """The field of a request that asks another worker to go on."""
        return msgspec.json.encode(
            {
                "choices": [
                    {
                        "index": index,
                        "token_ids": list(told.tokens),
                        "versions": told.versions,
                        "delivered_chars": told.chars if streamed else 0,
                        "finish": told.finish,
                    }
                    for index, told in sorted(self.choices.items())
                ]
            }
        )


def splice(body: bytes, name: str, value: bytes) -> bytes:
    """A JSON object with one more field."""
    body = body.rstrip()
    assert body.endswith(b"}")
    comma = b"" if body[:-1].rstrip().endswith(b"{") else b","
    return b'%b%b"%b":%b}' % (body[:-1], comma, name.encode(), value)
