"""Weight updates from GPU to GPU, on a machine without a GPU: only the calls that use a device are replaced.

`tests/test_gpu_weights.py` does the same on a GPU.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import pytest
import torch

from headgate.device.weights import broadcast, ipc
from headgate.device.weights.broadcast import BroadcastWeights
from headgate.device.weights.loading import SafetensorsFolder, load_weights
from headgate.errors import BrokenCheckpoint, RequestError
from headgate.models import build_model, read_spec
from headgate.protocol.command import (
    BroadcastSource,
    Collected,
    CollectWeights,
    Denied,
    EngineState,
    Pause,
    Resume,
    SharedMemorySource,
    SharedOnGpus,
    SharedStorage,
    SharedTensor,
    StagedSource,
    UpdateWeights,
)
from headgate.testing.tiny import tiny_model
from headgate.weights import send_weights, share
from tests.updates.driver import driving
from tests.updates.test_updates import IDS, address, answers_of, frozen, tensors_of


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("old"), tokenizer=False)


@pytest.fixture(scope="module")
def new(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("new"), seed=1, tokenizer=False)


@pytest.fixture(scope="module")
def undisturbed(old: Path) -> dict[int, list[int]]:
    return answers_of(old)


@pytest.fixture(scope="module")
def renewed(new: Path) -> dict[int, list[int]]:
    return answers_of(new)


# -- nccl ---------------------------------------------------------------------------------


class Landed:
    """A broadcast that completes at the third check."""

    looks = 0

    def is_completed(self) -> bool:
        self.looks += 1
        return self.looks > 2

    def wait(self) -> None:
        assert self.looks > 2


class FakeNccl:
    """Replaces NCCL with gloo."""

    used: ClassVar[list[int]] = []

    def __init__(self, store: Any, rank: int, world_size: int, timeout_s: float) -> None:
        self._group = torch.distributed.ProcessGroupGloo(store, rank, world_size)

    def broadcast(self, data: list[torch.Tensor], options: Any) -> Landed:
        self.used.append(data[0].numel())
        self._group.broadcast(data, options).wait()
        return Landed()

    def abort(self) -> None:
        self.used.append(-1)


class Engine(threading.Thread):
    """The engine's side of an exchange; `outcome` is None or what it raised."""

    def __init__(self, folder: Path, source: BroadcastSource) -> None:
        super().__init__()
        self.model = build_model(read_spec(folder), backend="torch")
        load_weights(self.model, SafetensorsFolder(folder))
        self.source, self.outcome = source, None
        self.start()

    def run(self) -> None:
        try:
            load_weights(self.model, BroadcastWeights(self.source, lambda _: 2**40))
        except Exception as error:
            self.outcome = error


def test_with_nccl_headers_use_the_host_and_buckets_go_from_device_to_device(old, new, monkeypatch):
    monkeypatch.setattr(broadcast, "takes_nccl", lambda _: True)
    monkeypatch.setattr(broadcast, "nccl_group", FakeNccl)
    FakeNccl.used = []
    place = address()
    engines = [Engine(old, BroadcastSource(place, 3, rank, 30, "nccl")) for rank in (1, 2)]
    send_weights(tensors_of(new), place, 3, timeout_s=30, bucket_bytes=10_000, backend="nccl")
    for engine in engines:
        engine.join(30)
    expected = build_model(read_spec(new), backend="torch")
    load_weights(expected, SafetensorsFolder(new))
    for engine in engines:
        assert engine.outcome is None
        assert torch.equal(engine.model.unembedding.matrix.data, expected.unembedding.matrix.data)
        assert torch.equal(engine.model.norm.weight, expected.norm.weight)
    assert FakeNccl.used.count(-1) == 3, "every rank leaves the group"
    assert sum(size for size in FakeNccl.used if size > 0) >= 3 * (new / "model.safetensors").stat().st_size * 0.95


def test_nccl_without_a_gpu_is_refused_at_once_and_all_ranks_get_the_reason(old, new, undisturbed):
    place = address()
    refusal: list[Exception] = []

    def train() -> None:
        with pytest.raises(BrokenCheckpoint) as refused:
            send_weights(tensors_of(new), place, 2, timeout_s=60, backend="nccl")
        refusal.append(refused.value)

    trainer = threading.Thread(target=train)
    trainer.start()
    with driving(old) as driver:
        denied = frozen(driver).call(UpdateWeights(BroadcastSource(place, 2, timeout_s=60, backend="nccl")))
        trainer.join(30)
        assert isinstance(denied, Denied) and (denied.status, denied.code) == (400, "bad_weights")
        for message in (denied.message, str(refusal[0])):
            assert (
                "rank 0: nccl needs a GPU, and cpu is not one; rank 1: nccl needs a GPU, and cpu is not one"
                in message
            )
        driver.call(Resume())
        assert driver.finish() == undisturbed


