"""Changed tensors with their base, and checksums of tensors, over every wire. Numbers cite docs/lifecycle.md."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from headgate.protocol.command import (
    BroadcastSource,
    CollectWeights,
    Denied,
    EngineState,
    FileSource,
    Pause,
    Resume,
    Sleep,
    Source,
    StagedSource,
    UpdateWeights,
    Wake,
)
from headgate.testing.tiny import tiny_model
from headgate.weights import changed, checksums, publish, send_weights, share
from tests.api.live import LiveServer, live_server
from tests.ports import own_port
from tests.updates.driver import Driver, driving
from tests.updates.test_devices import FakeGpu
from tests.updates.test_updates import IDS, answers_of, frozen, tensors_of

Tensors = dict[str, torch.Tensor]
WIRES = ("files", "group", "handles", "parts")
NORM = "model.layers.1.input_layernorm.weight"


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("old"))


@pytest.fixture(scope="module")
def after(old: Path, tmp_path_factory: pytest.TempPathFactory) -> Tensors:
    """The old weights, of which a few have changed."""
    other = tensors_of(tiny_model(tmp_path_factory.mktemp("other"), seed=1))
    names = list(other)[1:6]
    return tensors_of(old) | {name: other[name] for name in names} | {NORM: other[NORM]}


@pytest.fixture(scope="module")
def delta(old: Path, after: Tensors) -> Tensors:
    found = changed(tensors_of(old), after)
    assert 0 < len(found) < len(after)
    return found


@pytest.fixture(scope="module")
def undisturbed(old: Path) -> Any:
    return answers_of(old)


@pytest.fixture(scope="module")
def renewed(old: Path, after: Tensors) -> Any:
    """The answers after an update of all tensors."""
    with driving(old) as driver, publish(after) as files:
        driver.call(Pause("abort"))
        driver.call(UpdateWeights(files, version=1))
        return answers(driver)


def answers(driver: Driver) -> Any:
    driver.call(Resume())
    driver.submit(*IDS)
    return driver.finish()


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    return FakeGpu(monkeypatch)


@contextmanager
def sending(wire: str, driver: Driver, tensors: Tensors) -> Iterator[Source]:
    match wire:
        case "files":
            with publish(tensors) as files:
                yield files
        case "group":
            place = f"tcp://127.0.0.1:{own_port()}"
            sender = threading.Thread(target=send_weights, args=(tensors, place, 2), daemon=True)
            sender.start()
            yield BroadcastSource(place, 2, timeout_s=60)
            sender.join(60)
        case _:
            with share(tensors) as shared:
                if wire == "parts":
                    driver.call(CollectWeights(shared))
                yield StagedSource() if wire == "parts" else shared


@pytest.mark.parametrize("wire", WIRES)
def test_79_changed_tensors_give_the_same_bits_as_the_whole_model(old, delta, renewed, undisturbed, wire):
    assert renewed != undisturbed
    with driving(old) as driver, sending(wire, driver, delta) as source:
        driver.call(Pause("abort"))
        state = driver.call(UpdateWeights(source, version=1, base=0))
        assert isinstance(state, EngineState) and state.version == 1, state
        assert answers(driver) == renewed


@pytest.mark.parametrize("wire", ["files", "handles", "parts"])
def test_79_changes_of_another_version_are_refused_and_change_nothing(old, delta, undisturbed, wire):
    with driving(old) as driver, sending(wire, driver, delta) as source:
        refused = frozen(driver).call(UpdateWeights(source, version=4, base=3))
        assert isinstance(refused, Denied) and (refused.status, refused.code) == (409, "wrong_base")
        assert "the update applies to version 3, but this engine has 0" in refused.message
        driver.call(Resume())
        assert driver.finish() == undisturbed


def test_without_a_base_changed_tensors_are_an_incomplete_model(old, delta, undisturbed):
    with driving(old) as driver, publish(delta) as files:
        refused = frozen(driver).call(UpdateWeights(files))
        assert isinstance(refused, Denied) and "the checkpoint lacks" in refused.message
        driver.call(Resume())
        assert driver.finish() == undisturbed


def test_changes_are_not_loaded_into_sleeping_weights_and_not_read_again_after_a_sleep(old, delta):
    with driving(old) as driver, publish(delta) as files:
        driver.call(Pause("abort"))
        driver.call(Sleep(("weights",)))
        asleep = driver.call(UpdateWeights(files, base=0))
        assert isinstance(asleep, Denied) and "asleep and needs a full update" in asleep.message
        driver.call(Wake())
        assert isinstance(driver.call(UpdateWeights(files, base=0)), EngineState)
        driver.call(Sleep(("weights",)))
        lost = driver.call(Wake())
        assert isinstance(lost, Denied) and lost.code == "source_lost", "the files have changed tensors only"


def test_25_changed_tensors_do_not_end_a_quarantine(old, delta):
    with driving(old) as driver, publish(delta) as files:
        driver.call(Pause("abort"))
        driver.engine.loop.control.state = "quarantined"
        refused = driver.call(UpdateWeights(files, base=0))
        assert isinstance(refused, Denied) and "quarantined and needs a full update" in refused.message
        assert isinstance(driver.call(Resume()), Denied)


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("right", [True, False], ids=["right", "wrong"])
def test_79_checksums_of_tensors_are_verified_before_the_first_write(old, after, renewed, undisturbed, wire, right):
    promised = checksums(after)
    if not right:
        promised[NORM] = "AB" * 32
    with driving(old) as driver, sending(wire, driver, after) as source:
        driver.call(Pause("abort"))
        outcome = driver.call(UpdateWeights(source, checksum=promised))
        if right:
            assert isinstance(outcome, EngineState), outcome
        else:
            assert isinstance(outcome, Denied) and outcome.code == "bad_weights"
            assert f"tensor {NORM} has SHA-256" in outcome.message and f"{'ab' * 32} was promised" in outcome.message
        assert answers(driver) == (renewed if right else undisturbed)


def test_a_checksum_of_a_tensor_that_was_not_sent_is_refused(old, delta):
    with driving(old) as driver, publish(delta) as files:
        driver.call(Pause("abort"))
        outcome = driver.call(UpdateWeights(files, base=0, checksum={"model.norm.weight": "00"}))
        assert isinstance(outcome, Denied) and "a checksum for tensor model.norm.weight" in outcome.message


def test_changed_compares_bits():
    nan, zero = torch.tensor([float("nan")]), torch.tensor([0.0])
    before = {"nan": nan, "zero": zero, "shape": torch.zeros(2), "type": torch.zeros(1)}
    now = {"nan": nan.clone(), "zero": -zero, "shape": torch.zeros(2, 1), "type": torch.zeros(1).half(), "new": zero}
    assert changed(before, now).keys() == {"zero", "shape", "type", "new"}


# ------------------------------------------------------------------------------------------------------ over HTTP


@pytest.fixture(scope="module")
def server(old: Path) -> Iterator[LiveServer]:
    with live_server(old, device="cpu", kv_blocks=64, max_running=4) as server:
        yield server


def generated(server: LiveServer) -> list[int]:
    params = {"max_new_tokens": 16, "temperature": 0.0, "ignore_eos": True}
    return list(server.post("/generate", {"input_ids": [1, 2, 3], "sampling_params": params}).json()["output_ids"])


def test_changes_and_checksums_over_http(server: LiveServer, old: Path, after: Tensors, delta: Tensors):
    before = generated(server)
    server.post("/v1/pause", {"mode": "freeze"})
    place = f"tcp://127.0.0.1:{own_port()}"
    sender = threading.Thread(target=send_weights, args=(after, place, 2), daemon=True)
    sender.start()
    body = {"group": {"init_method": place, "world_size": 2}, "verify_checksum": {NORM: "00" * 32}}
    wrong = server.post("/v1/update_weights", body)
    assert wrong.status_code == 400 and f"tensor {NORM} has SHA-256" in wrong.text, wrong.text
    sender.join(60)
    with publish(delta, checksum=True) as files:
        assert isinstance(files, FileSource)
        body = {"path": files.path, "verify_checksum": files.checksum, "version": 8}
        refused = server.post("/v1/update_weights", body | {"base": 7})
        assert refused.status_code == 409 and refused.json()["error"]["code"] == "wrong_base", refused.text
        done = server.post("/v1/update_weights", body | {"base": 0})
        assert done.status_code == 200 and done.json()["result"]["checksum"] == files.checksum, done.text
    server.post("/v1/resume", {})
    assert generated(server) != before and server.status().version == 8
