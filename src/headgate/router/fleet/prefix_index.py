"""Which workers have seen the beginning of a prompt, as far as we know.

A prompt is cut at fixed places, finer at its beginning, and at its end. A node stands for everything up to one cut: its key
is a chained hash, its value the last visits of the workers that were sent it, newest first. Of evictions we know one number
per worker, its *horizon*: a paged cache gives up what was used least recently, so what was last used before the horizon is
gone and what was used later is there (docs/decisions/0007-one-number-for-evictions.md).

Rules: no clock, no I/O, one thread. There are at most `max_nodes` nodes and those used least recently go first, in two
generations, so that keeping order costs nothing. A visit is one object that all nodes of its prompt share: what becomes
of it later is written once.
"""

from __future__ import annotations

from bisect import bisect_right
from functools import partial
from math import inf
from typing import Final

import msgspec

from headgate.router.data_path.fast_path import PYTHON, FastPath
from headgate.router.fleet.worker import Worker

WORKERS_PER_NODE: Final = 8  # that a shared prefix is remembered for
REPEAT_BYTES: Final = 1024  # a shorter prompt that comes again is no reason to go to the same worker
TURN_MESSAGES: Final = (
    8  # that we look back for the last turn's end: an answer's tool calls and their results are several
)


def _cuts() -> list[int]:
    """Two to the octave: at most a third of what is shared goes unseen. Turns of a conversation are found exactly."""
    return [512, *(size for power in range(10, 31) for size in (1 << power, 3 << (power - 1)))]


CUTS: Final = tuple(_cuts())
LEAST_NODES: Final = 2 * (len(CUTS) + 1)  # each generation has room for the longest prompt


class Visit(msgspec.Struct, gc=False, eq=False):
    """One request at one worker. Its prompt cannot be evicted while it runs."""

    worker: Worker
    generation: int  # of the worker then
    last_cut: int  # key of the last cut of its prompt
    last_s: float = inf  # when its blocks were let go

    @property
    def counts(self) -> bool:
        worker = self.worker
        return self.last_s > worker.horizon_s and self.generation == worker.generation

    def end(self, now_s: float) -> None:
        """The request has run: its prompt stays until it is the least recently used."""
        self.last_s = now_s

    def undo(self) -> None:
        """The request never ran."""
        self.last_s = -inf


Node = tuple[Visit, ...]


class Path(msgspec.Struct, gc=False, eq=False):
    """A prompt as the index sees it."""

    root: int
    prompt: bytes
    chat: bool
    size: int  # bytes that the next turn will begin with
    cuts: list[int]  # keys of the nodes at CUTS
    tail: int  # key of the whole


class WorkerPrefix(msgspec.Struct, gc=False, eq=False):
    """The longest prefix of a prompt that one worker has."""

    size: int  # bytes
    last_s: float  # when it was last used


class Match(msgspec.Struct, gc=False, eq=False):
    found: dict[Worker, WorkerPrefix]
    homes: list[Worker]  # who had the turn before this one, or this very prompt; the latest first


