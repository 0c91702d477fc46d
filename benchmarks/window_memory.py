"""Prints the KV that one sequence holds while it generates, of models with attention windows.

python benchmarks/window_memory.py [--context 131072]

The layouts are those of published configs. Nothing is allocated. "all" is the KV of all layers for the whole context,
which a model without windows holds.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass

from headgate.models.kv_layout import kv_layout
from headgate.protocol.groups import LayerGroups

BLOCK_SIZE, BYTES = 32, 2  # bfloat16
MIB = 2**20


@dataclass(frozen=True, slots=True)
class Shape:
    windows: list[int | None]
    kv_heads: int
    head_dim: int


SHAPES = {
    "gpt-oss-20b": Shape([128, None] * 12, 8, 64),
    "gpt-oss-120b": Shape([128, None] * 18, 8, 64),
    "gemma-2-9b": Shape([4096, None] * 21, 8, 256),
    "gemma-3-4b": Shape([None if i % 6 == 5 else 1024 for i in range(34)], 4, 256),
    "gemma-3-27b": Shape([None if i % 6 == 5 else 1024 for i in range(62)], 16, 128),
    "mistral-7b-v0.1": Shape([4096] * 32, 8, 128),
}


def held_mib(shape: Shape, context: int) -> dict[str, float]:
    layout = kv_layout(shape.windows)
    groups = LayerGroups(BLOCK_SIZE, layout.windows)
    token_bytes = 2 * shape.kv_heads * shape.head_dim * BYTES  # of one layer
    stripes = groups.stripes_for(context)
    return {
        "groups": len(groups),
        "all": stripes * BLOCK_SIZE * token_bytes * len(shape.windows) / MIB,
        "held": groups.most_blocks(stripes, 1) * BLOCK_SIZE * token_bytes * layout.caches / MIB,
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--context", type=int, default=131_072)
    context = parser.parse_args().context
    print(json.dumps({name: held_mib(shape, context) for name, shape in SHAPES.items()}, indent=2))
