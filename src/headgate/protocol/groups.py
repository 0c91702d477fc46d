"""Groups of layers, and which KV of a sequence each group needs.

Layers with different attention windows need KV of different parts of a sequence. They are in groups: all layers of a
group have the same window, and a block holds the KV of `block_size` tokens for the layers of one group. A *stripe* is
the blocks of `block_size` consecutive tokens, one per group, in the order of the groups. Wherever blocks of a sequence
are listed, they are listed stripe by stripe. A model without windows has one group, and a stripe is one block.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

# In a list of blocks, stands for one that the sequence does not hold: the window of its group has passed the tokens of
# the block, or has not reached them.
ABSENT = -1


@dataclass(frozen=True, slots=True)
class LayerGroups:
    block_size: int  # tokens per block
    windows: tuple[int | None, ...] = (None,)  # of each group: how many tokens back its layers see; None: all

    def __post_init__(self) -> None:
        assert self.windowed or len(self) == 1, "layers without windows are one group"

    def __len__(self) -> int:
        return len(self.windows)

    @property
    def windowed(self) -> bool:
        """Whether blocks are given back while a sequence runs."""
        return self.windows != (None,) * len(self.windows)

    def stripes_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def first_needed(self, group: int, position: int) -> int:
        """The first stripe that `group` needs to compute the token at `position`, or the one before it again.

        A step that samples nothing is followed by one that computes its last token again; see `StepResult.lengths`.
        """
        window = self.windows[group]
        return 0 if window is None else max(0, position - window) // self.block_size

    def passed(self, before: int, position: int) -> list[int]:
        """The places, in a list of blocks, of those that are needed at position `before` and not at `position`."""
        count = len(self)
        return [
            stripe * count + group
            for group in range(count)
            for stripe in range(self.first_needed(group, before), self.first_needed(group, position))
        ]

    def places_for(self, position: int, stripes: int, *, start: int = 0) -> list[int]:
        """The places of those blocks in stripes `start` to `stripes - 1` that are needed at `position`."""
        needed = [self.first_needed(group, position) for group in range(len(self))]
        return [
            stripe * len(self) + group
            for stripe in range(start, stripes)
            for group, first in enumerate(needed)
            if stripe >= first
        ]

    def count_for(self, position: int, stripes: int) -> int:
        """How many blocks of the first `stripes` stripes are needed at `position`."""
        return sum(max(0, stripes - self.first_needed(group, position)) for group in range(len(self)))

    def lacking(self, blocks: Sequence[int], start: int, stripes: int, whole: int) -> Sequence[int]:
        """The places to be filled so that stripes `start` to `stripes - 1` are complete.

        Groups without a window get their blocks of the stripes up to `whole`, too.
        """
        if not self.windowed:
            return range(len(blocks), whole)
        count = len(self)
        return [
            place
            for place in range(start * count, max(stripes, whole) * count)
            if (place < stripes * count or self.windows[place % count] is None)
            and (place >= len(blocks) or blocks[place] == ABSENT)
        ]

    # -- how many blocks a sequence needs -------------------------------------------

    def most_blocks(self, stripes: int, batch_tokens: int) -> int:
        """The most blocks that a sequence of `stripes` stripes holds, if no step computes more than `batch_tokens`."""
        return sum(
            stripes if window is None else min(stripes, (window + batch_tokens - 2) // self.block_size + 2)
            for window in self.windows
        )

    def longest_context(self, num_blocks: int, batch_tokens: int, wanted: int) -> int:
        """The most tokens of a sequence, up to those of `wanted` tokens' stripes, that fit into `num_blocks` blocks."""
        stripes = range(self.stripes_for(wanted) + 1)
        return (
            bisect_right(stripes, num_blocks, key=lambda n: self.most_blocks(n, batch_tokens)) - 1
        ) * self.block_size

    # -- the prefix cache -----------------------------------------------------------

    def usable_prefix(self, found: Sequence[int]) -> int:
        """The most leading stripes after which a sequence can continue with the blocks in `found`."""
        count = len(self)
        columns = [found[group::count] for group in range(count)]
        stripes = len(columns[0])
        while (shorter := min(self._up_to_gap(*entry, stripes) for entry in enumerate(columns))) < stripes:
            stripes = shorter
        return stripes

    def _up_to_gap(self, group: int, column: Sequence[int], stripes: int) -> int:
        """`stripes`, or if one that `group` needs after them is absent, the stripes before it."""
        first = self.first_needed(group, stripes * self.block_size)
        needed = column[first:stripes]
        return first + needed.index(ABSENT) if ABSENT in needed else stripes


def present(blocks: Iterable[int]) -> list[int]:
    """The blocks in a list of stripes that are not absent."""
    return [block for block in blocks if block != ABSENT]


def group_keys(keys: Sequence[bytes], groups: int) -> list[bytes]:
    """The keys of all blocks of the stripes with `keys`."""
    if groups == 1:
        return list(keys)
    endings = [b"", *(group.to_bytes(1, "little") for group in range(1, groups))]
    return list(chain.from_iterable((key + ending for ending in endings) for key in keys))
