"""In the place of torch, in an environment whose Python has no CPU build of it.

SkyRL's clients import modules that mention torch's types when they are defined. The clients themselves call nothing of
torch: any call of these empty classes raises.
"""

from __future__ import annotations


def __getattr__(name: str) -> type:
    if name.startswith("__"):
        raise AttributeError(name)
    return type(name, (), {})