def test_an_engine_and_a_trainer_with_different_backends_do_not_wait_for_each_other(old, new):
    place = address()
    engine = Engine(old, BroadcastSource(place, 2, 1, 60, "nccl"))
    with pytest.raises(
        BrokenCheckpoint, match="rank 1: the trainer sends by gloo, and this engine is configured for nccl"
    ):
        send_weights(tensors_of(new), place, 2, timeout_s=60)
    engine.join(30)
    assert isinstance(engine.outcome, BrokenCheckpoint)


# -- shared memory of a GPU --------------------------------------------------------------


class FakeGpu:
    """Replaces GPU memory with host memory, which is exported under a number and opened by that number."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.exported: list[torch.UntypedStorage] = []
        self.opened: list[int] = []
        monkeypatch.setattr(ipc, "gpu_of", lambda _: "GPU-1")
        monkeypatch.setattr(ipc, "export_storage", self.export)
        monkeypatch.setattr(ipc, "open_storage", self.open)

    def export(self, storage: torch.UntypedStorage) -> SharedStorage:
        self.exported.append(storage)
        handle = (len(self.exported) - 1).to_bytes(64, "little")
        return SharedStorage(0, handle, storage.nbytes(), 0, b"counter\0", 0, b"event\xff", True)

    def open(self, shared: SharedStorage, device: int) -> torch.UntypedStorage:
        self.opened.append(int.from_bytes(shared.handle, "little"))
        return self.exported[self.opened[-1]]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    return FakeGpu(monkeypatch)


def sent(source: SharedMemorySource) -> SharedMemorySource:
    """Return the source after encoding and decoding as JSON, as over HTTP."""
    return msgspec.json.decode(msgspec.json.encode(source), type=SharedMemorySource)


def in_one_piece(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the same tensors as views of one flat buffer, as a trainer may have them."""
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors.values()])
    parts = flat.split([tensor.numel() for tensor in tensors.values()])
    return {name: part.view(tensors[name].shape) for name, part in zip(tensors, parts, strict=True)}


@pytest.mark.parametrize("flat", [False, True])
def test_25_weights_from_a_trainers_gpu_memory_answer_like_their_checkpoint(old, new, renewed, gpu, flat):
    tensors = in_one_piece(tensors_of(new)) if flat else tensors_of(new)
    with driving(old) as driver, share(tensors) as shared:
        assert len(gpu.exported) == (1 if flat else len(tensors))
        driver.call(Pause("abort"))
        state = driver.call(UpdateWeights(sent(shared), version=3))
        assert isinstance(state, EngineState) and state.version == 3
        assert sorted(gpu.opened) == list(range(len(gpu.exported))), "each is opened once"
        driver.call(Resume())
        driver.submit(*IDS)
        assert driver.finish() == renewed


def test_25_handles_are_verified_before_any_is_opened(old, new, undisturbed, gpu):
    tensors = tensors_of(new)
    wrong = tensors | {"model.norm.weight": torch.zeros(65)}
    with driving(old) as driver, share(wrong) as shared:
        denied = frozen(driver).call(UpdateWeights(sent(shared)))
        assert isinstance(denied, Denied) and denied.code == "bad_weights"
        assert "tensor model.norm.weight has shape [65]; the model expects [64]" in denied.message
        assert not gpu.opened
        driver.call(Resume())
        assert driver.finish() == undisturbed


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"start": 4}, "is not within its storage"),
        ({"start": -4}, "is not within its storage"),
        ({"start": 2}, "is not within its storage"),
        ({"storage": 999}, "is not in a shared storage"),
        ({"storage": -1}, "is not in a shared storage"),
        ({"shape": (-64,)}, "is not in a shared storage"),
        ({"dtype": "complex"}, "has the unknown dtype 'complex'"),
    ],
)
def test_25_a_tensor_outside_its_declared_storage_is_refused(old, new, gpu, change, sentence):
    with share(tensors_of(new)) as shared:
        tensors = [
            msgspec.structs.replace(tensor, **change) if tensor.name == "model.norm.weight" else tensor
            for tensor in shared.tensors
        ]
        bad = msgspec.structs.replace(shared, tensors=tuple(tensors))
        with driving(old) as driver:
            driver.call(Pause("abort"))
            denied = driver.call(UpdateWeights(sent(bad)))
    assert isinstance(denied, Denied) and f"tensor model.norm.weight {sentence}" in denied.message
    assert not gpu.opened


