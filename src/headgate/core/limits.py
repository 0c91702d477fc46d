"""The limits within which the scheduler works. Set once, when the engine is built."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    max_context: int  # most tokens of one sequence
    max_running: int  # most running sequences: the number of device rows
    max_batch_tokens: int  # most tokens of one step
    vocab_size: int
    eos_token_ids: tuple[int, ...] = ()
    exports: bool = True  # other engines can fetch KV from this one
    adapters: frozenset[str] = frozenset()  # adapters that are loaded beside the base model
    takes_grammars: bool = True  # the device can constrain an answer to a grammar
    keeps_routed_experts: bool = False  # the device keeps the experts of all tokens
    patience_s: float = 60.0  # a request without a deadline is queued as if it were due after this time
    lease_s: float = 30.0  # how long KV is kept for an engine that does not renew its lease
    export_wait_s: float = 30.0  # how long a request to export KV may wait for a row and blocks
    reschedules: bool = False  # a sequence that would be preempted is ended, to be resumed by another engine
    engine: str = "local"  # this engine's name in tickets
    generation: int = 0  # distinguishes this process's leases from those granted before a restart
