"""What a trainer sends in parts: the process groups that this engine is in, and the update that is being collected.

Tensors are received by threads of their own and added to the collection by the thread of the step loop. A part that
does not fit the model is received to its end and then refused, so that the trainer gets the reason instead of waiting.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future

import torch

from headgate.device.memory import finish_copies, free_bytes
from headgate.device.weights import ipc
from headgate.device.weights.ipc import SharedWeights
from headgate.device.weights.source import WeightSource
from headgate.device.weights.staging import Shapes, StagedWeights, Tensors, info_of
from headgate.device.weights.trainer_groups import DaemonWorker, JoinedGroup
from headgate.errors import BrokenCheckpoint, RequestError
from headgate.models.quantisation import Quantisation
from headgate.protocol.command import (
    Collected,
    GroupPart,
    JoinGroup,
    Part,
    SharedMemorySource,
    SharedOnGpus,
    SharedStorage,
    TensorSpec,
)

Room = Callable[[torch.device], int]


class WeightWires:
    """Owns the groups and the collected parts. All methods are called by the thread of the step loop."""

    def __init__(
        self,
        expected: Shapes,
        device: torch.device,
        room: Room = free_bytes,
        quantisation: Quantisation | None = None,
    ) -> None:
        self._expected = expected
        self._quantisation = quantisation
        self._device = device
        self._room = room
        self._groups: dict[str, JoinedGroup] = {}
        self._copier: DaemonWorker | None = None
        self._mapped: dict[SharedStorage, torch.UntypedStorage] = {}  # used by the copier's thread only
        self._staged = self._empty()

    def __len__(self) -> int:
        """The number of collected tensors."""
        return len(self._staged)

    def join(self, command: JoinGroup) -> Future[None]:
        """Join a group. A group of the same name is left first, and what it has sent is dropped."""
        if self.leave(command.name):
            self.discard()
        group = self._groups[command.name] = JoinedGroup(command, self._device)
        return group.join()

    def leave(self, name: str) -> bool:
        """Leave a group; returns whether there was one."""
        if (group := self._groups.pop(name, None)) is None:
            return False
        group.close()
        return True

    def receive(self, part: Part, *, anew: bool, timeout_s: float) -> Future[Tensors]:
        """Receive the tensors of `part`; `add` adds them."""
        part = self._own(part)
        specs = specs_of(part)
        if anew and any(spec.name in self._staged for spec in specs):
            self.discard()
        keep = self._keeper(specs)
        match part:
            case GroupPart(group=name):
                if name not in self._groups:
                    known = ", ".join(sorted(self._groups)) or "none"
                    message = f"there is no group {name!r}; initialize it first (there are: {known})"
                    raise RequestError(message, param="group_name", code="no_group")
                return self._groups[name].receive(part, keep, timeout_s)
            case SharedMemorySource():
                return self._copying().submit(lambda: self._copy(part, keep))

    def add(self, part: Part, tensors: Tensors) -> Collected:
        self._staged.verify(specs_of(self._own(part)))
        self._staged.add(tensors)
        return self._staged.state()

    def discard(self) -> None:
        """Drop the collected parts; a part that is being received is dropped when it has arrived."""
        self._staged = self._empty()
        self._unmap()

    def open(self) -> WeightSource:
        """The collected parts, which are no longer collected after this call."""
        staged, self._staged = self._staged, self._empty()
        self._unmap()
        return staged

    def close(self) -> None:
        for name in list(self._groups):
            self.leave(name)
        self.discard()

    def _empty(self) -> StagedWeights:
        return StagedWeights(self._expected, self._device, self._room, self._quantisation)

    def _keeper(self, specs: tuple[TensorSpec, ...]) -> Callable[[TensorSpec, torch.Tensor], torch.Tensor | None]:
        staged, fits = self._staged, True
        place: torch.device | None = None
        try:
            staged.verify(specs)
        except BrokenCheckpoint:
            fits = False  # `add` raises it after the tensors have been received
        wanted = [spec for spec in specs if staged.wants(spec.name)]
        if fits and wanted:
            place = staged.place(info_of(wanted[0]).dtype)
        return lambda spec, tensor: tensor.to(place) if place is not None and staged.wants(spec.name) else None

    def _own(self, part: Part) -> GroupPart | SharedMemorySource:
        """What this engine receives of `part`."""
        if not isinstance(part, SharedOnGpus):
            return part
        ours = ipc.gpu_of(self._device)
        for source in part.sources:
            if source.gpu == ours:
                return source
        found = ", ".join(source.gpu for source in part.sources)
        raise BrokenCheckpoint(f"there are handles for the GPUs {found}, and this engine is on {ours or 'a CPU'!r}")

    def _copy(
        self, source: SharedMemorySource, keep: Callable[[TensorSpec, torch.Tensor], torch.Tensor | None]
    ) -> Tensors:
        """Copies, because the trainer may change its memory as soon as it is answered.

        The storages of a part stay open until the next part, because some trainers use one buffer for all parts.
        """
        specs = {spec.name: spec for spec in specs_of(source)}
        with SharedWeights(source, self._device, self._mapped) as shared:
            shared.metadata()
            kept = [(name, keep(specs[name], tensor)) for name, tensor in shared]
            copies = [(name, tensor.clone()) for name, tensor in kept if tensor is not None]
            self._mapped = dict(zip(source.storages, shared.opened, strict=True))
            finish_copies(self._device)
        return copies

    def _unmap(self) -> None:
        if self._copier is not None:
            self._copier.submit(lambda: setattr(self, "_mapped", {}))

    def _copying(self) -> DaemonWorker:
        if self._copier is None:
            self._copier = DaemonWorker("headgate-copies", self._device)
        return self._copier


def specs_of(part: GroupPart | SharedMemorySource) -> tuple[TensorSpec, ...]:
    if isinstance(part, GroupPart):
        return part.tensors
    return tuple(TensorSpec(tensor.name, tensor.dtype, tensor.shape) for tensor in part.tensors)
