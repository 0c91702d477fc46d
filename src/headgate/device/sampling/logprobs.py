"""Log-probabilities for clients.

Those of a generated token are of one of three distributions, which the request chooses (`logprobs_mode`): `raw`, the
softmax of the model's logits; `scaled`, after bias, penalties, grammar and temperature, which is what a trainer
computes; `processed`, also after top_k, top_p and min_p, which is what the token was drawn from. With temperature 0
nothing is divided or filtered. Those of prompt tokens are always `raw`.

Steps that run as graphs compute those of drawn tokens themselves, where nothing but the temperature changes the logits
and no other tokens are requested (`drawn`); everything else is computed here.

Nothing here waits for the device, except `Scored.read`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from headgate.device.rows import Ints, Records, to_device
from headgate.device.sampling.draw import Knobs, filter_scaled, scaled_by
from headgate.protocol.plan import Logprobs

# Prompt positions are scored this many logits at a time, because a long prompt would not fit in memory at once.
CHUNK = 2**24

_LOW = 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class Scored:
    """The log-probabilities of some tokens. On a GPU they may not have arrived on the host yet."""

    places: Ints  # indices of the tokens in the step
    tops: Ints  # how many of the most likely tokens each one reports
    values: torch.Tensor  # [K] float32
    top_ids: torch.Tensor  # [K, most]
    top: torch.Tensor  # [K, most] float32
    ranks: torch.Tensor | None = None  # [K]: how many tokens are at least as likely

    def to_host(self) -> Scored:
        """Start copying everything to the host."""
        moved = {name: getattr(self, name).to("cpu", non_blocking=True) for name in ("values", "top_ids", "top")}
        return replace(self, **moved)

    def read(self) -> Iterator[tuple[int, Logprobs]]:
        """The entries by place. The values must have arrived."""
        values = self.values.tolist()
        if not self.tops.any() and self.ranks is None:
            return zip(self.places.tolist(), map(Logprobs, values), strict=True)
        return self._read_all(values)

    def _read_all(self, values: list[float]) -> Iterator[tuple[int, Logprobs]]:
        ids, tops = self.top_ids.tolist(), self.top.tolist()
        ranks = [0] * len(values) if self.ranks is None else self.ranks.tolist()
        for i, (place, count) in enumerate(zip(self.places.tolist(), self.tops.tolist(), strict=True)):
            # A token that cannot be drawn is not among the most likely ones.
            count = sum(value > -np.inf for value in tops[i][:count])
            yield place, Logprobs(values[i], tuple(ids[i][:count]), tuple(tops[i][:count]), ranks[i])


class Scores:
    """Collects the distributions that the rows of a step request, while the sampler changes their logits."""

    def __init__(self, records: Records) -> None:
        self._tops = records["logprobs"]
        self._modes = records["logprobs_mode"]
        self._taken: list[tuple[Ints, torch.Tensor]] = []

    def take_raw(self, logits: torch.Tensor) -> None:
        places = self._places("raw")
        if places.size:
            self._take(places, _rows_of(logits, places))

    def take_adjusted(self, logits: torch.Tensor, knobs: Knobs) -> Knobs:
        """Take the rows whose bias, penalties and grammar have been applied.

        The filters of rows in mode `processed` are applied to `logits` too. Returns `knobs` without these filters, so
        that no row is filtered twice.
        """
        scaled, processed = self._places("scaled"), self._places("processed")
        if scaled.size:
            self._take(scaled, scaled_by(_rows_of(logits, scaled), knobs[scaled]))
        if not processed.size:
            return knobs
        some = scaled_by(_rows_of(logits, processed), knobs[processed])
        if filter_scaled(some, knobs[processed]):
            # What is excluded stays excluded, and everything else has the logits that the draw expects.
            kept = _rows_of(logits, processed).masked_fill_(some == -torch.inf, -torch.inf)
            logits.index_copy_(0, to_device(processed, logits.device), kept)
            knobs = knobs.unfiltered(processed)
        self._take(processed, some)
        return knobs

    def of(self, tokens: torch.Tensor) -> list[Scored]:
        return [
            score(logprobs, _rows_of(tokens, places), self._tops[places], places) for places, logprobs in self._taken
        ]

    def _places(self, mode: str) -> Ints:
        return np.flatnonzero((self._tops >= 0) & (self._modes == mode))

    def _take(self, places: Ints, logits: torch.Tensor) -> None:
        self._taken.append((places, logits.log_softmax(-1)))


def score_factors(records: Records) -> npt.NDArray[np.float32]:
    """By row, the factor of the logits whose softmax is reported if nothing else changes them; 0: none is."""
    divided = (records["logprobs_mode"] != "raw") & (records["temperature"] > 0)
    factors = 1 / np.where(divided, records["temperature"], np.float32(1))
    return np.where(records["logprobs"] >= 0, factors, np.float32(0))


def drawn(records: Records, values: torch.Tensor) -> list[Scored]:
    """The log-probabilities `values` [R] that were computed with the draw, of the rows that request them."""
    places = np.flatnonzero(records["logprobs"] >= 0)
    if not places.size:
        return []
    values = values if len(places) == len(values) else _rows_of(values, places)
    none = values.new_empty(len(places), 0)
    return [Scored(places, np.zeros_like(places), values, none, none)]


def score(logprobs: torch.Tensor, tokens: torch.Tensor, tops: Ints, places: Ints, *, ranked: bool = False) -> Scored:
    """The log-probabilities of `tokens` [K], whose distributions are `logprobs` [K, V]."""
    own = logprobs.gather(1, tokens[:, None])
    top_ids = most_likely(logprobs, int(tops.max(initial=0)))
    ranks = (logprobs > own).sum(-1) + 1 if ranked else None
    return Scored(places, tops, own[:, 0], top_ids, logprobs.gather(1, top_ids), ranks)


def most_likely(logprobs: torch.Tensor, count: int) -> torch.Tensor:
    """The ids [K, count] of the largest of each row. The lowest id wins a tie, as in argmax."""
    if not count:
        return torch.empty(len(logprobs), 0, dtype=torch.int64, device=logprobs.device)
    # topk breaks ties arbitrarily, so the id is made a part of what is compared. Flipping the lower bits of negative
    # numbers makes the bits of floating-point numbers compare like the numbers.
    bits = logprobs.view(torch.int32)
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long() << 32
    ordered += _LOW - torch.arange(logprobs.shape[1], device=logprobs.device)
    return _LOW - (ordered.topk(min(count, logprobs.shape[1])).values & _LOW)


def _rows_of(tensor: torch.Tensor, places: Ints) -> torch.Tensor:
    return tensor.index_select(0, to_device(places, tensor.device))


def chunks(positions: int, vocab: int) -> Iterator[slice]:
    """Split `positions` into ranges whose logits fit in memory."""
    step = max(1, CHUNK // vocab)
    return (slice(first, min(first + step, positions)) for first in range(0, positions, step))
