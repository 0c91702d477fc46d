"""Updates of engines whose checkpoint is quantised: in its own format or not, over every wire."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from headgate.protocol.command import (
    Collected,
    CollectWeights,
    Denied,
    EngineState,
    FileSource,
    Pause,
    Resume,
    Sleep,
    UpdateWeights,
    Wake,
)
from headgate.testing.tiny import tiny_model
from headgate.weights import publish, share
from tests.formats.encoders import CASES, Case, encoded, write_quantised
from tests.updates.driver import driving
from tests.updates.test_declared import WIRES, answers, sending
from tests.updates.test_devices import FakeGpu
from tests.updates.test_updates import answers_of, frozen, tensors_of

SIZES = {"hidden_size": 128, "intermediate_size": 192, "head_dim": 32}
CASES_HERE = ("awq, groups", "gptq, ordered", "pack-quantized, zeros", "fp8, blocks", "int-quantized, rows")
UP = "model.layers.1.mlp.up_proj"

# The thread that sends to a group gets the engine's refusal too.
REFUSED_SENDER = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")

Tensors = dict[str, torch.Tensor]


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    return FakeGpu(monkeypatch)


class World:
    """An engine's quantised checkpoint, and others for updates."""

    def __init__(self, case: Case, folder: Path) -> None:
        plain, other = (tiny_model(folder / f"plain-{seed}", seed=seed, **SIZES) for seed in (0, 1))
        (folder / "old").mkdir()
        self.old, _ = write_quantised(plain, folder / "old", case)
        self.sent, self.values = encoded(load_file(other / "model.safetensors"), case.encode)
        self.undisturbed = answers_of(self.old)
        (folder / "new").mkdir()
        new, _ = write_quantised(other, folder / "new", case)
        self.renewed = answers_of(new)
        assert self.renewed != self.undisturbed


@pytest.fixture(scope="module", params=CASES_HERE)
def world(request: Any, tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(CASES[request.param], tmp_path_factory.mktemp("world"))


@pytest.fixture(scope="module")
def awq(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(CASES["awq, groups"], tmp_path_factory.mktemp("awq"))


@pytest.mark.parametrize("form", ["sent", "values"])
@pytest.mark.parametrize("wire", WIRES)
def test_25_new_weights_in_any_form_answer_like_a_start_with_them(world, wire, form):
    with driving(world.old) as driver, sending(wire, driver, getattr(world, form)) as source:
        driver.call(Pause("abort"))
        state = driver.call(UpdateWeights(source, version=1))
        assert isinstance(state, EngineState) and state.version == 1, state
        assert answers(driver) == world.renewed


def of_one_module(tensors: Tensors) -> Tensors:
    return {name: tensor for name, tensor in tensors.items() if name.startswith(UP + ".")}


@pytest.mark.parametrize("wire", WIRES)
def test_79_the_parts_of_one_weight_are_a_change_of_it(awq, wire, tmp_path):
    whole = tensors_of(awq.old) | of_one_module(awq.sent)
    with driving(awq.old) as driver, publish(whole) as files:
        driver.call(Pause("abort"))
        driver.call(UpdateWeights(files, version=1))
        expected = answers(driver)
    assert expected != awq.undisturbed
    with driving(awq.old) as driver, sending(wire, driver, of_one_module(awq.sent)) as source:
        driver.call(Pause("abort"))
        state = driver.call(UpdateWeights(source, version=1, base=0))
        assert isinstance(state, EngineState), state
        assert answers(driver) == expected


@REFUSED_SENDER
@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("kept", [".qweight", ".scales", ".qzeros"])
def test_79_a_part_is_never_combined_with_parts_of_the_weights_in_service(awq, wire, kept):
    stale = {UP + kept: awq.sent[UP + kept]}
    with driving(awq.old) as driver, sending(wire, driver, stale) as source:
        refused = frozen(driver).call(UpdateWeights(source, version=1, base=0))
        assert isinstance(refused, Denied) and refused.code == "bad_weights", refused
        assert f"has tensor {UP}{kept} and lacks the" in refused.message and "nothing has changed" in refused.message
        driver.call(Resume())
        assert driver.finish() == awq.undisturbed


def lacking_scales(tensors: Tensors) -> None:
    del tensors[f"{UP}.scales"]


def transposed(tensors: Tensors) -> None:
    tensors[f"{UP}.qweight"] = tensors[f"{UP}.qweight"].T.contiguous()


def twice(tensors: Tensors) -> None:
    tensors[f"{UP}.weight"] = torch.zeros(192, 128)


@REFUSED_SENDER
@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("spoil", [lacking_scales, transposed, twice])
def test_25_parts_that_do_not_make_a_weight_change_nothing(awq, wire, spoil):
    tensors = dict(awq.sent)
    spoil(tensors)
    with driving(awq.old) as driver:
        with sending(wire, driver, tensors) as source:
            refused = frozen(driver).call(UpdateWeights(source))
        assert isinstance(refused, Denied) and refused.code == "bad_weights", refused
        assert UP in refused.message and "nothing has changed" in refused.message
        driver.call(Resume())
        assert driver.finish() == awq.undisturbed


@pytest.mark.parametrize("wire", ["files", "parts", "handles", "group"])
def test_25_scales_that_are_nan_never_serve(awq, wire):
    """Sources that can read single tensors are verified before the first write, others while they deliver."""
    tensors = dict(awq.sent)
    tensors[f"{UP}.scales"] = tensors[f"{UP}.scales"].clone().fill_(torch.nan)
    with driving(awq.old) as driver, sending(wire, driver, tensors) as source:
        refused = frozen(driver).call(UpdateWeights(source))
        assert isinstance(refused, Denied) and f"{UP}.scales has scales that are infinite" in refused.message, refused
        if wire in ("files", "parts"):
            assert "nothing has changed" in refused.message
        else:
            assert refused.code == "quarantined"
            driver.call(UpdateWeights(FileSource(str(awq.old))))
        driver.call(Resume())
        assert driver.finish() == awq.undisturbed


def test_79_what_is_missing_of_a_collection_counts_weights(awq):
    names = list(awq.sent)
    half = {name: awq.sent[name] for name in names[: len(names) // 2]}
    with driving(awq.old) as driver, sending("parts", driver, half):
        driver.call(Pause("abort"))
        rest = {name: tensor for name, tensor in awq.sent.items() if name not in half}
        with share(rest) as shared:
            state = driver.call(CollectWeights(shared))
        assert isinstance(state, Collected) and state.missing == 0 and state.tensors == len(awq.sent), state


def test_33_weights_are_read_again_after_a_sleep(awq):
    with driving(awq.old) as driver:
        driver.call(Pause("freeze"))
        driver.call(Sleep())
        state = driver.call(Wake())
        assert isinstance(state, EngineState), state
        assert answers(driver) == awq.undisturbed
