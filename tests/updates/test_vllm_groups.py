"""vLLM's group wire: a trainer that sends its NCCL id in a store, and a model in packed buffers."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from headgate.device.weights.loading import SafetensorsFolder, type_name
from headgate.device.weights.wires import WeightWires
from headgate.errors import BrokenCheckpoint, SourceLost
from headgate.protocol.command import GroupPart, JoinGroup, TensorSpec
from headgate.testing.tiny import tiny_model
from headgate.weights import checksums
from tests.api.live import LiveServer, live_server
from tests.ports import own_port
from tests.updates.vllm_trainer import order, trainer_process

CPU = torch.device("cpu")
LIMIT_S = 60


@pytest.fixture(scope="module")
def new(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("new"), seed=1)


@pytest.fixture(scope="module")
def tensors(new: Path) -> dict[str, torch.Tensor]:
    return dict(SafetensorsFolder(new))


@contextmanager
def joined(folder: Path, tensors: dict[str, torch.Tensor]) -> Iterator[tuple[WeightWires, subprocess.Popen[str]]]:
    port = own_port()
    wires = WeightWires({name: tuple(tensor.shape) for name, tensor in tensors.items()}, CPU)
    with trainer_process(folder, port, 2) as process:
        try:
            wires.join(JoinGroup("vllm", "127.0.0.1", port, 2, 1, "gloo", LIMIT_S, "vllm")).result(LIMIT_S)
            assert process.stdout is not None and process.stdout.readline() == "joined\n"
            yield wires, process
        finally:
            wires.close()


def part_of(tensors: dict[str, torch.Tensor], names: list[str], packed_bytes: int | None) -> GroupPart:
    specs = (TensorSpec(name, type_name(tensors[name].dtype), tuple(tensors[name].shape)) for name in names)
    return GroupPart("vllm", tuple(specs), packed_bytes)


def received(wires: WeightWires, part: GroupPart) -> Any:
    arriving: Future[Any] = wires.receive(part, anew=False, timeout_s=LIMIT_S)
    return arriving.result(LIMIT_S)


@pytest.mark.parametrize("packed_bytes", [None, 1, 20_000, 2**30])
def test_an_engine_joins_by_the_pickled_id_and_receives_the_same_bits(new, tensors, packed_bytes):
    with joined(new, tensors) as (wires, trainer):
        for _ in range(2):
            order(trainer, *(["each"] if packed_bytes is None else ["packed", packed_bytes]), *tensors)
            arrived = dict(received(wires, part_of(tensors, list(tensors), packed_bytes)))
            assert arrived.keys() == tensors.keys()
            assert all(torch.equal(arrived[name], tensor) for name, tensor in tensors.items())


def test_a_trainer_that_is_gone_breaks_the_group(new, tensors):
    with joined(new, tensors) as (wires, trainer):
        trainer.kill()
        with pytest.raises(SourceLost, match="the group vllm broke off"):
            received(wires, part_of(tensors, list(tensors), 2**30))


def test_54_a_store_with_another_pickle_is_refused(tensors):
    port = own_port()
    store = torch.distributed.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    store.set("broadcast_from/0/0", b"\x80\x04\x8c\x05posix\x8c\x06system\x93\x8c\x04true\x85R.")
    wires = WeightWires({name: tuple(tensor.shape) for name, tensor in tensors.items()}, CPU)
    try:
        joining = wires.join(JoinGroup("vllm", "127.0.0.1", port, 2, 1, "gloo", LIMIT_S, "vllm"))
        with pytest.raises(BrokenCheckpoint, match=r"names posix\.system, which is not allowed"):
            joining.result(LIMIT_S)
    finally:
        wires.close()


@pytest.mark.parametrize("nccl_id", [None, b"\0" * 128])
def test_nccl_needs_a_gpu_and_is_refused_before_the_trainer_counts_this_rank(tensors, nccl_id):
    wires = WeightWires({}, CPU)
    with pytest.raises(BrokenCheckpoint, match="nccl needs a GPU"):
        wires.join(JoinGroup("vllm", "127.0.0.1", 1, 2, 1, "nccl", LIMIT_S, "vllm", nccl_id)).result(LIMIT_S)


def test_an_id_of_another_length_is_refused():
    with pytest.raises(ValueError, match="an NCCL id has 128 bytes, not 3"):
        JoinGroup("vllm", "", 0, 2, 1, "nccl", LIMIT_S, "vllm", b"abc")


# ------------------------------------------------------------------------------------------- through the server


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("old"))


@pytest.fixture(scope="module")
def server(old: Path) -> Iterator[LiveServer]:
    with live_server(old, device="cpu", kv_blocks=64, max_running=4, count=2) as server:
        yield server


@pytest.fixture(autouse=True)
def clean(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "server" in request.fixturenames:
        request.getfixturevalue("server").post("/v1/resume", None)


class Trainer:
    """Makes the calls of TRL's AsyncGRPO."""

    def __init__(self, server: LiveServer, process: subprocess.Popen[str], folder: Path) -> None:
        self.server, self.process = server, process
        self.tensors = dict(SafetensorsFolder(folder))

    def info(self, names: list[str], **more: Any) -> dict[str, Any]:
        each = [self.tensors[name] for name in names]
        dtypes, shapes = [type_name(tensor.dtype) for tensor in each], [list(tensor.shape) for tensor in each]
        return {"names": names, "dtype_names": dtypes, "shapes": shapes, **more}

    def send(self, names: list[str] | None = None, most: int | None = 2**30, **more: Any) -> Any:
        names = list(self.tensors) if names is None else names
        order(self.process, *(["each"] if most is None else ["packed", most]), *names)
        return self.server.post("/update_weights", {"update_info": self.info(names, **more)})