def test_25_memory_that_cannot_be_opened_leaves_the_old_weights(old, new, undisturbed, gpu, monkeypatch):
    def gone(shared: SharedStorage, device: int) -> torch.UntypedStorage:
        if len(gpu.opened) == 5:
            raise RuntimeError("CUDA error: invalid resource handle")
        return gpu.open(shared, device)

    monkeypatch.setattr(ipc, "open_storage", gone)
    with driving(old) as driver, share(tensors_of(new)) as shared:
        denied = frozen(driver).call(UpdateWeights(sent(shared)))
        assert isinstance(denied, Denied) and (denied.status, denied.code) == (502, "source_lost")
        assert "invalid resource handle" in denied.message
        driver.call(Resume())
        assert driver.finish() == undisturbed


def test_25_memory_of_another_gpu_is_refused(old, new, gpu, monkeypatch):
    with share(tensors_of(new)) as shared:
        monkeypatch.setattr(ipc, "gpu_of", lambda _: "")
        with driving(old) as driver:
            driver.call(Pause("abort"))
            denied = driver.call(UpdateWeights(sent(shared)))
    assert isinstance(denied, Denied) and denied.code == "bad_weights"
    assert "the tensors are on the GPU 'GPU-1' and this engine is on 'a CPU'" in denied.message


def halves(tensors: dict[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    names = list(tensors)
    return [{name: tensors[name] for name in names[i::2]} for i in range(2)]


@pytest.mark.parametrize("known", [True, False], ids=["by UUID", "without a UUID"])
def test_79_handles_in_parts_are_copied_beside_the_weights_and_loaded_together(old, new, renewed, gpu, known):
    tensors = tensors_of(new)
    with driving(old) as driver:
        for part in halves(tensors):
            with share(part) as shared:
                source = sent(shared) if known else msgspec.structs.replace(shared, gpu="")
                others = SharedMemorySource("GPU-2", (), ())
                given = SharedOnGpus((others, source)) if known else source
                collected = driver.call(CollectWeights(given))
                assert isinstance(collected, Collected), collected
            for tensor in part.values():
                tensor.zero_()  # the trainer may change its memory when it is answered
        assert collected.missing == 0
        driver.call(Pause("abort"))
        driver.call(UpdateWeights(StagedSource()))
        driver.call(Resume())
        driver.submit(*IDS)
        assert driver.finish() == renewed


def test_79_handles_for_other_gpus_only_are_refused(old, gpu):
    with driving(old) as driver:
        denied = driver.call(
            CollectWeights(SharedOnGpus(tuple(SharedMemorySource(f"GPU-{i}", (), ()) for i in (2, 3))))
        )
    assert (
        isinstance(denied, Denied)
        and "handles for the GPUs GPU-2, GPU-3, and this engine is on 'GPU-1'" in denied.message
    )


def test_79_a_buffer_that_a_trainer_uses_for_all_parts_is_opened_once(old, new, renewed, gpu):
    """Opening one export again would release it again, and the trainer would never free it."""
    tensors = tensors_of(new)
    buffer = torch.empty(sum(tensor.nbytes for tensor in tensors.values()), dtype=torch.uint8)
    with driving(old) as driver, share({"buffer": buffer}) as shared:
        for part in halves(tensors):
            entries, start = [], 0
            for name, tensor in part.items():
                buffer[start : start + tensor.nbytes] = tensor.reshape(-1).view(torch.uint8)
                entries.append(SharedTensor(name, str(tensor.dtype).removeprefix("torch."), tensor.shape, 0, start))
                start += tensor.nbytes
            driver.call(CollectWeights(msgspec.structs.replace(shared, tensors=tuple(entries))))
        assert gpu.opened == [0]
        driver.call(Pause("abort"))
        driver.call(UpdateWeights(StagedSource()))
        driver.call(Resume())
        driver.submit(*IDS)
        assert driver.finish() == renewed


def test_tensors_that_cannot_be_shared_are_reported_to_the_trainer(gpu):
    with pytest.raises(RequestError, match="tensor a is not contiguous"), share({"a": torch.ones(2, 3).t()}):
        pass
    with pytest.raises(RequestError, match="must be on one GPU"), share({}):
        pass
