"""Chooses one token from one row of logits. The choice depends on that row's sampling parameters alone.

The random stream of a row is a function of (seed, position) alone, where position is the index in the sequence of the
token to sample. It does not depend on call order, batch, engine or how often the sequence was resumed (invariant 10).
Every sum is exact or per element, so a row gives the same token, bit for bit, alone and in any batch.

`draw` is the definition, in torch, for any device. The CPU and Triton kernels implement the same; `fastest_draw`
selects one. They may differ where two sums lie within the rounding of a logarithm or a quotient.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch

from headgate.device.rows import Ints, to_device
from headgate.layers.cpu import Kernels, load_kernels

# Maximum number of logits in a temporary: small enough for the processor's cache, large enough for every row of a
# small vocabulary.
CHUNK = 2**21

# Probabilities are added as integers of this unit. Integer sums are exact in any order, and so the same in any batch.
# 2**21 tokens of the largest weight still fit.
MASS_UNIT = 2.0**41


@dataclass(frozen=True, slots=True)
class Knobs:
    """The sampling parameters of each row. All arrays are [R] and on the host."""

    temperature: npt.NDArray[np.float32]  # 0: the largest logit
    top_k: npt.NDArray[np.int32]  # 0: off
    top_p: npt.NDArray[np.float32]  # 1: off
    min_p: npt.NDArray[np.float32]  # 0: off
    key: npt.NDArray[np.uint64]

    @property
    def filtered(self) -> npt.NDArray[np.bool_]:
        """Rows whose top_k, top_p or min_p excludes tokens."""
        return (self.top_k > 0) | (self.top_p < 1) | (self.min_p > 0)

    def unfiltered(self, rows: Ints) -> Knobs:
        """The same without the filters of `rows`."""
        top_k, top_p, min_p = self.top_k.copy(), self.top_p.copy(), self.min_p.copy()
        top_k[rows], top_p[rows], min_p[rows] = 0, 1, 0
        return Knobs(self.temperature, top_k, top_p, min_p, self.key)

    def __getitem__(self, rows: slice | Ints) -> Knobs:
        return Knobs(self.temperature[rows], self.top_k[rows], self.top_p[rows], self.min_p[rows], self.key[rows])


Draw = Callable[[torch.Tensor, Knobs], torch.Tensor]


def fastest_draw(device: torch.device) -> Draw:
    """The fastest draw function for `device`. Compiles the CPU kernels on first use."""
    if device.type == "cpu" and isinstance(kernels := load_kernels(), Kernels):
        return draw_with(kernels)
    return draw_on_gpu if device.type == "cuda" else draw


def draw_with(kernels: Kernels) -> Draw:
    def draw_on_cpu(logits: torch.Tensor, knobs: Knobs) -> torch.Tensor:
        columns = (knobs.temperature, knobs.top_k, knobs.top_p, knobs.min_p, knobs.key.view(np.int64))
        return kernels.sample(logits, *map(torch.from_numpy, columns))

    return draw_on_cpu


def draw_on_gpu(logits: torch.Tensor, knobs: Knobs) -> torch.Tensor:
    """Like `draw`, but overwrites `logits`."""
    # Imported here because a machine without a GPU need not have Triton.
    from headgate.layers.triton.draw import draw_tokens

    device = logits.device
    filtered = np.flatnonzero((knobs.temperature > 0) & knobs.filtered)
    if filtered.size:
        which = to_device(filtered, device)
        some = logits.index_select(0, which)
        scaled = some / to_device(knobs.temperature[filtered], device)[:, None]
        some.masked_fill_(scaled < _lowest_kept(scaled, knobs[filtered]), -torch.inf)
        logits.index_copy_(0, which, some)
    return draw_tokens(logits, to_device(knobs.temperature, device), to_device(knobs.key.view(np.int64), device))


def stream_keys(seeds: npt.NDArray[np.uint64], positions: Ints) -> npt.NDArray[np.uint64]:
    """The key of the random stream at each (seed, position), computed with the finaliser of splitmix64."""
    x: npt.NDArray[np.uint64] = seeds + positions.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def draw(logits: torch.Tensor, knobs: Knobs) -> torch.Tensor:
    """One token per row of `logits` [R, V], as [R] int64.

    With temperature 0, the largest logit wins; ties go to the lowest id. Otherwise logits are divided by the
    temperature, and filters apply in this order. `top_k` keeps the k largest logits and those tied with the last of
    them. `top_p` keeps a token if all strictly likelier ones together have less mass than `top_p`. `min_p` keeps
    tokens with at least `min_p` of the probability of the most likely one. The winner is the largest sum of scaled
    logit and Gumbel noise.
    """
    if not knobs.temperature.any():
        return logits.argmax(-1)
    step = max(1, CHUNK // logits.shape[1])
    chunks = (slice(first, first + step) for first in range(0, len(logits), step))
    return torch.cat([_draw(logits[rows], knobs[rows]) for rows in chunks])


def _draw(logits: torch.Tensor, knobs: Knobs) -> torch.Tensor:
    device = logits.device
    greedy, scaled = knobs.temperature == 0, scaled_by(logits, knobs)
    filter_scaled(scaled, knobs)
    noise = gumbel(to_device(knobs.key.view(np.int64), device), logits.shape[1])
    noise.masked_fill_(to_device(greedy, device)[:, None], 0)
    return scaled.add_(noise).argmax(-1)


def scaled_by(logits: torch.Tensor, knobs: Knobs) -> torch.Tensor:
    """`logits` divided by the temperatures; a row with temperature 0 stays as it is."""
    divisors = np.where(knobs.temperature == 0, np.float32(1), knobs.temperature)
    return logits / to_device(divisors, logits.device)[:, None]


def filter_scaled(scaled: torch.Tensor, knobs: Knobs) -> bool:
    """Set the scaled logits that top_k, top_p and min_p exclude to -inf. Filters do not affect greedy rows.

    Returns whether any row was filtered.
    """
    filtered = np.flatnonzero((knobs.temperature > 0) & knobs.filtered)
    if filtered.size:
        which = to_device(filtered, scaled.device)
        some = scaled.index_select(0, which)
        some.masked_fill_(some < _lowest_kept(some, knobs[filtered]), -torch.inf)
        scaled.index_copy_(0, which, some)
    return bool(filtered.size)


def _lowest_kept(scaled: torch.Tensor, knobs: Knobs) -> torch.Tensor:
    """Per row, the smallest logit [R, 1] that all filters keep. Equal logits are kept or dropped together."""
    lowest = scaled.new_full((len(scaled), 1), -torch.inf)
    ranking = np.flatnonzero((knobs.top_k > 0) | (knobs.top_p < 1))
    if ranking.size:
        which = to_device(ranking, scaled.device)
        lowest.index_copy_(0, which, _last_by_rank(scaled.index_select(0, which), knobs[ranking]))
    if knobs.min_p.any():
        lowest = torch.maximum(lowest, _last_by_share(scaled, knobs))
    return lowest


def _last_by_rank(scaled: torch.Tensor, knobs: Knobs) -> torch.Tensor:
    """The smallest logit [R, 1] that top_k and top_p keep. The only place that sorts."""
    device, vocab = scaled.device, scaled.shape[1]
    ranked = scaled.sort(-1, descending=True).values
    last = np.where(knobs.top_k > 0, knobs.top_k, vocab).astype(np.int64) - 1
    kept = ranked >= ranked.gather(1, to_device(last, device)[:, None])
    weights = (ranked - ranked[:, :1]).exp_().masked_fill_(~kept, 0)
    mass = (weights * MASS_UNIT).long()
    before = mass.cumsum(-1).sub_(mass)
    # With top_p 1 this drops only tokens of a weight below 2**-41, which no noise could make win.
    wanted = mass.sum(-1, keepdim=True) * to_device(knobs.top_p.astype(np.float64), device)[:, None]
    kept &= before < wanted
    # A row with NaN logits keeps nothing; it must not affect the others.
    return ranked.gather(1, (kept.sum(-1, keepdim=True) - 1).clamp_(min=0))


def _last_by_share(scaled: torch.Tensor, knobs: Knobs) -> torch.Tensor:
    """The smallest logit [R, 1] that min_p keeps."""
    weights = (scaled - scaled.amax(-1, keepdim=True)).exp_()
    kept = weights >= to_device(knobs.min_p, scaled.device)[:, None]
    return scaled.masked_fill(~kept, torch.inf).amin(-1, keepdim=True)


def gumbel(keys: torch.Tensor, vocab: int) -> torch.Tensor:
    """Standard Gumbel noise [R, vocab] float32 that depends on (key, token id) alone; `keys` [R] hold 64 bits."""
    low, high = keys.to(torch.int32)[:, None], (keys >> 32).to(torch.int32)[:, None]
    x = (_strides(vocab, keys.device) + low).bitwise_xor_(high)
    x ^= (x >> 16) & 0xFFFF  # torch shifts arithmetically; the mask makes it a logical shift
    x *= 0x7FEB352D
    x ^= (x >> 15) & 0x1FFFF
    x *= _signed(0x846CA68B)
    x ^= (x >> 16) & 0xFFFF
    return -(-log_uniform((x >> 8) & 0xFFFFFF)).log_()


def log_uniform(n: torch.Tensor) -> torch.Tensor:
    """log((n + 1/2) / 2**24) for 24-bit `n`.

    Near 1 the quotient does not fit float32: the largest would round to 1, and its noise to infinity, which exceeds
    every logit. The difference from 1 does fit.
    """
    lacking = (2**24 - n).float().sub_(0.5).mul_(2.0**-24)
    quotient = n.float().add_(0.5).mul_(2.0**-24)
    return torch.where(lacking < 0.29, (-lacking).log1p_(), quotient.log_())


@lru_cache(maxsize=4)
def _strides(vocab: int, device: torch.device) -> torch.Tensor:
    """i * 0x9E3779B9 modulo 2**32 for every token id i, as int32."""
    return torch.arange(vocab, dtype=torch.int32, device=device) * _signed(0x9E3779B9)


def _signed(word: int) -> int:
    """The int32 with the same bits; torch multiplies int32 modulo 2**32, and has no uint32 arithmetic."""
    return word - 2**32 if word >= 2**31 else word
