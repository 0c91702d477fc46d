"""The base class of SGLang's engines; it has no code of its own."""  # noqa: N999 - SGLang's name

from __future__ import annotations


class EngineBase:
    pass
