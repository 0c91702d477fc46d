"""Draws one token per row of logits on the device: the largest logit, or the largest with Gumbel noise.

The noise for a key and a token id is that of `device.sampling.draw`, bit for bit up to the rounding of a logarithm.
Logits are multiplied by the inverse of the temperature instead of divided by it. There are two kernels: one finds the
best token of each chunk of the vocabulary, the other the best of the chunks. The result of a row does not depend on
other rows. The first kernel can also sum the exponentials of the logits, so that the log-probability of the drawn token
needs no further pass over them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from headgate.layers.triton.launch import launch, overlap, wait_for_previous

CHUNK = 2048


class Finalists:
    """The best token of each chunk, and its part of the normaliser: memory for `rows` rows, reused in every step."""

    def __init__(self, rows: int, vocab: int, device: torch.device) -> None:
        self.chunks = triton.cdiv(vocab, CHUNK)
        self.sums = torch.empty(rows, self.chunks, device=device)
        self.ids = torch.empty(rows, self.chunks, dtype=torch.int32, device=device)
        self.peaks, self.masses = torch.empty(2, rows, self.chunks, device=device).unbind()


def find_finalists(
    logits: torch.Tensor,
    temperatures: torch.Tensor,
    keys: torch.Tensor,
    factors: torch.Tensor,
    finalists: Finalists,
) -> None:
    """Find the best token of each chunk of `logits` [R, V].

    `temperatures` are float32, with 0 for greedy; `keys` are 64-bit integers. `factors` multiply the logits whose
    exponentials are summed; with 0 none are.
    """
    rows, vocab = logits.shape
    launch(
        chunk_kernel,
        (finalists.chunks, rows),
        logits,
        temperatures,
        keys,
        factors,
        finalists.sums,
        finalists.ids,
        finalists.peaks,
        finalists.masses,
        vocab,
        logits.stride(0),
        finalists.chunks,
        CHUNK=CHUNK,
        num_warps=4,
        **overlap(logits),
    )


def draw_tokens(logits: torch.Tensor, temperatures: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Draw one token id per row of `logits` [R, V]; returns int64 [R]."""
    finalists = Finalists(len(logits), logits.shape[1], logits.device)
    tokens = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    find_finalists(logits, temperatures, keys, torch.zeros_like(temperatures), finalists)
    launch(
        winner_kernel,
        (len(logits),),
        finalists.sums,
        finalists.ids,
        tokens,
        finalists.chunks,
        PADDED=triton.next_power_of_2(finalists.chunks),
    )
    return tokens


@triton.jit
def winner_of(sums, ids, row, chunks, PADDED: tl.constexpr):
    """Return the best of a row's finalists. The lowest id wins a tie, because chunks are in the order of ids."""
    chunk = tl.arange(0, PADDED)
    score = tl.load(sums + row * chunks + chunk, mask=chunk < chunks, other=-float("inf"))
    best = tl.argmax(score, 0)
    return tl.load(ids + row * chunks + best)


@triton.jit
def normaliser_of(peaks, masses, row, chunks, PADDED: tl.constexpr):
    """The logarithm of the sum of all exponentials of a row."""
    chunk = tl.arange(0, PADDED)
    peak = tl.load(peaks + row * chunks + chunk, mask=chunk < chunks, other=-float("inf"))
    mass = tl.load(masses + row * chunks + chunk, mask=chunk < chunks, other=0.0)
    highest = tl.max(peak, 0)
    return highest + tl.log(tl.sum(mass * tl.exp(peak - highest), 0))


@triton.jit
def winner_kernel(sums, ids, tokens, chunks, PADDED: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    tl.store(tokens + row, winner_of(sums, ids, row, chunks, PADDED).to(tl.int64))


@triton.jit(do_not_specialize_on_alignment=["temperatures", "keys", "factors"])
def chunk_kernel(
    logits,
    temperatures,
    keys,
    factors,
    sums,
    ids,
    peaks,
    masses,
    vocab,
    stride,
    chunks,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    chunk, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = token < vocab
    wait_for_previous(PDL)
    score = tl.load(logits + row * stride + token, mask=inside, other=-float("inf")).to(tl.float32)
    factor = tl.load(factors + row)
    if factor > 0:
        scaled = score * factor
        peak = tl.max(scaled, 0)
        tl.store(peaks + row * chunks + chunk, peak)
        tl.store(masses + row * chunks + chunk, tl.sum(tl.exp(scaled - peak), 0))
    temperature = tl.load(temperatures + row)
    if temperature > 0:
        score *= 1.0 / temperature
        score += gumbel(tl.load(keys + row), token)
        score = tl.where(inside, score, -float("inf"))
    best, place = tl.max(score, 0, return_indices=True)
    tl.store(sums + row * chunks + chunk, best)
    tl.store(ids + row * chunks + chunk, chunk * CHUNK + place)


@triton.jit
def gumbel(key, token):
    """Standard Gumbel noise of `token`; see `device.sampling.draw.gumbel`."""
    low = (key & 0xFFFFFFFF).to(tl.uint32)
    high = ((key >> 32) & 0xFFFFFFFF).to(tl.uint32)
    x = (token.to(tl.uint32) * 0x9E3779B9 + low) ^ high
    x ^= x >> 16
    x *= 0x7FEB352D
    x ^= x >> 15
    x *= 0x846CA68B
    x ^= x >> 16
    return -tl.log(-log_uniform((x >> 8).to(tl.int32)))


@triton.jit
def log_uniform(n):
    """log((n + 1/2) / 2**24). If the argument is near 1, its difference from 1 is used, which is exact in float32.

    See `device.sampling.draw`.
    """
    quotient = (n.to(tl.float32) + 0.5) * 5.9604644775390625e-08
    lacking = ((16777216 - n).to(tl.float32) - 0.5) * 5.9604644775390625e-08
    # log(1 - x) = -2 atanh(x / (2 - x)): for x below 0.29, five terms of the series are exact to float32.
    z = lacking / (2.0 - lacking)
    square = z * z
    series = 1.0 + square * (1 / 3 + square * (1 / 5 + square * (1 / 7 + square * (1 / 9))))
    return tl.where(lacking < 0.29, -2.0 * z * series, tl.log(quotient))
