"""`headgate.integrations.trl`: TRL's calls in their order (init, pause, send_weights, resume, destroy) on a real server."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from headgate.client import Fleet, FleetError
from headgate.integrations.trl import HeadgateWeightTransfer
from headgate.testing.tiny import tiny_model
from tests.api.live import LiveServer, live_server


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("trl") / "old")


@pytest.fixture(scope="module")
def new(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    return load_file(tiny_model(tmp_path_factory.mktemp("trl") / "new", seed=1) / "model.safetensors")


@pytest.fixture
def server(old: Path) -> Iterator[LiveServer]:
    with live_server(old, device="cpu", kv_blocks=64, max_running=4) as server:
        yield server


def answer(fleet: Fleet) -> list[int]:
    return fleet.generate("1: ", max_tokens=12, temperature=0, ignore_eos=True).token_ids


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def sync(transfer: HeadgateWeightTransfer, tensors: dict[str, torch.Tensor]) -> None:
    transfer.pause()
    transfer.send_weights(iter(tensors.items()))
    transfer.resume()


@pytest.mark.parametrize("over", ["shared memory", "a process group"])
def test_every_sync_changes_the_weights_and_counts_one_version(
    server: LiveServer, old: Path, new: dict[str, torch.Tensor], over: str
):
    group = f"tcp://127.0.0.1:{free_port()}" if over == "a process group" else None
    transfer, fleet = HeadgateWeightTransfer(server.url, init_method=group, timeout_s=60), Fleet(server.url)
    transfer.init_weight_transfer()
    before = answer(fleet)
    sync(transfer, new)
    assert transfer.version == 1 and answer(fleet) != before
    sync(transfer, load_file(old / "model.safetensors"))
    assert transfer.version == 2 and answer(fleet) == before
    transfer.destroy()


def test_a_request_that_arrives_during_a_sync_waits_for_the_new_weights(
    server: LiveServer, new: dict[str, torch.Tensor]
):
    transfer, fleet = HeadgateWeightTransfer(server.url), Fleet(server.url)
    transfer.pause()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(fleet.generate, "1: ", max_tokens=4, ignore_eos=True)
        transfer.send_weights(iter(new.items()))
        transfer.resume()
        assert set(waiting.result(60).weight_versions) == {1}


def test_an_incomplete_model_is_refused_and_the_old_weights_keep_serving(
    server: LiveServer, new: dict[str, torch.Tensor]
):
    transfer, fleet = HeadgateWeightTransfer(server.url), Fleet(server.url)
    before = answer(fleet)
    transfer.pause()
    with pytest.raises(FleetError, match=r"model\.norm\.weight"):
        transfer.send_weights((name, tensor) for name, tensor in new.items() if name != "model.norm.weight")
    transfer.resume()
    assert transfer.version == 0 and answer(fleet) == before
