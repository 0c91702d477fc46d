"""A sequence is one request while it runs: its tokens, how many are computed, and the resources it owns.

    WAITING ──► LOADING ──► RUNNING ──► FINISHED
       │           │         ▲   │
       ├───────────┼─────────┘   │        any phase may end in FINISHED;
       ◄───────────┴─────────────┘        LOADING and RUNNING fall back to WAITING when preempted

Rules: a sequence is in exactly one queue, the one for its phase. Each step moves `computed` towards the number of
tokens. Its row is not reused while `holds > 0`; a block is not reused while a transfer fills it.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from enum import Enum, auto
from math import inf

from headgate.protocol.keys import Key, next_keys, root_key
from headgate.protocol.output import Cause, Ended, FinishReason, Timings
from headgate.protocol.request import GenerateRequest, Ticket


class Phase(Enum):
    WAITING = auto()  # owns nothing; will be admitted in order
    LOADING = auto()  # owns blocks and a row; a transfer is filling the blocks
    RUNNING = auto()  # owns blocks and a row; scheduled whenever it has something to compute
    FINISHED = auto()  # never scheduled again; a row and blocks that it still owns are released with the last hold


@dataclass(eq=False, slots=True)
class Sequence:
    request: GenerateRequest
    tokens: list[int]  # prompt and answer, without tokens that are still on the device
    packed: array[int]  # the tokens of the request, as an array
    limit: int  # the most tokens it may have, prompt and answer together
    stops: dict[int, Cause]  # token id that ends the answer -> the cause to report
    order: tuple[int, float, int]  # (priority, due time, arrival number): lowest runs first, highest is preempted
    arrived_s: float
    deadline_s: float = inf
    started_s: float | None = None
    first_token_s: float | None = None
    cached_tokens: int | None = None  # prompt tokens found in the cache at first admission
    lockstep: bool = False  # each token must reach the host before the next can be sampled
    pooled: bool = False  # its prompt becomes a vector, for which the last token is computed; nothing is sampled
    scored: int = 1  # the first prompt position whose log-probability is still to be reported; position 0 has none

    phase: Phase = Phase.WAITING
    row: int = -1
    blocks: list[int] = field(default_factory=list)  # by stripes; see `protocol.groups`
    stripes: int = 0  # leading stripes whose blocks were all allocated; windows may have passed some of them
    found: int = 0  # leading stripes found in the cache
    own: int = 0  # blocks that it holds and that were allocated for it; excludes those found in the cache
    passed: int = 0  # position whose windows determined which blocks were given back
    shown: int = 0  # stripes sent to the device; 0 means that the sequence has not joined a row yet
    computed: int = 0  # positions whose KV is written, or will be written by a launched step
    sampling: int = 0  # tokens sampled on the device that have not landed yet
    holds: int = 0  # launched steps and transfers that still use its blocks or row
    published: int = 0  # leading stripes that need no publishing: found in the prefix cache, or published
    pure: bool = True  # all its KV belongs to the current weights, and may be published or exported
    ticket: Ticket | None = None  # names KV in another engine; valid for one fetch
    suspended: bool = False  # its client does not read; no more tokens are computed for now
    lease: int | None = None  # id of the lease under which another engine may fetch its KV
    _keys: list[Key] = field(default_factory=list)
    _keys_version: int = -1

    @property
    def id(self) -> int:
        return self.request.id

    @property
    def exports(self) -> bool:
        """Whether this sequence only computes KV for another engine and samples nothing."""
        return self.request.export_kv

    @property
    def prompt_len(self) -> int:
        return len(self.request.prompt)

    @property
    def output_len(self) -> int:
        return len(self.tokens) - len(self.request.prompt)

    @property
    def prompt_only(self) -> bool:
        """Whether this sequence only computes its prompt (for log-probabilities, a vector or the cache)."""
        return self.request.sampling.max_tokens == 0 and not self.exports

    @property
    def wanted(self) -> int:
        """The number of known tokens to compute. The last token of an answer, or of a prompt without one, is not.

        That of a prompt with pooling is.
        """
        return min(len(self.tokens) + self.sampling, self.limit - 1)

    @property
    def todo(self) -> int:
        """Tokens that can be computed now."""
        if self.sampling and self.lockstep:
            return 0
        return self.wanted - self.computed

    @property
    def unscored(self) -> bool:
        """Whether requested log-probabilities of the prompt are missing."""
        return self.request.sampling.prompt_logprobs is not None and self.scored < self.prompt_len

    @property
    def preempted(self) -> bool:
        return self.phase is Phase.WAITING and self.started_s is not None

    def keys(self, count: int, *, version: int, block_size: int) -> list[Key]:
        """The cache keys of the first `count` stripes under weights `version`."""
        if self._keys_version != version:
            self._keys, self._keys_version = [], version
        keys = self._keys
        if len(keys) < count:
            last = keys[-1] if keys else root_key(version, self.request.adapter, self.request.salt)
            start, end = len(keys) * block_size, count * block_size
            in_request = end <= len(self.packed)
            keys += next_keys(last, self.packed[start:end] if in_request else self.tokens[start:end], block_size)
        return keys[:count]

    def terminal_output(self, reason: FinishReason, cause: Cause, now_s: float) -> Ended:
        return Ended(
            id=self.id,
            finish_reason=reason,
            cause=cause,
            prompt_tokens=self.prompt_len,
            cached_tokens=self.cached_tokens or 0,
            output_tokens=self.output_len,
            timings=Timings(self.arrived_s, self.started_s, self.first_token_s, now_s),
        )

    def disown(self) -> None:
        """Reset all progress after the row and blocks were released, so that the tokens are computed again."""
        self.row, self.blocks, self.shown = -1, [], 0
        self.stripes = self.found = self.own = self.passed = 0
        self.computed = self.sampling = self.published = 0
        self.pure = True
