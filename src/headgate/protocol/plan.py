"""What the device is told to do, and what it answers: one step, complete, in columns.

A plan is data. It can be broadcast to ranks, written to a file on a crash and replayed in a test. Columns
(`rows`, `starts`, `counts`, `samples`) have one entry per slice: compute `counts[i]` tokens of the sequence in
device row `rows[i]` from position `starts[i]`, and sample a token after the last one if `samples[i]`.

The device writes the KV of all slices before any slice reads, layer by layer; a slice may therefore read blocks
that an earlier slice of the same plan fills.
"""

from __future__ import annotations

import msgspec

from headgate.contract.sampling import SamplingParams
from headgate.protocol.request import Ticket


class Join(msgspec.Struct, frozen=True, array_like=True):
    """A sequence takes a device row: everything the device will ever be told of it, but for later blocks."""

    row: int
    tokens: tuple[int, ...]
    prompt_len: int
    sampling: SamplingParams
    blocks: tuple[int, ...]


class Fetch(msgspec.Struct, frozen=True, array_like=True):
    """Pull KV named by `ticket` into our `blocks`, skipping the ticket's first `skip` blocks."""

    id: int  # of the sequence; none fetches twice
    ticket: Ticket
    skip: int
    blocks: tuple[int, ...]


class StepPlan(msgspec.Struct, frozen=True, array_like=True):
    step: int
    version: int  # weights that compute it
    rows: list[int]
    starts: list[int]
    counts: list[int]
    samples: list[bool]
    joins: tuple[Join, ...] = ()
    grown: tuple[tuple[int, tuple[int, ...]], ...] = ()  # (row, blocks added at the end of its table)
    fetches: tuple[Fetch, ...] = ()


class Logprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log-probabilities at one position: of the token itself and of the likeliest ones, best first."""

    token: float
    top_ids: tuple[int, ...] = ()
    top: tuple[float, ...] = ()


class StepResult(msgspec.Struct, frozen=True, array_like=True):
    """Answers one plan. `tokens` has the tokens of the slices that sample, slice after slice in plan order.

    A slice may have any number of tokens, unless a later step of its sequence is in flight, which was planned for the
    position after exactly one.
    """

    step: int
    tokens: list[int]
    logprobs: dict[int, Logprobs] = {}  # by index into `tokens`
    prompt_logprobs: dict[int, tuple[Logprobs, ...]] = {}  # by slice: of prompt tokens starts+1 ... starts+counts
    lost: tuple[int, ...] = ()  # indices into `tokens` that mean nothing: the row's grammar could not be followed
    lengths: list[int] = []  # how many tokens each slice that samples has; empty means one each
