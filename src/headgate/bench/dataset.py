"""The prompts of a benchmark: conversations, most of them with one turn. The same seed gives the same conversations.

*random* prompts share no prefix. *shared-prefix* has groups of prompts with a common prefix, like system prompts.
*multi-turn* continues with the server's own answers. *trace* replays a recording.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path

import msgspec

from headgate.errors import RequestError

VOCABULARY = (
    "time river stone bright window garden winter letter music table silver road morning paper green quiet "
    "mountain story bread water child door light summer captain island engine market number house"
)
WORDS = tuple(VOCABULARY.split())


@dataclass(frozen=True, slots=True)
class Turn:
    prompt: str
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Conversation:
    turns: tuple[Turn, ...]
    at_s: float = 0.0  # recorded start time, if any


@dataclass(frozen=True, slots=True)
class RandomPrompts:
    def __str__(self) -> str:
        return "random prompts"


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    groups: int = 8
    words: int = 512  # number of words in the prefix

    def __str__(self) -> str:
        return f"{self.groups} groups that share {self.words} words"


@dataclass(frozen=True, slots=True)
class MultiTurn:
    turns: int = 4

    def __str__(self) -> str:
        return f"conversations of {self.turns} turns"


@dataclass(frozen=True, slots=True)
class Trace:
    path: Path

    def __str__(self) -> str:
        return f"the trace {self.path.name}"


Dataset = RandomPrompts | SharedPrefix | MultiTurn | Trace
FORMS = "random, shared-prefix[:GROUPS[:WORDS]], multi-turn[:TURNS] or trace:FILE"


def parse_dataset(text: str) -> Dataset:
    name, _, rest = text.partition(":")
    match name:
        case "random" if not rest:
            return RandomPrompts()
        case "shared-prefix":
            return SharedPrefix(*_counts(text, rest, most=2))
        case "multi-turn":
            return MultiTurn(*_counts(text, rest, most=1))
        case "trace" if rest:
            return Trace(Path(rest))
    raise RequestError(f"dataset must be {FORMS}, not {text!r}")


def _counts(text: str, rest: str, *, most: int) -> list[int]:
    parts = rest.split(":") if rest else []
    if len(parts) > most or not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise RequestError(f"dataset must be {FORMS}, with numbers above 0, not {text!r}")
    return [int(part) for part in parts]


@dataclass(frozen=True, slots=True)
class Shape:
    """Number and length of requests, unless the dataset defines them."""

    requests: int
    prompt_words: int
    max_tokens: int
    seed: int


def conversations(dataset: Dataset, shape: Shape) -> list[Conversation]:
    chance = random.Random(shape.seed)
    match dataset:
        case RandomPrompts():
            return [_talk(chance, shape, 1) for _ in range(shape.requests)]
        case SharedPrefix(groups, words):
            prefixes = [some_words(chance, words) for _ in range(groups)]
            return [_talk(chance, shape, 1, prefixes[i % groups] + " ") for i in range(shape.requests)]
        case MultiTurn(turns):
            whole, rest = divmod(shape.requests, turns)
            return [_talk(chance, shape, count) for count in (*repeat(turns, whole), rest) if count]
        case Trace(path):
            return read_trace(path, chance)[: shape.requests]


def some_words(chance: random.Random, count: int) -> str:
    return " ".join(chance.choices(WORDS, k=count))


def _talk(chance: random.Random, shape: Shape, turns: int, prefix: str = "") -> Conversation:
    prompts = [prefix + some_words(chance, shape.prompt_words) for _ in range(turns)]
    return Conversation(tuple(Turn(prompt, shape.max_tokens) for prompt in prompts))


class _Recorded(msgspec.Struct):
    timestamp: float  # seconds
    output_length: int
    prompt: str | None = None
    prompt_length: int | None = None


def read_trace(path: Path, chance: random.Random) -> list[Conversation]:
    """Read JSON lines: `timestamp` in seconds, `output_length` in tokens, `prompt`, or `prompt_length` in words."""
    try:
        lines = [line for line in path.read_bytes().splitlines() if line.strip()]
    except OSError as error:
        raise RequestError(f"the trace {path} cannot be read: {error.strerror}") from None
    if not lines:
        raise RequestError(f"the trace {path} is empty")
    recorded = sorted((_read_line(line, f"{path}:{i}") for i, line in enumerate(lines, 1)), key=_timestamp)
    begin_s = recorded[0].timestamp
    return [
        Conversation((Turn(_prompt(each, chance), each.output_length),), each.timestamp - begin_s)
        for each in recorded
    ]


def _read_line(line: bytes, where: str) -> _Recorded:
    try:
        recorded = msgspec.json.decode(line, type=_Recorded)
    except msgspec.MsgspecError as error:
        raise RequestError(f"{where}: {error}") from None
    if recorded.output_length < 1:
        raise RequestError(f"{where}: output_length must be at least 1")
    if recorded.prompt is None and (recorded.prompt_length or 0) < 1:
        raise RequestError(f"{where}: give a prompt, or a prompt_length of at least 1")
    return recorded


def _timestamp(recorded: _Recorded) -> float:
    return recorded.timestamp


def _prompt(recorded: _Recorded, chance: random.Random) -> str:
    return recorded.prompt if recorded.prompt is not None else some_words(chance, recorded.prompt_length or 1)