@contextmanager
def trainer(server: LiveServer, folder: Path, **more: Any) -> Iterator[Trainer]:
    port = own_port()
    with trainer_process(folder, port, 3) as process:
        info = {"master_address": "127.0.0.1", "master_port": port, "rank_offset": 1, "world_size": 3}
        made = server.post("/init_weight_transfer_engine", {"init_info": info | {"backend": "gloo"} | more})
        assert made.status_code == 200, made.text
        yield Trainer(server, process, folder)


def answer(server: LiveServer) -> list[int]:
    params = {"max_tokens": 16, "temperature": 0.0, "ignore_eos": True}
    asked = server.post("/inference/v1/generate", {"token_ids": [1, 2, 3], "sampling_params": params})
    return list(asked.json()["choices"][0]["token_ids"])


def test_79_a_packed_transfer_is_visible_when_it_is_finished(server: LiveServer, old: Path, new: Path):
    before = answer(server)
    with trainer(server, new, packed=True) as sender:
        server.post("/pause?mode=keep", None)
        assert server.post("/start_weight_update", {"is_checkpoint_format": True}).status_code == 200
        assert sender.send().status_code == 200
        finished = server.post("/finish_weight_update", {"weight_version": "step-1"})
        assert finished.status_code == 200 and finished.json()["weight_version"] == "step-1", finished.text
        assert server.post("/resume", None).status_code == 200
        renewed = answer(server)
        assert renewed != before
        # The next round announces nothing: its tensors are those of the last.
        server.post("/start_weight_update", None)
        order(sender.process, "packed", 2**30, *sender.tensors)
        assert server.post("/update_weights", {"update_info": {"names": []}}).status_code == 200
        assert server.post("/finish_weight_update", None).status_code == 200
        assert answer(server) == renewed and server.status().state == "running"
    with trainer(
        server, old
    ) as sender:  # as versions of vLLM before 0.28: `packed` in the update, and in several calls
        names = list(sender.tensors)
        server.post("/start_weight_update", {})
        for part, most in ((names[::2], 20_000), (names[1::2], None)):
            more = {} if most is None else {"packed": True, "packed_buffer_size_bytes": most}
            assert sender.send(part, most, **more).status_code == 200
            assert server.status().version == 2
        assert server.post("/finish_weight_update", {}).status_code == 200
        assert answer(server) == before
        assert server.post("/shutdown_weight_transfer_engine", None).status_code == 200
        gone = sender.server.post("/update_weights", {"update_info": sender.info(names)})
        assert gone.status_code == 400 and gone.json()["error"]["code"] == "no_group"


def test_79_an_update_without_a_start_is_visible_when_the_model_is_complete(server: LiveServer, old: Path, new: Path):
    before = answer(server)
    for folder in (new, old):
        with trainer(server, folder, packed=True) as sender:
            names = list(sender.tensors)
            assert sender.send(names[:3]).status_code == 200
            assert server.status().state == "running"
            assert sender.send(names[3:]).status_code == 200
            assert (answer(server) == before) is (folder == old)


