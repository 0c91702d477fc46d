"""A model whose logits are a hash of the KV that it reads, and a simple sampler that works on one row at a time.

`HashModel` writes token ids into the cache and reads them back through slots and tables, so a wrong token, position,
slot or table gives a wrong hash. `expected_tokens` uses no cache, rows or batches, but only lists.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import torch

from headgate.contract.sampling import SamplingParams
from headgate.device.rows import Rows
from headgate.device.runner import ModelRunner
from headgate.layers.backend import KV
from headgate.layers.batch import Batch
from headgate.layers.parameter import WeightParameter, tensor_parameter
from headgate.protocol.plan import Join, StepPlan

PRIME = 1_000_003
VOCAB = 97
EOS = 2


def hash_of(tokens: list[int], weight: int = 1) -> int:
    return weight * sum((token + 1) * (i + 1) ** 2 for i, token in enumerate(tokens)) % PRIME


def logits_of(hashes: torch.Tensor) -> torch.Tensor:
    """Return logits [R, VOCAB] between -3 and 3. Integer arithmetic makes them the same in every batch."""
    ids = torch.arange(1, VOCAB + 1)
    return ((hashes.view(-1, 1) * ids * 7919 + ids * ids * 104_729) % PRIME).float() * (6 / PRIME) - 3


class HashModel:
    def __init__(self) -> None:
        self.weight = torch.ones(1, dtype=torch.int64)

    def __call__(self, batch: Batch, kv: list[KV]) -> torch.Tensor:
        cache = kv[0].k
        cache.view(-1)[batch.slots] = batch.tokens
        starts, contexts = batch.query_starts.tolist(), batch.context_lens.tolist()
        assert batch.max_context == max(contexts)
        assert batch.max_query == max(np.diff(starts))
        hashes: list[int] = []
        for s, context in enumerate(contexts):
            read = cache[batch.block_tables[s].long()].view(-1)[:context].tolist()
            positions = batch.positions[starts[s] : starts[s + 1]].tolist()
            assert positions[-1] == context - 1
            hashes += [hash_of(read[: position + 1], int(self.weight)) for position in positions]
        return torch.tensor(hashes)[:, None]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return logits_of(hidden)

    def parameters(self) -> Iterator[tuple[str, WeightParameter]]:
        yield "weight", tensor_parameter(self.weight)


def hash_runner(
    *, max_rows: int = 40, max_context: int = 64, block_size: int = 4, num_blocks: int = 640, max_tokens: int = 512
) -> ModelRunner:
    rows = Rows(max_rows=max_rows, max_context=max_context, block_size=block_size, vocab_size=VOCAB, eos_ids=(EOS,))
    rows.tokens.fill_(-7)  # not a token: reading a position that was never written gives a wrong hash
    cache = torch.full((num_blocks, block_size), -9)
    return ModelRunner(HashModel(), [KV(cache, cache)], rows, max_tokens=max_tokens)


def step_plan(step: int, slices: list[tuple[int, int, int, bool]], **more: object) -> StepPlan:
    """Return a plan of (row, start, count, samples) slices."""
    rows, starts, counts, samples = (list(column) for column in zip(*slices, strict=True)) if slices else ([],) * 4
    return StepPlan(step, 0, rows, starts, counts, samples, **more)  # type: ignore[arg-type]


class Text:
    """A sequence, with the part of a scheduler that makes plans for its row."""

    def __init__(
        self, row: int, prompt: list[int], sampling: SamplingParams, *, blocks: list[int], block_size: int = 4
    ) -> None:
        self.row, self.prompt, self.sampling = row, prompt, sampling
        self.blocks, self.block_size = blocks, block_size
        self.computed, self.shown = 0, 0

    def join(self, generated: list[int] | None = None) -> Join:
        tokens = (*self.prompt, *(generated or ()))
        self.shown = -(-len(tokens) // self.block_size)
        return Join(self.row, tokens, len(self.prompt), self.sampling, tuple(self.blocks[: self.shown]))

    def advance(self, count: int, samples: bool) -> tuple[int, int, int, bool]:
        self.computed += count
        return self.row, self.computed - count, count, samples

    def grown(self) -> tuple[tuple[int, tuple[int, ...]], ...]:
        """Return the blocks that the tokens computed so far need, but that were not sent to the device yet."""
        need = -(-self.computed // self.block_size)
        new = tuple(self.blocks[self.shown : need])
        self.shown = max(self.shown, need)
        return ((self.row, new),) if new else ()


def expected_tokens(prompt: list[int], sampling: SamplingParams, count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        logits = logits_of(torch.tensor([hash_of(tokens)]))[0].numpy()
        tokens.append(brute_force(logits, tokens, len(prompt), sampling))
    return tokens[len(prompt) :]


def brute_force(logits: np.ndarray, tokens: list[int], prompt_len: int, sampling: SamplingParams) -> int:
    """Return the token after `tokens`, computed in the simplest way: one loop per sampling rule."""
    adjusted = adjust(logits, tokens, prompt_len, sampling)
    if sampling.temperature == 0:
        return int(np.argmax(adjusted))
    scaled = adjusted / np.float32(sampling.temperature)
    key = mix64((sampling.seed or 0) + len(tokens) * 0x9E3779B97F4A7C15)
    return max(sorted(kept_ids(scaled, sampling)), key=lambda i: float(scaled[i]) + noise(key, i))


def adjust(logits: np.ndarray, tokens: list[int], prompt_len: int, sampling: SamplingParams) -> np.ndarray:
    out = logits.astype(np.float32).copy()
    for token, bias in sampling.logit_bias.items():
        out[token : token + 1] += np.float32(bias)  # a slice past the end is empty, and so without effect
    answer = tokens[prompt_len:]
    if len(answer) < sampling.min_tokens:
        for token in (*sampling.stop_token_ids, *(() if sampling.ignore_eos else (EOS,))):
            out[token : token + 1] = -np.inf
    for token in set(tokens):
        penalty = np.float32(sampling.repetition_penalty)
        out[token] = out[token] / penalty if out[token] > 0 else out[token] * penalty
    for token in set(answer):
        out[token] -= np.float32(answer.count(token)) * np.float32(sampling.frequency_penalty)
        out[token] -= np.float32(sampling.presence_penalty)
    return out


def kept_ids(scaled: np.ndarray, sampling: SamplingParams) -> set[int]:
    ids = set(range(len(scaled)))
    if sampling.top_k:
        kth = sorted(scaled.tolist(), reverse=True)[min(sampling.top_k, len(scaled)) - 1]
        ids = {i for i in ids if scaled[i] >= kth}
    best = max(float(scaled[i]) for i in ids)
    total = sum(math.exp(float(scaled[i]) - best) for i in ids)
    p = {i: math.exp(float(scaled[i]) - best) / total for i in ids}
    if sampling.top_p < 1:
        ids = {i for i in ids if sum(p[j] for j in p if scaled[j] > scaled[i]) < sampling.top_p}
    return {i for i in ids if p[i] >= sampling.min_p * max(p.values()) * (1 - 1e-9)}


def mix64(x: int) -> int:
    x %= 2**64
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ x >> 27) * 0x94D049BB133111EB % 2**64
    return x ^ x >> 31


def noise(key: int, i: int) -> float:
    x = (key + i * 0x9E3779B9) % 2**32 ^ key >> 32
    x = (x ^ x >> 16) * 0x7FEB352D % 2**32
    x = (x ^ x >> 15) * 0x846CA68B % 2**32
    x ^= x >> 16
    return -math.log(-math.log(((x >> 8) + 0.5) * 2.0**-24))
