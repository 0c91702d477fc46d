"""Answers that must match a grammar: one matcher for each row that has one, asked before and told after each token.

A matcher is a function of the grammar and the tokens of the answer alone. It is built when its sequence joins and replays
the tokens that are already there, so it survives preemption, resuming and moving to another engine like everything else.
It reads sampled tokens on the host, which is why such a sequence runs in lockstep: never two steps in flight.

A matcher that cannot go on (the grammar is broken, its limits are used up, or a token does not fit) stays in its error and
refuses every token. Its row's token is then reported as lost, and the scheduler ends the request; nothing that breaks the
grammar ever leaves the worker, and nobody else in the batch notices.
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
    """What matchers must know of the tokens, or None if this tokenizer is of a kind that they do not understand.

    Takes about a second for 150,000 tokens.
    """
    ends = [token for token in eos_ids if token < vocab_size]
    if not ends:
        return None  # nothing could ever end an answer
    # Models pad their vocabularies; a few know fewer tokens than their tokenizers.
    for size in (vocab_size, None):
        try:
            return LLTokenizer(tokenizer_json, n_vocab=size, eos_token=ends)
        except ValueError as error:
            complaint = error
    log.warning("this model takes no grammars: %s", complaint)
    return None


class Grammars:
    """The matchers of some rows.

    `apply` and `forbid` are called by the thread that launches steps, `advance` by the one that lands them. Lockstep
    keeps the two from touching the same matcher at once.
    """

    def __init__(self, vocabulary: LLTokenizer) -> None:
        self._vocabulary = vocabulary
        self._matchers: dict[int, LLMatcher] = {}  # by row
        self._compiled = lru_cache(maxsize=KEPT_GRAMMARS)(self._compile)

    @cached_property
    def _executor(self) -> LLExecutor:
        return LLExecutor()  # threads, which most workers never need

    def apply(self, plan: StepPlan) -> None:
        """Give the sequences that join their matchers, and forget those of the rows they take."""
        for join in plan.joins:
            self._matchers.pop(join.row, None)
            if join.sampling.grammar is not None:
                self._matchers[join.row] = self._matcher(join, join.sampling.grammar)

    def hold_any(self, rows: Ints) -> bool:
        """Whether one of these rows has a matcher."""
        return bool(self._matchers) and any(row in self._matchers for row in rows.tolist())

    def forbid(self, logits: torch.Tensor, rows: Ints) -> None:
        """Set to -inf what the grammars of `rows` do not allow next in `logits` [R, V]."""
        held = [(i, matcher) for i, row in enumerate(rows.tolist()) if (matcher := self._matchers.get(row))]
        if not held:
            return
        allowed = unpack(self._masks([matcher for _, matcher in held]), logits.shape[1], logits.device)
        which = to_device(np.array([i for i, _ in held]), logits.device)
        logits.index_copy_(0, which, torch.where(allowed, logits.index_select(0, which), -torch.inf))

    def advance(self, rows: Ints, tokens: list[int]) -> tuple[int, ...]:
        """Take note of the tokens sampled for `rows`; returns the indices of those that may not be used."""
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
        """What each may be told next; of one in error, nonsense, which `advance` will not take."""
        masks = np.zeros((len(matchers), -(-self._vocabulary.vocab_size // 32)), dtype=np.int32)
        size = masks.shape[1] * 4
        if len(matchers) == 1:
            matchers[0].unsafe_compute_mask_ptr(masks.ctypes.data, size)
        else:
            pairs = [(matcher, i) for i, matcher in enumerate(matchers)]
            self._executor.unsafe_compute_mask_ptr(pairs, masks.ctypes.data, size, len(matchers))
        return masks

    def _consume(self, matcher: LLMatcher, token: int) -> bool:
        # In its error a matcher still takes an EOS, which would make a broken answer look complete.
        if matcher.consume_token(token) and not matcher.is_error():
            return True
        log.info("an answer was ended by its grammar: %s", matcher.get_error())
        return False


def unpack(masks: Masks, vocab_size: int, device: torch.device) -> torch.Tensor:
    """Masks as booleans [R, vocab_size] on `device`."""
    octets = masks.view(np.uint8)
    if device.type == "cpu":
        bits = np.unpackbits(octets, axis=1, count=vocab_size, bitorder="little")
        return torch.from_numpy(bits.view(np.bool_))
    # Bits travel packed: an eighth of the bytes.
    powers = 1 << torch.arange(8, device=device, dtype=torch.uint8)
    bits_of = to_device(octets, device)[:, :, None].bitwise_and(powers)
    return bits_of.ne(0).view(len(masks), -1)[:, :vocab_size]
