"""The prefix index: which workers have computed the beginning of a prompt, as far as the router knows.

A prompt is cut at fixed offsets, more densely near its start, and at its end. A node stands for everything up to one
cut: its key is a chained hash, its value the latest visits of the workers that were sent this prefix, newest first.
Evictions are described by one number per worker, its *horizon*: a paged cache evicts the least recently used blocks,
so everything last used before the horizon is gone and everything used later is present
(docs/decisions/0007-one-number-for-evictions.md).

Rules: no clock, no I/O, one thread. The index has at most `max_nodes` nodes and evicts the least recently used first.
It keeps two generations of nodes instead of an ordered list, so that no order must be maintained. All nodes of a
prompt share one visit object, so ending a visit changes one object.
"""

from __future__ import annotations

from bisect import bisect_right
from functools import partial
from math import inf
from typing import Final

import msgspec

from headgate.router.data_path.fast_path import PYTHON, FastPath
from headgate.router.fleet.worker import Worker

MAX_WORKERS_PER_NODE: Final = 8  # most workers remembered for one prefix
MIN_REPEAT_BYTES: Final = 1024  # a shorter repeated prompt does not bind its request to the same worker
# How many messages are searched backwards for the end of the previous turn. One answer may add several messages, with
# tool calls and their results.
LOOKBACK_MESSAGES: Final = 8


def _cuts() -> list[int]:
    """Byte offsets at which prompts are cut: two per power of two, so at most a third of a shared prefix is missed.

    Conversation turns are found exactly.
    """
    return [512, *(size for power in range(10, 31) for size in (1 << power, 3 << (power - 1)))]


CUTS: Final = tuple(_cuts())
MIN_NODES: Final = 2 * (len(CUTS) + 1)  # so that one generation can hold the nodes of the longest prompt


class Visit(msgspec.Struct, gc=False, eq=False):
    """One request at one worker. Its prompt cannot be evicted while the request runs."""

    worker: Worker
    generation: int  # the worker's generation at that time
    last_cut: int  # key of the last cut of the request's prompt
    last_s: float = inf  # when the request released its blocks

    @property
    def counts(self) -> bool:
        worker = self.worker
        return self.last_s > worker.horizon_s and self.generation == worker.generation

    def end(self, now_s: float) -> None:
        """Note that the request ran: its prompt stays cached until it is the least recently used."""
        self.last_s = now_s

    def undo(self) -> None:
        """Note that the request never ran, so its prompt is not cached."""
        self.last_s = -inf


Node = tuple[Visit, ...]


class Path(msgspec.Struct, gc=False, eq=False):
    """A prompt, and the keys of the nodes that stand for its prefixes."""

    root: int
    prompt: bytes
    chat: bool
    size: int  # how many bytes of the prompt the next turn will repeat
    cuts: list[int]  # keys of the nodes at CUTS
    tail: int  # key of the node at the end of the prompt


class WorkerPrefix(msgspec.Struct, gc=False, eq=False):
    """The longest prefix of a prompt that one worker has."""

    size: int  # bytes
    last_s: float  # when it was last used


class Match(msgspec.Struct, gc=False, eq=False):
    found: dict[Worker, WorkerPrefix]
    last_workers: list[Worker]  # workers that computed the previous turn or this same prompt, latest first


