"""Constrains answers to a grammar: one matcher per constrained row, queried before each token and advanced after it.

A matcher is a function of the grammar and the answer's tokens alone. It is built when its sequence joins, and replays
the tokens that exist already, so it survives preemption, resuming and moving to another engine. It reads sampled
tokens on the host, so such a sequence runs in lockstep: it never has two steps in flight.

A matcher that cannot continue (the grammar is broken, its limits are exceeded, or a token does not fit) stays in
error and refuses every token. Its row's token is then reported as lost, and the scheduler ends the request. No token
that violates the grammar leaves the device, and the rest of the batch is unaffected.
"""

from __future__ import annotations

import logging
from functools import cached_property, lru_cache

import numpy as np
import numpy.typing as npt
import torch
from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer

from headgate.device.rows import Ints, to_device
from headgate.protocol.grammar import GRAMMAR_LIMITS
from headgate.protocol.plan import Join, StepPlan

log = logging.getLogger(__name__)

# Compiled grammars kept for the next request with the same one.
KEPT_GRAMMARS = 32

Masks = npt.NDArray[np.int32]  # one bit per token, set if the token may come next


def read_vocabulary(tokenizer_json: str, *, vocab_size: int, eos_ids: tuple[int, ...]) -> LLTokenizer | None:
    """The token vocabulary for matchers, or None if the tokenizer type is not supported.

    Takes about a second for 150,000 tokens.
    """
    ends = [token for token in eos_ids if token < vocab_size]
    if not ends:
        return None  # no token could ever end an answer
    # Models pad their vocabularies; a few have fewer tokens than their tokenizers.
    for size in (vocab_size, None):
        try:
            return LLTokenizer(tokenizer_json, n_vocab=size, eos_token=ends)
        except ValueError as error:
            complaint = error
    log.warning("grammars are not supported for this model: %s", complaint)
    return None


class Grammars:
    """The matchers of constrained rows.

    `apply` and `forbid` are called by the thread that launches steps, `advance` by the one that lands them. Lockstep
    keeps the two from using the same matcher at once.
    """

    def __init__(self, vocabulary: LLTokenizer) -> None:
        self._vocabulary = vocabulary
        self._matchers: dict[int, LLMatcher] = {}  # by row
        self._compiled = lru_cache(maxsize=KEPT_GRAMMARS)(self._compile)

    @cached_property
    def _executor(self) -> LLExecutor:
        return LLExecutor()  # starts threads, which most engines never need

    def apply(self, plan: StepPlan) -> None:
        """Create matchers for the sequences that join, and drop the previous matchers of their rows."""
        for join in plan.joins:
            self._matchers.pop(join.row, None)
            if join.sampling.grammar is not None:
                self._matchers[join.row] = self._matcher(join, join.sampling.grammar)

    def hold_any(self, rows: Ints) -> bool:
        """Whether any of these rows has a matcher."""
        return bool(self._matchers) and any(row in self._matchers for row in rows.tolist())

    def forbid(self, logits: torch.Tensor, rows: Ints) -> None:
        """Set the tokens that the grammars of `rows` do not allow next to -inf in `logits` [R, V]."""
        held = [(i, matcher) for i, row in enumerate(rows.tolist()) if (matcher := self._matchers.get(row))]
        if not held:
            return
        allowed = unpack(self._masks([matcher for _, matcher in held]), logits.shape[1], logits.device)
        which = to_device(np.array([i for i, _ in held]), logits.device)
        logits.index_copy_(0, which, torch.where(allowed, logits.index_select(0, which), -torch.inf))

    def advance(self, rows: Ints, tokens: list[int]) -> tuple[int, ...]:
        """Advance the matchers of `rows` by their tokens. Returns the indices of tokens that must not be used."""
        if not self._matchers:
            return ()
        matchers = map(self._matchers.get, rows.tolist())
        return tuple(i for i, m in enumerate(matchers) if m is not None and not self._consume(m, tokens[i]))

    def _matcher(self, join: Join, grammar: str) -> LLMatcher:
        matcher = self._compiled(grammar).deep_copy()
        matcher.consume_tokens(list(join.tokens[join.prompt_len :]))
        return matcher

    def _compile(self, grammar: str) -> LLMatcher:
        return LLMatcher(self._vocabulary, grammar, log_level=0, limits=LLParserLimits(**GRAMMAR_LIMITS))

    def _masks(self, matchers: list[LLMatcher]) -> Masks:
        """The tokens that each matcher allows next; meaningless for one in error, whose token `advance` rejects."""
        masks = np.zeros((len(matchers), -(-self._vocabulary.vocab_size // 32)), dtype=np.int32)
        size = masks.shape[1] * 4
        if len(matchers) == 1:
            matchers[0].unsafe_compute_mask_ptr(masks.ctypes.data, size)
        else:
            pairs = [(matcher, i) for i, matcher in enumerate(matchers)]
            self._executor.unsafe_compute_mask_ptr(pairs, masks.ctypes.data, size, len(matchers))
        return masks

    def _consume(self, matcher: LLMatcher, token: int) -> bool:
        # A matcher in error still accepts an EOS, which would make a broken answer look complete.
        if matcher.consume_token(token) and not matcher.is_error():
            return True
        log.info("the grammar ended an answer: %s", matcher.get_error())
        return False


def unpack(masks: Masks, vocab_size: int, device: torch.device) -> torch.Tensor:
    """Masks as booleans [R, vocab_size] on `device`."""
    octets = masks.view(np.uint8)
    if device.type == "cpu":
        bits = np.unpackbits(octets, axis=1, count=vocab_size, bitorder="little")
        return torch.from_numpy(bits.view(np.bool_))
    # Bits are sent packed: an eighth of the bytes.
    powers = 1 << torch.arange(8, device=device, dtype=torch.uint8)
    bits_of = to_device(octets, device)[:, :, None].bitwise_and(powers)
    return bits_of.ne(0).view(len(masks), -1)[:, :vocab_size]
