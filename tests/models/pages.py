"""Runs a model by hand: sequences in scattered blocks of a cache, any mix of chunks per step."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

import torch

from headgate.device.weights.loading import SafetensorsFolder, load_weights
from headgate.layers.batch import Batch
from headgate.layers.choice import available_backends
from headgate.models import Network, build_model, read_spec

BACKENDS = available_backends()
BLOCK_SIZE = 16


def load(folder, **options) -> Network:
    model = build_model(read_spec(folder), **options)
    load_weights(model, SafetensorsFolder(folder))
    return model


class Pages:
    """Sequences in a paged cache. `step({"a": tokens})` computes the next tokens of "a" and returns their logits."""

    def __init__(self, model: Network, num_blocks: int = 64, seed: int = 0) -> None:
        self.model = model
        self.kv = model.allocate_kv(num_blocks, BLOCK_SIZE)
        self.free = random.Random(seed).sample(range(num_blocks), num_blocks)
        self.blocks: dict[str, list[int]] = {}
        self.lengths: dict[str, int] = {}

    def step(self, chunks: Mapping[str, Sequence[int]]) -> dict[str, torch.Tensor]:
        with torch.inference_mode():
            logits = self.model.logits(self.model(self.batch(chunks), self.kv))
        sizes = [len(chunk) for chunk in chunks.values()]
        return dict(zip(chunks, logits.split(sizes), strict=True))

    def batch(self, chunks: Mapping[str, Sequence[int]]) -> Batch:
        starts = {name: self.lengths.get(name, 0) for name in chunks}
        for name, chunk in chunks.items():
            self.grow(name, starts[name] + len(chunk))
        places = [(name, starts[name] + i) for name, chunk in chunks.items() for i in range(len(chunk))]
        sizes = [len(chunk) for chunk in chunks.values()]
        contexts = [self.lengths[name] for name in chunks]
        width = max(len(self.blocks[name]) for name in chunks)
        padded = [self.blocks[name] + [-1] * (width - len(self.blocks[name])) for name in chunks]
        return Batch(
            tokens=torch.tensor([token for chunk in chunks.values() for token in chunk]),
            positions=torch.tensor([position for _, position in places]),
            slots=torch.tensor([self.slot(name, position) for name, position in places]),
            query_starts=torch.tensor([0, *sizes]).cumsum(0).int(),
            context_lens=torch.tensor(contexts, dtype=torch.int32),
            block_tables=torch.tensor(padded, dtype=torch.int32),
            max_query=max(sizes),
            max_context=max(contexts),
        )

    def grow(self, name: str, length: int) -> None:
        self.lengths[name] = length
        blocks = self.blocks.setdefault(name, [])
        while len(blocks) * BLOCK_SIZE < length:
            blocks.append(self.free.pop())

    def share(self, name: str, other: str, num_blocks: int) -> None:
        """Start `name` with the first blocks of `other`: a prefix hit."""
        self.blocks[name] = self.blocks[other][:num_blocks]
        self.lengths[name] = num_blocks * BLOCK_SIZE

    def slot(self, name: str, position: int) -> int:
        return self.blocks[name][position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE


def chunked(tokens: Sequence[int], *sizes: int) -> list[Sequence[int]]:
    """Return chunks of `sizes`, and the rest."""
    chunks, start = [], 0
    for size in (*sizes, len(tokens)):
        chunks.append(tokens[start : start + size])
        start += size
    return [chunk for chunk in chunks if chunk]


def prompt(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(256), k=length)
