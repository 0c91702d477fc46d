"""The weights of a source as the model names them, whichever way they are stored.

A quantised weight is stored in several tensors, its components (`layers/stored.py`), which a source yields in any order.
`WholeWeights` keeps the components of a weight until all are there. Everything that can be verified before the first weight
is yielded is verified by `metadata`: types, shapes, missing and superfluous components, and the values of scales if the
source can read single tensors.

A source may send any weight unquantised, so trainers can send what they train.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch

from headgate.device.weights.source import TensorInfo, WeightSource, type_name
from headgate.errors import BrokenCheckpoint
from headgate.layers.formats import Weight, floating
from headgate.layers.stored import Component, Kind, StoredFormat
from headgate.models.quantisation import Quantisation


@dataclass(frozen=True, slots=True)
class StoredWeight:
    """One quantised weight: its components, and what they make."""

    name: str
    format: StoredFormat
    components: Mapping[Kind, Component]
    shape: tuple[int, ...]

    @property
    def used(self) -> dict[Kind, Component]:
        return {kind: component for kind, component in self.components.items() if kind != "skipped"}

    def verify(self, kind: Kind, tensor: torch.Tensor) -> None:
        if kind != "numbers":
            self.format.verify(kind, self.components[kind].name, tensor, self.components)


@dataclass(slots=True)
class FoundWeights:
    """What a source has: unquantised tensors, and quantised weights by the names of their components."""

    tensors: dict[str, TensorInfo] = field(default_factory=dict)
    components: dict[str, tuple[StoredWeight, Kind]] = field(default_factory=dict)
    skipped: set[str] = field(default_factory=set)


class WholeWeights:
    """Iterates the weights of `source`. `unused`: how names begin that the model has no place for."""

    def __init__(self, source: WeightSource, quantisation: Quantisation | None, unused: tuple[str, ...] = ()) -> None:
        self._source = source
        self._quantisation = quantisation
        self._unused = unused
        self._found = FoundWeights()

    def metadata(self) -> dict[str, TensorInfo]:
        """Every weight that iteration will yield, as if it were not quantised."""
        stored = self._source.metadata()
        if self._quantisation is None:
            self._found = FoundWeights(dict(stored))
            return dict(stored)
        self._found = find_weights(stored, self._quantisation, self._unused)
        weights = {weight.name: weight for weight, _ in self._found.components.values()}
        self._verify_values(weights)
        return self._found.tensors | {
            name: TensorInfo(torch.float32, weight.shape) for name, weight in weights.items()
        }

    def _verify_values(self, weights: Mapping[str, StoredWeight]) -> None:
        read = getattr(self._source, "read", None)
        if read is None:
            return
        for weight in weights.values():
            for kind, component in weight.used.items():
                if kind != "numbers":
                    weight.verify(kind, read(component.name))

    def __iter__(self) -> Iterator[tuple[str, Weight]]:
        waiting: dict[str, dict[Kind, torch.Tensor]] = {}
        for name, tensor in self._source:
            if name in self._found.skipped:
                continue
            if isinstance(tensor, Weight) or name not in self._found.components:
                yield name, tensor if isinstance(tensor, Weight) else floating(tensor)
                continue
            weight, kind = self._found.components[name]
            weight.verify(kind, tensor)
            arrived = waiting.setdefault(weight.name, {})
            arrived[kind] = tensor
            if len(arrived) == len(weight.used):
                yield weight.name, weight.format.weight(waiting.pop(weight.name), weight.components)
            else:  # it is valid until the next tensor is requested
                arrived[kind] = tensor.clone()


def find_weights(
    stored: Mapping[str, TensorInfo], quantisation: Quantisation, unused: tuple[str, ...] = ()
) -> FoundWeights:
    """Sort the tensors of a source into weights. Raises BrokenCheckpoint if some do not make a weight."""
    found, groups = FoundWeights(), dict[str, dict[Kind, Component]]()
    for name, info in stored.items():
        belongs = None if unused and name.startswith(unused) else quantisation.component_of(name, info.dtype)
        match belongs:
            case None:
                found.tensors[name] = info
            case _, "skipped":
                found.skipped.add(name)
            case weight_name, kind:
                group = groups.setdefault(weight_name, {})
                if kind in group:
                    both = f"{group[kind].name} and {name}"
                    raise BrokenCheckpoint(f"the checkpoint has tensors {both}, which mean the same")
                group[kind] = Component(name, info.dtype, info.shape)
    for name, group in groups.items():
        weight = stored_weight(name, group, found.tensors, quantisation)
        found.components |= {component.name: (weight, kind) for kind, component in group.items()}
    return found


def stored_weight(
    name: str, group: Mapping[Kind, Component], tensors: Mapping[str, TensorInfo], quantisation: Quantisation
) -> StoredWeight:
    component = next(iter(group.values()))
    if name in tensors:
        kind = type_name(tensors[name].dtype)
        raise BrokenCheckpoint(f"the checkpoint has tensor {component.name} beside {name}, which is in {kind}")
    format = quantisation.format_of(name)
    if format is None:
        raise BrokenCheckpoint(
            f"the checkpoint has tensor {component.name}, and its config says that {name} is not quantised"
        )
    return StoredWeight(name, format, group, format.shape(group))
