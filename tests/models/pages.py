"""Runs a model by hand: sequences in scattered blocks of a cache, any mix of chunks per step."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

import torch

from headgate.device.weights.loading import SafetensorsFolder, load_weights
from headgate.layers.batch import Batch, of_groups
from headgate.layers.choice import available_backends
from headgate.models import Network, build_model, read_spec
from headgate.protocol.groups import LayerGroups

BACKENDS = available_backends()
BLOCK_SIZE = 16
FOREIGN = 100.0  # written to blocks that no window needs, as another sequence would


def load(folder, **options) -> Network:
    model = build_model(read_spec(folder), **options)
    load_weights(model, SafetensorsFolder(folder))
    return model


class Pages:
    """Sequences in a paged cache. Blocks that no attention window needs are overwritten after each step, unless
    they are `cached`.

    `step({"a": tokens})` computes the next tokens of "a" and returns their logits.
    """

    def __init__(self, model: Network, num_blocks: int = 64, seed: int = 0, *, cached: bool = False) -> None:
        self.model = model
        self.cached = cached  # what windows have passed stays in the cache
        self.groups = LayerGroups(BLOCK_SIZE, model.spec.kv_layout.windows)
        num_blocks *= len(self.groups)
        self.kv = model.allocate_kv(num_blocks, BLOCK_SIZE)
        self.free = random.Random(seed).sample(range(num_blocks), num_blocks)
        self.blocks: dict[str, list[list[int]]] = {}  # of each stripe, one per group of layers
        self.lengths: dict[str, int] = {}

    def step(self, chunks: Mapping[str, Sequence[int]]) -> dict[str, torch.Tensor]:
        with torch.inference_mode():
            logits = self.model.logits(self.model(self.batch(chunks), self.kv))
        for name in () if self.cached else chunks:
            self.overwrite_passed(name)
        sizes = [len(chunk) for chunk in chunks.values()]
        return dict(zip(chunks, logits.split(sizes), strict=True))

    def batch(self, chunks: Mapping[str, Sequence[int]]) -> Batch:
        starts = {name: self.lengths.get(name, 0) for name in chunks}
        for name, chunk in chunks.items():
            self.grow(name, starts[name] + len(chunk))
        return of_groups([self.batch_of(group, chunks, starts) for group in range(len(self.groups))])

    def batch_of(self, group: int, chunks: Mapping[str, Sequence[int]], starts: Mapping[str, int]) -> Batch:
        places = [(name, starts[name] + i) for name, chunk in chunks.items() for i in range(len(chunk))]
        sizes = [len(chunk) for chunk in chunks.values()]
        contexts = [self.lengths[name] for name in chunks]
        width = max(len(self.blocks[name]) for name in chunks)
        tables = {name: [stripe[group] for stripe in self.blocks[name]] for name in chunks}
        padded = [table + [-1] * (width - len(table)) for table in tables.values()]
        return Batch(
            tokens=torch.tensor([token for chunk in chunks.values() for token in chunk]),
            positions=torch.tensor([position for _, position in places]),
            slots=torch.tensor([self.slot(name, group, position) for name, position in places]),
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
            blocks.append([self.free.pop() for _ in range(len(self.groups))])

    def overwrite_passed(self, name: str) -> None:
        shared = {
            block for other, stripes in self.blocks.items() if other != name for stripe in stripes for block in stripe
        }
        for place in self.groups.passed(0, self.lengths[name]):
            block = self.blocks[name][place // len(self.groups)][place % len(self.groups)]
            if block not in shared:
                for cache in self.kv:
                    cache.k[block], cache.v[block] = FOREIGN, FOREIGN

    def share(self, name: str, other: str, num_blocks: int) -> None:
        """Start `name` with the first blocks of `other`: a prefix hit."""
        self.blocks[name] = self.blocks[other][:num_blocks]
        self.lengths[name] = num_blocks * BLOCK_SIZE

    def slot(self, name: str, group: int, position: int) -> int:
        return self.blocks[name][position // BLOCK_SIZE][group] * BLOCK_SIZE + position % BLOCK_SIZE


def chunked(tokens: Sequence[int], *sizes: int) -> list[Sequence[int]]:
    """Return chunks of `sizes`, and the rest."""
    chunks, start = [], 0
    for size in (*sizes, len(tokens)):
        chunks.append(tokens[start : start + size])
        start += size
    return [chunk for chunk in chunks if chunk]


def prompt(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(256), k=length)
