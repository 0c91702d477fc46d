"""Log-probabilities for clients, from the model's own logits, before bias, penalties and temperature."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from headgate.protocol.plan import Logprobs

# Prompt positions are scored this many logits at a time, because a long prompt would not fit in memory at once.
CHUNK = 2**24


def score(logprobs: torch.Tensor, token: int, top: int) -> Logprobs:
    """The log-probabilities of one position, whose distribution is `logprobs` [V]."""
    if not top:
        return Logprobs(float(logprobs[token]))
    kth = logprobs.topk(top).values[-1]
    # topk breaks ties arbitrarily. Candidates in id order and a stable sort put the lowest id first, as in argmax.
    ids = (logprobs >= kth).nonzero()[:, 0]
    best = logprobs[ids].sort(descending=True, stable=True)
    top_ids, values = ids[best.indices][:top], best.values[:top]
    return Logprobs(float(logprobs[token]), tuple(top_ids.tolist()), tuple(values.tolist()))


def chunks(positions: int, vocab: int) -> Iterator[slice]:
    """Split `positions` into ranges whose logits fit in memory."""
    step = max(1, CHUNK // vocab)
    return (slice(first, min(first + step, positions)) for first in range(0, positions, step))
