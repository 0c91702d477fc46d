"""The compiled fast path, which routers use in production."""

from __future__ import annotations

from functools import cache

from headgate.router.data_path.fast_path import FastPath, compiled


@cache
def compiled_fast_path() -> FastPath:
    fast_path = compiled()
    assert isinstance(fast_path, FastPath), fast_path
    return fast_path
