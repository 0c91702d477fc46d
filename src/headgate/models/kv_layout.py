"""How the layers of a model share KV blocks: groups of layers with the same attention window.

A block holds KV for as many layers as a group has, so all blocks have the same size. Each layer of a group has a cache of
its own; the groups share the caches, and their blocks are different ones. A group with fewer layers leaves some caches of
its blocks unused. Group sizes follow the smallest kind of layers, so that little is unused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

MOST_GROUPS = 8  # each is one more block table per sequence


class LayerPlace(NamedTuple):
    """Where the KV of a layer is."""

    group: int
    cache: int


@dataclass(frozen=True, slots=True)
class KvLayout:
    windows: tuple[int | None, ...]  # of each group; None: its layers see everything
    places: tuple[LayerPlace, ...]  # of each layer

    @property
    def caches(self) -> int:
        """The number of layers that a block has room for."""
        return max(place.cache for place in self.places) + 1


def kv_layout(windows: Sequence[int | None]) -> KvLayout:
    """Divide layers with these windows into groups. Layers that see everything come first."""
    kinds: dict[int | None, list[int]] = {None: []} if None in windows else {}
    for layer, window in enumerate(windows):
        kinds.setdefault(window, []).append(layer)
    size = min(map(len, kinds.values()))
    groups = [
        (window, layers[start : start + size])
        for window, layers in kinds.items()
        for start in range(0, len(layers), size)
    ]
    if len(groups) > MOST_GROUPS:
        groups = [(widest(windows), list(range(len(windows))))]
    places = {
        layer: LayerPlace(group, cache)
        for group, (_, layers) in enumerate(groups)
        for cache, layer in enumerate(layers)
    }
    return KvLayout(tuple(window for window, _ in groups), tuple(places[layer] for layer in range(len(windows))))


def widest(windows: Sequence[int | None]) -> int | None:
    known = [window for window in windows if window is not None]
    return max(known) if len(known) == len(windows) else None
