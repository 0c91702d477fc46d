"""The plan of one step for the device, and its result, both in columns.

A plan is data. It can be broadcast to ranks, written to a file on a crash and replayed in a test. The columns (`rows`,
`starts`, `counts`, `samples`) have one entry per slice: compute `counts[i]` tokens of the sequence in device row `rows[i]`
from position `starts[i]`, and sample a token after the last one if `samples[i]`.

In each layer the device writes the KV of all slices before any slice reads. A slice may therefore read blocks that an
earlier slice of the same plan fills.
"""

from __future__ import annotations

import msgspec

from headgate.contract.sampling import SamplingParams
from headgate.protocol.request import Pooling, Ticket


class Join(msgspec.Struct, frozen=True, array_like=True):
    """A sequence takes a device row. This is all that the device receives about it, except for blocks added later."""

    row: int
    tokens: tuple[int, ...]
    prompt_len: int
    sampling: SamplingParams
    blocks: tuple[int, ...]
    adapter: str = ""  # empty: the base model
    pooling: Pooling | None = None  # the slice that computes the last token returns the vector of the prompt


class Fetch(msgspec.Struct, frozen=True, array_like=True):
    """Fetch the KV that `ticket` names into local `blocks`, skipping the ticket's first `skip` blocks."""

    id: int  # of the sequence; a sequence fetches at most once
    ticket: Ticket
    skip: int
    blocks: tuple[int, ...]


class StepPlan(msgspec.Struct, frozen=True, array_like=True):
    step: int
    version: int  # of the weights that compute it
    rows: list[int]
    starts: list[int]
    counts: list[int]
    samples: list[bool]
    joins: tuple[Join, ...] = ()
    grown: tuple[tuple[int, tuple[int, ...]], ...] = ()  # (row, blocks added at the end of its table)
    fetches: tuple[Fetch, ...] = ()


class Logprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log-probabilities at one position: of the token itself and of the most likely tokens, in descending order."""

    token: float
    top_ids: tuple[int, ...] = ()
    top: tuple[float, ...] = ()
    rank: int = 0  # of the token itself, 1 for the most likely one; set for tokens of a prompt


class RoutedExperts(msgspec.Struct, frozen=True, array_like=True):
    """The experts that the model's routers chose for consecutive tokens of a sequence, from position `start` on.

    `ids` are [tokens, layers with experts, top], in the order of the choice; see `RoutedShape`.
    """

    start: int
    ids: bytes


class RoutedShape(msgspec.Struct, frozen=True, array_like=True):
    """How an engine reports the experts of a token."""

    layers: int  # of the model
    places: tuple[int, ...]  # which of them have experts
    top: int  # experts per token
    size: int  # bytes per id: 1 (unsigned) or 2 (signed)

    @property
    def token_bytes(self) -> int:
        return len(self.places) * self.top * self.size


class StepResult(msgspec.Struct, frozen=True, array_like=True):
    """The result of one plan. `tokens` has the tokens of the slices that sample, in plan order.

    A slice may have any number of tokens, unless a later step of its sequence is in flight: that step was planned for
    exactly one.
    """

    step: int
    tokens: list[int]
    logprobs: dict[int, Logprobs] = {}  # by index into `tokens`
    prompt_logprobs: dict[
        int, tuple[Logprobs, ...]
    ] = {}  # by slice: of its requested ones among prompt tokens starts+1 ... starts+counts
    lost: tuple[int, ...] = ()  # indices into `tokens` of invalid tokens: the row's grammar could not be followed
    lengths: list[int] = []  # number of tokens per slice that samples; empty: one each
    # By slice, if the sequence requested them: of tokens up to the slice's last.
    routed: dict[int, RoutedExperts] = {}
    vectors: dict[int, bytes] = {}  # by slice, if it completes a prompt with pooling: float32, little-endian
