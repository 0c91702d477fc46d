"""SGLang's group wire: a trainer process broadcasts a model in buckets. Numbers cite docs/lifecycle.md."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from headgate.testing.tiny import tiny_model
from tests.api.live import LiveServer, live_server
from tests.models.families import write_model
from tests.ports import own_port

GROUP = "slime-pp_0"

# Joins as slime does: torch's own helper on a store with the group's name as prefix. Follows orders on standard input.
TRAINER = """
import sys, datetime, torch, torch.distributed as dist
from torch.distributed.distributed_c10d import (
    Backend, PrefixStore, _new_process_group_helper, _world, rendezvous, default_pg_timeout)
from headgate.device.weights.loading import SafetensorsFolder

folder, port, world, name = sys.argv[1:]
store, rank, size = next(rendezvous(f"tcp://127.0.0.1:{port}", 0, int(world), timeout=default_pg_timeout))
group, _ = _new_process_group_helper(
    size, rank, [], Backend("gloo"), PrefixStore(name, store), group_name=name, timeout=default_pg_timeout)
_world.pg_group_ranks[group] = {i: i for i in range(size)}
tensors = dict(SafetensorsFolder(folder))
print("joined", flush=True)
for order in sys.stdin:
    kind, *names = order.split()
    if kind == "flat":
        flat = torch.cat([tensors[n].flatten().view(torch.uint8) for n in names])
        dist.broadcast(flat, 0, group=group)
    else:
        for work in [dist.broadcast(tensors[n], 0, group=group, async_op=True) for n in names]:
            work.wait()
    print("sent", flush=True)
"""


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("old"))


@pytest.fixture(scope="module")
def new(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("new"), seed=1)


@pytest.fixture
def server(old: Path) -> Iterator[LiveServer]:
    with live_server(old, device="cpu", kv_blocks=64, max_running=4, count=2) as server:
        yield server


@pytest.fixture(scope="module")
def renewed(new: Path) -> Any:
    with live_server(new, device="cpu", kv_blocks=64, max_running=4) as server:
        return answer(server)


def answer(server: LiveServer) -> list[int]:
    params = {"max_new_tokens": 16, "temperature": 0.0, "ignore_eos": True}
    return server.post("/generate", {"input_ids": [1, 2, 3], "sampling_params": params}).json()["output_ids"]


def label(server: LiveServer) -> str:
    """The version that slime's tests compare with the trainer's."""
    with server.http as http:
        return http.get("/model_info").json()["weight_version"]


class Trainer:
    def __init__(self, server: LiveServer, process: subprocess.Popen[str], folder: Path) -> None:
        from headgate.device.weights.loading import SafetensorsFolder

        self.server, self.process = server, process
        self.infos = dict(SafetensorsFolder(folder).metadata())

    def send(self, names: list[str], *, kind: str = "each", broadcast: bool = True, **more: Any) -> Any:
        assert self.process.stdin and self.process.stdout
        body = {
            "names": names,
            "dtypes": [str(self.infos[name].dtype).removeprefix("torch.") for name in names],
            "shapes": [list(self.infos[name].shape) for name in names],
            "group_name": GROUP,
            "flush_cache": False,
            **more,
        }
        if broadcast:
            print(kind, *names, file=self.process.stdin, flush=True)
        return self.server.post("/update_weights_from_distributed", body)

    def buckets(self, count: int = 3) -> list[list[str]]:
        names = list(self.infos)
        return [names[i::count] for i in range(count)]


@contextmanager
def trainer(server: LiveServer, folder: Path) -> Iterator[Trainer]:
    """A trainer process whose group two engines have joined."""
    port = own_port()
    process = subprocess.Popen(
        [sys.executable, "-c", TRAINER, str(folder), str(port), "3", GROUP],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        body = {"master_address": "127.0.0.1", "master_port": str(port), "rank_offset": 1, "world_size": 3}
        joined = server.post("/init_weights_update_group", body | {"group_name": GROUP, "backend": "gloo"})
        assert joined.status_code == 200 and joined.json()["success"], joined.text
        yield Trainer(server, process, folder)
    finally:
        process.kill()
        process.communicate(timeout=60)


def test_79_buckets_between_pause_and_continue_become_visible_at_once(server: LiveServer, new: Path, renewed: Any):
    before = answer(server)
    with trainer(server, new) as sender:
        for _ in range(2):  # a group serves many updates
            server.post("/pause_generation", {})
            for bucket in sender.buckets():
                sent = sender.send(bucket, weight_version="7")
                assert sent.status_code == 200 and sent.json()["success"], sent.text
            assert server.post("/continue_generation", {}).status_code == 200
            assert answer(server) == renewed != before
            assert label(server) == "7"
        destroyed = server.post("/destroy_weights_update_group", {"group_name": GROUP})
        assert destroyed.status_code == 200
        assert server.post("/destroy_weights_update_group", {"group_name": GROUP}).status_code == 400


SLOW_FAMILIES = [pytest.param(family, marks=pytest.mark.slow) for family in ("ernie4_5_moe", "glm4_moe")]


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", *SLOW_FAMILIES])
def test_79_a_mixture_of_experts_arrives_in_buckets(tmp_path: Path, family: str):
    old, new = (write_model(tmp_path / str(seed), family, seed=seed) for seed in (0, 1))
    with live_server(new, device="cpu", kv_blocks=64, max_running=4) as server:
        renewed = answer(server)
    with live_server(old, device="cpu", kv_blocks=64, max_running=4, count=2) as server:
        before = answer(server)
        with trainer(server, new) as sender:
            for bucket in sender.buckets():
                assert answer(server) == before
                sent = sender.send(bucket)
                assert sent.status_code == 200 and sent.json()["success"], sent.text
            assert answer(server) == renewed != before


@pytest.mark.parametrize("kind", ["each", "flat"])
def test_79_without_a_pause_the_whole_model_is_one_update(server: LiveServer, new: Path, renewed: Any, kind: str):
    before = answer(server)
    with trainer(server, new) as sender:
        more = {"load_format": "flattened_bucket"} if kind == "flat" else {}
        *first, last = sender.buckets()
        for bucket in first:
            assert sender.send(bucket, kind=kind, **more).status_code == 200
            assert answer(server) == before
        assert sender.send(last, kind=kind, **more).status_code == 200
        assert answer(server) == renewed


def test_79_begin_and_end_bracket_an_update_and_an_empty_one_is_refused(server: LiveServer, new: Path, renewed: Any):
    with trainer(server, new) as sender:
        assert server.post("/end_weight_update", {}).status_code == 400
        assert server.post("/begin_weight_update", {"selector": "all"}).status_code == 200
        assert server.post("/begin_weight_update", {}).status_code == 400
        empty = server.post("/end_weight_update", {})
        assert empty.status_code == 400 and "no tensor has arrived" in empty.json()["message"]
        server.post("/begin_weight_update", {})
        for bucket in sender.buckets():
            assert sender.send(bucket).status_code == 200
        assert server.post("/end_weight_update", {}).status_code == 200
        assert answer(server) == renewed


def test_79_parts_that_arrive_while_memory_is_released_are_visible_when_it_is_back(
    server: LiveServer, new: Path, renewed: Any
):
    """verl's order on one device. In the second round the weights came from a trainer and cannot be read again."""
    before = answer(server)
    with trainer(server, new) as sender:
        for _ in range(2):
            released = server.post("/release_memory_occupation", {"tags": ["kv_cache", "weights"]})
            assert released.status_code == 200, released.text
            assert server.post("/resume_memory_occupation", {"tags": ["weights"]}).status_code == 200
            for bucket in sender.buckets():
                assert sender.send(bucket, weight_version="7").status_code == 200
            assert server.post("/resume_memory_occupation", {"tags": ["kv_cache"]}).status_code == 200
            assert answer(server) == renewed != before and label(server) == "7"


