"""Prefix-cache keys: a chain of 128-bit digests, one per full block.

A key names everything that decides the content of a KV block: the tokens of the block and of all blocks before
it, the weights that computed it, the adapter, and the tenant's salt. Equal keys mean equal KV, on any engine.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b

Key = bytes

KEY_BYTES = 16


def root_key(version: int, adapter: str = "", salt: str = "") -> Key:
    """The parent of a sequence's first block; different weights, adapters or tenants never share a block."""
    # repr() quotes the strings, so ("a", "b") and ("ab", "") cannot collide.
    return blake2b(repr((version, adapter, salt)).encode(), digest_size=KEY_BYTES).digest()


def next_key(parent: Key, tokens: Sequence[int]) -> Key:
    """The key of a full block whose predecessor has key `parent`."""
    return blake2b(parent + array("I", tokens).tobytes(), digest_size=KEY_BYTES).digest()
