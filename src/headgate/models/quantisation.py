"""How the weights of a checkpoint are stored, if they are quantised: the formats, and the modules that have them."""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch

from headgate.layers.stored import Kind, StoredFormat

ALL_MATRICES = "Linear"


@dataclass(frozen=True, slots=True)
class FormatGroup:
    """The modules that share a format: names, patterns that begin with `re:`, or all matrices."""

    targets: tuple[str, ...]
    format: StoredFormat


@dataclass(frozen=True, slots=True)
class Quantisation:
    """How quantised weights are stored, and which modules are not quantised."""

    method: str
    groups: tuple[FormatGroup, ...]
    kept: tuple[str, ...] = ()  # modules that are not quantised, as targets
    by_component: bool = False  # an entry of `kept` also names modules below it, and all modules of that last name

    def __str__(self) -> str:
        return f"{self.method}, {' and '.join(dict.fromkeys(str(group.format) for group in self.groups))}"

    def component_of(self, name: str, dtype: torch.dtype) -> tuple[str, Kind] | None:
        """The weight that a stored tensor is a component of; None if it is a weight itself."""
        return self.groups[0].format.component_of(
            name, dtype
        )  # the formats of one method name components in the same way

    def format_of(self, weight: str) -> StoredFormat | None:
        """The format of a quantised weight; None if its module is not quantised."""
        module = weight.removesuffix(".weight")
        if any(self._keeps(target, module) for target in self.kept):
            return None
        for exact in (True, False):  # a module's own name goes before a kind of modules
            for group in self.groups:
                for target in group.targets:
                    if (target != ALL_MATRICES) == exact and matches(target, module):
                        return group.format
        return None

    def _keeps(self, target: str, module: str) -> bool:
        return matches(target, module) or (self.by_component and f".{target}." in f".{module}.")


def matches(target: str, module: str) -> bool:
    if target.startswith("re:"):
        return re.match(target.removeprefix("re:"), module) is not None
    return target in (module, ALL_MATRICES)
