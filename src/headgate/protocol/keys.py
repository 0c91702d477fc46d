"""Prefix-cache keys: a chain of 128-bit digests, one per full block.

A key covers everything that determines the content of a KV block: the tokens of the block and of all blocks before it, the
weights that computed it, the adapter, and the tenant's salt. Equal keys mean equal KV, on any engine.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from functools import lru_cache
from hashlib import blake2b

Key = bytes

KEY_BYTES = 16
RUN = 16  # blocks per cache entry of `_known_keys`
PIECE = 512  # tokens per cache entry of `_largest`


def root_key(version: int, adapter: str = "", salt: str = "") -> Key:
    """The parent key of a sequence's first block; different weights, adapters or tenants never share a block."""
    # repr() quotes the strings, so ("a", "b") and ("ab", "") cannot collide.
    return blake2b(repr((version, adapter, salt)).encode(), digest_size=KEY_BYTES).digest()


def tenant_salt(tenant: str, salt: str) -> str:
    """The salt of a caller's prompts; `tenant` is empty for callers without a key. Different pairs give different salts."""
    return repr((tenant, salt))


def next_keys(parent: Key, tokens: Sequence[int], block_size: int) -> list[Key]:
    """The keys of the consecutive full blocks that `tokens` form; `parent` is the key of the block before them."""
    data = array("I", tokens)
    size = block_size * data.itemsize
    keys: list[Key] = []
    for start in range(0, len(data), RUN * block_size):
        run = data[start : start + RUN * block_size].tobytes()
        keys += _known_keys(parent, run, size) if len(run) == RUN * size else _keys(parent, run, size)
        parent = keys[-1]
    return keys


def _keys(parent: Key, data: bytes, size: int) -> tuple[Key, ...]:
    keys = []
    for start in range(0, len(data), size):
        parent = blake2b(parent + data[start : start + size], digest_size=KEY_BYTES).digest()
        keys.append(parent)
    return tuple(keys)


def largest(tokens: array[int]) -> int:
    """The largest token id."""
    return max(_largest(tokens[start : start + PIECE].tobytes()) for start in range(0, len(tokens), PIECE))


# Many requests begin with the same few thousand tokens, and hashing them is the main cost of admitting a request.
_known_keys = lru_cache(maxsize=1024)(_keys)


@lru_cache(maxsize=1024)
def _largest(tokens: bytes) -> int:
    return max(memoryview(tokens).cast("I"))
