"""The weights and memory of a device: opens the source of an update, and reloads weights after a sleep.

Weights can be reloaded if they came from files that have not changed since. Weights received over the network cannot.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

import torch

from headgate.device.executor import Executor
from headgate.device.memory import free_bytes
from headgate.device.weights.broadcast import CPU, BroadcastWeights
from headgate.device.weights.declared import DeclaredWeights
from headgate.device.weights.file_stamps import Stamps, stamps
from headgate.device.weights.gguf import StoredGGUF
from headgate.device.weights.ipc import SharedWeights
from headgate.device.weights.loading import SafetensorsFiles, SafetensorsFolder
from headgate.device.weights.source import WeightSource
from headgate.errors import SourceLost
from headgate.protocol.command import BroadcastSource, FileSource, SharedMemorySource, Source, StagedSource, Tag


def open_source(source: Source, device: torch.device = CPU) -> WeightSource:
    """Open `source` for a model on `device`, without reading tensors yet. May raise SourceLost or NotAModel."""
    match source:
        case FileSource(path, checksum):
            return open_files(Path(path), checksum)
        case BroadcastSource():
            return BroadcastWeights(source, free_bytes, device)
        case SharedMemorySource():
            return SharedWeights(source, device)
        case StagedSource():
            raise SourceLost("an update is collected in parts by a running engine only")


def open_files(path: Path, checksum: dict[str, str] | None = None) -> WeightSource:
    try:
        if path.suffix == ".safetensors":
            return SafetensorsFiles([path], checksum)
        if path.is_file():
            return StoredGGUF(path, checksum)
        return SafetensorsFolder(path, checksum)
    except OSError as error:
        raise SourceLost(f"{path} cannot be read: {error.strerror}") from error


@dataclass(frozen=True, slots=True)
class Origin:
    """What was loaded, and how to recognise it."""

    source: Source
    stamps: Stamps

    def again(self) -> FileSource:
        """The source to reload. Raises SourceLost if it is missing or has changed."""
        if not isinstance(self.source, FileSource):
            raise SourceLost("the weights came from a trainer and cannot be read again; send them with an update")
        path = Path(self.source.path)
        if not self.stamps or stamps(path) != self.stamps:
            raise SourceLost(f"{path} has changed since it was loaded; send the weights with an update")
        return FileSource(self.source.path)


def origin_of(source: Source) -> Origin:
    return Origin(source, stamps(source.path) if isinstance(source, FileSource) else {})


Open = Callable[[Source], WeightSource]


class ModelResources:
    """The caller must run only one update, sleep or wake at a time."""

    def __init__(self, executor: Executor, origin: Origin, open: Open = open_source) -> None:
        self._executor = executor
        self._open = open
        self._origin = origin  # of the weights that the model holds, or held before it slept
        self._update: tuple[Origin, Future[None]] | None = None  # the last one started

    @property
    def asleep(self) -> tuple[Tag, ...]:
        return self._executor.asleep

    def load_weights(
        self, source: Source, *, partial: bool = False, checksum: Mapping[str, str] | None = None
    ) -> Future[None]:
        """Load `source`. `partial`: it contains only changed tensors. `checksum`: SHA-256 in hex by tensor name."""
        self._origin = self._last_origin()
        # Stamped before it is read, so that a change during the read is detected later. Changes cannot be read again.
        origin = Origin(StagedSource(), {}) if partial else origin_of(source)
        opened = self._open(source)
        if partial or checksum:
            opened = DeclaredWeights(opened, partial=partial, checksum=checksum or {}, room=free_bytes)
        loading = self._executor.load_weights(opened)
        self._update = origin, loading
        return loading

    def sleep(self, tags: Collection[Tag]) -> Future[None]:
        return self._executor.sleep(tags)

    def wake_kv(self) -> Future[None]:
        return self._executor.wake_kv()

    def checksums(self) -> Future[dict[str, str]]:
        return self._executor.checksums()

    def wake_weights(self) -> Future[None]:
        """Reload the weights from their last source. Raises SourceLost if it is missing or has changed."""
        self._origin = self._last_origin()
        self._update = None
        return self._executor.load_weights(self._open(self._origin.again()))

    def _last_origin(self) -> Origin:
        if self._update is None:
            return self._origin
        origin, loading = self._update
        return self._origin if loading.exception() else origin
