"""What a client asks of an engine: token ids, how to sample, when to stop. No text anywhere.

A request is valid once constructed: values outside their range raise ValueError with a sentence that names
the field. Whether it *fits* (context, blocks) is the scheduler's to say.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable

import msgspec

from headgate.protocol.grammar import MAX_GRAMMAR_CHARS
from headgate.protocol.keys import Key

MAX_LOGPROBS = 20


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """How the next token is chosen and when to stop. The defaults sample from the model as it is."""

    max_tokens: int | None = None  # None: up to the context length
    temperature: float = 1.0  # 0 is greedy
    top_p: float = 1.0
    top_k: int = 0  # 0 is off
    min_p: float = 0.0
    seed: int | None = None  # None: drawn when the request is accepted
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = {}
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None  # 0: of the sampled token alone; k: of the k likeliest too
    prompt_logprobs: int | None = None
    grammar: str | None = None  # what the answer must match, as `protocol.grammar` says

    def __post_init__(self) -> None:
        _check("max_tokens", self.max_tokens is None or 1 <= self.max_tokens < 2**31, "at least 1, in 31 bits")
        _check("temperature", 0 <= self.temperature <= 100, "between 0 and 100")
        _check("top_p", 0 < self.top_p <= 1, "above 0 and at most 1")
        _check("top_k", 0 <= self.top_k < 2**31, "0 (off) or a positive number")
        _check("min_p", 0 <= self.min_p <= 1, "between 0 and 1")
        _check("seed", self.seed is None or -(2**63) <= self.seed < 2**63, "a 64-bit integer")
        # Less would make infinities of logits, and so would a larger bias.
        _check("repetition_penalty", 0.01 <= self.repetition_penalty <= 100, "between 0.01 and 100")
        _check("presence_penalty", -2 <= self.presence_penalty <= 2, "between -2 and 2")
        _check("frequency_penalty", -2 <= self.frequency_penalty <= 2, "between -2 and 2")
        _check(
            "logit_bias", all(-1e30 <= bias <= 1e30 for bias in self.logit_bias.values()), "between -1e30 and 1e30"
        )
        _check("logit_bias", _are_ids(self.logit_bias), "keyed on token ids")
        most = 2**31 - 1 if self.max_tokens is None else self.max_tokens
        _check("min_tokens", 0 <= self.min_tokens <= most, "between 0 and max_tokens")
        _check("stop_token_ids", _are_ids(self.stop_token_ids), "token ids")
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            _check(name, value is None or 0 <= value <= MAX_LOGPROBS, f"between 0 and {MAX_LOGPROBS}")
        if self.grammar is not None:
            self._check_grammar(self.grammar)

    def _check_grammar(self, grammar: str) -> None:
        _check("grammar", 0 < len(grammar) <= MAX_GRAMMAR_CHARS, f"between 1 and {MAX_GRAMMAR_CHARS} characters long")
        # Whoever must go on after the grammar has ended has nothing left to say.
        _check("min_tokens", self.min_tokens == 0, "0 with a grammar, which alone says when an answer may end")
        _check("ignore_eos", not self.ignore_eos, "false with a grammar, whose end is an EOS")

    @property
    def penalised(self) -> bool:
        """Whether the choice depends on which tokens came before."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0


def _are_ids(tokens: Iterable[int]) -> bool:
    """Whether they can be packed as 32-bit words for a cache key; which are in the vocabulary is the engine's to check."""
    try:
        array("I", tokens)  # the fastest way to look at each
    except OverflowError:
        return False
    return True


def _check(name: str, ok: bool, allowed: str) -> None:
    if not ok:
        raise ValueError(f"{name} must be {allowed}")


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
        _check("prompt token ids", _are_ids(self.prompt), "between 0 and 2**32 - 1")
        _check("generated token ids", _are_ids(self.generated), "between 0 and 2**32 - 1")
        _check("priority", -(2**31) <= self.priority < 2**31, "a 32-bit integer")
        if self.timeout_s is not None and not self.timeout_s > 0:
            raise ValueError("timeout_s must be above 0")
        if self.export_kv and self.ticket is not None:
            raise ValueError("export_kv and a ticket exclude each other: fetch KV or compute it for others")