def test_79_an_incomplete_update_is_refused_and_the_old_weights_stay(server: LiveServer, new: Path):
    before = answer(server)
    with trainer(server, new) as sender:
        server.post("/pause_generation", {})
        sender.send(sender.buckets()[0])
        refused = server.post("/continue_generation", {})
        assert refused.status_code == 400 and "the checkpoint lacks tensor" in refused.text
        assert server.post("/continue_generation", {}).status_code == 200
        assert answer(server) == before


@pytest.mark.parametrize("paused", [True, False])
def test_79_a_trainer_killed_in_the_middle_leaves_the_old_weights_in_service(
    server: LiveServer, new: Path, renewed: Any, paused: bool
):
    before = answer(server)
    with trainer(server, new) as sender:
        if paused:
            server.post("/pause_generation", {})
        first, second, _ = sender.buckets()
        assert sender.send(first).status_code == 200
        sender.process.kill()
        lost = sender.send(second, broadcast=False)
        assert lost.status_code == 400 and "broke off" in lost.json()["message"], lost.text
        if paused:
            refused = server.post("/continue_generation", {})
            assert refused.status_code == 409 and "the update has failed" in refused.text
            assert server.post("/continue_generation", {}).status_code == 200
        assert answer(server) == before
    with trainer(server, new) as another:  # a trainer that returns under the same name is welcome
        for bucket in another.buckets():
            assert another.send(bucket).status_code == 200
        assert answer(server) == renewed


def test_a_part_that_does_not_fit_is_named_and_the_trainer_is_not_left_waiting(
    server: LiveServer, old: Path, tmp_path: Path
):
    wide = tiny_model(tmp_path, seed=1, intermediate_size=128)
    with trainer(server, wide) as sender:
        refused = sender.send(list(sender.infos))
        assert refused.status_code == 400 and "has shape [128, 64]; the model expects [96, 64]" in refused.text
        assert sender.process.stdout and sender.process.stdout.readline() == "joined\n"
        assert sender.process.stdout.readline() == "sent\n"
        unknown = sender.send(["model.norm.weight"], broadcast=False, group_name="other")
        assert unknown.status_code == 400 and "there is no group 'other'" in unknown.text


def test_79_an_update_of_which_nothing_arrived_does_not_finish(server: LiveServer):
    assert server.post("/start_weight_update", {}).status_code == 200
    refused = server.post("/finish_weight_update", {})
    assert refused.status_code == 400 and refused.json()["error"]["code"] == "no_update"
    assert answer(server)