class PrefixIndex:
    def __init__(self, max_nodes: int = 1_000_000, fast_path: FastPath = PYTHON) -> None:
        if max_nodes < LEAST_NODES:
            raise ValueError(f"an index of {max_nodes} nodes is too small; give it {LEAST_NODES} or more")
        self.max_nodes = max_nodes
        self._cut_keys, self._tail_key = fast_path.cut_keys, fast_path.tail_key
        self._message_end = fast_path.message_end
        self._runs, self._renew = fast_path.runs, fast_path.renew
        self._young: dict[int, Node] = {}
        self._old: dict[int, Node] = {}
        self._dying: dict[int, Node] = {}  # emptied bit by bit, because freeing it at once would be felt

    def __len__(self) -> int:
        return len(self._young) + len(self._old) + len(self._dying)

    def __repr__(self) -> str:
        return f"<PrefixIndex {len(self)} of {self.max_nodes} nodes>"

    def path(self, root: int, prompt: bytes, *, chat: bool) -> Path:
        """`prompt` lacks its closing bracket or quote; prompts with different roots share no prefix."""
        size = (prompt.rfind(b"}") + 1 or len(prompt)) if chat else len(prompt)
        keys = self._cut_keys(root, prompt, size, CUTS)
        start, key = (CUTS[len(keys) - 1], keys[-1]) if keys else (0, root)
        return Path(root, prompt, chat, size, keys, self._tail_key(key, prompt, start, size))

    def match(self, path: Path) -> Match:
        """Every worker's longest prefix, and where the conversation was last."""
        match = Match({}, [])
        young, old = self._young, self._old
        run: Node = ()
        depth = 0
        for run, depth in self._runs(young, old, path.cuts):
            _note(match, run, depth)
        tail = young.get(path.tail) or old.get(path.tail)
        if tail is not None:
            _note_tail(match, tail, path.size, home=path.size >= REPEAT_BYTES)
        elif path.chat:
            self._look_back(match, path, CUTS[depth])
        elif run and run[0].last_cut == path.cuts[depth - 1] and run[0].last_s < inf:
            # Text has no visible turns. Whoever goes on where an answered prompt ended is taken for its next turn.
            match.homes = [visit.worker for visit in run if visit.counts]
        return match

    def _look_back(self, match: Match, path: Path, unseen: int) -> None:
        """Find the turn before this one. It ended with a message, short of the first cut that nobody has seen."""
        prompt, end = path.prompt, min(path.size, unseen) - 1
        for _ in range(TURN_MESSAGES):
            end = self._message_end(prompt, end)
            if not end:
                return
            if (node := self._get(self._key_at(path, end))) is not None:
                _note_tail(match, node, end, home=True)
                return
            end -= 1

    def _key_at(self, path: Path, end: int) -> int:
        """The tail key of the part of a prompt that ends at `end`."""
        cut = bisect_right(CUTS, end)
        start, key = (CUTS[cut - 1], path.cuts[cut - 1]) if cut else (0, path.root)
        return self._tail_key(key, path.prompt, start, end)

    def _get(self, key: int) -> Node | None:
        return self._young.get(key) or self._old.get(key)

    def insert(self, path: Path, worker: Worker) -> Visit:
        """`worker` is being sent this prompt. The caller ends or undoes the visit, once."""
        visit = Visit(worker, worker.generation, path.cuts[-1] if path.cuts else 0)
        if not path.size:
            return visit
        keys = [*path.cuts, path.tail]
        self._make_room(len(keys))
        self._renew(self._young, self._old, keys, partial(_visited, visit))
        return visit

    def _make_room(self, count: int) -> None:
        if 2 * (len(self._young) + count) > self.max_nodes:
            self._young, self._old, self._dying = {}, self._young, self._old
        dying = self._dying
        for _ in range(min(count, len(dying))):
            dying.popitem()


def _note(match: Match, node: Node, depth: int) -> None:
    for visit in node:
        worker = visit.worker
        if visit.last_s > worker.horizon_s and visit.generation == worker.generation:  # `counts`, without the call
            match.found[worker] = WorkerPrefix(CUTS[depth - 1], visit.last_s)


def _note_tail(match: Match, node: Node, size: int, *, home: bool) -> None:
    for visit in node:
        worker = visit.worker
        if visit.last_s > worker.horizon_s and visit.generation == worker.generation:
            if home:
                match.homes.append(worker)
            known = match.found.get(worker)
            if known is None or known.size < size:
                match.found[worker] = WorkerPrefix(size, visit.last_s)


def _visited(visit: Visit, node: Node) -> Node:
    if not node:
        return (visit,)
    mine, others = visit.worker, []
    for other in node:
        worker = other.worker
        if worker is not mine and other.last_s > worker.horizon_s and other.generation == worker.generation:
            others.append(other)
    return (visit, *others[: WORKERS_PER_NODE - 1])