def test_79_a_trainer_that_is_gone_leaves_the_old_weights_and_the_finish_is_refused(server: LiveServer, new: Path):
    before = answer(server)
    with trainer(server, new, packed=True) as sender:
        names = list(sender.tensors)
        server.post("/start_weight_update", None)
        assert sender.send(names[:3]).status_code == 200
        sender.process.kill()
        lost = server.post("/update_weights", {"update_info": sender.info(names[3:])})
        assert lost.status_code == 502 and "broke off" in lost.json()["error"]["message"], lost.text
        refused = server.post("/finish_weight_update", None)
        assert refused.status_code == 409 and "the update has failed" in refused.text, refused.text
        assert answer(server) == before and server.status().state == "running"


def test_79_an_incomplete_update_names_a_missing_tensor_and_the_server_goes_on(server: LiveServer, new: Path):
    before = answer(server)
    with trainer(server, new) as sender:
        server.post("/start_weight_update", None)
        sender.send(list(sender.tensors)[:3], None)
        refused = server.post("/finish_weight_update", None)
        assert refused.status_code == 400 and "the checkpoint lacks tensor" in refused.text, refused.text
        assert answer(server) == before and server.status().state == "running"


def test_79_a_wrong_checksum_of_any_part_refuses_the_whole_update(server: LiveServer, old: Path, new: Path):
    before = answer(server)
    with trainer(server, new, packed=True) as sender:
        names = list(sender.tensors)
        server.post("/start_weight_update", None)
        promised = {names[0]: "00" * 32}
        assert sender.send(names[:3], verify_checksum=promised).status_code == 200
        assert sender.send(names[3:], verify_checksum=checksums(sender.tensors)).status_code == 200
        assert server.post("/finish_weight_update", None).status_code == 200, "the later promise replaces the first"
        server.post("/start_weight_update", None)
        sender.send(names[:3], verify_checksum=promised)
        sender.send(names[3:])
        refused = server.post("/finish_weight_update", None)
        assert refused.status_code == 400 and f"tensor {names[0]} has SHA-256" in refused.text, refused.text
        assert server.status().state == "running" and answer(server) != before
    with trainer(server, old, packed=True) as sender:
        assert sender.send(verify_checksum=checksums(sender.tensors)).status_code == 200
    assert answer(server) == before


def rpc(server: LiveServer, method: str, **kwargs: Any) -> Any:
    return server.post("/collective_rpc", {"method": method, "kwargs": kwargs})


def test_79_skyrls_methods_are_the_same_update(server: LiveServer, old: Path, new: Path):
    before = answer(server)
    for folder in (new, old):
        with trainer(server, folder) as sender:
            info = sender.info(list(sender.tensors), packed=True)
            assert rpc(server, "update_weights_nccl", update_info=info).json()["error"]["code"] == "no_update"
            started = rpc(server, "skyrl_start_weight_update", is_checkpoint_format=True)
            assert started.status_code == 200 and started.json() == {"results": [None, None]}
            order(sender.process, "packed", 2**30, *sender.tensors)
            assert rpc(server, "update_weights_nccl", update_info=info).status_code == 200
            assert rpc(server, "skyrl_finish_weight_update").status_code == 200
            assert (answer(server) == before) is (folder == old)
    other = rpc(server, "load_model")
    assert other.status_code == 400 and "there is no method 'load_model'" in other.text
    kernel = rpc(server, "skyrl_start_weight_update", is_checkpoint_format=False)
    assert kernel.status_code == 400 and kernel.json()["error"]["param"] == "is_checkpoint_format"
    empty = rpc(server, "skyrl_start_weight_update"), rpc(server, "skyrl_finish_weight_update")
    assert empty[1].status_code == 400 and empty[1].json()["error"]["code"] == "no_update"


@pytest.mark.parametrize(
    ("info", "status", "why"),
    [
        ({"transport": "other"}, 400, "transport must be headgate or left out"),
        ({"world_size": 3, "master_address": "127.0.0.1", "master_port": 0}, 400, "master_port must be a port"),
        ({"world_size": 3, "nccl_unique_id_b64": "AAAA"}, 400, "an NCCL id has 128 bytes, not 3"),
        ({"world_size": 3, "nccl_unique_id_b64": "A" * 170 + "A="}, 400, "nccl needs a GPU"),
        ({"world_size": 3, "nccl_unique_id_b64": "?"}, 400, "not base64"),
        ({"world_size": 2, "master_address": "127.0.0.1", "master_port": 9}, 400, "too small for all engines"),
    ],
)
def test_a_group_that_cannot_be_joined_is_refused_at_once(server: LiveServer, info: Any, status: int, why: str):
    refused = server.post("/init_weight_transfer_engine", {"init_info": info})
    assert refused.status_code == status and why in refused.text, refused.text
