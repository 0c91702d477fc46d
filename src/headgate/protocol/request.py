"""What a client asks of an engine: token ids, how to sample, when to stop. No text anywhere.

A request is valid once constructed: values outside their range raise ValueError with a sentence that names
the field. Whether it *fits* (context, blocks) is the scheduler's to say.
"""

from __future__ import annotations

import msgspec

from headgate.contract.parameter import are_token_ids, require
from headgate.contract.sampling import SamplingParams
from headgate.protocol.keys import Key


class Ticket(msgspec.Struct, frozen=True, array_like=True):
    """Names KV that another engine keeps for us under a lease; the lease is a secret, so only who was told can fetch."""

    engine: str  # HOST:PORT
    lease: int
    generation: int
    tokens: int  # of whole blocks
    version: int
    key: Key  # of the last block, which names all tokens before it too


class GenerateRequest(msgspec.Struct, frozen=True, array_like=True):
    """One sequence to run. `id` is unique for the life of the engine; client ids are labels kept elsewhere."""

    id: int
    prompt: tuple[int, ...]
    sampling: SamplingParams = SamplingParams()
    generated: tuple[int, ...] = ()  # already produced elsewhere: prompt for KV, output for every limit
    priority: int = 0  # lower runs first
    timeout_s: float | None = None  # from acceptance to the last token
    salt: str = ""
    adapter: str = ""
    export_kv: bool = False  # compute the tokens' KV for another engine: answer with a ticket, sample nothing
    ticket: Ticket | None = None
    accepted: bool = False  # by the API before the pause that the engine is in: no new request
    tenant: str = ""  # whose share of the engine it takes; empty if there is only one
    recompute: bool = False  # when it is preempted, also in an engine that gives such sequences back

    def __post_init__(self) -> None:
        if not self.prompt:
            raise ValueError("the prompt is empty")
        require("prompt token ids", are_token_ids(self.prompt), "between 0 and 2**32 - 1")
        require("generated token ids", are_token_ids(self.generated), "between 0 and 2**32 - 1")
        require("priority", -(2**31) <= self.priority < 2**31, "a 32-bit integer")
        if self.timeout_s is not None and not self.timeout_s > 0:
            raise ValueError("timeout_s must be above 0")
        if self.export_kv and self.ticket is not None:
            raise ValueError("export_kv and a ticket exclude each other: fetch KV or compute it for others")