class PrefixIndex:
    def __init__(self, max_nodes: int = 1_000_000, fast_path: FastPath = PYTHON) -> None:
        if max_nodes < MIN_NODES:
            raise ValueError(f"an index of {max_nodes} nodes is too small; give it {MIN_NODES} or more")
        self.max_nodes = max_nodes
        self._cut_keys, self._tail_key = fast_path.cut_keys, fast_path.tail_key
        self._message_end = fast_path.message_end
        self._runs, self._renew = fast_path.runs, fast_path.renew
        self._young: dict[int, Node] = {}
        self._old: dict[int, Node] = {}
        self._expired: dict[int, Node] = {}  # freed gradually; freeing it at once would stall the event loop

    def __len__(self) -> int:
        return len(self._young) + len(self._old) + len(self._expired)

    def __repr__(self) -> str:
        return f"<PrefixIndex {len(self)} of {self.max_nodes} nodes>"

    def path(self, root: int, prompt: bytes, *, chat: bool) -> Path:
        """Compute the keys of a prompt, given without its closing bracket or quote.

        Prompts with different roots share no prefix.
        """
        size = (prompt.rfind(b"}") + 1 or len(prompt)) if chat else len(prompt)
        keys = self._cut_keys(root, prompt, size, CUTS)
        start, key = (CUTS[len(keys) - 1], keys[-1]) if keys else (0, root)
        return Path(root, prompt, chat, size, keys, self._tail_key(key, prompt, start, size))

    def match(self, path: Path) -> Match:
        """Find the longest prefix per worker, and the workers that had the previous turn of the conversation."""
        match = Match({}, [])
        young, old = self._young, self._old
        run: Node = ()
        depth = 0
        for run, depth in self._runs(young, old, path.cuts):
            _add_prefix(match, run, depth)
        tail = young.get(path.tail) or old.get(path.tail)
        if tail is not None:
            _add_tail(match, tail, path.size, previous_turn=path.size >= MIN_REPEAT_BYTES)
        elif path.chat:
            self._find_previous_turn(match, path, CUTS[depth])
        elif run and run[0].last_cut == path.cuts[depth - 1] and run[0].last_s < inf:
            # Plain text shows no turns. A prompt that extends an earlier prompt counts as the next turn of it.
            match.last_workers = [visit.worker for visit in run if visit.counts]
        return match

    def _find_previous_turn(self, match: Match, path: Path, first_unknown_cut: int) -> None:
        """Find the previous turn: it ended with a message, before the first cut that is not in the index."""
        prompt, end = path.prompt, min(path.size, first_unknown_cut) - 1
        for _ in range(LOOKBACK_MESSAGES):
            end = self._message_end(prompt, end)
            if not end:
                return
            if (node := self._get(self._key_at(path, end))) is not None:
                _add_tail(match, node, end, previous_turn=True)
                return
            end -= 1

    def _key_at(self, path: Path, end: int) -> int:
        """Return the tail key of the part of a prompt that ends at `end`."""
        cut = bisect_right(CUTS, end)
        start, key = (CUTS[cut - 1], path.cuts[cut - 1]) if cut else (0, path.root)
        return self._tail_key(key, path.prompt, start, end)

    def _get(self, key: int) -> Node | None:
        return self._young.get(key) or self._old.get(key)

    def insert(self, path: Path, worker: Worker) -> Visit:
        """Record that `worker` is being sent this prompt. The caller calls `end` or `undo` of the visit once."""
        visit = Visit(worker, worker.generation, path.cuts[-1] if path.cuts else 0)
        if not path.size:
            return visit
        keys = [*path.cuts, path.tail]
        self._make_room(len(keys))
        self._renew(self._young, self._old, keys, partial(_visited, visit))
        return visit

    def _make_room(self, count: int) -> None:
        if 2 * (len(self._young) + count) > self.max_nodes:
            self._young, self._old, self._expired = {}, self._young, self._old
        expired = self._expired
        for _ in range(min(count, len(expired))):
            expired.popitem()


def _add_prefix(match: Match, node: Node, depth: int) -> None:
    for visit in node:
        worker = visit.worker
        if visit.last_s > worker.horizon_s and visit.generation == worker.generation:  # `counts`, inlined
            match.found[worker] = WorkerPrefix(CUTS[depth - 1], visit.last_s)


def _add_tail(match: Match, node: Node, size: int, *, previous_turn: bool) -> None:
    for visit in node:
        worker = visit.worker
        if visit.last_s > worker.horizon_s and visit.generation == worker.generation:
            if previous_turn:
                match.last_workers.append(worker)
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
    return (visit, *others[: MAX_WORKERS_PER_NODE - 1])
